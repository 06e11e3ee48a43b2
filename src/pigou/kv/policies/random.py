"""Random eviction: what any policy has to beat."""

from __future__ import annotations

import random

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.policies.base import Base
from pigou.kv.policies.policy import Setting


class RandomEviction(Base):
    """Any free block, each as likely as another."""

    def __init__(self, setting: Setting, params: msgspec.Struct | None = None) -> None:
        super().__init__(setting, params)
        self._generator = random.Random(setting.seed)
        self._free: list[Entry] = []

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Draw until a free one is drawn; those that are not leave the list."""
        while self._free:
            place = self._generator.randrange(len(self._free))
            entry = self._free[place]
            if entry.free:
                return entry
            self._free[place] = self._free[-1]
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
