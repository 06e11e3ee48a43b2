"""The sums of a law of work and their solution, compiled."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.games.regression_kernels import least

Numbers: TypeAlias = NDArray[np.float64]

#: Residuals beyond this many times the running median count for less (Huber's weight).
_HUBER = 3.0
_MEDIAN_STEP = 0.05
#: A law that is off by a thousandth is good enough: nothing more is called for.
_GOOD = 1e-6
#: Entries of `sums`: weighted square of the seconds, weight, median residual, and the law.
ENERGY, TRUST, SPREAD, SLOPE, BASE, PAIR = range(6)
MOMENTS = 6


@bare_kernel
def take_in(
    gram: Numbers, moment: Numbers, sums: Numbers, scratch: Numbers, keep: float, first: bool,
    size: float, seconds: float, pairs: float,
) -> None:  # fmt: skip
    """Take in an observation, and fit the law anew.

    Args:
        gram, moment: sums of least squares, of size, 1 and pairs, (3, 3) and (3,).
        sums: by the names above, (6,).
        scratch: (24, 3).
        keep: factor of the sums.
        first: nothing was observed before.
        size, seconds, pairs: of what was observed.
    """
    expected = sums[BASE] + sums[SLOPE] * size + sums[PAIR] * pairs
    if first:
        expected = seconds
    scale = max(expected, 1e-3 * seconds, 1e-9)
    residual = abs(seconds / scale - 1.0)
    limit = _HUBER * max(sums[SPREAD], 1e-3)
    trust = min(1.0, limit / max(residual, 1e-12))
    step = _MEDIAN_STEP if residual > sums[SPREAD] else -_MEDIAN_STEP
    sums[SPREAD] = min(max(sums[SPREAD] * math.exp(step), 1e-3), 1e3)
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
    for some in range(3):
        for i in range(some + 1):
            for j in range(some + 1):
                grams[some, i, j] = gram[i, j]
            moments[some, i] = moment[i]
    least(grams, moments, rest, best, errors)
    count, taken, price = max(sums[TRUST], 2.0), 0, math.inf
    for some in range(3):
        error = max(sums[ENERGY] + errors[some], _GOOD * sums[ENERGY], 1e-300)
        paid = count * math.log(error) + some * math.log(count)
        if paid < price and (some < 2 or best[2, 0] > 0.0):
            taken, price = some, paid
    sums[SLOPE], sums[BASE], sums[PAIR] = best[taken, 0], best[taken, 1], best[taken, 2]
