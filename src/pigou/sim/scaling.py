"""Scaling of a simulated fleet: a planner observes windows, and its actions are carried out."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from pigou.config import ConfigError
from pigou.control.planner.actuation import ManagedWorker, carry_out
from pigou.control.planner.messages import PlannerDecision
from pigou.control.planner.planner import Planner, PlannerSetup, load
from pigou.control.planner.tenant_load import TenantLoad
from pigou.objectives import Budget, Objectives, ProvisioningTimes, Slo
from pigou.performance.sweep_tables import SweepTables
from pigou.request import SECOND
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.client import SimulatedClient
from pigou.sim.fleet_config import FleetConfig, ScalingConfig
from pigou.sim.membership import Membership, MembershipChange
from pigou.sim.pool_performance import measure_performance
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.window_meter import WindowMeter
from pigou.sim.worker_spec import FleetWorker
from pigou.windows.planner_window import PlannerWindow, WorkerState

#: A move may undo the one before where the arrival rate has changed by more than this share.
DEADBAND = 0.1
#: Nanoseconds over which arrivals are counted where their rate is not known.
_COUNTED_NS = 60 * SECOND
#: Seconds of a drain that a planner reckons with, where there is no limit.
_DRAIN_S = 10.0
#: Key of the planner's events: after the control plane's tick and the load reports of a moment.
_PLANNER_KEY = -1


class ScalingMove(NamedTuple):
    """A decided join (+1) or leave (-1); a flip is both."""

    at_ns: int
    worker: str
    pool: str
    sign: int


class OfferedRate:
    """Arrival rate of a workload: by schedule, or counted over a minute."""

    def __init__(self, schedules: Sequence[RateSchedule], client: SimulatedClient) -> None:
        """Take the schedule of each part; none counts the client's requests instead."""
        self._schedules, self._client = tuple(schedules), client

    @property
    def changes_ns(self) -> tuple[int, ...]:
        """Times at which a rate changes, the beginning included."""
        times = {
            EPOCH + round(second * SECOND)
            for schedule in self._schedules
            for second in schedule.changes
        }
        return tuple(sorted(times | {EPOCH}))

    def at(self, now: int) -> tuple[float, ...]:
        """Return each part's requests per second at a past time."""
        if self._schedules:
            return tuple(schedule.at((now - EPOCH) / SECOND) for schedule in self._schedules)
        begin = max(EPOCH, now - _COUNTED_NS)
        runs = self._client.runs  # in the order of their intentions
        end, start = (bisect_right(runs, at, key=attrgetter("intended_ns")) for at in (now, begin))
        count = end - start
        return (count * SECOND / max(now - begin, 1),)


def reversals(moves: Sequence[ScalingMove], arrivals: OfferedRate) -> int:
    """Return how often a move undid its pool's last one at unchanged load.

    Load changed if an arrival rate rose (before an addition) or fell (before a removal) by more
    than `DEADBAND`; with several parts, either way.
    """
    count = 0
    last: dict[str, ScalingMove] = {}
    for move in moves:
        before = last.get(move.pool)
        last[move.pool] = move
        if before is None or before.sign == move.sign:
            continue
        count += not _follows(arrivals.at(before.at_ns), arrivals.at(move.at_ns), move.sign)
    return count


def _follows(old: Sequence[float], new: Sequence[float], sign: int) -> bool:
    """Whether a change of rates explains a move in this direction."""
    risen = any(after > before * (1 + DEADBAND) for before, after in zip(old, new, strict=True))
    fallen = any(after < before * (1 - DEADBAND) for before, after in zip(old, new, strict=True))
    if len(new) > 1:
        return risen or fallen
    return risen if sign > 0 else fallen


def settle_seconds(
    moves: Sequence[ScalingMove], changes: Sequence[MembershipChange], load_ns: Sequence[int],
    end_ns: int,
) -> float:  # fmt: skip
    """Return the longest time from a load change until the last moved worker is up, or gone."""
    final = (WorkerState.READY, None)
    settled_ns = {
        move: next(
            (c.at_ns for c in changes
             if c.worker == move.worker and c.at_ns >= move.at_ns and c.state in final),
            end_ns,
        )
        for move in moves
    }  # fmt: skip
    max_ns = 0
    for move, at_ns in settled_ns.items():
        before = [time for time in load_ns if time <= move.at_ns]
        max_ns = max(max_ns, at_ns - before[-1])
    return max_ns / SECOND


@dataclass(frozen=True, slots=True)
class ScaledFleet:
    """A planned fleet of one model."""

    prefix: str  # prefix of pool and worker names for the planner; "" if alone
    membership: Membership
    meter: WindowMeter
    arrivals: OfferedRate  # arrival rate for judging moves
    moves: list[ScalingMove] = field(default_factory=list)  # in order

    def own_name(self, name: str) -> str | None:
        """Return a name without the prefix; None for one of another fleet."""
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def note(self, worker: str, pool: str, sign: int, now: int) -> None:
        """Note a move."""
        self.moves.append(ScalingMove(now, worker, pool, sign))


class ScaledFleets:
    """Several planned fleets as one `ManagedFleet`."""

    def __init__(self, fleets: Sequence[ScaledFleet]) -> None:
        self._fleets = tuple(fleets)

    @property
    def size(self) -> int:
        """Workers in all states."""
        return sum(fleet.membership.size for fleet in self._fleets)

    @property
    def pools(self) -> Collection[str]:
        """Names of the pools, with their prefixes."""
        return [fleet.prefix + pool for fleet in self._fleets for pool in fleet.membership.pools]

    def worker(self, id: str) -> ManagedWorker | None:
        """Return a live worker, or None."""
        fleet, worker = self._find(id)
        if fleet is None or worker is None or worker.state is None:
            return None
        return ManagedWorker(id, fleet.prefix + worker.pool, worker.state)

    def is_last_decoder(self, id: str) -> bool:
        """True for the last ready decoder."""
        fleet, worker = self._at(id)
        return fleet.membership.is_last_decoder(worker)

    def start_refusal(self, pool: str) -> str:
        """Return why a pool cannot grow, or ""."""
        fleet, own = self._pool(pool)
        return fleet.membership.start_refusal(own)

    def flip_refusal(self, id: str, pool: str) -> str:
        """Return why a worker cannot change pools, or ""."""
        fleet, worker = self._at(id)
        own = fleet.own_name(pool)
        if own is None or not fleet.membership.can_flip(worker.pool, own):
            return f"{id} cannot serve in pool {pool!r}"
        return ""

    def decodes(self, pool: str) -> bool:
        """Whether workers of a pool decode."""
        fleet, own = self._pool(pool)
        return fleet.membership.pools[own].role.decodes

    def limits_refusal(self, pool: str) -> str:  # noqa: ARG002
        """Return nothing: simulated engines change their limits between two steps."""
        return ""

    def set_limits(
        self, pool: str, max_seqs: int | None, max_batched_tokens: int | None, now: int
    ) -> None:
        """Set running limits of a pool's workers, future ones too."""
        fleet, own = self._pool(pool)
        fleet.membership.set_limits(own, max_seqs, max_batched_tokens, now)

    def add(self, pool: str, now: int) -> str:
        """Order one more worker of a pool; return its id."""
        fleet, own = self._pool(pool)
        worker = fleet.membership.add(own, now)
        fleet.note(worker.name, own, 1, now)
        return fleet.prefix + worker.name

    def drain(self, id: str, now: int) -> None:
        """Drain a ready worker, then remove it."""
        fleet, worker = self._at(id)
        fleet.note(worker.name, worker.pool, -1, now)
        fleet.membership.drain(worker, now)

    def remove(self, id: str, now: int) -> None:
        """Remove a worker at once; its requests migrate."""
        fleet, worker = self._at(id)
        if worker.state is not WorkerState.DRAINING:
            fleet.note(worker.name, worker.pool, -1, now)
        fleet.membership.remove(worker, now)

    def flip(self, id: str, pool: str, now: int) -> None:
        """Flip a ready worker to another pool, after a drain if flips need one."""
        fleet, worker = self._at(id)
        _, own = self._pool(pool)
        fleet.note(worker.name, worker.pool, -1, now)
        fleet.note(worker.name, own, 1, now)
        fleet.membership.flip(worker, own, now)

    def _pool(self, name: str) -> tuple[ScaledFleet, str]:
        for fleet in self._fleets:
            own = fleet.own_name(name)
            if own is not None and own in fleet.membership.pools:
                return fleet, own
        raise KeyError(name)

    def _find(self, name: str) -> tuple[ScaledFleet | None, FleetWorker | None]:
        for fleet in self._fleets:
            own = fleet.own_name(name)
            worker = None if own is None else fleet.membership.worker(own)
            if worker is not None:
                return fleet, worker
        return None, None

    def _at(self, name: str) -> tuple[ScaledFleet, FleetWorker]:
        fleet, worker = self._find(name)
        if fleet is None or worker is None:
            raise KeyError(name)
        return fleet, worker


class PlannedFleet(NamedTuple):
    """A planner's view of a fleet."""

    prefix: str
    config: FleetConfig
    membership: Membership


def with_start_up(fleet: FleetConfig, config: ScalingConfig) -> FleetConfig:
    """Return a fleet with the scaling's start-up time, if set."""
    if config.start_up is None:
        return fleet
    start_up = msgspec.structs.replace(fleet.start_up, seconds=config.start_up)
    return msgspec.structs.replace(fleet, start_up=start_up)


def build_planner(
    config: ScalingConfig, objectives: Objectives, fleets: Sequence[PlannedFleet], seed: int
) -> Planner:
    """Return a configuration's planner."""
    params = dict(config.planner)
    return load(params.pop("planner"), planner_setup(config, objectives, fleets, seed), params)


def planner_setup(
    config: ScalingConfig, objectives: Objectives, fleets: Sequence[PlannedFleet], seed: int
) -> PlannerSetup:
    """Return the planner setup of these fleets."""
    tables = _tables(config, fleets)
    performance = {
        fleet.prefix + pool.name: measure_performance(pool.spec, pool.role, fleet.config)
        if tables is None
        else tables.performance(pool.role)
        for fleet in fleets
        for pool in fleet.membership.pools.values()
    }
    return PlannerSetup(
        slo=objectives.slo or Slo(),
        classes=objectives.classes,
        budget=budget_of(config, fleets),
        times=times_of(fleets),
        performance=performance,
        seed=seed,
    )


def _tables(config: ScalingConfig, fleets: Sequence[PlannedFleet]) -> SweepTables | None:
    if not config.performance:
        return None
    makes = {pool.make for fleet in fleets for pool in fleet.membership.pools.values()}
    if len(fleets) > 1 or len(makes) > 1:
        raise ConfigError(
            f"performance is {config.performance!r}, and the fleet has workers of several kinds; "
            "leave it out, and they are measured"
        )
    return SweepTables.read(config.performance)


def budget_of(config: ScalingConfig, fleets: Sequence[PlannedFleet]) -> Budget:
    """Return GPUs for as many workers of the widest pool as there may be."""
    if not config.max_workers:
        return Budget()
    pools = [pool for fleet in fleets for pool in fleet.membership.pools.values()]
    return Budget(max_gpus=config.max_workers * max(pool.spec.gpus for pool in pools))


def times_of(fleets: Sequence[PlannedFleet]) -> ProvisioningTimes:
    """Return change durations, of the slowest fleet each."""
    start_ups = [fleet.config.start_up for fleet in fleets]
    drain_s = max(fleet.config.drain_s or _DRAIN_S for fleet in fleets)
    flips = [
        fleet.config.flip.seconds + (drain_s if fleet.config.flip.drains else 0.0)
        for fleet in fleets
        if any(fleet.membership.can_flip(a, b) for a in fleet.membership.pools
               for b in fleet.membership.pools)
    ]  # fmt: skip
    return ProvisioningTimes(
        start_up_s=max(start.seconds for start in start_ups),
        warm_up_s=max(start.warm_up_s for start in start_ups),
        drain_s=drain_s,
        flip_s=max(flips, default=math.inf),
    )


class Scaling:
    """Lets a planner change fleets, every few seconds of the virtual clock.

    Refuses actions beyond `max_workers`, on the last decode worker, or on unknown workers or pools.
    """

    def __init__(
        self, planner: Planner, fleets: Sequence[ScaledFleet], clock: Clock, config: ScalingConfig
    ) -> None:
        self.decisions: list[dict[str, Any]] = []
        self._advice: tuple[str, ...] = ()  # moves of experts that the last decision chose
        self.replicas: list[dict[str, Any]] = []
        self._planner, self._fleets = planner, tuple(fleets)
        self._managed = ScaledFleets(self._fleets)
        self._clock, self._config = clock, config
        self._interval_ns = round(config.interval_s * SECOND)
        self._sample_ns = min(SECOND, self._interval_ns)
        self.peak_workers = self.size
        config.check_size(self.size)
        self._record(EPOCH)
        clock.at(EPOCH + self._sample_ns, Phase.TICK, _PLANNER_KEY, self._sample)
        clock.at(EPOCH + self._interval_ns, Phase.TICK, _PLANNER_KEY, self._plan)

    @property
    def size(self) -> int:
        """Workers in all states."""
        return self._managed.size

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
        windows = [(fleet.prefix, fleet.meter.window(now)) for fleet in self._fleets]
        self._planner.observe(_merged(windows))
        decision = self._planner.tick(now)
        limit, tenants = self._config.max_workers or 0, self._tenant_load(now)
        results = [
            carry_out(action, self._managed, now, limit, tenants) for action in decision.actions
        ]
        refusals = [refusal for refusal in results if refusal]
        self.peak_workers = max(self.peak_workers, self.size)
        advice = tuple(a.move for a in decision.alternatives if a.chosen and a.reason)
        if decision.actions or advice != self._advice:
            self.decisions.append(_entry(decision, refusals))
        self._advice = advice
        self._record(now)
        self._clock.at(now + self._interval_ns, Phase.TICK, _PLANNER_KEY, self._plan)

    def _tenant_load(self, now: int) -> TenantLoad:
        loads = [fleet.meter.tenant_load(now) for fleet in self._fleets]
        works = (Counter(load.tokens) for load in loads)
        return TenantLoad(sum(works, Counter[str]()), loads[0].weights)

    def _record(self, now: int) -> None:
        pools = {
            fleet.prefix + pool: fleet.membership.counts(pool)
            for fleet in self._fleets
            for pool in fleet.membership.pools
        }
        if not self.replicas or self.replicas[-1]["pools"] != pools:
            self.replicas.append({"at_s": (now - EPOCH) / SECOND, "pools": pools})


def _merged(windows: Sequence[tuple[str, PlannerWindow]]) -> PlannerWindow:
    """Return one window of several fleets, their prefixes before the names."""
    (prefix, first), *_ = windows
    if len(windows) == 1 and not prefix:
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
    """Return a decision's fields, without unknown ones."""
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
