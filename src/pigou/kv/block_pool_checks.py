"""Integrity of a pool of blocks: references, queues, hash table and forest."""

from __future__ import annotations

import numpy as np

from pigou.kv.block import IntegrityError
from pigou.kv.block_pool import (
    CACHED,
    CHILD,
    FILLED,
    FREE,
    HELD,
    IDLE,
    NEXT,
    OWNER,
    PARENT,
    PREV,
    REFS,
    YOUNGER,
    BlockPool,
    find,
)
from pigou.request import BlockHashes, Counts, Ints


def check_pool(pool: BlockPool, references: Ints) -> None:
    """Raise an IntegrityError on a violated invariant; `references` per block, (blocks,)."""
    _check_references(pool.meta, pool.counts, references)
    _check_queues(pool.meta, pool.counts, pool.blocks)
    _check_table(pool.keys, pool.slots, pool.counts)
    _check_forest(pool.meta, pool.keys)


def _require(law: str, wrong: Ints) -> None:
    if len(wrong):
        shown = ", ".join(map(str, wrong[:8].tolist()))
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise IntegrityError(f"{law}: not so for blocks {shown}{more}")


def _where(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Ints:
    return np.flatnonzero(mask).astype(np.int32)


def _check_references(meta: Ints, counts: Counts, references: Ints) -> None:
    refs = meta[: len(references), REFS]
    _require("references are those of rows, holds, loads and copies", _where(refs != references))
    free = int((refs == 0).sum())
    if free != counts[FREE]:
        raise IntegrityError(f"{free} blocks have no reference, but {counts[FREE]} count as free")


def _check_queues(meta: Ints, counts: Counts, blocks: int) -> None:
    main, idle = len(meta) - 1, meta[:blocks, REFS] == 0
    owner, seen = meta[:blocks, OWNER], np.zeros(blocks, dtype=np.int32)
    for queue in [*range(meta[main, OWNER], main), main]:
        at, count = queue, -1
        while count < blocks:
            count += 1
            after = int(meta[at, NEXT])
            if meta[after, PREV] != at:
                raise IntegrityError(f"the free queue is torn between blocks {at} and {after}")
            if after == queue:
                break
            seen[after] += 1
            at = after
            _require("an idle block queues at its account", _where(owner[[at]] != queue))
        if queue != main:
            held = int((owner == queue).sum())
            if (held, count) != (meta[queue, HELD], meta[queue, IDLE]):
                raise IntegrityError(f"account {queue} holds {held}, {count} of them idle")
    _require("a block is free exactly when it is in the queue", _where(seen != idle))
    if seen.sum() != counts[FREE]:
        raise IntegrityError(f"{seen.sum()} blocks queue, but {counts[FREE]} count as free")


def _check_table(keys: BlockHashes, slots: Ints, counts: Counts) -> None:
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


def _check_forest(meta: Ints, keys: BlockHashes) -> None:
    """Check that parents are cached and come after their children in the free queue."""
    cached = (keys != 0).any(axis=1)
    parent = meta[: len(keys), PARENT]
    child = _where(parent >= 0)
    _require("a block with a parent is cached", child[~cached[child]])
    _require("the parent of a cached block is cached", child[~cached[parent[child]]])
    _require("a block with a child is cached", _where((meta[: len(keys), CHILD] >= 0) & ~cached))
    children = [b for p in _where(meta[: len(keys), CHILD] >= 0) for b in _children(meta, int(p))]
    if sorted(children) != child.tolist():
        raise IntegrityError("lists of children and parents of blocks differ")
    rank, owner = _rank(meta, len(keys)), meta[:, OWNER]
    both = child[(rank[child] >= 0) & (rank[parent[child]] >= 0)]
    both = both[owner[both] == owner[parent[both]]]
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


def _rank(meta: Ints, blocks: int) -> Ints:
    """Return each free block's place in its queue, -1 for those in use."""
    main, rank = len(meta) - 1, np.full(blocks, -1, dtype=np.int32)
    for queue in [*range(meta[main, OWNER], main), main]:
        at, position = int(meta[queue, NEXT]), 0
        while at != queue:
            rank[at] = position
            position += 1
            at = int(meta[at, NEXT])
    return rank
