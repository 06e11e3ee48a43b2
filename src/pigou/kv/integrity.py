"""The laws of a block pool and of tiers, checked: nothing lost, twice or out of order."""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import TYPE_CHECKING

import numpy as np

from pigou.kv.block_pool_kernels import (
    CACHED,
    CHILD,
    FILLED,
    FREE,
    NEXT,
    PARENT,
    PREV,
    REFS,
    YOUNGER,
    Counts,
    find,
)
from pigou.request import BlockHashes, Ints

if TYPE_CHECKING:
    from pigou.kv.offload import Move
    from pigou.kv.tier import Tier


class IntegrityError(AssertionError):
    """A law of the cache does not hold: a defect of the engine. Names the law and the blocks."""


def ensure(law: bool, otherwise: str) -> None:
    """Raise an IntegrityError with the message `otherwise` where a law does not hold."""
    if not law:
        raise IntegrityError(otherwise)


def _require(law: str, wrong: Ints) -> None:
    if len(wrong):
        shown = ", ".join(map(str, wrong[:8].tolist()))
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise IntegrityError(f"{law}: not so for blocks {shown}{more}")


def _where(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Ints:
    return np.flatnonzero(mask).astype(np.int32)


def check_references(meta: Ints, counts: Counts, references: Ints) -> None:
    """Check that blocks are referred to as often as expected, and that the rest are free."""
    refs = meta[:-1, REFS]
    _require("references are those of rows, holds, loads and copies", _where(refs != references))
    free = int((refs == 0).sum())
    if free != counts[FREE]:
        raise IntegrityError(f"{free} blocks have no reference, but {counts[FREE]} count as free")


def check_queue(meta: Ints, counts: Counts) -> None:
    """Check that the free queue holds each block without a reference, once."""
    queue = len(meta) - 1
    seen = np.zeros(queue, dtype=np.int32)
    at = queue
    for _ in range(queue + 1):
        after = int(meta[at, NEXT])
        if meta[after, PREV] != at:
            raise IntegrityError(f"the free queue is torn between blocks {at} and {after}")
        if after == queue:
            break
        seen[after] += 1
        at = after
    _require("a block is free exactly when it is in the queue", _where(
        seen != (meta[:-1, REFS] == 0)
    ))  # fmt: skip
    if seen.sum() != counts[FREE]:
        raise IntegrityError(f"{seen.sum()} blocks queue, but {counts[FREE]} count as free")


def check_table(keys: BlockHashes, slots: Ints, counts: Counts) -> None:
    """Check that each cached hash leads to the block that is cached under it."""
    hashed = _where((keys != 0).any(axis=1))
    if len(hashed) != counts[CACHED]:
        raise IntegrityError(f"{len(hashed)} blocks have a hash, {counts[CACHED]} count as cached")
    filled = (slots >= 0).sum()
    if filled != counts[FILLED] or 2 * filled > len(slots):
        raise IntegrityError(
            f"{filled} of {len(slots)} slots are filled, {counts[FILLED]} count as such; "
            "at most half may be"
        )
    blocks = [find(keys, slots, high, low) for high, low in keys[hashed]]
    _require("a hash leads to its block", hashed[np.array(blocks, dtype=np.int32) != hashed])


def check_forest(meta: Ints, keys: BlockHashes) -> None:
    """Check that parents are cached, and outlive their children in the free queue."""
    cached = (keys != 0).any(axis=1)
    parent = meta[:-1, PARENT]
    child = _where(parent >= 0)
    _require("a block with a parent is cached", child[~cached[child]])
    _require("the parent of a cached block is cached", child[~cached[parent[child]]])
    _require("a block with a child is cached", _where((meta[:-1, CHILD] >= 0) & ~cached))
    children = [b for p in _where(meta[:-1, CHILD] >= 0) for b in _children(meta, int(p))]
    if sorted(children) != child.tolist():
        raise IntegrityError("lists of children and parents of blocks differ")
    rank = _rank(meta)
    both = child[(rank[child] >= 0) & (rank[parent[child]] >= 0)]
    _require("a block is handed out before its parent", both[rank[both] > rank[parent[both]]])


def _children(meta: Ints, parent: int) -> list[int]:
    children: list[int] = []
    at = int(meta[parent, CHILD])
    while at >= 0 and len(children) < len(meta):
        if meta[at, PARENT] != parent:
            raise IntegrityError(f"block {at} is a child of {parent}, and says otherwise")
        children.append(at)
        at = int(meta[at, YOUNGER])
    return children


def _rank(meta: Ints) -> Ints:
    queue = len(meta) - 1
    rank: Ints = np.full(queue, -1, dtype=np.int32)
    at = int(meta[queue, NEXT])
    position = 0
    while at != queue:
        rank[at] = position
        position += 1
        at = int(meta[at, NEXT])
    return rank


def check_tier(
    number: int,
    tier: Tier,
    incoming: Set[bytes],
    leaving: Set[bytes],
    staging: int,
    under: Collection[Move],
) -> None:
    """Check a tier, and the moves to it and from it.

    A tier's store holds the tier's blocks, and those that are still read there for the next tier:
    at most its cap and its staging.

    Args:
        tier: its blocks.
        incoming: keys that have not arrived.
        leaving: keys that the tier evicted, and that are still read; it may hold them again.

    Raises:
        IntegrityError: names the first law that does not hold.
    """
    tier.check()
    sent = [key for move in under if move.target == number for key in move.keys]
    ensure(len(sent) == len(set(sent)), f"tier {number} is sent a block twice")
    ensure(incoming == set(sent), f"tier {number} waits for what is not on its way")
    read = {key for move in under if move.source == number for key in move.keys}
    ensure(leaving <= read, f"tier {number} keeps what nobody reads any more")
    ensure(
        len(leaving) <= staging, f"tier {number} stages {len(leaving)} blocks, and may {staging}"
    )
