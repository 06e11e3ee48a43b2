"""Capacity of pools: the load that so many workers serve inside the objective."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pigou.objectives import Slo
from pigou.performance.model import PerformanceModel, joint_share
from pigou.performance.speed import RequestMix
from pigou.request import Role

#: Numbers of workers at which capacity is computed; between them lie straight lines.
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
#: An objective that one request alone breaks is replaced by so many times the least latency.
RELAXED = 1.5


@dataclass(frozen=True, slots=True)
class PoolOption:
    """A pool that a model's plan may use.

    Attributes:
        start_cost, removal_cost: weighted seconds of delay that one start, or one removal, costs.
    """

    name: str
    role: Role
    gpus: int
    performance: PerformanceModel
    min_workers: int  # fewest that it keeps
    max_workers: int  # most that it can have
    supply: int  # workers that serve or are on their way
    start_cost: float = 0.0
    removal_cost: float = 0.0


class CapacityCurve:
    """Requests a second that n workers of one pool serve inside the objectives.

    With several classes it is the least over their objectives: they share the queue. Computed at
    `KNOTS` when asked for; capacity a worker rises with n, because a larger pool waits less.
    """

    def __init__(
        self, performance: PerformanceModel, role: Role, mix: RequestMix, slos: Sequence[Slo]
    ) -> None:
        self._performance, self._role, self._mix = performance, role, mix
        self._slos = [reachable(slo, performance, role, mix) for slo in slos]
        self.is_relaxed = list(slos) != self._slos
        self._points: list[float] = []
        self._values = {0: 0.0}
        self._shares: dict[tuple[float, int], float] = {}

    def __call__(self, workers: int) -> float:
        """Return requests a second of so many workers, 0 or more."""
        value = self._values.get(workers)
        if value is None:
            value = self._values[workers] = self._between(workers)
        return value

    def _between(self, workers: int) -> float:
        index = bisect.bisect_left(KNOTS, workers)
        if index == len(KNOTS):
            return self._point(index - 1) * workers / KNOTS[-1]
        if KNOTS[index] == workers:
            return self._point(index)
        low, high = KNOTS[index - 1], KNOTS[index]
        share = (workers - low) / (high - low)
        return (1.0 - share) * self._point(index - 1) + share * self._point(index)

    def _point(self, index: int) -> float:
        while len(self._points) <= index:
            workers = KNOTS[len(self._points)]
            limits = [
                self._performance.limit_rps(self._role, workers, self._mix, slo, joint_share(slo))
                for slo in self._slos
            ]
            self._points.append(min(limits))
        return self._points[index]

    def inside_share(self, rps: float, workers: int) -> float:
        """Return the share of requests inside the strictest class's part of its objective."""
        key = (round(rps, 6), workers)
        if key not in self._shares:
            self._shares[key] = min(
                self._performance.inside_share(self._role, rps, workers, self._mix, slo)
                for slo in self._slos
            )
        return self._shares[key]

    def workers_for(self, rps: float, max_workers: int) -> int:
        """Return the fewest workers that serve a load, or `max_workers` where too few do."""
        if rps <= 0:
            return 0
        low, high = 0, 1
        while high < max_workers and self(high) < rps:
            low, high = high, 2 * high
        high = min(high, max_workers)
        if high <= low or self(high) < rps:
            return max_workers
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self(middle) >= rps else (middle, high)
        return high


def reachable(slo: Slo, performance: PerformanceModel, role: Role, mix: RequestMix) -> Slo:
    """Return the objective, or where one request alone breaks it, one that can be met.

    No number of workers shortens one request. An objective below its latency would buy workers
    for nothing (Dynamo's pull request 11624) or none at all; 1.5 times that latency takes its part.
    """
    share = joint_share(slo)
    single = performance.latency(role, 0.0, 1, mix, share)
    ttft_s, itl_s = slo.ttft_s, slo.itl_s
    if role.prefills and performance.limit_rps(Role.PREFILL, 64, mix, slo, share) <= 0:
        ttft_s = max(ttft_s, RELAXED * single.ttft_s)
        while True:
            relaxed = replace_slo(slo, ttft_s, itl_s)
            if performance.limit_rps(Role.PREFILL, 64, mix, relaxed, share) > 0:
                break
            ttft_s *= RELAXED
    if role.decodes and itl_s < single.itl_s:
        itl_s = RELAXED * single.itl_s
    if (ttft_s, itl_s) == (slo.ttft_s, slo.itl_s):
        return slo
    return replace_slo(slo, ttft_s, itl_s)


def replace_slo(slo: Slo, ttft_s: float, itl_s: float) -> Slo:
    """Return an objective with other latencies."""
    return Slo(ttft_s=ttft_s, itl_s=itl_s, percentile=slo.percentile)


class RoleCapacity:
    """Capacity of all pools of one role, filled one after another.

    Pools with the most capacity a GPU come first. Load is split in proportion to capacity, so
    capacities add.
    """

    def __init__(self, pools: Sequence[tuple[PoolOption, CapacityCurve]]) -> None:
        self._pools = sorted(pools, key=lambda item: (-item[1](1) / item[0].gpus, item[0].name))

    @property
    def is_empty(self) -> bool:
        """Whether no pool has this role."""
        return not self._pools

    def counts_for(self, rps: float) -> dict[str, int]:
        """Return workers by pool that serve a load, or all that there may be."""
        counts = {option.name: option.min_workers for option, _ in self._pools}
        for option, curve in self._pools:
            others = self.rps(counts) - curve(counts[option.name])
            if others + curve(counts[option.name]) >= rps:
                break
            wanted = curve.workers_for(rps - others, option.max_workers)
            counts[option.name] = max(wanted, option.min_workers)
        return counts

    def rps(self, counts: dict[str, int]) -> float:
        """Return the load that workers of these pools serve."""
        return sum(curve(counts.get(option.name, 0)) for option, curve in self._pools)

    def inside_share(self, rps: float, counts: dict[str, int]) -> float:
        """Return the share of requests inside, the load split in proportion to capacity."""
        limits = {o.name: curve(counts.get(o.name, 0)) for o, curve in self._pools}
        total = sum(limits.values())
        if total <= 0:
            return 0.0
        return sum(
            limits[option.name] / total
            * curve.inside_share(rps * limits[option.name] / total, counts[option.name])
            for option, curve in self._pools
            if limits[option.name] > 0
        )  # fmt: skip

    def levels(self, rps: float) -> list[float]:
        """Return the capacities below a load at which one more worker is needed, and the load."""
        levels = {rps}
        top = self.counts_for(rps)
        counts = {option.name: option.min_workers for option, _ in self._pools}
        levels.add(min(self.rps(counts), rps))
        for option, curve in self._pools:
            others = self.rps(counts) - curve(counts[option.name])
            for count in range(counts[option.name], top[option.name] + 1):
                levels.add(min(others + curve(count), rps))
            counts[option.name] = top[option.name]
        return sorted(level for level in levels if math.isfinite(level))
