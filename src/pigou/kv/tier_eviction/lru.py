"""Policies that evict the free block of lowest rank."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from itertools import count

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.tier_eviction.policy import EvictionPolicy, TierSetting


class RankedEviction(EvictionPolicy):
    """A heap of free blocks by rank; items with outdated ranks are skipped lazily."""

    def __init__(self, setting: TierSetting, params: msgspec.Struct | None = None) -> None:
        super().__init__(setting, params)
        self._heap: list[tuple[float, int, Entry]] = []
        self._number = count()
        self._live = 0

    @abstractmethod
    def rank(self, entry: Entry, now: int) -> float:
        """Return a free block's rank; the lowest is evicted first, ties in ranking order."""

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
        """Rank a new block if it is free."""
        self._live += 1
        if entry.free:
            self._push(entry, now)

    def hit(self, entry: Entry, now: int) -> None:
        """Rank a used block again if it is free."""
        if entry.free:
            self._push(entry, now)

    def freed(self, entry: Entry, now: int) -> None:
        """Rank a block that became free."""
        self._push(entry, now)

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Count a removal; heap items are skipped later."""
        self._live -= 1

    def _push(self, entry: Entry, now: int) -> None:
        entry.rank = self.rank(entry, now)
        heapq.heappush(self._heap, (entry.rank, next(self._number), entry))
        if len(self._heap) > 4 * self._live + 64:
            self._heap = [item for item in self._heap if item[2].rank == item[0] and item[2].free]
            heapq.heapify(self._heap)


class LruEviction(RankedEviction):
    """Least recently used, as in vLLM and Mooncake."""

    def rank(self, entry: Entry, now: int) -> float:
        """Return the time of the last use, nanoseconds."""
        return entry.last
