"""ARC: blocks used once and blocks used again, and how much room each deserves."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.policies.base import Base
from pigou.kv.policies.ghosts import Ghosts
from pigou.kv.policies.policy import Setting
from pigou.kv.policies.queues import Queue


class Arc(Base):
    """Adaptive replacement cache (Megiddo and Modha, FAST '03), by bytes.

    T1 holds blocks used once, T2 those used again, both in order of use; B1 and B2 are their
    ghosts. A ghost that comes back moves the share p of T1: towards its own list. The list over
    its share gives up its oldest block.
    """

    paths = True

    def __init__(self, setting: Setting, params: msgspec.Struct | None = None) -> None:
        super().__init__(setting, params)
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._once_ghosts, self._again_ghosts = Ghosts(sys.maxsize), Ghosts(sys.maxsize)
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
        """Return the oldest free block of the list that is over its share (REPLACE)."""
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
        """Take it out of its list; if it was evicted, remember it."""
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
