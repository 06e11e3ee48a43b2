"""Compiled kernels over ranges of blocks. `pigou.kv.pool` wraps them; beside it only
`pigou.engine.step_kernels` calls them.

State of a pool of n blocks, all arrays:
    meta: int32, shape (n + 1, 8); the columns below. Row n is the sentinel of the free queue.
    keys: uint64, shape (n, 2); the hash under which a block is cached, (0, 0) when it is not.
    slots: int32, a power of two of at least 4 n; open addressing with linear probing from a
        hash to the block that is cached under it, or was; -1 where empty. At most half are filled.
    counts: int64, shape (4,); free blocks, cached blocks, filled slots, and what `touch` returned
        last (so that its loads are not optimised away).

The free queue is a doubly linked list in the order in which blocks are handed out. Cached
blocks form a forest: a block's parent is the block cached under the hash before its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.kv.table_kernels import find, probe, renew, touch
from pigou.request import BlockHashes, Ints

#: Columns of `meta`: reference count; neighbours in the free queue; parent, first child and
#: siblings in the forest of cached blocks.
REFS, PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER = range(7)
WIDTH = 8
#: Entries of `counts`.
FREE, CACHED, FILLED, SEEN = range(4)

Counts = NDArray[np.int64]


# --- the free queue: who is handed out next -------------------------------------------------


@inlined
def unlink(meta: Ints, block: int) -> None:
    """Take a block out of the free queue."""
    before, after = meta[block, PREV], meta[block, NEXT]
    meta[before, NEXT] = after
    meta[after, PREV] = before
    meta[block, PREV] = -1
    meta[block, NEXT] = -1


@inlined
def link_after(meta: Ints, before: int, block: int) -> None:
    """Put a block into the free queue, right after `before`."""
    after = meta[before, NEXT]
    meta[block, PREV] = before
    meta[block, NEXT] = after
    meta[before, NEXT] = block
    meta[after, PREV] = block


@bare_kernel
def peek(meta: Ints, count: int, out: Ints) -> None:
    """Read which `count` blocks will be handed out next, in order."""
    block = meta.shape[0] - 1
    for i in range(count):
        block = meta[block, NEXT]
        out[i] = block


# --- the forest of cached blocks ------------------------------------------------------------


@inlined
def adopt(meta: Ints, parent: int, block: int) -> None:
    """Make a block the child of `parent`; -1 for a root."""
    meta[block, PARENT] = parent
    meta[block, ELDER] = -1
    meta[block, YOUNGER] = -1
    if parent >= 0:
        child = meta[parent, CHILD]
        meta[block, YOUNGER] = child
        if child >= 0:
            meta[child, ELDER] = block
        meta[parent, CHILD] = block


@inlined
def disown(meta: Ints, block: int) -> None:
    """Cut a block without children from its parent and siblings."""
    elder, younger, parent = meta[block, ELDER], meta[block, YOUNGER], meta[block, PARENT]
    if elder >= 0:
        meta[elder, YOUNGER] = younger
    elif parent >= 0:
        meta[parent, CHILD] = younger
    if younger >= 0:
        meta[younger, ELDER] = elder
    meta[block, PARENT] = -1
    meta[block, ELDER] = -1
    meta[block, YOUNGER] = -1


@inlined
def uncache(
    meta: Ints, keys: BlockHashes, counts: Counts, block: int, removed: BlockHashes, done: int
) -> int:
    """Forget a cached block, its descendants first; append their hashes to `removed`."""
    at = block
    while True:
        while meta[at, CHILD] >= 0:
            at = meta[at, CHILD]
        parent = meta[at, PARENT]
        removed[done, 0] = keys[at, 0]
        removed[done, 1] = keys[at, 1]
        done += 1
        disown(meta, at)
        keys[at, 0] = 0
        keys[at, 1] = 0
        counts[CACHED] -= 1
        if at == block:
            return done
        at = parent


@bare_kernel
def gapless(hashes: BlockHashes, limit: int) -> int:
    """Count the hashes of `hashes[:limit]` before the first that is (0, 0)."""
    for i in range(limit):
        if hashes[i, 0] == 0 and hashes[i, 1] == 0:
            return i
    return limit


# --- ranges ---------------------------------------------------------------------------------


@bare_kernel
def match(
    meta: Ints, keys: BlockHashes, slots: Ints, hashes: BlockHashes, limit: int, out: Ints
) -> tuple[int, int]:
    """Find the longest cached prefix of `hashes[:limit]`; write its blocks to `out`.

    Returns:
        Blocks found, and how many of them nobody refers to at present (they count as free).
    """
    idle = 0
    for i in range(limit):
        block = find(keys, slots, hashes[i, 0], hashes[i, 1])
        if block < 0:
            return i, idle
        out[i] = block
        if meta[block, REFS] == 0:
            idle += 1
    return limit, idle


@bare_kernel
def take(meta: Ints, counts: Counts, blocks: Ints, out: Ints) -> None:
    """Refer to cached blocks once more, and write them to `out`."""
    for i in range(blocks.shape[0]):
        block = blocks[i]
        if meta[block, REFS] == 0:
            unlink(meta, block)
            counts[FREE] -= 1
        meta[block, REFS] += 1
        out[i] = block


@bare_kernel
def allocate(meta: Ints, keys: BlockHashes, counts: Counts, out: Ints, removed: BlockHashes) -> int:
    """Fill `out` with the first blocks of the free queue; return how many hashes died."""
    done, queue = 0, meta.shape[0] - 1
    block = meta[queue, NEXT]
    for i in range(out.shape[0]):
        out[i] = block
        after = meta[block, NEXT]
        if keys[block, 0] != 0 or keys[block, 1] != 0:
            done = uncache(meta, keys, counts, block, removed, done)
        meta[block, REFS] = 1
        meta[block, PREV] = -1
        meta[block, NEXT] = -1
        block = after
    meta[queue, NEXT] = block
    meta[block, PREV] = queue
    counts[FREE] -= out.shape[0]
    return done


@bare_kernel
def claim(meta: Ints, keys: BlockHashes, counts: Counts, blocks: Ints, removed: BlockHashes) -> int:
    """Take these free blocks, as `allocate` takes the first; return how many hashes died."""
    done = 0
    for i in range(blocks.shape[0]):
        block = blocks[i]
        unlink(meta, block)
        if keys[block, 0] != 0 or keys[block, 1] != 0:
            done = uncache(meta, keys, counts, block, removed, done)
        meta[block, REFS] = 1
    counts[FREE] -= blocks.shape[0]
    return done


@bare_kernel
def seal(
    meta: Ints,
    keys: BlockHashes,
    slots: Ints,
    counts: Counts,
    table: Ints,
    hashes: BlockHashes,
    start: int,
    stop: int,
) -> tuple[int, int, bool]:
    """Cache the blocks `table[start:stop]` under `hashes[start:stop]`.

    A hash that another block is cached under already stays with that block. As a cached block's
    parent is always cached, such hashes come first, and the new ones after them. A block whose
    parent is not cached is left out, and so are those after it.

    Returns:
        Index of the first block that was cached, how many were, and whether a block of the
        range has its hash cached elsewhere (it is a duplicate, and stays private).
    """
    parent = -1
    if start > 0:
        parent = find(keys, slots, hashes[start - 1, 0], hashes[start - 1, 1])
        if parent < 0:
            return start, 0, False
    twins = False
    if 2 * (counts[FILLED] + stop - start) > slots.shape[0]:
        counts[FILLED] = renew(keys, slots)
    counts[SEEN] = touch(keys, slots, hashes, start, stop)
    i = start
    while i < stop:
        block = find(keys, slots, hashes[i, 0], hashes[i, 1])
        if block < 0:
            break
        if block != table[i]:
            twins = True
        parent = block
        i += 1
    first = i
    while i < stop:
        high, low = hashes[i, 0], hashes[i, 1]
        if high == 0 and low == 0:
            break
        other, place = probe(keys, slots, high, low)
        if other >= 0:
            break
        block = table[i]
        keys[block, 0] = high
        keys[block, 1] = low
        slots[place] = block
        adopt(meta, parent, block)
        parent = block
        i += 1
    counts[CACHED] += i - first
    counts[FILLED] += i - first
    return first, i - first, twins


@bare_kernel
def release(
    meta: Ints,
    keys: BlockHashes,
    slots: Ints,
    counts: Counts,
    table: Ints,
    start: int,
    stop: int,
    hashes: BlockHashes,
    twins: bool,
) -> int:
    """Refer no longer to `table[start:stop]`, last block first; return how many became free.

    Free blocks that are cached join the end of the queue, so that tails are handed out before
    the prefixes that they stand on; blocks that nobody could hit go to its front. Where the
    range has duplicates (`twins`), the blocks cached under their hashes count as just used, too.
    """
    freed = 0
    queue = meta.shape[0] - 1
    for i in range(stop - 1, -1, -1):
        if i >= start:
            block = table[i]
            meta[block, REFS] -= 1
            if meta[block, REFS] == 0:
                freed += 1
                if keys[block, 0] != 0 or keys[block, 1] != 0:
                    link_after(meta, meta[queue, PREV], block)
                else:
                    link_after(meta, queue, block)
        elif not twins:
            break
        if twins and i < hashes.shape[0]:
            other = find(keys, slots, hashes[i, 0], hashes[i, 1])
            if other >= 0 and other != table[i] and meta[other, REFS] == 0:
                unlink(meta, other)
                link_after(meta, meta[queue, PREV], other)
    counts[FREE] += freed
    return freed


@bare_kernel
def forget(
    meta: Ints,
    keys: BlockHashes,
    counts: Counts,
    table: Ints,
    start: int,
    stop: int,
    removed: BlockHashes,
) -> int:
    """Forget the hashes of `table[start:stop]` and what stands on them; return how many died."""
    done = 0
    for i in range(start, stop):
        block = table[i]
        if keys[block, 0] != 0 or keys[block, 1] != 0:
            done = uncache(meta, keys, counts, block, removed, done)
    return done


@bare_kernel
def clear(meta: Ints, keys: BlockHashes, slots: Ints, counts: Counts) -> None:
    """Forget all hashes. The free queue keeps its order."""
    slots[:] = -1
    keys[:] = 0
    meta[:, PARENT] = -1
    meta[:, CHILD] = -1
    meta[:, ELDER] = -1
    meta[:, YOUNGER] = -1
    counts[CACHED] = 0
    counts[FILLED] = 0
