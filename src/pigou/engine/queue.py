"""Who waits, in the order in which they will be admitted."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from pigou.engine.sequence import Sequence


class WaitingQueue:
    """Sequences by their keys, lowest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._present: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._present

    def push(self, seq: Sequence) -> None:
        """Let a sequence wait; keys are unique."""
        heappush(self._heap, (seq.key, seq))
        self._present.add(seq)

    def head(self) -> Sequence | None:
        """Return who is next, or None."""
        while self._heap:
            seq = self._heap[0][1]
            if seq in self._present:
                return seq
            heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Remove and return who is next; there must be one."""
        seq = self.head()
        assert seq is not None, "nobody waits"
        heappop(self._heap)
        self._present.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from wherever it waits."""
        self._present.remove(seq)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield who waits, in no particular order."""
        return iter(self._present)
