"""The planner protocol, its setup, and its entry point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec

from pigou.config import ConfigError
from pigou.control.messages import Message
from pigou.control.planner.messages import PlannerDecision
from pigou.objectives import Budget, ProvisioningTimes, Slo, WorkloadClass
from pigou.performance.model import PerformanceModel
from pigou.performance.sweep_tables import SweepTables
from pigou.registry import named, read_struct
from pigou.request import Role
from pigou.windows.planner_window import PlannerWindow

GROUP = "pigou.planner"


@dataclass(frozen=True, slots=True)
class PlannerSetup:
    """What every planner is given."""

    slo: Slo = field(default_factory=Slo)
    classes: tuple[WorkloadClass, ...] = ()
    budget: Budget = field(default_factory=Budget)  # limits of the fleet
    times: ProvisioningTimes = field(default_factory=ProvisioningTimes)
    # measured, by pool name; where absent, planners learn it or refuse
    performance: Mapping[str, PerformanceModel] = field(default_factory=dict)
    seed: int = 0  # seed of the planner's random draws

    def class_of(self, workload: str, model: str = "") -> WorkloadClass:
        """Return the class of this name, or the default class."""
        for workload_class in self.classes:
            if workload_class.name == workload and workload_class.model in ("", model):
                return workload_class
        return WorkloadClass(name=workload, slo=self.slo)


class Planner(Protocol):
    """State machine that sizes pools; made as `Name(setup, params)`, unknown params refused."""

    name: ClassVar[str]
    Params: ClassVar[type[msgspec.Struct]]

    def observe(self, window: PlannerWindow) -> None:
        """Take in one interval. Intervals come in order and do not overlap."""
        ...

    def tick(self, now_ns: int) -> PlannerDecision:
        """Return the decision; no actions without a window since the last tick."""
        ...


def load(
    name: str, setup: PlannerSetup | None = None, params: Mapping[str, Any] | None = None
) -> Planner:
    """Return the planner `name` of `pigou.planner`; raises ConfigError for bad parameters."""
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


class PoolProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker's measurements of itself."""

    prefill: tuple[tuple[float, float], ...]  # (prompt tokens, seconds alone), at least one
    # (streams, tokens each holds, ITL in seconds), at least one
    decode: tuple[tuple[float, float, float], ...]
    kv_tokens: float = math.inf  # KV capacity; infinity if unknown
    max_seqs: int = 256  # most streams

    @property
    def performance(self) -> PerformanceModel:
        """The performance model of these points."""
        return PerformanceModel.from_points(
            self.prefill, self.decode, self.kv_tokens, self.max_seqs
        )


class PlannerStarted(Message, frozen=True, kw_only=True):
    """Everything that makes a planner, for the journal; `make` makes it again."""

    planner: str  # name in `pigou.planner`
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    slo: Slo = msgspec.field(default_factory=Slo)
    classes: tuple[WorkloadClass, ...] = ()
    budget: Budget = msgspec.field(default_factory=Budget)
    times: ProvisioningTimes = msgspec.field(default_factory=ProvisioningTimes)
    # by pool; other speeds are learned
    profiles: dict[str, PoolProfile] = msgspec.field(default_factory=dict)
    tables: SweepTables | None = None  # tables of `pigou sweep`; override profiles
    roles: dict[str, Role] = msgspec.field(default_factory=dict)
    seed: int = 0

    def make(self) -> Planner:
        """Return the planner; raises ConfigError for a bad name or parameter."""
        performance = {name: profile.performance for name, profile in self.profiles.items()}
        if self.tables is not None:
            performance = {name: self.tables.performance(r) for name, r in self.roles.items()}
        setup = PlannerSetup(
            self.slo, self.classes, self.budget, self.times, performance, self.seed
        )
        return load(self.planner, setup, self.params)


def decide(planner: Planner, window: PlannerWindow) -> PlannerDecision:
    """Let a planner observe a window; return its decision at the window's end."""
    planner.observe(window)
    return planner.tick(window.now_ns)


def writable(value: Any) -> Any:
    """Return a message as builtins, non-finite numbers as strings."""
    return _finite(msgspec.to_builtins(value))


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return repr(value)
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
    return value
