"""Compiled kernels of the block pool: its free queue, hash table and forest of cached blocks.

State of a pool of n blocks, all arrays:
    meta: int32, shape (n + 1, 8); the columns below. Row n is the sentinel of the free queue.
    keys: uint64, shape (n, 2); the hash under which a block is cached, (0, 0) when it is not.
    slots: int32, a power of two of at least 4 n; open addressing with linear probing from a
        hash to its block; -1 where empty. A block that is cached no longer keeps its slot until
        the table is rebuilt. At most half are filled.
    counts: int64, shape (4,); the entries below.
The free queue is a doubly linked list in the order in which blocks are handed out. Cached blocks
form a forest: a block's parent is the block cached under the hash before its own.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.request import BlockHashes, Ints

#: Columns of `meta`: reference count; neighbours in the free queue; parent, first child and
#: siblings in the forest of cached blocks.
REFS, PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER = range(7)
META_COLUMNS = 8
#: Columns of a hash: its upper and lower 64 bits.
HIGH, LOW = range(2)
#: Entries of `counts`: free blocks, cached blocks, filled slots, and what `prefetch` returned last
#: (so that its loads are not optimised away).
FREE, CACHED, FILLED, PREFETCHED = range(4)

Counts = NDArray[np.int64]
#: `meta`, `keys`, `slots`, `counts`, and `removed` (blocks, 2): hashes that kernels removed.
PoolArrays: TypeAlias = tuple[Ints, BlockHashes, Ints, Counts, BlockHashes]

_MIX_1 = np.uint64(0x9E3779B97F4A7C15)
_MIX_2 = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


@inlined
def is_cached(keys: BlockHashes, block: int) -> bool:
    """Whether a block can be found by its hash."""
    return bool(keys[block, HIGH] != 0 or keys[block, LOW] != 0)


# --- the hash table -------------------------------------------------------------------------


@inlined
def home(high: np.uint64, low: np.uint64, mask: int) -> np.int64:
    """Slot where the search for a hash begins."""
    x = (high ^ (low * _MIX_1)) * _MIX_2
    x ^= x >> _SHIFT
    return np.int64(x & np.uint64(mask))


@inlined
def probe(keys: BlockHashes, slots: Ints, high: np.uint64, low: np.uint64) -> tuple[int, np.int64]:
    """Block that is cached under a hash, or -1; and the slot where the search ended."""
    mask = slots.shape[0] - 1
    i = home(high, low, mask)
    while True:
        block: int = slots[i]
        if block < 0 or (keys[block, HIGH] == high and keys[block, LOW] == low):
            return block, i
        i = (i + 1) & mask


@inlined
def find(keys: BlockHashes, slots: Ints, high: np.uint64, low: np.uint64) -> int:
    """Block that is cached under a hash, or -1; the hash (0, 0) is nobody's."""
    if high == 0 and low == 0:
        return -1
    block, _ = probe(keys, slots, high, low)
    return block


@inlined
def prefetch(
    keys: BlockHashes, slots: Ints, hashes: BlockHashes, start: int, stop: int
) -> np.int64:
    """Load what searches for `hashes[start:stop]` look at first; return something of it.

    These loads run at once. Those of searches wait for one another, as branches depend on them.
    """
    mask, seen = slots.shape[0] - 1, np.uint64(0)
    for i in range(start, stop):
        block = slots[home(hashes[i, HIGH], hashes[i, LOW], mask)]
        seen |= keys[max(block, 0), HIGH]
    return np.int64(seen)


@inlined
def rebuild(keys: BlockHashes, slots: Ints) -> int:
    """Make the table anew, of the cached blocks alone; return how many there are."""
    mask, filled = slots.shape[0] - 1, 0
    slots[:] = -1
    for block in range(keys.shape[0]):
        if is_cached(keys, block):
            i = home(keys[block, HIGH], keys[block, LOW], mask)
            while slots[i] >= 0:
                i = (i + 1) & mask
            slots[i] = block
            filled += 1
    return filled


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
        removed[done, HIGH] = keys[at, HIGH]
        removed[done, LOW] = keys[at, LOW]
        done += 1
        disown(meta, at)
        keys[at, HIGH] = 0
        keys[at, LOW] = 0
        counts[CACHED] -= 1
        if at == block:
            return done
        at = parent


@bare_kernel
def match(
    meta: Ints, keys: BlockHashes, slots: Ints, hashes: BlockHashes, limit: int, out: Ints
) -> tuple[int, int]:
    """Find the longest cached prefix of `hashes[:limit]`; write its blocks to `out`.

    Returns:
        Blocks of the prefix, and how many of them have no reference (they count as free).
    """
    idle = 0
    for i in range(limit):
        block = find(keys, slots, hashes[i, HIGH], hashes[i, LOW])
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
    """Fill `out` with the first blocks of the free queue; return how many hashes were removed."""
    done, queue = 0, meta.shape[0] - 1
    block = meta[queue, NEXT]
    for i in range(out.shape[0]):
        out[i] = block
        after = meta[block, NEXT]
        if is_cached(keys, block):
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
    """Take these free blocks, as `allocate` does; return how many hashes were removed."""
    done = 0
    for i in range(blocks.shape[0]):
        block = blocks[i]
        unlink(meta, block)
        if is_cached(keys, block):
            done = uncache(meta, keys, counts, block, removed, done)
        meta[block, REFS] = 1
    counts[FREE] -= blocks.shape[0]
    return done


@bare_kernel
def cache_full_blocks(
    meta: Ints, keys: BlockHashes, slots: Ints, counts: Counts, table: Ints, hashes: BlockHashes,
    start: int, stop: int,
) -> tuple[int, int, bool]:  # fmt: skip
    """Cache the blocks `table[start:stop]` under `hashes[start:stop]`.

    A hash of another block stays with that block; such hashes come first, as parents are cached.
    A block without a cached parent ends the range.

    Returns:
        Index of the first block that was cached, how many were, and whether a block of the
        range is a duplicate: its hash is cached elsewhere, and it stays private.
    """
    parent = -1
    if start > 0:
        parent = find(keys, slots, hashes[start - 1, HIGH], hashes[start - 1, LOW])
        if parent < 0:
            return start, 0, False
    duplicates = False
    if 2 * (counts[FILLED] + stop - start) > slots.shape[0]:
        counts[FILLED] = rebuild(keys, slots)
    counts[PREFETCHED] = prefetch(keys, slots, hashes, start, stop)
    i = start
    while i < stop:
        block = find(keys, slots, hashes[i, HIGH], hashes[i, LOW])
        if block < 0:
            break
        if block != table[i]:
            duplicates = True
        parent = block
        i += 1
    first = i
    while i < stop:
        high, low = hashes[i, HIGH], hashes[i, LOW]
        if high == 0 and low == 0:
            break
        other, slot = probe(keys, slots, high, low)
        if other >= 0:
            break
        block = table[i]
        keys[block, HIGH] = high
        keys[block, LOW] = low
        slots[slot] = block
        adopt(meta, parent, block)
        parent = block
        i += 1
    counts[CACHED] += i - first
    counts[FILLED] += i - first
    return first, i - first, duplicates


@bare_kernel
def release(
    meta: Ints, keys: BlockHashes, slots: Ints, counts: Counts, table: Ints, start: int, stop: int,
    hashes: BlockHashes, duplicates: bool,
) -> int:  # fmt: skip
    """Refer no longer to `table[start:stop]`, last block first; return how many became free.

    Free blocks that are cached join the end of the queue, tails before their prefixes. Others go to
    its front. Where the range has `duplicates`, the blocks cached under its hashes are renewed too.
    """
    freed = 0
    queue = meta.shape[0] - 1
    for i in range(stop - 1, -1, -1):
        if i >= start:
            block = table[i]
            meta[block, REFS] -= 1
            if meta[block, REFS] == 0:
                freed += 1
                if is_cached(keys, block):
                    link_after(meta, meta[queue, PREV], block)
                else:
                    link_after(meta, queue, block)
        elif not duplicates:
            break
        if duplicates and i < hashes.shape[0]:
            other = find(keys, slots, hashes[i, HIGH], hashes[i, LOW])
            if other >= 0 and other != table[i] and meta[other, REFS] == 0:
                unlink(meta, other)
                link_after(meta, meta[queue, PREV], other)
    counts[FREE] += freed
    return freed


@bare_kernel
def release_chain(meta: Ints, counts: Counts, table: Ints) -> int:
    """Refer no longer to the cached blocks of a chain; return how many became free.

    Its tail is handed out next: blocks without other references, on which nothing is cached but the
    chain itself. What is before them joins the end of the queue.
    """
    freed = 0
    queue = meta.shape[0] - 1
    first = table.shape[0]
    while first > 0:
        block = table[first - 1]
        child = meta[block, CHILD]
        is_last_child = child < 0
        if first < table.shape[0] and child == table[first]:
            is_last_child = meta[child, ELDER] < 0 and meta[child, YOUNGER] < 0
        if meta[block, REFS] != 1 or not is_last_child:
            break
        first -= 1
    for i in range(first - 1, -1, -1):
        block = table[i]
        meta[block, REFS] -= 1
        if meta[block, REFS] == 0:
            freed += 1
            link_after(meta, meta[queue, PREV], block)
    for i in range(first, table.shape[0]):  # so that the last one is the first
        meta[table[i], REFS] = 0
        freed += 1
        link_after(meta, queue, table[i])
    counts[FREE] += freed
    return freed


@bare_kernel
def forget(
    meta: Ints, keys: BlockHashes, counts: Counts, table: Ints, start: int, stop: int,
    removed: BlockHashes,
) -> int:  # fmt: skip
    """Forget the hashes of `table[start:stop]` and their descendants; return how many."""
    done = 0
    for i in range(start, stop):
        block = table[i]
        if is_cached(keys, block):
            done = uncache(meta, keys, counts, block, removed, done)
    return done


@bare_kernel
def clear(meta: Ints, keys: BlockHashes, slots: Ints, counts: Counts) -> None:
    """Forget all hashes. The free queue keeps its order."""
    slots[:] = -1
    keys[:] = 0
    meta[:, PARENT:] = -1
    counts[CACHED] = 0
    counts[FILLED] = 0
