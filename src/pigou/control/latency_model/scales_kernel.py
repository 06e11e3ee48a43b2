"""The sums of scales, compiled; `pigou.control.latency_model.scales` says what they are.

weight, mean, variance: of each worker's evidence, (workers,) each.
at: when that was last added to, in nanoseconds, (workers,).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
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
LEAST_VARIANCE = 0.01
#: Samples that tell as much as one that had nothing to do with the others.
_ALIKE = 4.0


@inlined
def aged(weight: Numbers, at: Nanos, row: int, now: int) -> float:
    """Return the weight of a worker's evidence as of now."""
    age = max(0, now - at[row]) / SECOND / _HALF_LIFE_S
    found: float = weight[row] * 0.5**age
    return found


@inlined
def common(weight: Numbers, mean: Numbers, at: Nanos, now: int, own: Numbers) -> float:
    """Write to `own` what each worker's evidence weighs; return the logarithm of all together."""
    total, together = 0.0, 0.0
    for i in range(mean.shape[0]):
        own[i] = max(aged(weight, at, i, now), 1e-6)
        total += own[i]
        together += own[i] * mean[i]
    return together / total if mean.shape[0] > 0 else 0.0


@inlined
def shrunk(mean: Numbers, variance: Numbers, i: int, level: float, sure: float) -> float:
    """Return the factor of a worker whose evidence weighs `sure`, beside that of all together."""
    off = mean[i] - level
    error = _ALIKE * max(variance[i], LEAST_VARIANCE) / sure
    return math.exp(off * max(0.0, 1.0 - error / max(off * off, 1e-12)))


@bare_kernel
def factors(
    weight: Numbers, mean: Numbers, variance: Numbers, at: Nanos, now: int, own: Numbers
) -> float:
    """Write the factor of each worker to `own`, (workers,) each; return that of all together."""
    level = common(weight, mean, at, now, own)
    for i in range(mean.shape[0]):
        own[i] = shrunk(mean, variance, i, level, own[i])
    return math.exp(level)


@bare_kernel
def factor(
    weight: Numbers, mean: Numbers, variance: Numbers, at: Nanos, row: int, now: int, own: Numbers
) -> float:
    """Return the factor of one worker; `own` is for use here, (workers,)."""
    level = common(weight, mean, at, now, own)
    return shrunk(mean, variance, row, level, own[row])


@bare_kernel
def observe(
    weight: Numbers, mean: Numbers, variance: Numbers, at: Nanos, row: int, ratio: float, now: int,
    trust: float,
) -> None:  # fmt: skip
    """Take in that worker `row` took `ratio` times what the common law says (`Scales.observe`)."""
    before = min(_MEMORY, aged(weight, at, row, now))
    step = math.log(ratio) - mean[row]
    clipped = min(max(step, -_MOST_STEP), _MOST_STEP)
    share = trust / (before + trust)
    mean[row] += share * clipped
    least = max(share, trust / _MEMORY)
    variance[row] += least * (trust * clipped * clipped - variance[row])
    weight[row] = before + trust
    at[row] = now
