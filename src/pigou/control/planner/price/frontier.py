"""The best split of each number of GPUs of a model, and the budget-clearing price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pigou.control.planner.price.terms import (
    MIN_REMOTE,
    PRICE_WIDTH,
    ROUNDING,
    SPLITS,
    PricePlannerParams,
    goodput,
    rent,
    saved,
    scarce_goodput,
)
from pigou.objectives import Slo
from pigou.performance.capacity import CapacityCurve
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import RequestMix
from pigou.request import Role


@dataclass(frozen=True, slots=True)
class PoolOption:
    """A pool that a model's plan may use."""

    name: str
    role: Role
    gpus: int
    performance: PerformanceModel
    min_workers: int
    max_workers: int
    supply: int  # serving or on their way
    start_cost: float = 0.0  # per start, in weighted seconds of delay
    removal_cost: float = 0.0  # per removal, same unit

    def move_cost(self, workers: int) -> float:
        """Return the one-time cost of moving to `workers` workers."""
        change = workers - self.supply
        return self.start_cost * change if change > 0 else -self.removal_cost * change


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One split of a model's GPUs."""

    gpus: int
    rps: float  # served inside the objective, at most the planned load
    value: float  # weighted seconds of delay saved a second, against serving nothing
    cost: float  # cost of the moves to it, same unit
    counts: dict[str, int]  # workers by pool


class RoleCapacity:
    """Capacity of all pools of one role, filled by capacity per GPU; load is split by capacity.

    Routes send a `share` of the load there, and `prompt_s` seconds of prompts of each request
    beside: 1 / R = share / curve + prompt_s / workers.
    """

    def __init__(
        self, pools: Sequence[tuple[PoolOption, CapacityCurve]], share: float = 1.0,
        prompt_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._share, self._prompt_s = share, prompt_s
        self._pools = sorted(pools, key=lambda item: (-item[1](1) / item[0].gpus, item[0].name))

    @property
    def is_empty(self) -> bool:
        """True if no pool has this role."""
        return not self._pools

    def counts_for(self, rps: float) -> dict[str, int]:
        """Return the fewest workers by pool that serve a load, or all."""
        rps *= 1.0 - ROUNDING  # a level is what some counts serve
        counts = {option.name: option.min_workers for option, _ in self._pools}
        for option, curve in self._pools:
            others = self.rps(counts) - self.pool_rps(curve, counts[option.name])
            if self.rps(counts) >= rps:
                break
            wanted = curve.workers_for((rps - others) * self._share, option.max_workers)
            while wanted < option.max_workers and self.pool_rps(curve, wanted) < rps - others:
                wanted += 1
            counts[option.name] = max(wanted, option.min_workers)
        return counts

    def pool_rps(self, curve: CapacityCurve, workers: int) -> float:
        """Return the load of the model at which these workers of one pool are at capacity."""
        own = curve(workers)
        if (self._share, self._prompt_s) == (1.0, 0.0) or own <= 0 or math.isinf(own):
            return own
        return 1.0 / (self._share / own + self._prompt_s / workers)

    def rps(self, counts: Mapping[str, int]) -> float:
        """Return the load that these workers serve."""
        return sum(
            self.pool_rps(curve, counts.get(option.name, 0)) for option, curve in self._pools
        )

    def inside_share(self, rps: float, counts: Mapping[str, int]) -> float:
        """Return the share of requests inside, load split by capacity."""
        limits = {o.name: curve(counts.get(o.name, 0)) for o, curve in self._pools}
        total, rps = sum(limits.values()), rps * self._share
        if total <= 0:
            return 0.0
        return sum(
            limits[option.name] / total
            * curve.inside_share(rps * limits[option.name] / total, counts[option.name])
            for option, curve in self._pools
            if limits[option.name] > 0
        )  # fmt: skip

    def levels(self, rps: float) -> list[float]:
        """Return capacities below a load at which another worker is needed, and the load."""
        top = self.counts_for(rps)
        counts = {option.name: option.min_workers for option, _ in self._pools}
        levels = {rps, min(self.rps(counts), rps)}
        for option, curve in self._pools:
            others = self.rps(counts) - self.pool_rps(curve, counts[option.name])
            for count in range(counts[option.name], top[option.name] + 1):
                levels.add(min(others + self.pool_rps(curve, count), rps))
            counts[option.name] = top[option.name]
        return sorted(level for level in levels if math.isfinite(level))


class ModelPlan:
    """Value of one model's pools at its planned load, per worker count and as a frontier."""

    def __init__(
        self,
        params: PricePlannerParams,
        load_rps: float,
        mix: RequestMix,
        pools: Sequence[PoolOption],
        slos: Sequence[Slo],
        weight: float = 1.0,
        remote_share: float = 1.0,
        late_s: float | None = None,
    ) -> None:
        self.remote_share = remote_share  # share of prompt tokens that prefill pools compute
        self.late_s = params.late_s if late_s is None else late_s
        self.params, self.load_rps, self.mix, self.weight = params, load_rps, mix, weight
        self.pools, self.slos = tuple(pools), tuple(slos)
        self.curves: dict[str, CapacityCurve] = {}
        self._cached_splits: list[dict[str, int]] | None = None
        self.set_pools(pools)

    def set_pools(self, pools: Sequence[PoolOption]) -> None:
        """Set limits and supplies of the pools; computed capacities stay."""
        limits = [(p.name, p.min_workers, p.max_workers) for p in self.pools]
        if limits != [(p.name, p.min_workers, p.max_workers) for p in pools]:
            self._cached_splits = None
        self.pools = tuple(pools)
        for pool in self.pools:
            if pool.name not in self.curves:
                self.curves[pool.name] = CapacityCurve(
                    pool.performance, pool.role, self.mix, self.slos
                )
        local_s = 0.0
        if self.remote_share < 1.0:
            seconds = [p.performance.service_s(self.mix) for p in self.pools if p.role.decodes]
            local_s = (1.0 - self.remote_share) * max(seconds, default=0.0)
        shares = {Role.PREFILL: (max(self.remote_share, MIN_REMOTE), 0.0),
                  Role.DECODE: (1.0, local_s), Role.BOTH: (1.0, 0.0)}  # fmt: skip
        self._roles = {
            role: RoleCapacity(
                [(p, self.curves[p.name]) for p in self.pools if p.role is role], *share
            )
            for role, share in shares.items()
        }

    @property
    def is_relaxed(self) -> bool:
        """True if no number of workers meets the objective."""
        return any(self.curves[pool.name].is_relaxed for pool in self.pools)

    def capacity_rps(self, pool: str, workers: int) -> float:
        """Return the load of the model that workers of a pool serve inside the objective."""
        return self._roles[self.pool(pool).role].pool_rps(self.curves[pool], workers)

    def pool(self, name: str) -> PoolOption:
        """Return a pool by name."""
        return next(pool for pool in self.pools if pool.name == name)

    def rps(self, counts: Mapping[str, int]) -> float:
        """Return requests a second served inside the objective."""
        roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
        return goodput(*(self._roles[role].rps(counts) for role in roles))

    def value(self, counts: Mapping[str, int]) -> float:
        """Return weighted seconds of delay saved a second."""
        return saved(self.late_s, self.weight, self._effective_rps(counts))

    def _effective_rps(self, counts: Mapping[str, int]) -> float:
        rps = min(self.rps(counts), self.load_rps)
        if rps >= self.load_rps or any(p.role is Role.BOTH for p in self.pools):
            return rps
        share = 1.0
        for role in (Role.PREFILL, Role.DECODE):
            share *= self._roles[role].inside_share(self.load_rps, counts)
        return scarce_goodput(self.load_rps, rps, share, max(slo.share for slo in self.slos))

    def marginal(self, counts: Mapping[str, int], changes: Mapping[str, int]) -> float:
        """Return the value that a change of counts adds."""
        after = {name: counts.get(name, 0) for name in {*counts, *changes}}
        for name, change in changes.items():
            after[name] += change
        return self.value(after) - self.value(counts)

    def frontier(self, is_scarce: bool = False) -> list[FrontierPoint]:
        """Return undominated splits of rising GPUs; if `is_scarce`, unbalanced ones count, too."""
        if self._cached_splits is None:
            self._cached_splits = self._splits()
        splits = self._cached_splits
        if is_scarce:
            splits = [*splits, *self._unbalanced_splits()]
        points = [self._point(counts, is_scarce) for counts in splits]
        points.sort(key=lambda point: (point.gpus, point.cost - point.value))
        best: list[FrontierPoint] = []
        for point in points:
            if not best or point.value - point.cost > best[-1].value - best[-1].cost + 1e-9:
                if best and best[-1].gpus == point.gpus:
                    continue
                best.append(point)
        return best

    def _splits(self) -> list[dict[str, int]]:
        mixed = self._roles[Role.BOTH]
        prefill, decode = self._roles[Role.PREFILL], self._roles[Role.DECODE]
        if prefill.is_empty or decode.is_empty:
            minimum = {
                pool.name: pool.min_workers for pool in self.pools if pool.role is not Role.BOTH
            }
            return [minimum | mixed.counts_for(g) for g in mixed.levels(self.load_rps)]
        splits = []
        mixed_levels = [0.0] if mixed.is_empty else mixed.levels(self.load_rps)
        if len(mixed_levels) > SPLITS:
            mixed_levels = [*mixed_levels[:: len(mixed_levels) // SPLITS], mixed_levels[-1]]
        for part in mixed_levels:
            both = {} if mixed.is_empty else mixed.counts_for(part)
            rest = max(self.load_rps - (mixed.rps(both) if both else 0.0), 0.0)
            levels = {*prefill.levels(rest), *decode.levels(rest)}
            splits += [both | prefill.counts_for(g) | decode.counts_for(g) for g in levels]
        return splits

    def _unbalanced_splits(self) -> list[dict[str, int]]:
        """Return all pairs of each role's last counts below the load."""
        roles = [self._roles[role] for role in (Role.PREFILL, Role.DECODE)]
        if any(role.is_empty for role in roles) or not self._roles[Role.BOTH].is_empty:
            return []
        sides = [
            list({tuple(role.counts_for(g).items()): None for g in role.levels(self.load_rps)})
            for role in roles
        ]
        return [
            dict(one) | dict(other) for one in sides[0][-SPLITS:] for other in sides[1][-SPLITS:]
        ]

    def _point(self, counts: dict[str, int], is_scarce: bool) -> FrontierPoint:
        gpus = sum(counts[pool.name] * pool.gpus for pool in self.pools)
        rps = min(self.rps(counts), self.load_rps)
        value = saved(self.late_s, self.weight, self._effective_rps(counts) if is_scarce else rps)
        moves = sum(pool.move_cost(counts[pool.name]) for pool in self.pools)
        return FrontierPoint(gpus, rps, value, moves / self.params.horizon_s, counts)


# --- the budget of all models ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clearing:
    """Allocation of the budget."""

    points: tuple[FrontierPoint, ...]  # one per model, in order
    price: float  # per GPU at which demand fits the budget; 0 if slack
    is_feasible: bool  # whether all minimums fit


def clear_budget(
    frontiers: Sequence[Sequence[FrontierPoint]], gpus: int | None, gpu_price: float
) -> Clearing:
    """Divide `gpus` (None: unlimited) to maximise value minus moves minus price of GPUs."""
    own = [_demand(frontier, gpu_price) for frontier in frontiers]
    if gpus is None or sum(point.gpus for point in own) <= gpus:
        return Clearing(tuple(own), 0.0, True)
    if sum(frontier[0].gpus for frontier in frontiers) > gpus:
        return Clearing(tuple(frontier[0] for frontier in frontiers), math.inf, False)
    price = shadow_price(frontiers, gpus, gpu_price)
    return Clearing(_divide(frontiers, gpus, gpu_price), price, True)


def is_scarce(
    frontiers: Sequence[Sequence[FrontierPoint]], gpus: int | None, gpu_price: float
) -> bool:
    """True if models demand more than the budget at the GPU price."""
    demand = sum(_demand(frontier, gpu_price).gpus for frontier in frontiers)
    return gpus is not None and demand > gpus


def shadow_price(
    frontiers: Sequence[Sequence[FrontierPoint]], gpus: int, gpu_price: float
) -> float:
    """Return the GPU price at which demand fits the budget, by tatonnement.

    price := price exp(step excess / budget); the step halves whenever demand changes sides. Demand
    falls with the price, so it converges (Walras; Uzawa 1960).
    """
    price, step = max(gpu_price, 1e-12), 1.0
    low, high = price, math.inf  # too low, high enough
    side = 0
    for _ in range(200):
        demand = sum(_demand(frontier, price).gpus for frontier in frontiers)
        if demand > gpus:
            low = max(low, price)
        else:
            high = min(high, price)
        if high - low <= PRICE_WIDTH * high and high < math.inf:
            break
        new_side = 1 if demand > gpus else -1
        step = 0.5 * step if side and side != new_side else step
        side = new_side
        excess = min(max(abs(demand - gpus) / max(gpus, 1), 0.05), 1.0) * new_side
        price *= math.exp(step * excess)
        if price <= low or price >= high:
            price = math.sqrt(low * high) if high < math.inf else 1.5 * low
    return high if high < math.inf else price


def _demand(frontier: Sequence[FrontierPoint], price: float) -> FrontierPoint:
    return max(frontier, key=lambda p: (p.value - p.cost - rent(price, p.gpus), -p.gpus))


def _divide(
    frontiers: Sequence[Sequence[FrontierPoint]], gpus: int, gpu_price: float
) -> tuple[FrontierPoint, ...]:
    """Return the best points within the budget, by dynamic programming over GPUs."""
    best = np.zeros(gpus + 1)
    choices = []
    for frontier in frontiers:
        totals = np.full((len(frontier), gpus + 1), -np.inf)
        for index, point in enumerate(frontier):
            if point.gpus <= gpus:
                net = point.value - point.cost - rent(gpu_price, point.gpus)
                totals[index, point.gpus :] = best[: gpus + 1 - point.gpus] + net
        choices.append(totals.argmax(axis=0))
        best = totals.max(axis=0)
    left, points = gpus, []
    for frontier, choice in zip(reversed(frontiers), reversed(choices), strict=True):
        point = frontier[int(choice[left])]
        points.append(point)
        left -= point.gpus
    return tuple(reversed(points))
