"""KV offload: moves between tiers and their queue, tier speeds, and the recompute cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pigou.config import check_fields
from pigou.kv.block import Block
from pigou.request import Ints

#: Source or target of a move: the device, and nowhere (a deletion).
DEVICE, NOWHERE = -1, -2
#: One in this many of a tier's blocks may be staged for the next tier.
_STAGING = 16
#: Device blocks of moves between tiers.
NO_BLOCKS: Ints = np.empty(0, dtype=np.int32)


class TierSpeed(NamedTuple):
    """Read speed of a tier."""

    latency: float = 0.0  # seconds before the first byte
    block: float = 0.0  # seconds for each block


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks to copy from one tier to another, or to delete."""

    number: int  # id for its completion; -1 for deletions, which are not completed
    source: int  # tier to read from, or `DEVICE`
    target: int  # tier to write to, or `NOWHERE`: the blocks are deleted from `source`
    keys: Sequence[bytes]  # block keys, parent before child
    blocks: Sequence[Block] = ()  # in the same order; empty for deletions
    # device blocks to read, shape (n,); empty for another source.
    device: Ints = field(default_factory=lambda: NO_BLOCKS)


class MoveQueue:
    """Moves not yet taken by the driver, and those not yet completed."""

    def __init__(self) -> None:
        self.under_way: dict[int, Move] = {}  # by number
        self._decided: list[Move] = []
        self._number = 0

    def add(
        self, source: int, target: int, blocks: Sequence[Block], device: Ints = NO_BLOCKS
    ) -> Move:
        """Add and return a move."""
        keys = [block.key for block in blocks]
        move = Move(self._number, source, target, keys, blocks, device)
        self._number += 1
        self.under_way[move.number] = move
        self._decided.append(move)
        return move

    def delete(self, tier: int, keys: Sequence[bytes]) -> None:
        """Add a deletion of a tier's blocks."""
        self._decided.append(Move(-1, tier, NOWHERE, list(keys)))

    def drain(self) -> list[Move]:
        """Return the moves added since the last call, in order."""
        decided, self._decided = self._decided, []
        return decided

    def end(self, number: int) -> Move:
        """Complete and return a move; raise a ValueError if none is under way."""
        move = self.under_way.pop(number, None)
        if move is None:
            raise ValueError(f"move {number} has landed, and is not under way")
        return move


@dataclass(slots=True)
class TierCounts:
    """Blocks of one tier, totals since the start."""

    stored: int = 0
    restored: int = 0
    recalled: int = 0  # prefetched for a session expected back
    evicted: int = 0
    lost: int = 0


def staging_of(rooms: Sequence[int]) -> list[int]:
    """Return how many blocks of each tier, nearest first, may be staged for the next tier."""
    return [*(max(1, room // _STAGING) for room in rooms[:-1]), 0]


def blocks_worth_loading(
    tiers: Sequence[int],
    first: int,
    speeds: Sequence[TierSpeed],
    recompute_cost: RecomputeCost | None,
) -> int:
    """Return how many blocks from `first` on to load, by tier, instead of recomputing."""
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
    """Seconds that one hit of a block saves over recomputing it.

    A block at depth d takes `base + slope * d` seconds to recompute, and `restore * size` to load.
    """

    base: float = 1.0  # seconds to compute a block at the beginning of a prompt
    slope: float = 0.0  # additional seconds per block before it
    restore: float = 0.0  # seconds to load a byte

    def __post_init__(self) -> None:
        check_fields(self, "base", "slope", "restore", ge=0, infinite=True)

    def saved(self, block: Block) -> float:
        """Return the seconds saved by a hit of this block, at least 0."""
        return max(0.0, self.base + self.slope * block.depth - self.restore * block.size)

    def recompute(self, depth: int, count: int = 1) -> float:
        """Return the seconds to compute `count` blocks from `depth` on."""
        return count * self.base + self.slope * (count * depth + count * (count - 1) / 2)
