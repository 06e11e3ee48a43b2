"""Which prompts are long, beside the others that came lately."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

#: Prompts that are remembered.
_PROMPTS = 1000
#: Times the median's tokens that a long prompt has, and the share of prompts that may be long.
_TIMES, _SHARE = 4.0, 0.1


class PromptLengths:
    """The lengths of the last thousand prompts."""

    def __init__(self) -> None:
        """Begin without prompts."""
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
