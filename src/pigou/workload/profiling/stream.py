"""Times of a stream's tokens, and what can be read from several of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND
from pigou.workload.outcome import Stream


@dataclass(frozen=True)
class Window:
    """Steps in which all of several streams decode.

    Attributes:
        steps: of the stream that has the fewest.
        seconds: of one.
        generated: tokens that all together had at the middle.
    """

    steps: int
    seconds: float
    generated: int


def arrivals(stream: Stream) -> NDArray[np.int64]:
    """Return when each token came, in nanoseconds, shape (tokens,)."""
    return stream.first + np.concatenate([[0], np.cumsum(stream.gaps)]).astype(np.int64)


def window(streams: Sequence[Stream]) -> Window | None:
    """Return the steps between the last first token and the first last one; None for below 2."""
    times = [arrivals(stream) for stream in streams]
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    middle = (start + end) // 2
    inside = [each[(each >= start) & (each <= end)] for each in times]
    if min(len(each) for each in inside) < 3:
        return None
    mean = [(each[-1] - each[0]) / (len(each) - 1) for each in inside]
    generated = sum(int(each.searchsorted(middle, "right")) for each in times)
    steps = min(len(each) for each in inside) - 1
    return Window(steps, float(np.median(mean)) / SECOND, generated)


def excess(times: NDArray[np.int64], sent: int, ended: int) -> float | None:
    """Return the seconds that a running stream lost while somebody else was served.

    Args:
        times: when each of its tokens came.
        sent: when the other was sent.
        ended: when the other was over.

    Returns:
        The time between the token before `sent` and the second one after `ended`, less the same
        number of usual gaps: a mean over those before and after, since tokens may arrive in
        clumps. None where the stream is too short for that.
    """
    around = reach(times)
    before = int(times.searchsorted(sent, "right")) - 1
    after = int(times.searchsorted(ended, "right")) + 1
    if before < around or after + around >= len(times):
        return None
    quiet = times[before] - times[before - around] + times[after + around] - times[after]
    usual = float(quiet) / (2 * around)
    return float(times[after] - times[before] - (after - before) * usual) / SECOND


def reach(times: NDArray[np.int64]) -> int:
    """Return how many gaps on either side tell what is usual for a stream."""
    mean = float(times[-1] - times[0]) / max(1, len(times) - 1)
    return max(LEAST_GAPS, math.ceil(LEAST_SECONDS * SECOND / max(mean, 1.0)))


#: Of a stretch that tells what is usual, at least.
LEAST_GAPS, LEAST_SECONDS = 16, 0.05
