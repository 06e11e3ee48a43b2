"""Capacity of a pool: the load that n workers serve within the objectives."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec

from pigou.objectives import Slo
from pigou.performance.model import PerformanceModel, joint_share
from pigou.performance.speed import RequestMix
from pigou.request import Role

#: Worker counts at which capacity is computed; interpolated linearly between.
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
#: An unreachable objective is replaced by this many times the latency of a single request.
RELAXED = 1.5


class CapacityCurve:
    """Requests a second that n workers of one pool serve within all classes' objectives."""

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
        """Return requests a second of `workers` workers."""
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
            self._points.append(
                min(
                    self._performance.limit_rps(
                        self._role, workers, self._mix, slo, joint_share(slo)
                    )
                    for slo in self._slos
                )
            )
        return self._points[index]

    def inside_share(self, rps: float, workers: int) -> float:
        """Return the share of requests within the strictest class's part of its objective."""
        key = (round(rps, 6), workers)
        if key not in self._shares:
            self._shares[key] = min(
                self._performance.inside_share(self._role, rps, workers, self._mix, slo)
                for slo in self._slos
            )
        return self._shares[key]

    def workers_for(self, rps: float, max_workers: int) -> int:
        """Return the fewest workers that serve a load, at most `max_workers`."""
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
    """Return the objective, relaxed where no pool meets it (Dynamo's pull request 11624)."""
    share = joint_share(slo)
    single = performance.latency(role, 0.0, 1, mix, share)

    def is_met(slo: Slo) -> bool:
        return performance.limit_rps(Role.PREFILL, 64, mix, slo, share) > 0

    if role.prefills and not is_met(slo):
        slo = msgspec.structs.replace(slo, ttft_s=max(slo.ttft_s, RELAXED * single.ttft_s))
        while not is_met(slo):
            slo = msgspec.structs.replace(slo, ttft_s=slo.ttft_s * RELAXED)
    if role.decodes and slo.itl_s < single.itl_s:
        slo = msgspec.structs.replace(slo, itl_s=RELAXED * single.itl_s)
    return slo
