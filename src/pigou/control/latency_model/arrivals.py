"""Rates of arrival, which decay between two arrivals: compiled, for every decision asks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.request import SECOND

#: Rates of arrivals are means over about this many seconds.
RATE_S = 10.0
#: The fleet's is a mean over about so many gaps between arrivals: known at once, at any rate.
_GAPS = 128.0
#: A gap counts for so many seconds at most: a quiet night says nothing of tomorrow's rate.
_LONGEST = 10.0
#: Seconds between two arrivals that are assumed before any; counts as one of them.
_FIRST_GAP = 0.5
#: A prefill pool is never taken to be busier than this: queues would be infinite.
MOST_BUSY = 0.95


class FleetRate:
    """How many prompts a second come to the fleet, of late."""

    def __init__(self) -> None:
        self._keep = 1.0 - 1.0 / _GAPS
        self._weight, self._seconds = 1.0, _FIRST_GAP

    def observe(self, gap: float) -> None:
        """Take in the seconds between two arrivals, at least 0."""
        self._weight = self._keep * self._weight + 1.0
        self._seconds = self._keep * self._seconds + min(gap, _LONGEST)

    @property
    def per_second(self) -> float:
        """Prompts a second."""
        return self._weight / max(self._seconds, 1e-9)


@bare_kernel
def decayed(
    rate: NDArray[np.float64],
    rated: NDArray[np.int64],
    service: NDArray[np.float64],
    now: int,
    arrivals: NDArray[np.float64],
    busy: NDArray[np.float64],
) -> None:
    """Write the rates as of `now`, and the share of its time that each worker computes prompts.

    Args:
        rate: prompts a second, as of `rated` (nanoseconds), (workers,) each.
        service: seconds that a prompt takes in the mean, (workers,).
        now: nanoseconds.
        arrivals, busy: take the result, (workers,) each.
    """
    for i in range(rate.shape[0]):
        age = max(0, now - rated[i]) / SECOND / RATE_S
        arrivals[i] = rate[i] * math.exp(-age)
        busy[i] = min(MOST_BUSY, arrivals[i] * service[i])
