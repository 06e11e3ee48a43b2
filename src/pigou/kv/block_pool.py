"""Pool of device blocks and prefix cache index, and the pool of host blocks for swapped sequences.

Arrays of a pool of n blocks: `meta`, int32 (n + 1, 8), columns below, row n the free queue's
sentinel; `keys`, uint64 (2 n, 2), hashes of cached blocks, else (0, 0), then the hashes removed by
a kernel; `slots`, int32, an open addressing hash table with linear probing from hash to block, at
most half full; `counts`, int64.
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.kv.block import IntegrityError
from pigou.request import BlockHashes, Counts, Ints

#: Columns of `meta`: reference count; neighbours in the free queue; parent, first child and
#: siblings in the forest of cached blocks.
REFS, PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER = range(7)
META_COLUMNS = 8
#: Columns of a hash: its upper and lower 64 bits.
HIGH, LOW = range(2)
#: Entries of `counts`: free blocks, cached blocks, filled slots, and the last `prefetch` result
#: (keeps its loads from being optimised away).
FREE, CACHED, FILLED, PREFETCHED = range(4)


_MIX_1 = np.uint64(0x9E3779B97F4A7C15)
_MIX_2 = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)
#: Minimum of slots per block, so that most probes end at the first slot.
_SLOTS_PER_BLOCK = 4


@inlined
def is_cached(keys: BlockHashes, block: int) -> bool:
    """True if a block has a hash."""
    return bool(keys[block, HIGH] != 0 or keys[block, LOW] != 0)


# --- the hash table -------------------------------------------------------------------------


@inlined
def home(high: np.uint64, low: np.uint64, mask: int) -> np.int64:
    """Return the slot where probing for a hash begins."""
    x = (high ^ (low * _MIX_1)) * _MIX_2
    x ^= x >> _SHIFT
    return np.int64(x & np.uint64(mask))


@inlined
def probe(keys: BlockHashes, slots: Ints, high: np.uint64, low: np.uint64) -> tuple[int, np.int64]:
    """Return the block cached under a hash, or -1, and the slot where probing ended."""
    mask = slots.shape[0] - 1
    i = home(high, low, mask)
    while True:
        block: int = slots[i]
        if block < 0 or (keys[block, HIGH] == high and keys[block, LOW] == low):
            return block, i
        i = (i + 1) & mask


@inlined
def find(keys: BlockHashes, slots: Ints, high: np.uint64, low: np.uint64) -> int:
    """Return the block cached under a hash, or -1; the hash (0, 0) is never cached."""
    if high == 0 and low == 0:
        return -1
    block, _ = probe(keys, slots, high, low)
    return block


@inlined
def prefetch(
    keys: BlockHashes, slots: Ints, hashes: BlockHashes, start: int, stop: int
) -> np.int64:
    """Prefetch the first slots and keys for `hashes[start:stop]`; return part of them."""
    mask, seen = slots.shape[0] - 1, np.uint64(0)
    for i in range(start, stop):
        block = slots[home(hashes[i, HIGH], hashes[i, LOW], mask)]
        seen |= keys[max(block, 0), HIGH]
    return np.int64(seen)


@inlined
def rebuild(keys: BlockHashes, slots: Ints) -> int:
    """Rebuild the table from the cached blocks; return their number."""
    mask, filled = slots.shape[0] - 1, 0
    slots[:] = -1
    for block in range(keys.shape[0] // 2):
        if is_cached(keys, block):
            i = home(keys[block, HIGH], keys[block, LOW], mask)
            while slots[i] >= 0:
                i = (i + 1) & mask
            slots[i] = block
            filled += 1
    return filled


@inlined
def unlink(meta: Ints, block: int) -> None:
    """Remove a block from the free queue."""
    before, after = meta[block, PREV], meta[block, NEXT]
    meta[before, NEXT] = after
    meta[after, PREV] = before
    meta[block, PREV] = -1
    meta[block, NEXT] = -1


@inlined
def link_after(meta: Ints, before: int, block: int) -> None:
    """Insert a block into the free queue after `before`."""
    after = meta[before, NEXT]
    meta[block, PREV] = before
    meta[block, NEXT] = after
    meta[before, NEXT] = block
    meta[after, PREV] = block


@bare_kernel
def peek(meta: Ints, count: int, out: Ints) -> None:
    """Write the next `count` blocks of the free queue to `out`, in order."""
    block = meta.shape[0] - 1
    for i in range(count):
        block = meta[block, NEXT]
        out[i] = block


# --- the forest of cached blocks ------------------------------------------------------------


@inlined
def adopt(meta: Ints, parent: int, block: int) -> None:
    """Make a block a child of `parent`, or a root for -1."""
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
    """Unlink a leaf from its parent and siblings."""
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
def uncache(meta: Ints, keys: BlockHashes, counts: Counts, block: int, done: int) -> int:
    """Remove a cached block after its descendants; append their hashes to the `done` removed."""
    at, blocks = block, meta.shape[0] - 1
    while True:
        while meta[at, CHILD] >= 0:
            at = meta[at, CHILD]
        parent = meta[at, PARENT]
        keys[blocks + done, HIGH] = keys[at, HIGH]
        keys[blocks + done, LOW] = keys[at, LOW]
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
    """Write the longest cached prefix of `hashes[:limit]` to `out`; return length and idle."""
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
    """Add a reference to cached blocks and write their ids to `out`."""
    for i in range(blocks.shape[0]):
        block = blocks[i]
        if meta[block, REFS] == 0:
            unlink(meta, block)
            counts[FREE] -= 1
        meta[block, REFS] += 1
        out[i] = block


@bare_kernel
def allocate(meta: Ints, keys: BlockHashes, counts: Counts, out: Ints) -> int:
    """Fill `out` with blocks from the free queue; return the number of removed hashes."""
    done, queue = 0, meta.shape[0] - 1
    block = meta[queue, NEXT]
    for i in range(out.shape[0]):
        out[i] = block
        after = meta[block, NEXT]
        if is_cached(keys, block):
            done = uncache(meta, keys, counts, block, done)
        meta[block, REFS] = 1
        meta[block, PREV] = -1
        meta[block, NEXT] = -1
        block = after
    meta[queue, NEXT] = block
    meta[block, PREV] = queue
    counts[FREE] -= out.shape[0]
    return done


@bare_kernel
def claim(meta: Ints, keys: BlockHashes, counts: Counts, blocks: Ints, done: int) -> int:
    """Allocate these free blocks; return the number of removed hashes, `done` earlier ones too."""
    for i in range(blocks.shape[0]):
        block = blocks[i]
        unlink(meta, block)
        if is_cached(keys, block):
            done = uncache(meta, keys, counts, block, done)
        meta[block, REFS] = 1
    counts[FREE] -= blocks.shape[0]
    return done


@bare_kernel
def cache_full_blocks(
    meta: Ints, keys: BlockHashes, slots: Ints, counts: Counts, table: Ints, hashes: BlockHashes,
    start: int, stop: int,
) -> tuple[int, int, bool]:  # fmt: skip
    """Cache the blocks `table[start:stop]` under `hashes[start:stop]`.

    Hashes already cached elsewhere keep their block. Returns the index of the first newly cached
    block, the number of new ones, and whether any hash is cached under another block.
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
    """Drop references to `table[start:stop]`, last first; return the number of blocks freed."""
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
    """Drop references to the cached blocks of a chain; see `BlockPool.release_chain`."""
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
    meta: Ints, keys: BlockHashes, counts: Counts, table: Ints, start: int, stop: int
) -> int:
    """Remove the hashes of `table[start:stop]` and their descendants; return their number."""
    done = 0
    for i in range(start, stop):
        block = table[i]
        if is_cached(keys, block):
            done = uncache(meta, keys, counts, block, done)
    return done


@bare_kernel
def clear(meta: Ints, keys: BlockHashes, slots: Ints, counts: Counts) -> None:
    """Remove all hashes; the free queue keeps its order."""
    slots[:] = -1
    keys[:] = 0
    meta[:, PARENT:] = -1
    counts[CACHED] = 0
    counts[FILLED] = 0


def _require(law: str, wrong: Ints) -> None:
    if len(wrong):
        shown = ", ".join(map(str, wrong[:8].tolist()))
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise IntegrityError(f"{law}: not so for blocks {shown}{more}")


def _where(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Ints:
    return np.flatnonzero(mask).astype(np.int32)


def _check_references(meta: Ints, counts: Counts, references: Ints) -> None:
    refs = meta[:-1, REFS]
    _require("references are those of rows, holds, loads and copies", _where(refs != references))
    free = int((refs == 0).sum())
    if free != counts[FREE]:
        raise IntegrityError(f"{free} blocks have no reference, but {counts[FREE]} count as free")


def _check_queue(meta: Ints, counts: Counts) -> None:
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


class BlockPool:
    """Reference-counted blocks with a prefix cache.

    Free blocks stay cached until reallocated, and are evicted leaf first in LRU order.

    Example:
        pool = BlockPool(8)
        table = np.empty(3, dtype=np.int32)
        pool.allocate(table)  # one reference to each of three blocks
        assert pool.free == 5
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.meta: Ints = np.full((blocks + 1, META_COLUMNS), -1, dtype=np.int32)
        self.meta[:, REFS] = 0
        ids = np.arange(blocks + 1, dtype=np.int32)
        self.meta[:, PREV] = np.roll(ids, 1)
        self.meta[:, NEXT] = np.roll(ids, -1)
        #: `keys` of the kernels.
        self.hashes: BlockHashes = np.zeros((2 * blocks, 2), dtype=np.uint64)
        self.keys, self.removed = self.hashes[:blocks], self.hashes[blocks:]
        size = 1 << (_SLOTS_PER_BLOCK * blocks - 1).bit_length()
        self.slots: Ints = np.full(size, -1, dtype=np.int32)
        self.counts = np.array([blocks, 0, 0, 0], dtype=np.int64)

    @property
    def free(self) -> int:
        """Blocks without references."""
        return self.counts.item(FREE)

    @property
    def cached(self) -> int:
        """Blocks in the prefix cache, free or in use."""
        return self.counts.item(CACHED)

    def refs(self, blocks: Ints) -> Ints:
        """Return the reference counts of `blocks`, shape (n,)."""
        counts: Ints = self.meta[blocks, REFS]
        return counts

    def allocate(self, out: Ints) -> BlockHashes:
        """Fill `out` with the next free blocks; return removed hashes, shape (m, 2)."""
        assert len(out) <= self.counts[FREE], "more blocks than are free"
        return self.take_removed(allocate(self.meta, self.hashes, self.counts, out))

    def peek(self, count: int) -> Ints:
        """Return the next `count` blocks that `allocate` would take."""
        assert count <= self.counts[FREE], "more blocks than are free"
        out = np.empty(count, dtype=np.int32)
        peek(self.meta, count, out)
        return out

    def claim(self, blocks: Ints) -> BlockHashes:
        """Allocate these free blocks; return removed hashes, shape (m, 2)."""
        return self.take_removed(claim(self.meta, self.hashes, self.counts, blocks, 0))

    def forget(self, table: Ints, start: int, stop: int) -> BlockHashes:
        """Remove the hashes of `table[start:stop]`; return all removed hashes, shape (m, 2)."""
        return self.take_removed(forget(self.meta, self.hashes, self.counts, table, start, stop))

    def take_removed(self, count: int) -> BlockHashes:
        """Return the first `count` hashes that a kernel removed, shape (count, 2)."""
        return self.removed[:count].copy() if count else self.removed[:0]

    def take(self, blocks: Ints, out: Ints) -> None:
        """Add a reference to cached `blocks` and write their ids to `out`, both shape (n,)."""
        take(self.meta, self.counts, blocks, out)

    def release(
        self, table: Ints, start: int, stop: int, hashes: BlockHashes, duplicates: bool = False
    ) -> int:
        """Drop references to `table[start:stop]`, last first; return the number of blocks freed.

        `hashes` has the sequence's known hashes, shape (known, 2). Set `duplicates` if one of its
        hashes is cached under another block.
        """
        return release(
            self.meta, self.hashes, self.slots, self.counts, table, start, stop, hashes, duplicates
        )

    def release_chain(self, table: Ints) -> int:
        """Drop references to a chain; its unshared tail goes first in the free queue."""
        return release_chain(self.meta, self.counts, table)

    def check(self, references: Ints) -> None:
        """Raise an IntegrityError on a violated invariant; `references` per block, (blocks,)."""
        _check_references(self.meta, self.counts, references)
        _check_queue(self.meta, self.counts)
        _check_table(self.keys, self.slots, self.counts)
        _check_forest(self.meta, self.keys)


class HostPool:
    """Blocks of host memory, each free or owned by one preempted sequence."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._stack: Ints = np.arange(blocks - 1, -1, -1, dtype=np.int32)
        self.free = blocks

    def allocate(self, count: int) -> Ints:
        """Take `count` blocks, at most `free`; return their ids, shape (count,)."""
        assert count <= self.free, "more host blocks than are free"
        taken = self._stack[self.free - count : self.free][::-1].copy()
        self.free -= count
        return taken

    def release(self, blocks: Ints) -> None:
        """Return blocks to the pool, shape (n,)."""
        self._stack[self.free : self.free + len(blocks)] = blocks[::-1]
        self.free += len(blocks)

    def check(self, owned: Ints) -> None:
        """Raise an IntegrityError unless each block is either free or `owned`, shape (n,)."""
        times = np.bincount(self._stack[: self.free], minlength=self.blocks)
        times += np.bincount(owned, minlength=self.blocks)
        if len(times) != self.blocks or (times != 1).any():
            wrong = np.flatnonzero(times != 1)[:8].tolist()
            raise IntegrityError(f"free and swapped host blocks are not all, once: {wrong}")
