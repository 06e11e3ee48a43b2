"""A law of work fitted as observations come: seconds = base + slope * size + pair * pairs."""

from __future__ import annotations

import numpy as np

from pigou.control.speeds.affine_kernel import BASE, MOMENTS, PAIR, SLOPE, SPREAD, take_in


class AffineFit:
    """Weighted least squares with forgetting; all parameters are at least 0.

    Each observation counts half after `half_life` more. Residuals are relative to the law.
    Outliers count less by Huber's weight against a running median of residuals (Huber, "Robust
    Estimation of a Location Parameter", 1964). A base, and then pairs, are there where the data
    call for them, by Schwarz's criterion ("Estimating the Dimension of a Model", 1978).

    Attributes:
        seen: observations.
    """

    def __init__(self, half_life: float = 128.0) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._gram = np.zeros((3, 3))  # of size, 1, pairs
        self._moment = np.zeros(3)
        self._sums = np.zeros(MOMENTS)
        self._sums[SPREAD] = 0.25
        self._scratch = np.zeros((24, 3))
        self.seen = 0

    def __call__(self, size: float, pairs: float = 0.0) -> float:
        """Return the seconds that something of this size takes; 0 before anything was seen."""
        base, slope = self.law
        return base + slope * size + self.pair * pairs

    @property
    def law(self) -> tuple[float, float]:
        """Base and slope."""
        return self._sums.item(BASE), self._sums.item(SLOPE)

    @property
    def pair(self) -> float:
        """Seconds of a pair."""
        return self._sums.item(PAIR)

    @property
    def ratio(self) -> float:
        """Size that a pair is worth."""
        pair = self.pair
        return pair / self._sums.item(SLOPE) if pair > 0.0 else 0.0

    def observe(self, size: float, seconds: float, pairs: float = 0.0) -> None:
        """Take in that something of this size took so many seconds, above 0."""
        take_in(
            self._gram, self._moment, self._sums, self._scratch, self._keep, self.seen == 0,
            size, seconds, pairs,
        )  # fmt: skip
        self.seen += 1
