"""A planner's run on record: what it was made of, and what it decided of each window."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from pigou.control.messages import Message
from pigou.control.planner.messages import PlannerDecision, PlannerWindow
from pigou.control.planner.objectives import Budget, ProvisioningTimes, Slo, WorkloadClass
from pigou.control.planner.performance.model import PerformanceModel
from pigou.control.planner.performance.sweep_tables import SweepTables
from pigou.control.planner.planner import Planner, PlannerSetup, load
from pigou.request import Role


class PoolProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a worker of a pool measured of itself."""

    prefill: tuple[tuple[float, float], ...]  # (prompt tokens, seconds alone), at least one
    # (streams, tokens that each holds, seconds between tokens), at least one.
    decode: tuple[tuple[float, float, float], ...]
    kv_tokens: float = math.inf  # that it can hold; infinity where it did not say
    max_seqs: int = 256  # most streams of it

    @property
    def performance(self) -> PerformanceModel:
        """The performance model that follows."""
        return PerformanceModel.from_points(
            self.prefill, self.decode, self.kv_tokens, self.max_seqs
        )


class PlannerStarted(Message, frozen=True, kw_only=True):
    """All that a planner is made of: `make` makes the same one again.

    Attributes:
        budget, times: as of `PlannerSetup`.
    """

    planner: str  # its name under `pigou.planner`
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    slo: Slo = msgspec.field(default_factory=Slo)
    classes: tuple[WorkloadClass, ...] = ()
    budget: Budget = msgspec.field(default_factory=Budget)
    times: ProvisioningTimes = msgspec.field(default_factory=ProvisioningTimes)
    # of pools, by name; speeds of the others are learned.
    profiles: dict[str, PoolProfile] = msgspec.field(default_factory=dict)
    tables: SweepTables | None = None  # of `pigou sweep`; they go before profiles
    roles: dict[str, Role] = msgspec.field(default_factory=dict)
    seed: int = 0

    def make(self) -> Planner:
        """Return the planner.

        Raises:
            ConfigError: there is none of that name, or a parameter is refused.
        """
        performance = {name: profile.performance for name, profile in self.profiles.items()}
        if self.tables is not None:
            performance = {name: self.tables.performance(r) for name, r in self.roles.items()}
        setup = PlannerSetup(
            slo=self.slo,
            classes=self.classes,
            budget=self.budget,
            times=self.times,
            performance=performance,
            seed=self.seed,
        )
        return load(self.planner, setup, self.params)


def decide(planner: Planner, window: PlannerWindow) -> PlannerDecision:
    """Let a planner observe a window, and return what it decides at its end.

    A planner that looks at its setup alone returns the same of the same windows.
    """
    planner.observe(window)
    return planner.tick(window.now_ns)


def writable(value: Any) -> Any:
    """Return builtins of a message in which numbers that are not finite are strings."""
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
