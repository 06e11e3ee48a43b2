"""The worker of median speed: what a request takes there alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.control.latency_model.estimates import Estimates


class MedianWorker:
    """What the worker of median speed takes for one request at a time.

    Attributes:
        itl: seconds between tokens of a single stream.
    """

    def __init__(self, known: Estimates) -> None:
        self.known = known
        rows = np.arange(len(known.a))
        self.itl = _median(known.itl(rows, np.ones(len(rows))))
        # Workers differ by a factor: they have one order, whatever the length of the prompt.
        columns = known.prefill_base, known.prefill_token, known.prefill_pair
        laws = sorted(zip(*(column.tolist() for column in columns), strict=True))
        self._laws: list[tuple[float, float, float]] = [
            laws[index] for index in ((len(laws) - 1) // 2, len(laws) // 2) if laws
        ]

    def prompt(self, uncached: int, pairs: int) -> float:
        """Return the seconds of a prompt with so many uncached tokens, and pairs of them."""
        if not self._laws:
            return math.nan
        seconds = (base + token * uncached + pair * pairs for base, token, pair in self._laws)
        return sum(seconds) / 2


def _median(values: NDArray[np.float64]) -> float:
    """Return the median of a few numbers, NaN of none; NumPy's takes ten times as long."""
    ordered: list[float] = sorted(values.tolist())
    if not ordered:
        return math.nan
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return (low + high) / 2
