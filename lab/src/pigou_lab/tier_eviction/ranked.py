"""Fifo."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.tier_eviction.lru import LruEviction, RankedEviction
from pigou.kv.tier_eviction.policy import EvictionPolicy, TierSetting
from pigou.request import SECOND


class FifoEviction(RankedEviction):
    """First in, first out: rank = number of the admission."""

    def insert(self, entry: Entry, now: int) -> None:
        """Number it."""
        entry.mark = next(self._number)
        super().insert(entry, now)

    def rank(self, entry: Entry, now: int) -> float:
        """Return its number."""
        return entry.mark


class LfuEviction(RankedEviction):
    """Least frequently used: rank = uses since it was admitted; of equals the oldest goes."""

    def rank(self, entry: Entry, now: int) -> float:
        """Return the uses."""
        return entry.uses


class GdsfParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `Gdsf`."""

    # what a miss costs: `unit` (aged LFU), `bytes` (so that size does not matter), or `seconds`
    # (what the tier's `Worth` says).
    cost: Literal["unit", "bytes", "seconds"] = "bytes"


class GdsfEviction(RankedEviction):
    """Greedy dual size frequency (Cherkasova 1998): rank = L + (uses + 1) * cost / size."""

    Params = GdsfParams

    def __init__(self, setting: TierSetting, params: GdsfParams) -> None:
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
        cost = 1.0 if self._cost == "unit" else self.setting.recompute_cost.saved(block)
        return cost / block.size


class FrequencyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `Frequency`."""

    step_s: float = 600.0  # seconds of a decay step


class FrequencyEviction(RankedEviction):
    """Evicts the lowest frequency: 1, doubled by a hit, less 1 per step (Georgiou 2026, section 2).

    All decay alike, so rank = frequency + step. `PROMOTES` makes a block eligible for the next
    tier.
    """

    Params = FrequencyParams
    PROMOTES = 2
    paths = True

    def __init__(self, setting: TierSetting, params: FrequencyParams) -> None:
        super().__init__(setting, params)
        if not params.step_s > 0:
            raise ValueError(f"step_s is {params.step_s}; it must be above 0")
        self._step = params.step_s * SECOND

    def frequency(self, entry: Entry, now: int) -> float:
        """Return the frequency of a held block."""
        return max(0.0, entry.level - now // self._step)

    def eligible(self, entry: Entry, now: int) -> bool:
        """Return whether a held block should go to the tier above."""
        return self.frequency(entry, now) >= self.PROMOTES

    def rank(self, entry: Entry, now: int) -> float:
        """Return frequency plus step as they were set."""
        return entry.level

    def insert(self, entry: Entry, now: int) -> None:
        """Begin at 1."""
        entry.level = 1.0 + now // self._step
        super().insert(entry, now)

    def hit(self, entry: Entry, now: int) -> None:
        """Double it, up to 2^52; from 0 it begins again at 1."""
        frequency = max(1.0, 2.0 * self.frequency(entry, now))
        entry.level = min(frequency, 2.0**52) + now // self._step
        super().hit(entry, now)


class KvbmParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `Kvbm`."""

    step_s: float = 600.0  # seconds of a decay step
    entries: int = 1_000_000  # counts that are kept at most
    least: int = 2  # count from which on a block may come in


class KvbmEviction(LruEviction):
    """LRU behind the frequency filter of Dynamo's KVBM (`block_manager/offload/filter.rs`)."""

    Params: type[msgspec.Struct] = KvbmParams

    def __init__(self, setting: TierSetting, params: KvbmParams) -> None:
        super().__init__(setting, params)
        if not (params.step_s > 0 and params.entries > 0 and params.least > 0):
            raise ValueError(f"{params}: all must be above 0")
        self._step = int(params.step_s * SECOND)
        self._entries, self._min_count = params.entries, params.least
        self._counts: dict[bytes, int] = {}
        self._decayed: int | None = None
        #: Offered at the instant `_last`.
        self._fresh: set[bytes] = set()
        self._last = -1

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Count the offers; returns for which they are enough."""
        self._decay(now)
        if now != self._last:
            self._fresh.clear()
            self._last = now
        return [self._count_offer(block) for block in blocks]

    def _count_offer(self, block: Block) -> bool:
        count = self._counts.get(block.key, 0)
        if block.key in self._fresh:
            return count >= self._min_count
        self._fresh.add(block.key)
        count = min(2 * count, 1 << 62) if count else 1
        self._counts[block.key] = count
        while len(self._counts) > self._entries:
            self._less()
        return count >= self._min_count

    def _decay(self, now: int) -> None:
        if self._decayed is None:
            self._decayed = now
        while now - self._decayed >= self._step:
            self._decayed += self._step
            if self._counts:
                self._less()
            else:
                self._decayed += (now - self._decayed) // self._step * self._step

    def _less(self) -> None:
        self._counts = {key: count - 1 for key, count in self._counts.items() if count > 1}


class RandomEviction(EvictionPolicy):
    """Any free block, each as likely as another."""

    def __init__(self, setting: TierSetting, params: msgspec.Struct | None = None) -> None:
        super().__init__(setting, params)
        self._generator = random.Random(setting.seed)
        self._free: list[Entry] = []

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Draw until a free one is drawn; those that are not leave the list."""
        while self._free:
            index = self._generator.randrange(len(self._free))
            entry = self._free[index]
            if entry.free:
                return entry
            self._free[index] = self._free[-1]
            self._free.pop()
            entry.mark = 0
        return None

    def insert(self, entry: Entry, now: int) -> None:
        """List it, if it is free."""
        if entry.free:
            self.freed(entry, now)

    def freed(self, entry: Entry, now: int) -> None:
        """List it, once."""
        if not entry.mark:
            entry.mark = 1
            self._free.append(entry)
