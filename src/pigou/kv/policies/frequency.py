"""Frequencies that double and decay: the seed's eviction, and KVBM's filter before a disk."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.policies.policy import Setting
from pigou.kv.policies.ranked import Lru, Ranked
from pigou.request import SECOND


class FrequencyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `Frequency`.

    Attributes:
        step_s: seconds of a decay step.
    """

    step_s: float = 600.0


class Frequency(Ranked):
    """The lowest frequency goes: 1 at first, doubled by a hit, less 1 for each step, at least 0.

    (Georgiou 2026, section 2, on Dynamo's KV block manager.) As all decay alike, the rank is the
    frequency plus the number of the step in which it was set. A frequency of `PROMOTES` or more
    makes a block eligible for the tier above (`eligible`).
    """

    Params = FrequencyParams
    PROMOTES = 2
    paths = True

    def __init__(self, setting: Setting, params: FrequencyParams) -> None:
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
    """Parameters of `Kvbm`.

    Attributes:
        step_s: seconds of a decay step.
        entries: counts that are kept at most.
        least: count from which on a block may come in.
    """

    step_s: float = 600.0
    entries: int = 1_000_000
    least: int = 2


class Kvbm(Lru):
    """LRU behind the filter that Dynamo's KVBM has before its disk.

    A block's count is 1 when it is offered first, and doubles with each offer (those of one
    instant are one); it comes in from `least` on. Every step takes 1 from all counts, and forgets
    those at 0; so do extra steps while there are more than `entries`. (Dynamo,
    `block_manager/offload/filter.rs`.)
    """

    Params: type[msgspec.Struct] = KvbmParams

    def __init__(self, setting: Setting, params: KvbmParams) -> None:
        super().__init__(setting, params)
        if not (params.step_s > 0 and params.entries > 0 and params.least > 0):
            raise ValueError(f"{params}: all must be above 0")
        self._step = int(params.step_s * SECOND)
        self._entries, self._least = params.entries, params.least
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
        return [self._offered(block) for block in blocks]

    def _offered(self, block: Block) -> bool:
        count = self._counts.get(block.key, 0)
        if block.key in self._fresh:
            return count >= self._least
        self._fresh.add(block.key)
        count = min(2 * count, 1 << 62) if count else 1
        self._counts[block.key] = count
        while len(self._counts) > self._entries:
            self._less()
        return count >= self._least

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
