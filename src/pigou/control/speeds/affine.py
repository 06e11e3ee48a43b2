"""A law of work fitted as observations come: seconds = base + slope * size + pair * pairs."""

from __future__ import annotations

import math

import numpy as np

from pigou.games.regression_kernels import least

#: Residuals beyond this many times the running median count for less (Huber's weight).
_HUBER = 3.0
_MEDIAN_STEP = 0.05
#: A law that is off by a thousandth is good enough: nothing more is called for.
_GOOD = 1e-6


class AffineFit:
    """Weighted least squares with forgetting; all parameters are at least 0.

    Each observation counts half after `half_life` more. Residuals are relative to the law.
    Outliers count less by Huber's weight against a running median of residuals (Huber, "Robust
    Estimation of a Location Parameter", 1964). A base, and then pairs, are there where the data
    call for them, by Schwarz's criterion ("Estimating the Dimension of a Model", 1978).

    Attributes:
        seen: observations.
        law: base and slope.
        pair: seconds of a pair.
    """

    def __init__(self, half_life: float = 128.0) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._gram = np.zeros((3, 3))  # of size, 1, pairs
        self._moment = np.zeros(3)
        self._grams, self._moments = np.zeros((3, 3, 3)), np.zeros((3, 3))
        self._best, self._errors, self._scratch = np.zeros((3, 3)), np.zeros(3), np.zeros((5, 3))
        self._energy = 0.0
        self._trust = 0.0
        self._spread = 0.25
        self.seen = 0
        self.law = (0.0, 0.0)
        self.pair = 0.0

    def __call__(self, size: float, pairs: float = 0.0) -> float:
        """Return the seconds that something of this size takes; 0 before anything was seen."""
        base, slope = self.law
        return base + slope * size + self.pair * pairs

    @property
    def ratio(self) -> float:
        """Size that a pair is worth."""
        return self.pair / self.law[1] if self.pair > 0.0 else 0.0

    @property
    def mean_size(self) -> float:
        """Mean size that was observed, pairs counted for what they are worth."""
        size = float(self._gram[0, 1]) + self.ratio * float(self._gram[2, 1])
        return size / max(float(self._gram[1, 1]), 1e-12)

    def observe(self, size: float, seconds: float, pairs: float = 0.0) -> None:
        """Take in that something of this size took so many seconds, above 0."""
        expected = self(size, pairs) if self.seen else seconds
        scale = max(expected, 1e-3 * seconds, 1e-9)
        residual = abs(seconds / scale - 1.0)
        limit = _HUBER * max(self._spread, 1e-3)
        trust = min(1.0, limit / max(residual, 1e-12))
        step = _MEDIAN_STEP if residual > self._spread else -_MEDIAN_STEP
        self._spread = min(max(self._spread * math.exp(step), 1e-3), 1e3)
        keep, weight = self._keep, trust / scale**2
        row = np.array((size, 1.0, pairs))
        self._gram = keep * self._gram + weight * np.outer(row, row)
        self._moment = keep * self._moment + weight * seconds * row
        self._energy = keep * self._energy + weight * seconds * seconds
        self._trust = keep * self._trust + trust
        self.seen += 1
        slope, base, self.pair = self._fit()
        self.law = base, slope

    def _fit(self) -> tuple[float, float, float]:
        """Return slope, base and pair: of size alone, then a base, then pairs, where it pays."""
        for some in range(3):
            kept = slice(0, some + 1)
            self._grams[some, kept, kept] = self._gram[kept, kept]
            self._moments[some, kept] = self._moment[kept]
        least(self._grams, self._moments, self._scratch, self._best, self._errors)
        count, least_error = max(self._trust, 2.0), _GOOD * self._energy
        best, price = 0, math.inf
        for some, gain in enumerate(self._errors.tolist()):
            error = max(self._energy + gain, least_error)
            paid = count * math.log(max(error, 1e-300)) + some * math.log(count)
            if paid < price and (some < 2 or self._best[2, 0] > 0.0):
                best, price = some, paid
        slope, base, pair = self._best[best].tolist()
        return slope, base, pair
