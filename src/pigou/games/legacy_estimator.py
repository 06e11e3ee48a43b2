"""The paper's own index of a fleet, kept for comparison: mean latency over a constant."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats


class LegacyEstimator:
    """The paper's estimator (Georgiou 2026, Eq. 12), as its tables show that it was run.

    Mean latency of the last ``window`` completions over that of an assignment of them, one to one,
    to copies of the workers' columns: the k-th request that a column takes costs it
    a k + b + d / max(capacity - k, eps)^beta, less ``cache_weight`` times its overlap. Columns grow
    past ``capacity`` where the requests need it. None of the parameters is fitted to the fleet,
    so the index is neither a bound nor an estimate of a Price of Anarchy: it is mean latency over a
    constant. `calibrated` is what replaces it.
    """

    def __init__(
        self,
        workers: int,
        *,
        window: int = 200,
        a: float = 0.005,
        b: float = 0.020,
        d: float = 0.010,
        beta: float = 2.0,
        capacity: int = 64,
        eps: float = 0.4,
        cache_weight: float = 0.015,
    ) -> None:
        if workers < 1 or window < 1 or capacity < 1 or not eps > 0:
            raise ValueError("workers, window and capacity must be 1 or more, and eps above 0")
        self.workers, self.window = workers, window
        self.a, self.b, self.d, self.beta = a, b, d, beta
        self.capacity, self.eps, self.cache_weight = capacity, eps, cache_weight
        self._latencies: deque[float] = deque(maxlen=window)
        self._overlaps: deque[Floats | None] = deque(maxlen=window)

    def observe(self, seconds: float, overlaps: ArrayLike | None = None) -> None:
        """Add a completion: its end-to-end latency, and its overlap with each worker (0..1)."""
        row = None if overlaps is None else np.asarray(overlaps, dtype=np.float64)
        if row is not None and row.shape != (self.workers,):
            raise ValueError(f"overlaps have shape {row.shape}: give ({self.workers},)")
        self._latencies.append(float(seconds))
        self._overlaps.append(row)

    def optimum(self) -> float:
        """Return the denominator: seconds of the cheapest assignment of the window's requests."""
        count = len(self._latencies)
        if not count:
            raise ValueError("no completions: call observe() first")
        copies = max(self.capacity, math.ceil(count / self.workers))
        k = np.arange(1, copies + 1, dtype=np.float64)
        gap = np.maximum(self.capacity - k, self.eps)
        costs = self.a * k + self.b + self.d / gap**self.beta
        if all(row is None for row in self._overlaps):
            ordered = np.sort(costs).tolist()  # all columns have these: the cheapest are taken
            return math.fsum(ordered[rank // self.workers] for rank in range(count))
        none = np.zeros(self.workers)
        rows = [none if row is None else row for row in self._overlaps]
        saved = self.cache_weight * np.stack(rows)
        matrix = (costs[None, None, :] - saved[:, :, None]).reshape(count, -1)
        from scipy.optimize import linear_sum_assignment  # half of a gateway's import time

        taken = matrix[linear_sum_assignment(matrix)]
        return float(taken.sum())

    def poa(self) -> float:
        """Return the index: summed latencies over the `optimum`."""
        best = self.optimum()
        if best <= 0:
            raise ValueError(f"the optimum costs {best}: lower cache_weight, a ratio needs > 0")
        return math.fsum(self._latencies) / best
