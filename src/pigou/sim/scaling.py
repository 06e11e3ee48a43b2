"""Scaling of a simulated fleet: a planner observes windows, and its actions are carried out."""

from __future__ import annotations

from typing import Any

import msgspec

from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    PlannerDecision,
    RebalancePool,
    RemoveWorker,
    WorkerState,
)
from pigou.control.planner.objectives import Budget, ProvisioningTimes
from pigou.control.planner.planner import Planner
from pigou.request import SECOND
from pigou.sim.fleet_config import FleetConfig
from pigou.sim.membership import Membership
from pigou.sim.scaling_config import ScalingConfig
from pigou.sim.scaling_summary import OfferedRate, ScalingMove, reversals, settle_seconds
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.window_meter import WindowMeter
from pigou.sim.worker_spec import FleetWorker

#: Key of the planner's events: after the control plane's tick and the load reports of a moment.
_PLANNER_KEY = -1
#: Seconds of a drain that a planner reckons with, where there is no limit.
_DRAIN_S = 10.0


def with_start_up(fleet: FleetConfig, config: ScalingConfig) -> FleetConfig:
    """Return a fleet with the start-up time that the scaling has, where it has one."""
    if config.start_up is None:
        return fleet
    start_up = msgspec.structs.replace(fleet.start_up, seconds=config.start_up)
    return msgspec.structs.replace(fleet, start_up=start_up)


def budget_of(config: ScalingConfig, membership: Membership) -> Budget:
    """Return the budget of a planner: GPUs for so many workers of the widest pool."""
    if not config.max_workers:
        return Budget()
    width = max(pool.spec.gpus for pool in membership.pools.values())
    return Budget(max_gpus=config.max_workers * width)


def times_of(fleet: FleetConfig, membership: Membership) -> ProvisioningTimes:
    """Return what changes of a fleet take, as a planner is told."""
    drain_s = fleet.drain_s or _DRAIN_S
    flips = any(membership.can_flip(a, b) for a in membership.pools for b in membership.pools)
    flip_s = fleet.flip.seconds + (drain_s if fleet.flip.drains else 0.0)
    return ProvisioningTimes(
        start_up_s=fleet.start_up.seconds,
        warm_up_s=fleet.start_up.warm_up_s,
        drain_s=drain_s,
        flip_s=flip_s if flips else float("inf"),
    )


class Scaling:
    """Lets a planner change a fleet, every few seconds of the virtual clock.

    An action that cannot be carried out is refused, and the decision says why: it would exceed
    `max_workers`, take the last worker that decodes, or names a worker or pool that is not there.

    Attributes:
        decisions: those with actions, as the figures have them.
        moves: of workers, in order.
        peak_workers: most workers at once, starting and draining ones included.
    """

    def __init__(
        self, planner: Planner, membership: Membership, meter: WindowMeter, clock: Clock,
        config: ScalingConfig, arrivals: OfferedRate,
    ) -> None:  # fmt: skip
        """Begin to plan when the clock runs.

        Args:
            planner: decides.
            membership: of the fleet.
            meter: makes its windows.
            clock: virtual.
            config: interval and limit.
            arrivals: the arrival rate, by which moves are judged.
        """
        self.decisions: list[dict[str, Any]] = []
        self.moves: list[ScalingMove] = []
        self.peak_workers = membership.size
        self._planner, self._membership, self._meter = planner, membership, meter
        self._clock, self._config, self._arrivals = clock, config, arrivals
        self._interval_ns = round(config.interval_s * SECOND)
        self._sample_ns = min(SECOND, self._interval_ns)
        clock.at(EPOCH + self._sample_ns, Phase.TICK, _PLANNER_KEY, self._sample)
        clock.at(EPOCH + self._interval_ns, Phase.TICK, _PLANNER_KEY, self._plan)

    def summary(self, now: int) -> dict[str, Any]:
        """Return the figures of the run until now."""
        seconds = self._membership.gpu_seconds(now)
        hours = {
            role: {state: value / 3600 for state, value in times.items()}
            for role, times in seconds.items()
        }
        settle_s = settle_seconds(
            self.moves, self._membership.changes, self._arrivals.changes_ns, now
        )
        return {
            "name": self._planner.name,
            "gpu_hours": sum(value for times in hours.values() for value in times.values()),
            "moves": len(self.moves),
            "reversals": reversals(self.moves, self._arrivals),
            "settle_s": settle_s,
            "peak_workers": self.peak_workers,
            "gpu_hours_by_role": hours,
            "decisions": self.decisions,
        }

    def _sample(self, now: int) -> None:
        self._meter.sample(now)
        self._clock.at(now + self._sample_ns, Phase.TICK, _PLANNER_KEY, self._sample)

    def _plan(self, now: int) -> None:
        """Observe a window, decide, and do it."""
        self._planner.observe(self._meter.window(now))
        decision = self._planner.tick(now)
        refusals = [why for action in decision.actions if (why := self._do(action, now))]
        self.peak_workers = max(self.peak_workers, self._membership.size)
        if decision.actions:
            self.decisions.append(_entry(decision, refusals))
        self._clock.at(now + self._interval_ns, Phase.TICK, _PLANNER_KEY, self._plan)

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

    def _add(self, pool: str, count: int, now: int) -> str:
        if pool not in self._membership.pools:
            return f"there is no pool {pool!r}"
        limit = self._config.max_workers
        room = limit - self._membership.size if limit else count
        for _ in range(min(count, room)):
            worker = self._membership.add(pool, now)
            self._note(worker.name, pool, 1, now)
        if room < count:
            return f"{pool}: {count - max(room, 0)} workers more than max_workers allows"
        return ""

    def _drain(self, name: str, now: int) -> str:
        worker = self._membership.worker(name)
        if worker is None or worker.state is not WorkerState.READY:
            return f"{name} is not ready"
        if self._is_last_decoder(worker):
            return f"{name} is the last worker that decodes"
        self._note(name, worker.pool, -1, now)
        self._membership.drain(worker, now)
        return ""

    def _remove(self, name: str, now: int) -> str:
        worker = self._membership.worker(name)
        if worker is None:
            return f"{name} is not there"
        if self._is_last_decoder(worker):
            return f"{name} is the last worker that decodes"
        if worker.state is not WorkerState.DRAINING:
            self._note(name, worker.pool, -1, now)
        self._membership.remove(worker, now)
        return ""

    def _flip(self, name: str, pool: str, now: int) -> str:
        worker = self._membership.worker(name)
        if worker is None or worker.state is not WorkerState.READY:
            return f"{name} is not ready"
        if not self._membership.can_flip(worker.pool, pool):
            return f"{name} cannot serve in pool {pool!r}"
        if not self._membership.pools[pool].role.decodes and self._is_last_decoder(worker):
            return f"{name} is the last worker that decodes"
        self._note(name, worker.pool, -1, now)
        self._note(name, pool, 1, now)
        self._membership.flip(worker, pool, now)
        return ""

    def _is_last_decoder(self, worker: FleetWorker) -> bool:
        """Whether no other ready worker decodes."""
        if worker.state is not WorkerState.READY or not worker.info.role.decodes:
            return False
        return not any(
            other is not worker and other.state is WorkerState.READY and other.info.role.decodes
            for pool in self._membership.pools
            for other in self._membership.members(pool)
        )

    def _note(self, worker: str, pool: str, sign: int, now: int) -> None:
        self.moves.append(ScalingMove(now, worker, pool, sign))


def _entry(decision: PlannerDecision, refusals: list[str]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "at_s": (decision.now_ns - EPOCH) / SECOND,
        "actions": [msgspec.to_builtins(action) for action in decision.actions],
        "reasons": list(decision.reasons),
    }
    if refusals:
        entry["refused"] = refusals
    return entry
