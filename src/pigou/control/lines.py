"""Lines: the prompts that each worker has to compute, and since when the first is under way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


class Lines:
    """Prompts of each worker in the order in which they came; the first is under way.

    Attributes:
        tokens: of the first that are uncached, 0 where there is none, (workers,).
        pairs: of those with the ones before them, (workers,).
        since: when the first became that, in nanoseconds, (workers,).
    """

    def __init__(self) -> None:
        self.tokens: Counts = np.zeros(0, dtype=np.int64)
        self.pairs, self.since = self.tokens.copy(), self.tokens.copy()
        self._lines: list[dict[str, tuple[int, int]]] = []

    def up(self) -> None:
        """A worker joined; its row is the last."""
        self._lines.append({})
        for name in ("tokens", "pairs", "since"):
            setattr(self, name, np.append(getattr(self, name), 0))

    def down(self, row: int) -> None:
        """A worker left."""
        del self._lines[row]
        for name in ("tokens", "pairs", "since"):
            setattr(self, name, np.delete(getattr(self, name), row))

    def join(self, row: int, request: str, tokens: int, pairs: int, now: int) -> None:
        """A prompt was sent to worker `row`; one that is there already has so many tokens now."""
        line = self._lines[row]
        first = not line
        line[request] = tokens, pairs
        if first or next(iter(line)) == request:
            self.tokens[row], self.pairs[row] = tokens, pairs
            if first:
                self.since[row] = now

    def leave(self, row: int, request: str, now: int) -> None:
        """A prompt is computed, or was given up."""
        line = self._lines[row]
        first = next(iter(line), None) == request
        del line[request]
        if first:
            self.tokens[row], self.pairs[row] = next(iter(line.values()), (0, 0))
            self.since[row] = now
