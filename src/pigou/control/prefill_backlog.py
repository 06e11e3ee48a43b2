"""The prefill backlog: prompts that each worker has to compute, in order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


class PrefillBacklog:
    """Prompts that each worker has to compute, in the order in which they were sent.

    The first of a worker is under way.

    Attributes:
        tokens: uncached ones of the first prompt, 0 where there is none, (workers,).
        pairs: of those with the ones before them, (workers,).
        since: when the first became that, in nanoseconds, (workers,).
    """

    def __init__(self) -> None:
        self.tokens: Counts = np.zeros(0, dtype=np.int64)
        self.pairs, self.since = self.tokens.copy(), self.tokens.copy()
        self._prompts: list[dict[str, tuple[int, int]]] = []

    def up(self) -> None:
        """Add a worker; its row is the last."""
        self._prompts.append({})
        for name in ("tokens", "pairs", "since"):
            setattr(self, name, np.append(getattr(self, name), 0))

    def down(self, row: int) -> None:
        """Remove a worker."""
        del self._prompts[row]
        for name in ("tokens", "pairs", "since"):
            setattr(self, name, np.delete(getattr(self, name), row))

    def add(self, row: int, request: str, tokens: int, pairs: int, now: int) -> None:
        """Add a prompt of worker `row`; one that is there already has so many tokens now."""
        prompts = self._prompts[row]
        first = not prompts
        prompts[request] = tokens, pairs
        if first or next(iter(prompts)) == request:
            self.tokens[row], self.pairs[row] = tokens, pairs
            if first:
                self.since[row] = now

    def remove(self, row: int, request: str, now: int) -> None:
        """Remove a prompt that is computed, or was given up."""
        prompts = self._prompts[row]
        first = next(iter(prompts), None) == request
        del prompts[request]
        if first:
            self.tokens[row], self.pairs[row] = next(iter(prompts.values()), (0, 0))
            self.since[row] = now
