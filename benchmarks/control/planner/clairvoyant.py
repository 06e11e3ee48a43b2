"""The plan of a clairvoyant, by dynamic programming, and a planner that carries it out.

It knows the arrival rates, the lengths and the start-up time, and has the performance models that
planners have. With n_k workers of pool k that serve in a step of dt seconds, it minimises

    sum over steps of  gpus(n) dt + late_gpu_s lambda dt (1 - prod_k inside_k(n_k, lambda))
    + gpus (start_up starts + drain (drains + flips))

over all sequences of n that begin with the fleet as it is. A share `inside` is that of the
performance model at the load, so the smallest GPU-hours for an attainment are those of some price
`late_gpu_s` of a late request. There is no backlog in it: what is late stays late. The orders are
run in the simulator, which says what they attain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import ClassVar

import msgspec
import numpy as np

from benchmarks.control.planner.planner_loads import STEP_S, Demand, Floats
from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    PlannerDecision,
)
from pigou.objectives import Slo
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import RequestMix
from pigou.request import SECOND, Role
from pigou.sim.virtual_clock import EPOCH
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState

#: Shares of requests inside at which the load of a pool is computed.
SHARES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.997, 0.999)
#: Loads over that of the smallest share from which on nobody is inside.
_OVERLOAD = 1.15


@dataclass(frozen=True)
class ForeseenPool:
    """A pool as a clairvoyant knows it."""

    name: str
    role: Role
    gpus: int
    model: PerformanceModel


@dataclass(frozen=True)
class Foresight:
    """One model's fleet and objective.

    Attributes:
        start_up_s, drain_s: seconds of changes.
    """

    pools: tuple[ForeseenPool, ...]
    slo: Slo
    start: tuple[int, ...]  # workers of each pool at the beginning
    max_workers: int
    start_up_s: float
    drain_s: float = 10.0
    flips: bool = True  # whether workers can change between the pools


@dataclass(frozen=True, order=True)
class PlannedOrder:
    """Workers that join (`source` ""), leave (`target` "") or flip at a second."""

    at_s: float
    source: str
    target: str
    count: int = field(compare=False)


def inside_shares(pool: ForeseenPool, rps: float, counts: int, mix: RequestMix, slo: Slo) -> Floats:
    """Return the share inside its part of the objective of 0 .. counts workers."""
    return np.array([0.0, *(_inside(pool, rps, n, mix, slo) for n in range(1, counts + 1))])


_LIMITS: dict[tuple[ForeseenPool, int, RequestMix, Slo], tuple[float, ...]] = {}


def _inside(pool: ForeseenPool, rps: float, workers: int, mix: RequestMix, slo: Slo) -> float:
    key = (pool, workers, mix, slo)
    if key not in _LIMITS:
        _LIMITS[key] = tuple(
            pool.model.limit_rps(pool.role, workers, mix, slo, share) for share in SHARES
        )
    limits = np.maximum.accumulate(np.array(_LIMITS[key][::-1]))
    loads = np.array([0.0, *limits, _OVERLOAD * limits[-1]])
    inside = float(np.interp(rps, loads, [1.0, *SHARES[::-1], 0.0]))
    return inside**2 if pool.role is Role.BOTH else inside  # TTFT times ITL


def plan_orders(
    demand: Demand, foresight: Foresight, late_gpu_s: float, margin: float = 1.0
) -> list[PlannedOrder]:
    """Return the orders of the plan of least cost.

    Args:
        late_gpu_s: GPU-seconds that a late request counts for.
        margin: factor of the demand that is planned for.
    """
    pools, limit = foresight.pools, foresight.max_workers
    top = limit - len(pools) + 1
    states = np.array([
        counts for counts in product(range(1, top + 1), repeat=len(pools)) if sum(counts) <= limit
    ])  # fmt: skip
    gpus = states @ np.array([pool.gpus for pool in pools])
    moves, late_moves = _move_costs(states, foresight)
    first = int(np.flatnonzero((states == foresight.start).all(axis=1))[0])
    cost = np.full(len(states), np.inf)
    cost[first] = 0.0
    choices = []
    lag_steps = foresight.start_up_s / STEP_S
    for step, (rps, mix) in enumerate(zip(demand.rps.tolist(), demand.mixes, strict=True)):
        totals = cost[:, None] + (late_moves if step >= lag_steps else moves)
        choice = totals.argmin(axis=0)
        inside = np.ones(len(states))
        for column, pool in enumerate(pools):
            shares = inside_shares(pool, round(margin * rps, 3), top, mix, foresight.slo)
            inside *= shares[states[:, column]]
        late = late_gpu_s * rps * STEP_S * (1.0 - inside)
        cost = totals[choice, np.arange(len(states))] + gpus * STEP_S + late
        choices.append(choice)
    at = int(cost.argmin())
    path = [at]
    for choice in reversed(choices):
        at = int(choice[at])
        path.append(at)
    return _orders([tuple(states[n].tolist()) for n in reversed(path)], foresight)


def _move_costs(states: np.ndarray, foresight: Foresight) -> tuple[Floats, Floats]:
    """Return costs from state to state: without starts (infinite), and with them."""
    change = states[None, :, :] - states[:, None, :]
    gpus = np.array([pool.gpus for pool in foresight.pools])
    ups, downs = np.maximum(change, 0) @ gpus, np.maximum(-change, 0) @ gpus
    flips = np.minimum(ups, downs) if foresight.flips else np.zeros_like(ups)
    starts, drains = ups - flips, downs - flips
    drained = foresight.drain_s * (drains + flips)
    with_starts = foresight.start_up_s * starts + drained
    return np.where(starts > 0, np.inf, drained), with_starts.astype(float)


def _orders(path: Sequence[tuple[int, ...]], foresight: Foresight) -> list[PlannedOrder]:
    orders = []
    names = [pool.name for pool in foresight.pools]
    for step, (old, new) in enumerate(pairwise(path)):
        change = dict(zip(names, (b - a for a, b in zip(old, new, strict=True)), strict=True))
        at = STEP_S * step
        down = {name: -n for name, n in change.items() if n < 0}
        for target, count in change.items():
            wanted = count
            while wanted > 0 and down and foresight.flips:
                source, spare = next(iter(down.items()))
                moved = min(wanted, spare)
                orders.append(PlannedOrder(at, source, target, moved))
                wanted -= moved
                down[source] -= moved
                if not down[source]:
                    del down[source]
            if wanted > 0:
                orders.append(PlannedOrder(at - foresight.start_up_s, "", target, wanted))
        orders += [PlannedOrder(at, source, "", spare) for source, spare in down.items()]
    return sorted(orders)


def perfect_gpu_hours(demand: Demand, foresight: Foresight) -> float:
    """Return the GPU-hours of ceil(lambda / mu) workers at each moment, of each pool.

    mu is what a worker of a large pool serves inside the objective; workers start at once.
    """
    total = 0.0
    for pool in foresight.pools:
        mu = {
            mix: pool.model.limit_rps(pool.role, 64, mix, foresight.slo, foresight.slo.share) / 64
            for mix in set(demand.mixes)
        }
        workers = [
            max(np.ceil(rps / mu[mix]), 1.0)
            for rps, mix in zip(demand.rps, demand.mixes, strict=True)
        ]
        total += pool.gpus * STEP_S * float(np.sum(workers)) / 3600
    return total


class NoScheduleParams(msgspec.Struct, frozen=True):
    """None."""


class SchedulePlanner:
    """Carries out given orders; what cannot be done yet is done as soon as it can."""

    name: ClassVar[str] = "clairvoyant"
    Params: ClassVar[type[msgspec.Struct]] = NoScheduleParams

    def __init__(self, orders: Sequence[PlannedOrder], max_gpus: int, early_s: float = 2.5) -> None:
        self._orders = sorted(orders)
        self._max_gpus, self._early_s = max_gpus, early_s
        self._window: PlannerWindow | None = None

    def observe(self, window: PlannerWindow) -> None:
        """Note the workers that there are."""
        self._window = window

    def tick(self, now_ns: int) -> PlannerDecision:
        """Return the actions that are due."""
        window, actions = self._window, list[Action]()
        assert window is not None
        now_s = (now_ns - EPOCH) / SECOND
        pools = {pool.name: pool for pool in window.pools}
        room = self._max_gpus - window.used_gpus
        gone: set[str] = set()
        later = []
        for order in self._orders:
            done = 0
            if order.at_s <= now_s + self._early_s:
                if order.source:
                    victims = _victims(pools[order.source], gone)[: order.count]
                    gone.update(victims)
                    actions += [_leaves(one, order, pools) for one in victims]
                    done = len(victims)
                else:
                    done = min(order.count, room // pools[order.target].gpus)
                    room -= done * pools[order.target].gpus
                    actions += [AddWorkers(order.target, done)] if done else []
            if done < order.count:
                later.append(replace(order, count=order.count - done))
        self._orders = later
        return PlannerDecision(now_ns=now_ns, planner=self.name, actions=tuple(actions))


def _victims(pool: PoolWindow, gone: set[str]) -> list[str]:
    ready = [w for w in pool.in_state(WorkerState.READY) if w.id not in gone]
    return [w.id for w in sorted(ready, key=lambda w: (w.running or 0, w.id))]


def _leaves(worker: str, order: PlannedOrder, pools: Mapping[str, PoolWindow]) -> Action:
    if not order.target:
        return DrainWorker(worker)
    return FlipRole(worker, pools[order.target].role, order.target)


def fewest_workers(
    model: PerformanceModel, role: Role, rps: float, mix: RequestMix, slo: Slo, share: float
) -> int | None:
    """Return the fewest workers that keep the objective; None if no number does."""
    if rps <= 0:
        return 0
    if model.limit_rps(role, 64, mix, slo, share) <= 0:
        return None
    high = 1
    while model.limit_rps(role, high, mix, slo, share) < rps:
        high *= 2
    return bisect_left(
        range(high), rps, lo=high // 2, key=lambda n: model.limit_rps(role, n, mix, slo, share)
    )
