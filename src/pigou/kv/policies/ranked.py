"""Policies that are an order of the free blocks: the one of lowest rank goes."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from itertools import count
from typing import Literal

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.policies.base import Base
from pigou.kv.policies.policy import Setting


class Ranked(Base):
    """A heap of free blocks. Items of blocks that have a newer rank, or are not free, are stale."""

    def __init__(self, setting: Setting, params: msgspec.Struct | None = None) -> None:
        super().__init__(setting, params)
        self._heap: list[tuple[float, int, Entry]] = []
        self._number = count()
        self._live = 0

    @abstractmethod
    def rank(self, entry: Entry, now: int) -> float:
        """Return the rank of a free block from now on, the lowest of which goes first.

        Of equal ranks goes first what was ranked first.
        """

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Return the free block of lowest rank."""
        heap = self._heap
        while heap:
            rank, _, entry = heap[0]
            if entry.rank == rank and entry.free:
                return entry
            heapq.heappop(heap)
        return None

    def insert(self, entry: Entry, now: int) -> None:
        """Rank it, if it is free."""
        self._live += 1
        if entry.free:
            self._push(entry, now)

    def hit(self, entry: Entry, now: int) -> None:
        """Rank it anew, if it is free."""
        if entry.free:
            self._push(entry, now)

    def freed(self, entry: Entry, now: int) -> None:
        """Rank it."""
        self._push(entry, now)

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Count it out; its items go when they come up."""
        self._live -= 1

    def _push(self, entry: Entry, now: int) -> None:
        entry.rank = self.rank(entry, now)
        heapq.heappush(self._heap, (entry.rank, next(self._number), entry))
        if len(self._heap) > 4 * self._live + 64:
            self._heap = [item for item in self._heap if item[2].rank == item[0] and item[2].free]
            heapq.heapify(self._heap)


class Lru(Ranked):
    """Least recently used: rank = time of the last use. What vLLM and Mooncake evict by."""

    def rank(self, entry: Entry, now: int) -> float:
        """Return the time of the last use, nanoseconds."""
        return entry.last


class Fifo(Ranked):
    """First in, first out: rank = number of the admission."""

    def insert(self, entry: Entry, now: int) -> None:
        """Number it."""
        entry.mark = next(self._number)
        super().insert(entry, now)

    def rank(self, entry: Entry, now: int) -> float:
        """Return its number."""
        return entry.mark


class Lfu(Ranked):
    """Least frequently used: rank = uses since it was admitted; of equals the oldest goes."""

    def rank(self, entry: Entry, now: int) -> float:
        """Return the uses."""
        return entry.uses


class GdsfParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `Gdsf`.

    Attributes:
        cost: what a miss costs: `unit` (aged LFU), `bytes` (so that size does not matter), or
            `seconds` (what the tier's `Worth` says).
    """

    cost: Literal["unit", "bytes", "seconds"] = "bytes"


class Gdsf(Ranked):
    """Greedy dual size frequency: rank = L + (uses + 1) * cost / size.

    L is the rank of what was evicted last, at the time of the block's last use (Cherkasova 1998;
    LFU with dynamic aging where cost / size is 1, Arlitt et al. 2000).
    """

    Params = GdsfParams

    def __init__(self, setting: Setting, params: GdsfParams) -> None:
        super().__init__(setting, params)
        self._cost = params.cost
        self._level = 0.0

    def rank(self, entry: Entry, now: int) -> float:
        """Return the rank as of the block's last use."""
        return entry.level + (entry.uses + 1) * self._density(entry.block)

    def insert(self, entry: Entry, now: int) -> None:
        """Rank it at today's level."""
        entry.level = self._level
        super().insert(entry, now)

    def hit(self, entry: Entry, now: int) -> None:
        """Rank it at today's level."""
        entry.level = self._level
        super().hit(entry, now)

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Raise the level, and hand the block's own to its parent."""
        super().remove(entry, evicted, now)
        if evicted:
            self._level = max(self._level, entry.rank)
        if entry.up is not None:
            entry.up.level = max(entry.up.level, entry.level)

    def _density(self, block: Block) -> float:
        if self._cost == "bytes":
            return 1.0
        cost = 1.0 if self._cost == "unit" else self.setting.worth.saved(block)
        return cost / block.size
