"""When an open-loop client means to send: a renewal process with a given rate and variation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from pigou.request import SECOND

_CHUNK = 1024
#: Variations of gaps: a burst is about cv^2 requests at once, then nothing for as many.
LEAST_CV, MOST_CV = 1e-6, 1e3
#: Nanoseconds; later times are no integers of 64 bits.
_FAR = 2.0**62


def renewal_times(rate: float, cv: float, rng: np.random.Generator) -> Iterator[int]:
    """Yield intended send times, nanoseconds from the start, without end and never falling.

    The gaps, that before the first request included, are independent and Gamma distributed with
    mean 1/rate and coefficient of variation `cv`: shape 1/cv^2, scale cv^2/rate. A cv of 1 is
    Poisson (exponential gaps), less is smoother, more is burstier, and 0 is a metronome.

    Args:
        rate: requests per second, above 0.
        cv: standard deviation of a gap over its mean: 0, or `LEAST_CV` to `MOST_CV`.
        rng: the only source of randomness; the same generator state gives the same times.

    Raises:
        ValueError: rate or cv is out of its range.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate is {rate}; it must be above 0 requests per second")
    if cv and not LEAST_CV <= cv <= MOST_CV:
        raise ValueError(f"cv is {cv}; it must be 0, or {LEAST_CV:g} to {MOST_CV:g}")
    return _times(rate, cv, rng)


def _times(rate: float, cv: float, rng: np.random.Generator) -> Iterator[int]:
    mean = SECOND / rate
    last = 0.0
    while True:
        gaps = rng.gamma(1 / cv**2, mean * cv**2, _CHUNK) if cv else np.full(_CHUNK, mean)
        times = last + np.cumsum(gaps)
        last = float(times[-1])
        yield from np.minimum(times, _FAR).round().astype(np.int64).tolist()
