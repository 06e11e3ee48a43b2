"""An oracle with stores below the device: what a move copies is what lies there when it is made."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core_oracle import POISON, Oracle, Slot

from pigou.engine.plan import Effects, Plan, Result
from pigou.kv.block import keys_of
from pigou.kv.tiers import DEVICE, NOWHERE, Move, Tiers


@dataclass
class TierOracle(Oracle):
    """Device, host and stores of one engine.

    Attributes:
        stores: of each tier, blocks by key.
        links: of each tier, moves to it and deletions in it that are not done, in order.
        most: of each tier, blocks that its store has room for.
    """

    stores: list[dict[bytes, list[Slot]]] = field(default_factory=list)
    links: list[deque[Move]] = field(default_factory=list)
    most: list[int] = field(default_factory=list)

    @property
    def tiers(self) -> Tiers:
        assert self.core.tiers is not None
        return self.core.tiers

    def execute(self, plan: Plan, most: int = 1_000_000) -> Result:
        for move in plan.moves:
            at = move.source if move.target == NOWHERE else move.target
            self.links[at].append(move)
        return super().execute(plan, most)

    def make(self, tier: int, fails: bool) -> Effects:
        """Make the next move to a tier, or delete there."""
        move = self.links[tier].popleft()
        if move.target == NOWHERE:
            for key in move.keys:
                self.stores[tier].pop(key, None)
            return Effects()
        good = []
        for i, key in enumerate(move.keys):
            if move.source == DEVICE:
                content = list(self.device[move.device[i]])
            else:
                content = list(self.stores[move.source][key])
            good.append(not (fails and i % 2 == len(move.keys) % 2))
            if good[-1]:
                self.stores[tier][key] = content
        assert len(self.stores[tier]) <= self.most[tier], "a store holds more than it may"
        return self.core.landed(move.number, good)

    def restore(self, name: str, missing: int) -> Effects:
        """End a load from tiers; its block number `missing` cannot be read, if there is one."""
        load = self.loads.pop(name)
        size = self.core.config.block_size
        self.write(load.blocks, 0, [POISON] * (len(load.blocks) * size))
        good = min(missing, len(load.blocks))
        keys = keys_of(load.hashes)
        for i in range(good):
            self.write(load.blocks, i * size, self.stores[load.tiers[i]][keys[i]])
        return self.core.loaded(name, good * size)

    def check(self) -> None:
        """Check also that stores have what tiers think, and nothing under a wrong key."""
        super().check()
        size = self.core.config.block_size
        for tier, store in enumerate(self.stores):
            for key, content in store.items():
                high, low = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
                history = self.content[high, low]
                expected = [history[: i + 1] for i in range(len(history) - size, len(history))]
                assert content == expected, "a store has something else under this key"
            for block in self.tiers.tiers[tier].blocks():
                if self.tiers.readable(tier, block.key, 0):
                    assert block.key in store, "a tier counts on what its store has not"
