"""Scales: how much slower or faster each worker is than the fleet's common law."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.request import SECOND

Numbers = NDArray[np.float64]
Nanos = NDArray[np.int64]

#: What a worker showed counts half after so many seconds: one that is avoided is tried again.
_HALF_LIFE_S = 60.0
#: An observation moves a scale as if it were at most this much beyond it (in logarithms).
_MOST_STEP = 0.5
#: Observations that a scale remembers.
_MEMORY = 64.0
#: Variance of the logarithm of one observation: at least, and before it is known.
_LEAST_VARIANCE = 0.01
#: Samples that tell as much as one that had nothing to do with the others.
_ALIKE = 4.0


class Scales:
    """One factor a worker, 1 for those of which nothing sure is known.

    It is the exponential mean of log(observed / common law), robust to outliers (Huber's
    clipping), less that of all workers together, and shrunk to 0 by the positive-part rule of
    James and Stein ("Estimation with Quadratic Loss", 1961): m max(0, 1 - (2 se)^2 / m^2), se
    being its standard error, doubled because samples of the same streams are alike. So chance
    differences between like workers do not send everybody to one of them, real ones count, and a
    worker that looked slow once and gets no requests is forgiven as its evidence ages.
    """

    def __init__(self) -> None:
        self._weight = np.zeros(0)
        self._mean = np.zeros(0)
        self._variance = np.zeros(0)
        self._at = np.zeros(0, dtype=np.int64)
        self._own = np.zeros(0)

    def up(self) -> None:
        """A worker joined; its row is the last."""
        self._weight = np.append(self._weight, 0.0)
        self._mean = np.append(self._mean, 0.0)
        self._variance = np.append(self._variance, 4 * _LEAST_VARIANCE)
        self._at = np.append(self._at, 0)
        self._own = np.append(self._own, 0.0)

    def down(self, row: int) -> None:
        """A worker left."""
        for name in ("_weight", "_mean", "_variance", "_at", "_own"):
            setattr(self, name, np.delete(getattr(self, name), row))

    def observe(self, row: int, ratio: float, now: int, trust: float = 1.0) -> None:
        """Take in that worker `row` took `ratio` times what the common law says, above 0.

        `trust`, above 0 and at most 1, is how much that tells beside a sure observation.
        """
        weight = min(_MEMORY, self._aged(row, now))
        step = math.log(ratio) - float(self._mean[row])
        clipped = min(max(step, -_MOST_STEP), _MOST_STEP)
        share = trust / (weight + trust)
        self._mean[row] += share * clipped
        variance = max(share, trust / _MEMORY)
        self._variance[row] += variance * (trust * clipped * clipped - self._variance[row])
        self._weight[row] = weight + trust
        self._at[row] = now

    def now(self, now: int) -> tuple[float, Numbers]:
        """Return the factor of all together, and that of each worker besides, (workers,)."""
        own = np.empty(len(self._mean))
        return self._factors(now, own), own

    def of(self, row: int, now: int) -> float:
        """Return the factor of worker `row`, besides that of all together."""
        self._factors(now, self._own)
        return float(self._own[row])

    def _factors(self, now: int, own: Numbers) -> float:
        return factors(self._weight, self._mean, self._variance, self._at, now, own)

    def _aged(self, row: int, now: int) -> float:
        age = max(0, now - int(self._at[row])) / SECOND / _HALF_LIFE_S
        return float(self._weight[row] * 0.5**age)


@bare_kernel
def factors(
    weight: Numbers, mean: Numbers, variance: Numbers, at: Nanos, now: int, own: Numbers
) -> float:
    """Write the factor of each worker to `own`, (workers,) each; return that of all together."""
    total, together = 0.0, 0.0
    for i in range(mean.shape[0]):
        age = max(0, now - at[i]) / SECOND / _HALF_LIFE_S
        own[i] = max(weight[i] * 0.5**age, 1e-6)  # at first what its evidence weighs
        total += own[i]
        together += own[i] * mean[i]
    common = together / total if mean.shape[0] > 0 else 0.0
    for i in range(mean.shape[0]):
        off = mean[i] - common
        error = _ALIKE * max(variance[i], _LEAST_VARIANCE) / own[i]
        own[i] = math.exp(off * max(0.0, 1.0 - error / max(off * off, 1e-12)))
    return math.exp(common)
