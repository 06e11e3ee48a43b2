"""Prompts of a window: waits by length, and repeats (retry storms)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import TypedDict

import numpy as np

from pigou.request import Request

#: Remembered prompts.
_LENGTHS = 1000
#: A long prompt has this many times the median's tokens, and is in this longest share.
_TIMES, _SHARE = 4.0, 0.1
#: Seconds within which a repeat counts, and remembered prompts.
_WITHIN_S, _PROMPTS = 60.0, 20_000


class WaitFigures(TypedDict):
    """Waits of short and long prompts, as in `FleetObservation`."""

    short_wait_p50_s: float | None
    short_wait_p95_s: float | None
    long_wait_max_s: float | None


class PromptLengths:
    """Lengths of the last thousand prompts."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._ascending: list[int] = []

    def add(self, tokens: int) -> None:
        """Add a prompt's length."""
        if len(self._order) == _LENGTHS:
            del self._ascending[bisect_left(self._ascending, self._order.popleft())]
        self._order.append(tokens)
        insort(self._ascending, tokens)

    def is_long(self, tokens: int) -> bool:
        """True if a prompt is in the longest tenth and over four times the median."""
        known = self._ascending
        if not known:
            return False
        tenth = known[int((1.0 - _SHARE) * (len(known) - 1))]
        return tokens >= tenth and tokens > _TIMES * known[len(known) // 2]

    def wait_figures(self, wait_s: Sequence[tuple[int, float]]) -> WaitFigures:
        """Return the waits of short and long prompts, from (tokens, seconds so far) of each."""
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


def prompt_key(request: Request) -> Hashable | None:
    """Return a key of a request's prompt; None without a full block."""
    for keys in (*request.keys.values(), request.hashes[:, 0]):
        if len(keys):
            return request.tenant, request.prompt, int(keys[-1])
    return None


class RepeatedPrompts:
    """Counts prompts that return after an abandoned, refused or failed attempt; bounded memory."""

    def __init__(self) -> None:
        self.count = 0
        self._open: dict[str, Hashable] = {}
        self._unserved: OrderedDict[Hashable, float] = OrderedDict()

    def arrive(self, request: str, prompt: Hashable | None, now_s: float) -> bool:
        """Add a request's prompt (None: unknown); return whether its client repeated it."""
        if prompt is None or request in self._open:
            return False
        self._open[request] = prompt
        at = self._unserved.pop(prompt, None)
        repeated = at is not None and now_s - at <= _WITHIN_S
        self.count += repeated
        return repeated

    def end(self, request: str, now_s: float, *, served: bool) -> None:
        """End a request; unknown ids are ignored."""
        prompt = self._open.pop(request, None)
        if prompt is None or served:
            return
        self._unserved[prompt] = now_s
        self._unserved.move_to_end(prompt)
        if len(self._unserved) > _PROMPTS:
            self._unserved.popitem(last=False)
