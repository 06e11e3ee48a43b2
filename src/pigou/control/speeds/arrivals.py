"""Rates of arrival, which decay between two arrivals: compiled, for every decision asks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.request import SECOND

#: Rates of arrivals are means over about this many seconds.
RATE_S = 10.0
#: A prefill pool is never taken to be busier than this: queues would be infinite.
MOST_BUSY = 0.95


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
