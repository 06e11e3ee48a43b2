"""Scaling of a simulated fleet: a planner observes windows, and its actions are carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    PlannerDecision,
    PlannerWindow,
    RebalancePool,
    RemoveWorker,
    WorkerState,
)
from pigou.control.planner.planner import Planner
from pigou.request import SECOND
from pigou.sim.membership import Membership
from pigou.sim.scaling_config import ScalingConfig
from pigou.sim.scaling_summary import OfferedRate, ScalingMove, reversals, settle_seconds
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.window_meter import WindowMeter
from pigou.sim.worker_spec import FleetWorker

#: Key of the planner's events: after the control plane's tick and the load reports of a moment.
_PLANNER_KEY = -1


@dataclass(frozen=True, slots=True)
class ScaledFleet:
    """A fleet of one model that a planner changes.

    Attributes:
        prefix: of the names of its pools and workers before the planner; "" where it is alone.
        membership: of the fleet.
        meter: makes its windows.
        arrivals: the arrival rate, by which moves are judged.
        moves: of its workers, in order.
    """

    prefix: str
    membership: Membership
    meter: WindowMeter
    arrivals: OfferedRate
    moves: list[ScalingMove] = field(default_factory=list)

    def own_name(self, name: str) -> str | None:
        """Return a name without the prefix; None for one of another fleet."""
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def note(self, worker: str, pool: str, sign: int, now: int) -> None:
        """Note a move."""
        self.moves.append(ScalingMove(now, worker, pool, sign))


class Scaling:
    """Lets a planner change fleets, every few seconds of the virtual clock.

    An action that cannot be carried out is refused, and the decision says why: it would exceed
    `max_workers`, take the last worker that decodes, or names a worker or pool that is not there.

    Attributes:
        decisions: those with actions, as the figures have them.
        replicas: workers of each pool by state, whenever they differ from those before.
        peak_workers: most workers at once, starting and draining ones included.
    """

    def __init__(
        self, planner: Planner, fleets: Sequence[ScaledFleet], clock: Clock, config: ScalingConfig
    ) -> None:
        """Begin to plan when the clock runs.

        Args:
            planner: decides.
            fleets: that it changes, one of each model.
            clock: virtual.
            config: interval and limit.

        Raises:
            ConfigError: there are more workers than the limit allows.
        """
        self.decisions: list[dict[str, Any]] = []
        self.replicas: list[dict[str, Any]] = []
        self._planner, self._fleets = planner, tuple(fleets)
        self._clock, self._config = clock, config
        self._interval_ns = round(config.interval_s * SECOND)
        self._sample_ns = min(SECOND, self._interval_ns)
        self.peak_workers = self.size
        if 0 < config.max_workers < self.size:
            raise ConfigError(
                f"max_workers is {config.max_workers}, and the fleet begins with {self.size}; "
                "give at least as many"
            )
        self._record(EPOCH)
        clock.at(EPOCH + self._sample_ns, Phase.TICK, _PLANNER_KEY, self._sample)
        clock.at(EPOCH + self._interval_ns, Phase.TICK, _PLANNER_KEY, self._plan)

    @property
    def size(self) -> int:
        """Workers in all states."""
        return sum(fleet.membership.size for fleet in self._fleets)

    def summary(self, now: int) -> dict[str, Any]:
        """Return the figures of the run until now."""
        hours: dict[str, dict[str, float]] = {}
        for fleet in self._fleets:
            for role, times in fleet.membership.gpu_seconds(now).items():
                hours[fleet.prefix + role] = {name: s / 3600 for name, s in times.items()}
        settled = [
            settle_seconds(fleet.moves, fleet.membership.changes, fleet.arrivals.changes_ns, now)
            for fleet in self._fleets
        ]
        return {
            "name": self._planner.name,
            "gpu_hours": sum(value for times in hours.values() for value in times.values()),
            "moves": sum(len(fleet.moves) for fleet in self._fleets),
            "reversals": sum(reversals(fleet.moves, fleet.arrivals) for fleet in self._fleets),
            "settle_s": max(settled),
            "peak_workers": self.peak_workers,
            "gpu_hours_by_role": hours,
            "decisions": self.decisions,
            "replicas": self.replicas,
        }

    def _sample(self, now: int) -> None:
        for fleet in self._fleets:
            fleet.meter.sample(now)
        self._clock.at(now + self._sample_ns, Phase.TICK, _PLANNER_KEY, self._sample)

    def _plan(self, now: int) -> None:
        """Observe a window, decide, and do it."""
        windows = [(fleet.prefix, fleet.meter.window(now)) for fleet in self._fleets]
        self._planner.observe(_merged(windows))
        decision = self._planner.tick(now)
        refusals = [why for action in decision.actions if (why := self._do(action, now))]
        self.peak_workers = max(self.peak_workers, self.size)
        if decision.actions:
            self.decisions.append(_entry(decision, refusals))
        self._record(now)
        self._clock.at(now + self._interval_ns, Phase.TICK, _PLANNER_KEY, self._plan)

    def _record(self, now: int) -> None:
        """Record the workers of each pool, where they have changed."""
        pools = {
            fleet.prefix + pool: fleet.membership.counts(pool)
            for fleet in self._fleets
            for pool in fleet.membership.pools
        }
        if not self.replicas or self.replicas[-1]["pools"] != pools:
            self.replicas.append({"at_s": (now - EPOCH) / SECOND, "pools": pools})

    # --- actions ------------------------------------------------------------------------------

    def _do(self, action: Action, now: int) -> str:
        """Carry out an action; return why not, empty where it was."""
        match action:
            case AddWorkers(pool, count):
                return self._add(pool, count, now)
            case DrainWorker(name):
                return self._drain(name, now)
            case RemoveWorker(name):
                return self._remove(name, now)
            case FlipRole(name, _, pool):
                return self._flip(name, pool, now)
            case RebalancePool():
                return ""  # advice to the router, which goes by what it sees itself
        return f"{type(action).__name__} is not simulated"

    def _add(self, name: str, count: int, now: int) -> str:
        for fleet in self._fleets:
            pool = fleet.own_name(name)
            if pool in fleet.membership.pools:
                break
        else:
            return f"there is no pool {name!r}"
        limit = self._config.max_workers
        room = max(limit - self.size, 0) if limit else count
        for _ in range(min(count, room)):
            worker = fleet.membership.add(pool, now)
            fleet.note(worker.name, pool, 1, now)
        if room < count:
            return f"{name}: {count - room} workers more than max_workers allows"
        return ""

    def _drain(self, name: str, now: int) -> str:
        fleet, worker = self._find(name)
        if worker is None or worker.state is not WorkerState.READY:
            return f"{name} is not ready"
        if fleet.membership.is_last_decoder(worker):
            return f"{name} is the last worker that decodes"
        fleet.note(worker.name, worker.pool, -1, now)
        fleet.membership.drain(worker, now)
        return ""

    def _remove(self, name: str, now: int) -> str:
        fleet, worker = self._find(name)
        if worker is None:
            return f"{name} is not there"
        if fleet.membership.is_last_decoder(worker):
            return f"{name} is the last worker that decodes"
        if worker.state is not WorkerState.DRAINING:
            fleet.note(worker.name, worker.pool, -1, now)
        fleet.membership.remove(worker, now)
        return ""

    def _flip(self, name: str, pool_name: str, now: int) -> str:
        fleet, worker = self._find(name)
        pool = fleet.own_name(pool_name)
        if worker is None or worker.state is not WorkerState.READY:
            return f"{name} is not ready"
        if pool is None or not fleet.membership.can_flip(worker.pool, pool):
            return f"{name} cannot serve in pool {pool_name!r}"
        prefills = not fleet.membership.pools[pool].role.decodes
        if prefills and fleet.membership.is_last_decoder(worker):
            return f"{name} is the last worker that decodes"
        fleet.note(worker.name, worker.pool, -1, now)
        fleet.note(worker.name, pool, 1, now)
        fleet.membership.flip(worker, pool, now)
        return ""

    def _find(self, name: str) -> tuple[ScaledFleet, FleetWorker | None]:
        """Return a worker, and its fleet; any fleet where there is none."""
        for fleet in self._fleets:
            own = fleet.own_name(name)
            worker = None if own is None else fleet.membership.worker(own)
            if worker is not None:
                return fleet, worker
        return self._fleets[0], None


def _merged(windows: Sequence[tuple[str, PlannerWindow]]) -> PlannerWindow:
    """Return one window of several fleets, their prefixes before the names."""
    (_, first), *_ = windows
    if len(windows) == 1:
        return first
    pools = []
    for prefix, window in windows:
        for pool in window.pools:
            workers = tuple(
                msgspec.structs.replace(worker, id=prefix + worker.id) for worker in pool.workers
            )
            pools.append(msgspec.structs.replace(pool, name=prefix + pool.name, workers=workers))
    return PlannerWindow(
        now_ns=first.now_ns,
        seconds=first.seconds,
        loads=tuple(load for _, window in windows for load in window.loads),
        pools=tuple(pools),
        price_of_anarchy={k: v for _, w in windows for k, v in w.price_of_anarchy.items()},
        better_prefill={k: v for _, w in windows for k, v in w.better_prefill.items()},
    )


def _entry(decision: PlannerDecision, refusals: list[str]) -> dict[str, Any]:
    """Return a decision as the figures have it; what is not known is left out."""
    entry: dict[str, Any] = {
        "at_s": (decision.now_ns - EPOCH) / SECOND,
        "actions": [msgspec.to_builtins(action) for action in decision.actions],
        "reasons": list(decision.reasons),
    }
    for name in ("forecasts", "pools", "alternatives"):
        if parts := getattr(decision, name):
            entry[name] = [
                {
                    key: value
                    for key, value in msgspec.to_builtins(part).items()
                    if value is not None
                }
                for part in parts
            ]
    if refusals:
        entry["refused"] = refusals
    return entry
