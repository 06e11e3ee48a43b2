"""Moves between tiers, and how fast blocks come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pigou.kv.block import Block
from pigou.kv.worth import Worth
from pigou.request import Ints

#: In a move: the device; and nowhere, for blocks that are only deleted.
DEVICE, NOWHERE = -1, -2
#: One of so many of a tier's blocks may lie there still while it is copied to the next.
_STAGING = 16
#: Of moves that are not of the device.
NO_BLOCKS: Ints = np.empty(0, dtype=np.int32)


class Speed(NamedTuple):
    """How fast blocks come back from a tier.

    Attributes:
        latency: seconds before the first byte.
        block: seconds for each block.
    """

    latency: float = 0.0
    block: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks to be copied from one place to another, or to be deleted.

    Attributes:
        number: under which it is answered; -1 for deletions, which are not.
        source: tier to read from, or `DEVICE`.
        target: tier to write to, or `NOWHERE`: the blocks are deleted from `source`.
        keys: of the blocks, each after those that it stands on.
        blocks: what they are, in the same order; empty for deletions.
        device: device blocks to read, shape (n,); empty for another source.
    """

    number: int
    source: int
    target: int
    keys: Sequence[bytes]
    blocks: Sequence[Block] = ()
    device: Ints = field(default_factory=lambda: NO_BLOCKS)


@dataclass(slots=True)
class Counts:
    """Blocks of one tier, since the start.

    Attributes:
        stored: that were written to it.
        restored: that were read from it for a request.
        recalled: that were read from it for a session that was expected back.
        evicted: that it gave up for others.
        lost: that could not be written or read.
    """

    stored: int = 0
    restored: int = 0
    recalled: int = 0
    evicted: int = 0
    lost: int = 0


def staging_of(rooms: Sequence[int]) -> list[int]:
    """Return how many blocks of each tier are for what is on its way to the next.

    Args:
        rooms: blocks that each tier's store holds, from the nearest on; the farthest needs none.
    """
    return [*(max(1, room // _STAGING) for room in rooms[:-1]), 0]


def worth_reading(
    found: Sequence[int], first: int, speeds: Sequence[Speed], worth: Worth | None
) -> int:
    """Return how many blocks of a sequence save most time if they are read, not computed.

    Args:
        found: the tier that each lies in, from index `first` of the sequence on.
        first: index of the first.
        speeds: of reading from each tier; its latency is paid once.
        worth: what computing a block takes; None where nobody knows: all are read.
    """
    if worth is None:
        return len(found)
    saved = best = 0.0
    count = 0
    seen: set[int] = set()
    for i, tier in enumerate(found):
        saved += worth.recompute(first + i) - speeds[tier].block
        saved -= 0.0 if tier in seen else speeds[tier].latency
        seen.add(tier)
        if saved > best:
            best, count = saved, i + 1
    return count
