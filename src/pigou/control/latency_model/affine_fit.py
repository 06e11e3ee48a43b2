"""A law of work fitted as observations come: seconds = base + slope * size + pair * pairs."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.games.regression import minimise_all

Numbers: TypeAlias = NDArray[np.float64]

#: Residuals beyond this many times the running median count for less (Huber's weight).
_HUBER = 3.0
_MEDIAN_STEP = 0.05
#: A law that is off by a thousandth is good enough: nothing more is called for.
_GOOD = 1e-6
#: Entries of `sums`: weighted square of the seconds, weight, median residual, and the law.
ENERGY, TRUST, MEDIAN, SLOPE, BASE, PAIR = range(6)
#: Columns of the sums of least squares.
_SIZE, _ONE, _PAIRS = range(3)
_MIN_MEDIAN, _FIRST_MEDIAN = 1e-3, 0.25


class AffineFit:
    """Weighted least squares with forgetting; all parameters are at least 0.

    Each observation counts half after `half_life` more. Residuals are relative to the law.
    Outliers count less by Huber's weight against a running median of residuals (Huber, "Robust
    Estimation of a Location Parameter", 1964). A base, and then pairs, are there where the data
    call for them, by Schwarz's criterion ("Estimating the Dimension of a Model", 1978).

        fit = AffineFit()
        fit.observe(1000.0, 0.12)  # 1,000 tokens took 0.12 s
        fit(500.0)                 # seconds of 500 tokens
    """

    def __init__(self, half_life: float = 128.0) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._gram = np.zeros((3, 3))  # of size, 1, pairs
        self._moment = np.zeros(3)
        self._sums = np.zeros(6)
        self._sums[MEDIAN] = _FIRST_MEDIAN
        self._scratch = np.zeros((24, 3))
        self.observed = 0

    def __call__(self, size: float, pairs: float = 0.0) -> float:
        """Return the seconds that something of this size takes; 0 before anything was seen."""
        base, slope = self.law
        return base + slope * size + self.pair * pairs

    @property
    def law(self) -> tuple[float, float]:
        """Base and slope, in seconds."""
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
        """Add that something of this size took so many seconds, above 0."""
        add_observation(
            (self._gram, self._moment, self._sums, self._scratch), self._keep, self.observed == 0,
            size, seconds, pairs,
        )  # fmt: skip
        self.observed += 1


@bare_kernel
def add_observation(
    arrays: tuple[Numbers, Numbers, Numbers, Numbers], keep: float, first: bool, size: float,
    seconds: float, pairs: float,
) -> None:  # fmt: skip
    """Add an observation, and fit the law anew.

    Args:
        arrays: gram (3, 3) and moment (3,), sums of least squares over size, 1 and pairs; `sums`
            by the names above (6,); scratch (24, 3).
        keep: factor of the sums.
        first: nothing was observed before.
    """
    gram, moment, sums, scratch = arrays
    expected = sums[BASE] + sums[SLOPE] * size + sums[PAIR] * pairs
    if first:
        expected = seconds
    scale = max(expected, 1e-3 * seconds, 1e-9)
    residual = abs(seconds / scale - 1.0)
    limit = _HUBER * max(sums[MEDIAN], _MIN_MEDIAN)
    trust = min(1.0, limit / max(residual, 1e-12))
    step = _MEDIAN_STEP if residual > sums[MEDIAN] else -_MEDIAN_STEP
    sums[MEDIAN] = min(max(sums[MEDIAN] * math.exp(step), _MIN_MEDIAN), 1e3)
    weight = trust / (scale * scale)
    row = (size, 1.0, pairs)
    for i in range(3):
        for j in range(3):
            gram[i, j] = keep * gram[i, j] + weight * row[i] * row[j]
        moment[i] = keep * moment[i] + weight * seconds * row[i]
    sums[ENERGY] = keep * sums[ENERGY] + weight * seconds * seconds
    sums[TRUST] = keep * sums[TRUST] + trust
    _solve(gram, moment, sums, scratch)


@bare_kernel
def _solve(gram: Numbers, moment: Numbers, sums: Numbers, scratch: Numbers) -> None:
    """Write the law: of size alone, then with a base, then with pairs, where that pays."""
    grams, moments = scratch[:9].reshape(3, 3, 3), scratch[9:12]
    best, errors, rest = scratch[12:15], scratch[15], scratch[16:21]
    for last in range(3):
        for i in range(last + 1):
            for j in range(last + 1):
                grams[last, i, j] = gram[i, j]
            moments[last, i] = moment[i]
    minimise_all(grams, moments, rest, best, errors)
    count, taken, lowest = max(sums[TRUST], 2.0), 0, math.inf
    for last in range(3):
        error = max(sums[ENERGY] + errors[last], _GOOD * sums[ENERGY], 1e-300)
        criterion = count * math.log(error) + last * math.log(count)
        if criterion < lowest and (last < _PAIRS or best[_PAIRS, _SIZE] > 0.0):
            taken, lowest = last, criterion
    sums[SLOPE], sums[BASE], sums[PAIR] = best[taken, _SIZE], best[taken, _ONE], best[taken, _PAIRS]
