"""What most policies have in common: everything may come in, and nothing else matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from pigou.kv.block import Block, Entry
from pigou.kv.policies.policy import NoParams, Setting
from pigou.kv.worth import Worth


class Base:
    """Admits everything; notes nothing."""

    Params: type[msgspec.Struct] = NoParams
    paths = False
    price = 0.0
    exclusive = False
    above: Callable[[bytes], bool] | None = None

    def __init__(self, setting: Setting, params: msgspec.Struct | None = None) -> None:
        self.setting = setting

    def learn(self, worth: Worth) -> None:
        """Take another worth of a block from now on."""
        self.setting = replace(self.setting, worth=worth)

    def asked(self, blocks: Sequence[Block], now: int) -> None:
        """Do nothing."""

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Return True for each."""
        return [True] * len(blocks)

    def insert(self, entry: Entry, now: int) -> None:
        """Do nothing."""

    def hit(self, entry: Entry, now: int) -> None:
        """Do nothing."""

    def freed(self, entry: Entry, now: int) -> None:
        """Do nothing."""

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Do nothing."""
