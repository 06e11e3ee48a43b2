"""The least that requests cost each other on a pool, for loads that come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pigou.games import Floats
from pigou.games.latency import LatencyLaw

#: A grid of loads is at least this fine (steps a request), and has about this many points.
STEPS = 16
POINTS = 512


class Levelling:
    """Least mean cost over a pool of workers, each request meeting ``totals`` in all.

    ``totals`` (requests,) are means over each request's stage, itself counted, so fractions
    occur. A mean load x below 1 is a worker that is busy a share x of the time, with one request:
    x of them cost x f(1). Spread continuously by that rule, then raised by what whole requests cost
    more than continuous ones at the integers around, the result is exact for whole totals, and
    for one worker is its law. Kept tables make further pools cheap.
    """

    def __init__(self, totals: Floats) -> None:
        self._totals = totals
        self._most = max(1, math.ceil(float(totals.max(initial=1.0))))
        steps = max(1, min(STEPS, POINTS // self._most))
        self._fine = np.arange(self._most * steps + 1) / steps
        self._whole = np.arange(self._most + 1, dtype=np.float64)
        self._tables: dict[LatencyLaw, tuple[Floats, Floats]] = {}

    def cost(self, laws: Sequence[LatencyLaw]) -> Floats:
        """Return seconds for each request, shape (requests,), over workers with these laws."""
        tables = [self._table(law) for law in laws]
        fine = self._cumulated([t[0] for t in tables], len(self._fine))
        whole = self._cumulated([t[1] for t in tables], len(self._whole))
        gap = np.ones_like(whole)
        gap[1:] = whole[1:] / np.interp(self._whole[1:], self._fine, fine)
        spread = np.interp(self._totals, self._fine, fine) / self._totals
        least: Floats = spread * np.interp(self._totals, self._whole, gap)
        return least

    def _table(self, law: LatencyLaw) -> tuple[Floats, Floats]:
        """What each further step of load adds, on the fine grid and by whole requests."""
        if law not in self._tables:
            fine = np.diff(self._fine * law(np.maximum(self._fine, 1.0)))
            self._tables[law] = fine, np.diff(self._whole * law(self._whole))
        return self._tables[law]

    @staticmethod
    def _cumulated(marginals: Sequence[Floats], size: int) -> Floats:
        """Costs of 0, 1, 2 ... steps of load, each put where it adds least."""
        added = np.sort(np.concatenate(marginals))[: size - 1]
        return np.concatenate([[0.0], np.cumsum(added)])
