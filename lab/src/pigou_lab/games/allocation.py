"""The allocation game: prefill and decode share a budget of GPUs (Georgiou 2026, Definition 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from pigou.games import Floats
from pigou_lab.games import improves

Kind = Literal["interior", "kink", "flat", "no prefill", "no decode"]

POINTS = 4001
#: Gains count as equal when they differ by less than this share of them, or by rounding.
LEVEL = 1e-9
ROUNDING = 1e-15


@dataclass(frozen=True, slots=True)
class Allocation:
    """``prefill`` + ``decode`` GPUs, and their violations (TTFT plus ITL)."""

    prefill: float
    decode: float
    violations: float


@dataclass(frozen=True, slots=True)
class Equilibrium(Allocation):
    """A variational equilibrium: one price of a GPU for both pools.

    ``kind`` is "interior" (equal marginal gains), "kink" (gains cross in a step), "flat" (equal
    gains from ``prefill`` to ``until`` GPUs), or a corner: "no prefill", "no decode". ``stable`` is
    true if GPUs return after a small push.
    """

    kind: Kind
    stable: bool
    until: float


class AllocationGame:
    """G GPUs, ``prefill`` of them for prefill and the others for decode.

    ``v_ttft(g_p)`` and ``v_itl(g_d, g_p)`` give violation rates (or any cost), non-increasing in
    their own pool. Only the social optimum counts the externality of g_p on v_itl. Raises
    ValueError unless ``gpus`` is above 0.
    """

    def __init__(
        self,
        v_ttft: Callable[[float], float],
        v_itl: Callable[[float, float], float],
        gpus: float,
    ) -> None:
        if not gpus > 0:
            raise ValueError(f"gpus is {gpus}: give a number above 0")
        self.v_ttft = v_ttft
        self.v_itl = v_itl
        self.gpus = float(gpus)
        self._step = 1e-5 * self.gpus

    def violations(self, prefill: float) -> float:
        """Return v_ttft + v_itl with ``prefill`` GPUs for prefill and all others for decode."""
        return float(self.v_ttft(prefill) + self.v_itl(self.gpus - prefill, prefill))

    def pull(self, prefill: float) -> float:
        """Return prefill's marginal gain less decode's; 0 at an interior equilibrium (Eq. 5)."""
        of_prefill, of_decode = self._gains_by_pool(prefill)
        return of_prefill - of_decode

    def _gains_by_pool(self, prefill: float) -> tuple[float, float]:
        of_prefill = -self._slope(self.v_ttft, prefill)
        of_decode = -self._slope(lambda g: self.v_itl(g, prefill), self.gpus - prefill)
        return of_prefill, of_decode

    def equilibria(self) -> list[Equilibrium]:
        """Return every variational equilibrium, by rising prefill share, from 4,001 allocations."""
        grid = np.linspace(0.0, self.gpus, POINTS)
        pool_gains = np.array([self._gains_by_pool(float(g)) for g in grid])
        of_prefill, of_decode = pool_gains.T
        pulls = of_prefill - of_decode
        rounding = ROUNDING * max(abs(self.violations(g)) for g in (0.0, self.gpus)) / self._step
        pulls[np.abs(pulls) <= LEVEL * np.abs(pool_gains).sum(axis=1) + rounding] = 0.0
        equilibria = []
        if pulls[0] < 0:
            equilibria.append(self._equilibrium(0.0, "no prefill", stable=True))
        equilibria += self._between(grid, pulls)
        if pulls[-1] > 0:
            equilibria.append(self._equilibrium(self.gpus, "no decode", stable=True))
        return equilibria

    def social_optimum(self) -> Allocation:
        """Return the allocation of least violations in all, the externality counted."""
        grid = np.linspace(0.0, self.gpus, POINTS)
        costs = np.array([self.violations(float(g)) for g in grid])
        best = int(np.argmin(costs))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, POINTS - 1)]
        inner = minimize_scalar(self.violations, bounds=(low, high), options={"xatol": 1e-10})
        if improves(float(inner.fun), float(costs[best])):
            return self._allocation(float(inner.x))
        return self._allocation(float(grid[best]))

    def best_response_path(self, start: int, step: int = 1) -> list[int]:
        """Return the prefill GPUs along best responses, up to a rest or first repeat.

        ValueError.
        """
        total = round(self.gpus)
        if total != self.gpus or not 0 <= start <= total or step < 1:
            raise ValueError(
                f"start={start}, step={step}, gpus={self.gpus}: give whole GPUs, "
                "0 <= start <= gpus and step >= 1"
            )
        path = [start]
        while True:
            prefill = path[-1]
            moves = [g for g in (prefill + step, prefill - step) if 0 <= g <= total]
            gain, best = max(
                ((self._net_gain(prefill, g), g) for g in moves), default=(0.0, prefill)
            )
            if not improves(-gain, 0.0):
                return path
            path.append(best)
            if best in path[:-1]:
                return path

    def _net_gain(self, prefill: int, moved: int) -> float:
        """Gain of the growing pool less the other's loss, prefill's size in v_itl fixed."""
        ttft = self.v_ttft(prefill) - self.v_ttft(moved)
        itl = self.v_itl(self.gpus - prefill, prefill) - self.v_itl(self.gpus - moved, prefill)
        return float(ttft + itl)

    def _between(self, grid: Floats, pulls: Floats) -> list[Equilibrium]:
        points: list[Equilibrium | None] = []
        index = 0
        while index < POINTS:
            first = index
            while index + 1 < POINTS and pulls[first] == pulls[index + 1] == 0.0:
                index += 1
            if index > first:
                points.append(self._flat(grid, pulls, first, index))
            elif pulls[index] == 0.0:
                points.append(self._point(float(grid[index]), pulls, index - 1, index + 1))
            elif index + 1 < POINTS and pulls[index] * pulls[index + 1] < 0:
                low, high = float(grid[index]), float(grid[index + 1])
                root = float(brentq(self.pull, low, high, xtol=1e-12 * self.gpus))
                points.append(self._point(root, pulls, index, index + 1))
            index += 1
        return [point for point in points if point is not None]

    def _flat(self, grid: Floats, pulls: Floats, first: int, last: int) -> Equilibrium:
        comes_back = first == 0 or pulls[first - 1] > 0
        comes_back = comes_back and (last == POINTS - 1 or pulls[last + 1] < 0)
        start = self._equilibrium(float(grid[first]), "flat", stable=bool(comes_back))
        return replace(start, until=float(grid[last]))

    def _point(self, root: float, pulls: Floats, left: int, right: int) -> Equilibrium | None:
        nearby = 3.0 * self._step
        below = self.pull(max(root - nearby, 0.0))
        above = self.pull(min(root + nearby, self.gpus))
        stable = below >= 0 >= above and below > above
        before = abs(float(pulls[max(left, 0)]))
        after = abs(float(pulls[min(right, POINTS - 1)]))
        if abs(below) <= 0.5 * before or abs(above) <= 0.5 * after:
            return self._equilibrium(root, "interior", stable=stable)
        # The gains jump past one another. Falling, a price between them clears the market;
        # rising, each pool pulls away from here, and no price does.
        return self._equilibrium(root, "kink", stable=True) if stable else None

    def _slope(self, cost: Callable[[float], float], at: float) -> float:
        low, high = max(at - self._step, 0.0), min(at + self._step, self.gpus)
        return float((cost(high) - cost(low)) / (high - low))

    def _allocation(self, prefill: float) -> Allocation:
        return Allocation(prefill, self.gpus - prefill, self.violations(prefill))

    def _equilibrium(self, prefill: float, kind: Kind, *, stable: bool) -> Equilibrium:
        cost = self.violations(prefill)
        return Equilibrium(prefill, self.gpus - prefill, cost, kind, stable, prefill)
