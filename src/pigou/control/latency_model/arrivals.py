"""Arrivals of prompts: rates of the fleet and of each worker, and how much gaps differ."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.request import SECOND

#: A worker's rate of arrivals is a mean over about so many seconds.
RATE_S = 10.0
#: The fleet's rate is a mean over about so many gaps: it is known at once, at any rate.
_RATE_GAPS = 128.0
#: A gap counts for at most so many seconds: a quiet night says nothing of tomorrow's rate.
_MAX_GAP_S = 10.0
#: Seconds of the gap that is assumed before the first; it counts as one.
_FIRST_GAP_S = 0.5
#: A worker is taken to compute prompts at most this share of its time: else queues are infinite.
MAX_BUSY = 0.95
#: Gaps that count half in their variance, which needs many.
_VARIANCE_HALF_LIFE = 512.0
#: Gaps before which their variance is unknown.
_MIN_GAPS = 16


class FleetRate:
    """Recent rate of prompts of the whole fleet."""

    def __init__(self) -> None:
        self._keep = 1.0 - 1.0 / _RATE_GAPS
        self._weight, self._seconds = 1.0, _FIRST_GAP_S

    def observe(self, gap_s: float) -> None:
        """Add the seconds between two arrivals, at least 0."""
        self._weight = self._keep * self._weight + 1.0
        self._seconds = self._keep * self._seconds + min(gap_s, _MAX_GAP_S)

    @property
    def per_second(self) -> float:
        """Prompts a second."""
        return self._weight / max(self._seconds, 1e-9)


class ArrivalGaps:
    """Running mean and variance of the gaps between arrivals, with forgetting."""

    def __init__(self) -> None:
        self._keep = 0.5 ** (1.0 / _VARIANCE_HALF_LIFE)
        self._weight = self._sum = self._squares = 0.0
        self._observed = 0

    def observe(self, gap_s: float) -> None:
        """Add the seconds between two arrivals, at least 0."""
        self._weight = self._keep * self._weight + 1.0
        self._sum = self._keep * self._sum + gap_s
        self._squares = self._keep * self._squares + gap_s * gap_s
        self._observed += 1

    @property
    def cv2(self) -> float:
        """Variance over squared mean; 1 while there were too few gaps."""
        if self._observed < _MIN_GAPS or self._sum <= 0.0:
            return 1.0
        mean = self._sum / self._weight
        return max(0.0, self._squares / self._weight - mean * mean) / (mean * mean)


@bare_kernel
def decay_rates(
    rate: NDArray[np.float64],
    rated_at: NDArray[np.int64],
    service_s: NDArray[np.float64],
    now: int,
    arrivals: NDArray[np.float64],
    busy: NDArray[np.float64],
) -> None:
    """Write the rates as of `now`, and the share of its time that each worker computes prompts.

    Compiled, since each decision asks for it.

    Args:
        rate: prompts a second as of `rated_at`, (workers,).
        rated_at: nanoseconds, (workers,).
        service_s: mean seconds of a prompt, (workers,).
        now: nanoseconds.
        arrivals: takes the rates, (workers,).
        busy: takes the shares, (workers,).
    """
    for w in range(rate.shape[0]):
        age = max(0, now - rated_at[w]) / SECOND / RATE_S
        arrivals[w] = rate[w] * math.exp(-age)
        busy[w] = min(MAX_BUSY, arrivals[w] * service_s[w])
