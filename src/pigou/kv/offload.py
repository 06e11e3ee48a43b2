"""KV offload: moves between tiers and their queue, speeds of tiers, and the recompute cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pigou.kv.block import Block
from pigou.request import Ints

#: In a move: the device; and nowhere, for blocks that are only deleted.
DEVICE, NOWHERE = -1, -2
#: One of so many of a tier's blocks may lie there still while it is copied to the next.
_STAGING = 16
#: Of moves that are not of the device.
NO_BLOCKS: Ints = np.empty(0, dtype=np.int32)


class TierSpeed(NamedTuple):
    """How fast blocks come back from a tier."""

    latency: float = 0.0  # seconds before the first byte
    block: float = 0.0  # seconds for each block


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks to be copied from one tier to another, or to be deleted."""

    number: int  # under which it is answered; -1 for deletions, which are not
    source: int  # tier to read from, or `DEVICE`
    target: int  # tier to write to, or `NOWHERE`: the blocks are deleted from `source`
    keys: Sequence[bytes]  # of the blocks, each after those that it stands on
    blocks: Sequence[Block] = ()  # what they are, in the same order; empty for deletions
    # device blocks to read, shape (n,); empty for another source.
    device: Ints = field(default_factory=lambda: NO_BLOCKS)


class MoveQueue:
    """Moves that were decided: the driver takes them, makes them, and answers each."""

    def __init__(self) -> None:
        self.under_way: dict[int, Move] = {}  # moves that were not answered yet, by number
        self._decided: list[Move] = []
        self._number = 0

    def add(
        self, source: int, target: int, blocks: Sequence[Block], device: Ints = NO_BLOCKS
    ) -> Move:
        """Add a move of blocks, and return it."""
        keys = [block.key for block in blocks]
        move = Move(self._number, source, target, keys, blocks, device)
        self._number += 1
        self.under_way[move.number] = move
        self._decided.append(move)
        return move

    def delete(self, tier: int, keys: Sequence[bytes]) -> None:
        """Add the deletion of a tier's blocks."""
        self._decided.append(Move(-1, tier, NOWHERE, list(keys)))

    def drain(self) -> list[Move]:
        """Return the moves that were decided since the last call, in order."""
        decided, self._decided = self._decided, []
        return decided

    def end(self, number: int) -> Move:
        """Take the answer of a move in, and return it; raise a ValueError if none is under way."""
        move = self.under_way.pop(number, None)
        if move is None:
            raise ValueError(f"move {number} has landed, and is not under way")
        return move


@dataclass(slots=True)
class TierCounts:
    """Blocks of one tier, since the start."""

    stored: int = 0
    restored: int = 0
    recalled: int = 0  # that were read from it for a session that was expected back
    evicted: int = 0
    lost: int = 0


def staging_of(rooms: Sequence[int]) -> list[int]:
    """Return how many blocks of each tier, nearest first, are for moves to the next."""
    return [*(max(1, room // _STAGING) for room in rooms[:-1]), 0]


def blocks_worth_loading(
    tiers: Sequence[int],
    first: int,
    speeds: Sequence[TierSpeed],
    recompute_cost: RecomputeCost | None,
) -> int:
    """Return how many blocks of a sequence from `first` on are best read, not computed.

    `tiers` says where each lies; a tier's latency is paid once. All are read while the cost of
    recomputing is unknown (None).
    """
    if recompute_cost is None:
        return len(tiers)
    saved = best = 0.0
    count = 0
    seen: set[int] = set()
    for i, tier in enumerate(tiers):
        saved += recompute_cost.recompute(first + i) - speeds[tier].block
        saved -= 0.0 if tier in seen else speeds[tier].latency
        seen.add(tier)
        if saved > best:
            best, count = saved, i + 1
    return count


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Seconds that one use of a block saves over recomputing it.

    Recomputing a block at depth d of its chain takes `base + slope * d` seconds: a linear part, and
    attention over what comes before it. From a tier it comes back in `restore * size` seconds. What
    a read costs once (a seek, a round trip) is not charged to its blocks.
    """

    base: float = 1.0  # seconds to compute a block at the beginning of a prompt
    slope: float = 0.0  # seconds more for each block before it
    restore: float = 0.0  # seconds for each byte that is read back

    def __post_init__(self) -> None:
        for name in ("base", "slope", "restore"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def saved(self, block: Block) -> float:
        """Return the seconds that a hit of this block saves, at least 0."""
        return max(0.0, self.base + self.slope * block.depth - self.restore * block.size)

    def recompute(self, depth: int, count: int = 1) -> float:
        """Return the seconds to compute `count` blocks of which the first is at `depth`."""
        return count * self.base + self.slope * (count * depth + count * (count - 1) / 2)
