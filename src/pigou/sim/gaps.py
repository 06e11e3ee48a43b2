"""Gaps between tokens: counted in narrow classes, since there are millions of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND, Nanos
from pigou.sim.kernels import CLASSES, Counts, add_gaps, bounds


class Gaps:
    """A histogram of nanoseconds, with an exact mean.

    Attributes:
        histogram: gaps by class, shape (CLASSES,).
        sums: how many there are, and their sum in nanoseconds, shape (2,).
    """

    def __init__(self) -> None:
        self.histogram: Counts = np.zeros(CLASSES, dtype=np.int64)
        self.sums: Counts = np.zeros(2, dtype=np.int64)

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.sums[0])

    def add(self, gaps: Nanos) -> None:
        """Count gaps of 0 nanoseconds and more, shape (n,)."""
        add_gaps(gaps, self.histogram, self.sums)

    def mean(self) -> float:
        """Return the mean in seconds, NaN where there is none."""
        return int(self.sums[1]) / self.count / SECOND if self.count else float("nan")

    def percentiles(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return percentiles (0 to 100) in seconds, each the middle of its class; NaN where empty.

        The k-th smallest of n, k = ceil(share n / 100).
        """
        if not self.count:
            return np.full(len(shares), np.nan)
        ranks = np.maximum(1, np.ceil(shares / 100 * self.count)).astype(np.int64)
        low, high = bounds(np.searchsorted(np.cumsum(self.histogram), ranks, side="left"))
        middle: NDArray[np.float64] = (low + high) / 2 / SECOND
        return middle
