"""A request that waits, and heaps of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import msgspec

from pigou.request import Request


class Waiting(msgspec.Struct, eq=False):
    """A queued request.

    Attributes:
        request: the request.
        since: when it was queued, in nanoseconds.
        uncached: tokens of its prompt that the worker which holds most of them lacks.
        output: tokens that it is expected to generate.
        weight: of its tenant.
        exclude: workers that just failed it.
        returned: it ran before, and its worker failed; it goes first, and is not shed for space.
        serial: rises with each request that is queued.
        late: it missed its deadline while it waited (`edf`).
        kept: it was accepted with the first sequence of its group, so it is not shed any more.
    """

    request: Request
    since: int
    uncached: int
    output: int = 1
    weight: float = 1.0
    exclude: frozenset[str] = frozenset()
    returned: bool = False
    serial: int = 0
    late: bool = False
    kept: bool = False

    @property
    def tokens(self) -> int:
        """What it asks of the fleet: uncached prompt plus expected output tokens."""
        return self.uncached + self.output * self.request.sequences

    @property
    def held_tokens(self) -> int:
        """What the sequences of its group ask for that were not submitted yet."""
        return self.request.held_tokens + self.request.held * self.output


class Heap:
    """Waiting requests by key, the least first; those of equal keys in the order of `serial`.

    Adding and taking the first cost O(log n), removing any O(1), amortised: what is removed stays
    behind as a dead entry until it comes up, or until the dead outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Waiting]] = []
        self._live: dict[str, tuple[Any, int, Waiting]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Waiting]:
        """All of them, in no order."""
        return (entry[2] for entry in self._live.values())

    def add(self, key: Any, waiting: Waiting) -> None:
        """Add a request that is not there; all keys of a heap must be comparable."""
        entry = (key, waiting.serial, waiting)
        self._live[waiting.request.id] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, waiting: Waiting) -> None:
        """Take a request out; one that is not there is no error."""
        if self._live.pop(waiting.request.id, None) is None:
            return
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def last(self, most: int, before: Any, tenant: str | None = None) -> list[Waiting]:
        """Return requests whose keys are above `before`, the greatest first, at most so many.

        Of equal keys the newest come first. Requests that were accepted for good are left out.
        `tenant` picks those of one tenant. The cost is O(n).
        """
        entries = (
            entry
            for entry in self._live.values()
            if entry[0] > before and not entry[2].kept and tenant in (None, entry[2].request.tenant)
        )
        return [entry[2] for entry in heapq.nlargest(most, entries, key=lambda each: each[:2])]

    def first(self) -> Waiting | None:
        """Return the least, which stays; None when nobody waits."""
        heap = self._heap
        while heap and self._live.get(heap[0][2].request.id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None
