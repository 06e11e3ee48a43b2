"""Which prompts are long, beside the last thousand, and how long short and long ones wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np

#: Prompts that are remembered.
_PROMPTS = 1000
#: Times the median's tokens that a long prompt has, and the share of prompts that may be long.
_TIMES, _SHARE = 4.0, 0.1


class WaitFigures(TypedDict):
    """Waits of short and long prompts, named as in `FleetObservation`."""

    short_wait_p50_s: float | None
    short_wait_p95_s: float | None
    long_wait_max_s: float | None


class PromptLengths:
    """The lengths of the last thousand prompts."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._ascending: list[int] = []

    def add(self, tokens: int) -> None:
        """Note a prompt's length."""
        if len(self._order) == _PROMPTS:
            del self._ascending[bisect_left(self._ascending, self._order.popleft())]
        self._order.append(tokens)
        insort(self._ascending, tokens)

    def is_long(self, tokens: int) -> bool:
        """Whether a prompt is among the longest tenth, and over four times the median."""
        known = self._ascending
        if not known:
            return False
        tenth = known[int((1.0 - _SHARE) * (len(known) - 1))]
        return tokens >= tenth and tokens > _TIMES * known[len(known) // 2]

    def wait_figures(self, wait_s: Sequence[tuple[int, float]]) -> WaitFigures:
        """Return the waits of short and of long prompts.

        Args:
            wait_s: tokens of each prompt, and its seconds so far.
        """
        short: list[float] = []
        long: list[float] = []
        for tokens, wait in wait_s:
            (long if self.is_long(tokens) else short).append(wait)
        return {
            "short_wait_p50_s": percentile(short, 50), "short_wait_p95_s": percentile(short, 95),
            "long_wait_max_s": max(long, default=None),
        }  # fmt: skip


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return a percentile of values; None without any."""
    numbers = np.fromiter(values, dtype=np.float64)
    return float(np.percentile(numbers, percent)) if len(numbers) else None
