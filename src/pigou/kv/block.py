"""Blocks as the tiers beyond the device know them, and where they hang in their chains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count, repeat
from typing import NamedTuple

import numpy as np

from pigou.request import NEVER, BlockHashes

#: The parent's key of a chain's first block.
ROOT = b""


class Block(NamedTuple):
    """A block of KV that a tier is offered, or has given up.

    Attributes:
        key: its hash, 16 bytes, most significant first (`keys_of`).
        parent: key of the block before it in its chain; `ROOT` for the first.
        depth: its index in the chain, from 0.
        size: bytes that it takes in the tier.
        expiry: when its tenure ends, in nanoseconds of the epoch.
    """

    key: bytes
    parent: bytes
    depth: int
    size: int
    expiry: int = NEVER


class Entry:
    """A block that a tier holds, with its place in the forest of chains. Policies read it.

    `last` and `uses` count what ended at this block; a child that goes hands its own to its
    parent. So those of a block without children are all of its uses, and a hit is O(1).

    Attributes:
        block: which block.
        last: when it was used last, or admitted; nanoseconds.
        uses: hits since it was admitted.
        pins: readers and writers at present.
        held: whether it can be hit; if not, its bytes wait for the last pin.
        up, down: the parent where that is held, the first child.
        left, right: children of the same parent.
        rank, level, mark: the policy's own.
    """

    __slots__ = (
        "block", "down", "held", "last", "left", "level", "mark", "pins", "rank", "right", "up",
        "uses",
    )  # fmt: skip

    def __init__(self, block: Block, now: int) -> None:
        self.block = block
        self.last = now
        self.uses = 0
        self.pins = 0
        self.held = True
        self.up: Entry | None = None
        self.down: Entry | None = None
        self.left: Entry | None = None
        self.right: Entry | None = None
        self.rank: float = 0.0
        self.level: float = 0.0
        self.mark = 0

    @property
    def free(self) -> bool:
        """Whether it may be evicted: nothing stands on it, and nobody reads or writes it."""
        return self.held and self.down is None and self.pins == 0


def keys_of(hashes: BlockHashes) -> list[bytes]:
    """Return the keys of consecutive blocks, whose hashes have shape (n, 2)."""
    keys: list[bytes] = hashes.astype(">u8").view("V16").ravel().tolist()
    return keys


def hashes_of(keys: Sequence[bytes]) -> BlockHashes:
    """Return the hashes of blocks by their keys, shape (n, 2)."""
    words = np.frombuffer(b"".join(keys), dtype=">u8").reshape(len(keys), 2)
    return words.astype(np.uint64)


def chain_of(
    hashes: BlockHashes, size: int, expiry: int = NEVER, start: int = 0, parent: bytes = ROOT
) -> list[Block]:
    """Return consecutive blocks of one chain, all of `size` bytes.

    Args:
        hashes: shape (n, 2), of the blocks from index `start` of the chain on.
        size: bytes of each.
        expiry: when their tenure ends, nanoseconds.
        start: index of the first in its chain.
        parent: key of the block before it; `ROOT` where start is 0.
    """
    keys = keys_of(hashes)
    rows = zip(keys, [parent, *keys[:-1]], count(start), repeat(size), repeat(expiry), strict=False)
    return list(map(_block, rows))


#: A block of a tuple of its fields, in a third of the time.
_block = partial(tuple.__new__, Block)
