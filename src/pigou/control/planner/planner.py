"""What a planner is, what it is made of, and its entry point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec

from pigou.config import ConfigError, named
from pigou.control.planner.messages import PlannerDecision, PlannerWindow
from pigou.control.planner.objectives import Budget, ProvisioningTimes, Slo, WorkloadClass
from pigou.control.planner.performance.model import PerformanceModel
from pigou.struct_values import read_struct

GROUP = "pigou.planner"


@dataclass(frozen=True, slots=True)
class PlannerSetup:
    """What every planner is given."""

    slo: Slo = field(default_factory=Slo)
    classes: tuple[WorkloadClass, ...] = ()
    budget: Budget = field(default_factory=Budget)  # limits of the fleet
    times: ProvisioningTimes = field(default_factory=ProvisioningTimes)
    # of each pool by its name, as measured; a planner that needs one learns it where it is absent,
    # or refuses.
    performance: Mapping[str, PerformanceModel] = field(default_factory=dict)
    seed: int = 0  # of the planner's random draws, for one that has any

    def class_of(self, workload: str, model: str = "") -> WorkloadClass:
        """Return the class of this name; the one of everybody else where there is none."""
        for workload_class in self.classes:
            if workload_class.name == workload and workload_class.model in ("", model):
                return workload_class
        return WorkloadClass(name=workload, slo=self.slo)


class Planner(Protocol):
    """A state machine that says how many workers each pool should have.

    It is made as `Name(setup, params)`. `Params` is a frozen `msgspec.Struct` with defaults;
    a planner honours each of its parameters, and refuses others.
    """

    name: ClassVar[str]
    Params: ClassVar[type[msgspec.Struct]]

    def observe(self, window: PlannerWindow) -> None:
        """Note what one interval showed. Intervals come in order and do not overlap."""
        ...

    def tick(self, now_ns: int) -> PlannerDecision:
        """Return what to do now. What was returned before shows in the next window's pools.

        Without a window since the last tick, it returns no actions.
        """
        ...


def load(
    name: str, setup: PlannerSetup | None = None, params: Mapping[str, Any] | None = None
) -> Planner:
    """Return a new planner by its name in the entry point group `pigou.planner`.

    Args:
        params: its parameters by name; those left out keep their defaults.

    Raises:
        ConfigError: there is none of that name (the message lists those that there are), it has
            no such parameter, or a value does not fit.
    """
    kind = named(GROUP, name, "planner")
    values = dict(params or {})
    known = kind.Params.__struct_fields__
    for key in values:
        if key not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{key} is no parameter of planner {name}; it has: {names}")
    own = read_struct(f"planner {name}", kind.Params, values)
    planner: Planner = kind(setup or PlannerSetup(), own)
    return planner
