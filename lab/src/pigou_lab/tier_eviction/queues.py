"""Policies of queues, that a block waits in until it comes up: SIEVE and S3-FIFO."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.tier_eviction.policy import EvictionPolicy, TierSetting

Queue = OrderedDict[bytes, Entry]


def oldest(queue: Queue) -> Entry:
    """Return the block at a queue's end, where it is left."""
    return next(iter(queue.values()))


class SieveEviction(EvictionPolicy):
    """SIEVE (Zhang et al., NSDI '24): a queue, and a hand that evicts unvisited blocks."""

    paths = True

    def __init__(self, setting: TierSetting, params: msgspec.Struct | None = None) -> None:
        super().__init__(setting, params)
        #: From the oldest to the hand, and from the hand to the youngest.
        self._passed: Queue = OrderedDict()
        self._ahead: Queue = OrderedDict()

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Move the hand to the first free block that is not marked."""
        for _ in range(2 * (len(self._passed) + len(self._ahead)) + 1):
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
            if not self._ahead:
                return None
            entry = oldest(self._ahead)
            if entry.free and not entry.mark:
                return entry
            if entry.free:
                entry.mark = 0
            del self._ahead[entry.block.key]
            self._passed[entry.block.key] = entry
        return None

    def insert(self, entry: Entry, now: int) -> None:
        """Insert at the queue's young end."""
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead
        self._ahead[entry.block.key] = entry

    def hit(self, entry: Entry, now: int) -> None:
        """Mark it as visited."""
        entry.mark = 1

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Take it out of the queue."""
        key = entry.block.key
        (self._ahead if key in self._ahead else self._passed).pop(key)


class S3FifoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of `S3Fifo`."""

    small: float = 0.1  # part of the tier for blocks on probation
    ghost: float = 0.9  # bytes of forgotten blocks that are remembered, as a part of the tier
    promote: int = 2  # uses on probation that lead to the main queue


class S3FifoEviction(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP '23): a small queue, a main queue after `promote` uses, ghosts."""

    Params = S3FifoParams
    paths = True
    _MAX_USES = 3

    def __init__(self, setting: TierSetting, params: S3FifoParams) -> None:
        super().__init__(setting, params)
        if not (0 <= params.small <= 1 and params.ghost >= 0 and params.promote >= 1):
            raise ValueError(f"{params}: small is in 0 to 1, ghost at least 0, promote at least 1")
        self._promote = params.promote
        self._small_cap = int(setting.cap_bytes * params.small)
        self._main_cap = setting.cap_bytes - self._small_cap
        self._ghosts = GhostBlocks(int(setting.cap_bytes * params.ghost))
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._small_bytes = self._main_bytes = 0
        self._back: set[bytes] = set()
        self._evicted = False

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Return True for each, and remember which were ghosts."""
        self._back = {block.key for block in blocks if self._ghosts.pop(block.key)}
        return [True] * len(blocks)

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Evict from the queue over its share."""
        if self._main_bytes <= self._main_cap:
            entry = self._of_small()
            if entry is not None:
                return entry
        return self._of_main() or self._of_small()

    def _of_small(self) -> Entry | None:
        """Promote used blocks, up to the first unused one."""
        while self._small:
            entry = oldest(self._small)
            if entry.free and entry.mark < self._promote:
                return entry
            self._leave_small(entry)
            entry.mark = 0
            self._enter_main(entry)
        return None

    def _of_main(self) -> Entry | None:
        """Reinsert used blocks, up to the first unused one."""
        for _ in range((self._MAX_USES + 1) * len(self._main)):
            entry = oldest(self._main)
            if entry.free and entry.mark == 0:
                return entry
            entry.mark = max(entry.mark - 1, 0)
            self._main.move_to_end(entry.block.key)
        return None

    def insert(self, entry: Entry, now: int) -> None:
        """Put it on probation, or among the main ones if it was a ghost."""
        entry.mark = 0
        key = entry.block.key
        full = not self._evicted and self._small_bytes >= self._small_cap
        if key in self._back or full:
            self._back.discard(key)
            self._enter_main(entry)
        else:
            self._small[key] = entry
            self._small_bytes += entry.block.size

    def hit(self, entry: Entry, now: int) -> None:
        """Count the use."""
        entry.mark = min(entry.mark + 1, self._MAX_USES)

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Remove it from its queue; remember it if on probation."""
        self._evicted |= evicted
        if entry.block.key in self._main:
            del self._main[entry.block.key]
            self._main_bytes -= entry.block.size
            return
        self._leave_small(entry)
        if evicted:
            self._ghosts.add(entry.block.key, entry.block.size)

    def _leave_small(self, entry: Entry) -> None:
        del self._small[entry.block.key]
        self._small_bytes -= entry.block.size

    def _enter_main(self, entry: Entry) -> None:
        self._main[entry.block.key] = entry
        self._main_bytes += entry.block.size


class GhostBlocks:
    """Bounded list of evicted keys. Falsy if empty."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def add(self, key: bytes, size: int) -> None:
        """Remember a block of `size` bytes as the youngest."""
        self.pop(key)
        self._sizes[key] = size
        self.bytes += size
        while self.bytes > self.cap_bytes:
            self.forget()

    def pop(self, key: bytes) -> int:
        """Forget a block; returns its size, 0 if it was not remembered."""
        size = self._sizes.pop(key, 0)
        self.bytes -= size
        return size

    def forget(self) -> None:
        """Forget the oldest."""
        _, size = self._sizes.popitem(last=False)
        self.bytes -= size


class ArcEviction(EvictionPolicy):
    """Adaptive replacement cache (Megiddo and Modha, FAST '03), by bytes."""

    paths = True

    def __init__(self, setting: TierSetting, params: msgspec.Struct | None = None) -> None:
        super().__init__(setting, params)
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._once_ghosts, self._again_ghosts = GhostBlocks(sys.maxsize), GhostBlocks(sys.maxsize)
        self._once_bytes = self._again_bytes = 0
        self._share = 0.0
        self._back: set[bytes] = set()
        self._from_again: set[bytes] = set()

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Return True for each; a ghost moves the share."""
        for block in blocks:
            self._recall(block)
        return [True] * len(blocks)

    def _recall(self, block: Block) -> None:
        once, again = self._once_ghosts.bytes, self._again_ghosts.bytes
        if self._once_ghosts.pop(block.key):
            self._share += block.size * max(1.0, again / once)
            self._share = min(self._share, self.setting.cap_bytes)
            self._back.add(block.key)
        elif self._again_ghosts.pop(block.key):
            self._share = max(0.0, self._share - block.size * max(1.0, once / again))
            self._back.add(block.key)
            self._from_again.add(block.key)

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Return the oldest free block of the list over its share (REPLACE)."""
        over = self._once_bytes > self._share or (
            self._once_bytes == self._share and newcomer.key in self._from_again
        )
        full = self._once_bytes >= self.setting.cap_bytes
        lists = (self._once, self._again) if over or full else (self._again, self._once)
        for queue in lists:
            for entry in queue.values():
                if entry.free:
                    return entry
        return None

    def insert(self, entry: Entry, now: int) -> None:
        """Put it into T1, or into T2 if it was a ghost; forget what is too much."""
        key = entry.block.key
        if key in self._back:
            self._back.discard(key)
            self._from_again.discard(key)
            self._again[key] = entry
            self._again_bytes += entry.block.size
        else:
            self._once[key] = entry
            self._once_bytes += entry.block.size
        self._trim()

    def _trim(self) -> None:
        """Keep |T1| + |B1| within the tier, and all four lists within twice the tier."""
        cap, once, again = self.setting.cap_bytes, self._once_ghosts, self._again_ghosts
        while once and self._once_bytes + once.bytes > cap:
            once.forget()
        held = self._once_bytes + self._again_bytes
        while again and held + once.bytes + again.bytes > 2 * cap:
            again.forget()

    def hit(self, entry: Entry, now: int) -> None:
        """Make it the youngest of T2."""
        key = entry.block.key
        if key in self._again:
            self._again.move_to_end(key)
            return
        del self._once[key]
        self._once_bytes -= entry.block.size
        self._again[key] = entry
        self._again_bytes += entry.block.size

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Remove it from its list; remember it if evicted."""
        key, size = entry.block.key, entry.block.size
        if key in self._once:
            del self._once[key]
            self._once_bytes -= size
            ghosts = self._once_ghosts
        else:
            del self._again[key]
            self._again_bytes -= size
            ghosts = self._again_ghosts
        if evicted:
            ghosts.add(key, size)
