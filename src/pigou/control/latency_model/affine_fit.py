"""Online fits of affine laws: prefill, transfers, and remote KV fetches."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.latency_model.estimates import PRIOR_FETCH
from pigou.games.regression import minimise_all
from pigou.request import SECOND

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
#: Tokens of the two fetches that are assumed before the first, as long as `PRIOR_FETCH` says.
_PRIOR_TOKENS = (16.0, 4096.0)
#: Observations that count half.
_HALF_LIFE = 32.0
_MAX_RATIO = 8.0  # cap of an observation over its expectation
#: Nanoseconds without an observation after which the prior is added again.
_FORGIVE_NS = 60 * SECOND
#: Seconds that a fetch takes at least.
_MIN_FETCH_S = 1e-5


class AffineFit:
    """Weighted least squares with forgetting (`half_life`); parameters are at least 0.

    Outliers are reweighted (Huber 1964). A base and pairs enter by Schwarz's criterion (1978).

        fit = AffineFit()
        fit.observe(1000.0, 0.12)  # 1,000 tokens took 0.12 s
        fit(500.0)                 # seconds of 500 tokens
    """

    def __init__(self, half_life: float = 128.0) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._gram = np.zeros((3, 3))  # columns: size, 1, pairs
        self._moment = np.zeros(3)
        self._sums = np.zeros(6)
        self._sums[MEDIAN] = _FIRST_MEDIAN
        self._scratch = np.zeros((24, 3))
        self.observed = 0

    def __call__(self, size: float, pairs: float = 0.0) -> float:
        """Return the predicted seconds for a size; 0 before any observation."""
        base, slope = self.law
        return base + slope * size + self.pair * pairs

    @property
    def law(self) -> tuple[float, float]:
        """Base and slope, in seconds."""
        return self._sums.item(BASE), self._sums.item(SLOPE)

    @property
    def pair(self) -> float:
        """Seconds per pair."""
        return self._sums.item(PAIR)

    @property
    def ratio(self) -> float:
        """Size equivalent of a pair."""
        pair = self.pair
        return pair / self._sums.item(SLOPE) if pair > 0.0 else 0.0

    def observe(self, size: float, seconds: float, pairs: float = 0.0) -> None:
        """Add an observation of `seconds` (above 0) for a size."""
        _add_observation(
            (self._gram, self._moment, self._sums, self._scratch), self._keep, self.observed == 0,
            size, seconds, pairs,
        )  # fmt: skip
        self.observed += 1


@bare_kernel
def _add_observation(
    arrays: tuple[Numbers, Numbers, Numbers, Numbers], keep: float, first: bool, size: float,
    seconds: float, pairs: float,
) -> None:  # fmt: skip
    """Add an observation and refit; `gram` (3, 3), `moment` (3,), `sums` (6,)."""
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
    """Fit size alone, then with a base, then with pairs, as far as that pays."""
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


class FetchFit:
    """Seconds of a fetch by its tokens: least squares with forgetting, never below 0.

    Fetches that look expensive are not tried. So the prior is cheap, a slow outlier is bounded, and
    the prior returns after a minute without fetches.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # sums of 1, x, x x, y, x y
        self._law = PRIOR_FETCH
        self._observed = False
        self._observed_at = 0
        self._add_prior()

    @property
    def law(self) -> tuple[float, float]:
        """Base and seconds per token; the prior before the first fetch."""
        return self._law if self._observed else PRIOR_FETCH

    def observe(self, tokens: float, seconds: float, now: int) -> None:
        """Add an observed fetch."""
        base, token = self._law
        max_s = _MAX_RATIO * max(base + token * tokens, _MIN_FETCH_S)
        self._add(tokens, min(max(seconds, _MIN_FETCH_S), max_s))
        self._observed, self._observed_at = True, now

    def tick(self, now: int) -> None:
        """Restore the prior after a time without fetches."""
        if self._observed and now - self._observed_at >= _FORGIVE_NS:
            self._observed_at = now
            self._add_prior()

    def _add_prior(self) -> None:
        base, token = PRIOR_FETCH
        for tokens in _PRIOR_TOKENS:
            self._add(tokens, base + token * tokens)

    def _add(self, x: float, y: float) -> None:
        keep = 0.5 ** (1.0 / _HALF_LIFE)
        terms = (1.0, x, x * x, y, x * y)
        self._sums = sums = tuple(keep * a + b for a, b in zip(self._sums, terms, strict=True))
        n, sx, sxx, sy, sxy = sums
        determinant = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / determinant if determinant > 0.0 else 0.0
        base = (sy - slope * sx) / n
        if slope < 0.0:
            base, slope = sy / n, 0.0
        elif base < 0.0:
            base, slope = 0.0, sxy / sxx
        self._law = (base, slope)
