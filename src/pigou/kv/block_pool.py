"""Pool of device blocks and prefix cache index.

Arrays of a pool of n blocks: `meta`, int32, columns below: n rows of blocks, those of tenants'
accounts, and the sentinel of the free queue; `keys`, uint64 (2 n, 2), hashes of cached blocks, else
(0, 0), then the hashes removed by a kernel; `slots`, int32, an open addressing hash table with
linear probing from hash to block, at most half full; `counts`, int64.

With quotas (`set_accounts`) a block belongs to the account of who first wrote it, and idle cached
blocks queue at their account. Blocks without a hash are handed out first, then those of the account
that is most above its ceiling, then the least recently used of accounts above their floors, then
the requester's own. A block that another account's idle block extends is handed over to it.
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.request import BlockHashes, Counts, Ints

#: Columns of `meta`: reference count; neighbours in the free queue; parent, first child and
#: siblings in the forest of cached blocks.
#: Then the row of its account, or of the free queue's sentinel; and, with quotas, when a block
#: became idle.
REFS, PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER, OWNER, STAMP = range(9)
META_COLUMNS = 8
#: Columns of an account's row: blocks held; sentinel of its queue (`PREV`, `NEXT`); idle blocks;
#: floor and ceiling in blocks; and those of `peek`: next block, and blocks left. The sentinel of
#: the free queue has the first account's row as `OWNER`, and the clock of stamps as `STAMP`.
HELD, IDLE, FLOOR, CEILING, CURSOR, LEFT = REFS, PARENT, CHILD, ELDER, 9, 10
ACCOUNT_COLUMNS = 12
#: Columns of a hash: its upper and lower 64 bits.
HIGH, LOW = range(2)
#: Entries of `counts`: free blocks, cached blocks, filled slots, and the last `prefetch` result
#: (keeps its loads from being optimised away).
FREE, CACHED, FILLED, PREFETCHED = range(4)


#: Age of blocks that go before all others of their account.
_OLD = 1 << 30
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


# --- accounts of tenants ------------------------------------------------------------------------


@inlined
def charge(meta: Ints, block: int, own: int) -> None:
    """Give a block in use, which has no account, to one; the sentinel's row stands for none."""
    if own != meta.shape[0] - 1:
        meta[block, OWNER] = own
        meta[own, HELD] += 1


@inlined
def discharge(meta: Ints, block: int, idle: int) -> None:
    """Take a block from its account, where it counts as `idle` (0 or 1)."""
    owner, queue = meta[block, OWNER], meta.shape[0] - 1
    if owner != queue:
        meta[owner, HELD] -= 1
        meta[owner, IDLE] -= idle
        meta[block, OWNER] = queue


@inlined
def tick(meta: Ints) -> None:
    """Advance the clock of stamps, which wraps around."""
    if meta.shape[1] > STAMP:
        meta[meta.shape[0] - 1, STAMP] += 1


@inlined
def surrender(meta: Ints, block: int) -> None:
    """Move an account's idle block, which lost its hash, to the front of the free queue."""
    queue = meta.shape[0] - 1
    if meta[block, REFS] == 0 and meta[block, OWNER] != queue:
        unlink(meta, block)
        discharge(meta, block, 1)
        link_after(meta, queue, block)


@inlined
def rest(meta: Ints, block: int, age: int) -> None:
    """Queue an idle cached block: last, or first with an age."""
    owner, queue = meta[block, OWNER], meta.shape[0] - 1
    link_after(meta, owner if age > 0 else meta[owner, PREV], block)
    if owner != queue:
        meta[owner, IDLE] += 1
        meta[block, STAMP] = meta[queue, STAMP] - age


@bare_kernel
def protected(meta: Ints, own: int) -> int:
    """Return how many idle blocks the floors of others keep from an account."""
    queue, blocks = meta.shape[0] - 1, 0
    for account in range(meta[queue, OWNER], queue):
        if account != own:
            above = max(meta[account, HELD] - meta[account, FLOOR], 0)
            blocks += max(meta[account, IDLE] - above, 0)
    return blocks


@inlined
def heir_of(meta: Ints, block: int) -> int:
    """Return the youngest idle child of an idle block that is another account's, or -1."""
    heir, child = -1, meta[block, CHILD]
    while child >= 0:
        idle = meta[child, REFS] == 0 and meta[child, OWNER] != meta[block, OWNER]
        if idle and (heir < 0 or meta[child, STAMP] - meta[heir, STAMP] > 0):
            heir = child
        child = meta[child, YOUNGER]
    return heir


@inlined
def victim_queue(meta: Ints, own: int, head: int, held: int) -> int:
    """Return the account whose first block goes next for one of `own`; -1 for nobody's.

    Blocks within others' floors go last: callers ask `protected` before. The columns `head` and
    `held` are `NEXT` and `HELD`, or `CURSOR` and `LEFT` for `peek`.
    """
    queue = meta.shape[0] - 1
    while True:
        best, excess, oldest = -1, 0, -1
        last, age_of_last = own, -1  # below its floor: where nobody else is left
        for account in range(meta[queue, OWNER], queue):
            first = meta[account, head]
            if first == account:
                continue
            over = meta[account, held] - meta[account, CEILING]
            age = meta[queue, STAMP] - meta[first, STAMP]
            is_above = meta[account, held] > meta[account, FLOOR]
            if over > excess or (excess == 0 and is_above and age > oldest):
                best, excess, oldest = account, max(over, 0), age
            if age > age_of_last:
                last, age_of_last = account, age
        if best < 0:
            if own == queue:
                return -1
            best = own if meta[own, head] != own else last
        block = meta[best, head]
        heir = heir_of(meta, block)
        if heir < 0:
            return best
        if meta[best, CURSOR] == block:
            meta[best, CURSOR] = meta[block, NEXT]
        unlink(meta, block)
        to = meta[heir, OWNER]
        for column in (HELD, LEFT, IDLE):
            meta[best, column] -= 1
            meta[to, column] += 1
        meta[block, OWNER] = to
        meta[block, STAMP] = meta[heir, STAMP]
        link_after(meta, heir, block)


@bare_kernel
def peek(meta: Ints, count: int, out: Ints) -> int:
    """Write the next `count` free blocks that anybody may take to `out`; return their number."""
    queue = meta.shape[0] - 1
    block = meta[queue, NEXT]
    for i in range(count):
        if block == queue:
            break
        out[i] = block
        block = meta[block, NEXT]
    else:
        return count
    for account in range(meta[queue, OWNER], queue):
        meta[account, CURSOR] = meta[account, NEXT]
        meta[account, LEFT] = meta[account, HELD]
    while i < count:
        account = victim_queue(meta, queue, CURSOR, LEFT)
        if account < 0:
            break
        out[i] = meta[account, CURSOR]
        meta[account, CURSOR] = meta[out[i], NEXT]
        meta[account, LEFT] -= 1
        i += 1
    return i


@inlined
def uncache(meta: Ints, keys: BlockHashes, counts: Counts, block: int, done: int) -> int:
    """Remove a cached block after its descendants; append their hashes to the `done` removed."""
    at, blocks = block, keys.shape[0] // 2
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
        surrender(meta, at)
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
            if meta[block, OWNER] != meta.shape[0] - 1:
                meta[meta[block, OWNER], IDLE] -= 1
        meta[block, REFS] += 1
        out[i] = block


@bare_kernel
def allocate(
    meta: Ints, keys: BlockHashes, counts: Counts, out: Ints, own: int, done: int
) -> int:  # fmt: skip
    """Fill `out` with blocks for an account; return the number of removed hashes, as `claim`."""
    queue = meta.shape[0] - 1
    for i in range(out.shape[0]):
        at = queue
        if meta[queue, NEXT] == queue:
            at = victim_queue(meta, own, NEXT, HELD)
        block = meta[at, NEXT]
        out[i] = block
        after = meta[block, NEXT]
        meta[at, NEXT] = after
        meta[after, PREV] = at
        discharge(meta, block, 1)
        if is_cached(keys, block):
            done = uncache(meta, keys, counts, block, done)
        meta[block, REFS] = 1
        meta[block, PREV] = -1
        meta[block, NEXT] = -1
        charge(meta, block, own)
    counts[FREE] -= out.shape[0]
    return done


@bare_kernel
def claim(meta: Ints, keys: BlockHashes, counts: Counts, blocks: Ints, done: int) -> int:
    """Allocate these free blocks; return the number of removed hashes, `done` earlier ones too."""
    for i in range(blocks.shape[0]):
        block = blocks[i]
        unlink(meta, block)
        discharge(meta, block, 1)
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
    tick(meta)
    for i in range(stop - 1, -1, -1):
        if i >= start:
            block = table[i]
            meta[block, REFS] -= 1
            if meta[block, REFS] == 0:
                freed += 1
                if is_cached(keys, block):
                    rest(meta, block, 0)
                else:
                    discharge(meta, block, 0)
                    link_after(meta, queue, block)
        elif not duplicates:
            break
        if duplicates and i < hashes.shape[0]:
            other = find(keys, slots, hashes[i, HIGH], hashes[i, LOW])
            if other >= 0 and other != table[i] and meta[other, REFS] == 0:
                unlink(meta, other)
                if meta[other, OWNER] != queue:
                    meta[meta[other, OWNER], IDLE] -= 1
                rest(meta, other, 0)
    counts[FREE] += freed
    return freed


@bare_kernel
def release_chain(meta: Ints, counts: Counts, table: Ints) -> int:
    """Drop references to the cached blocks of a chain; see `BlockPool.release_chain`."""
    freed = 0
    tick(meta)
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
            rest(meta, block, 0)
    for i in range(first, table.shape[0]):  # so that the last one is the first
        meta[table[i], REFS] = 0
        freed += 1
        rest(meta, table[i], _OLD)
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
def forget_tree(meta: Ints, keys: BlockHashes, counts: Counts, root: int) -> int:
    """Remove hashes as `forget` does, of a block and its descendants; idle ones go first."""
    queue, at = meta.shape[0] - 1, root
    while True:
        if meta[at, REFS] == 0:
            unlink(meta, at)
            discharge(meta, at, 1)
            link_after(meta, queue, at)
        after = meta[at, CHILD]
        while after < 0 and at != root:
            after = meta[at, YOUNGER]
            if after < 0:
                at = meta[at, PARENT]
        if after < 0:
            return uncache(meta, keys, counts, root, 0)
        at = after


@bare_kernel
def clear(meta: Ints, keys: BlockHashes, slots: Ints, counts: Counts) -> None:
    """Remove all hashes; the free queue keeps its order, and takes the blocks of accounts."""
    slots[:] = -1
    keys[:] = 0
    for block in range(keys.shape[0] // 2):
        for column in range(PARENT, OWNER):
            meta[block, column] = -1
        surrender(meta, block)
    counts[CACHED] = 0
    counts[FILLED] = 0


def _ring(meta: Ints, rows: Ints) -> None:
    """Link rows to a queue, in order."""
    meta[rows, PREV] = np.roll(rows, 1)
    meta[rows, NEXT] = np.roll(rows, -1)


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
        _ring(self.meta, ids)
        self.meta[:, OWNER] = blocks
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

    @property
    def nobody(self) -> int:
        """Account of nobody: the free queue's own row."""
        return len(self.meta) - 1

    @property
    def has_accounts(self) -> bool:
        """True once tenants have accounts."""
        return len(self.meta) > self.blocks + 1

    def open_accounts(self, limit: int) -> None:
        """Let blocks belong to up to `limit` accounts; those cached or in use, to the first."""
        old, meta = self.meta, np.full((self.blocks + limit + 1, ACCOUNT_COLUMNS), -1, np.int32)
        order, main = self.peek(self.free), len(meta) - 1
        meta[: self.blocks, :OWNER] = old[: self.blocks, :OWNER]
        meta[: self.blocks, STAMP] = meta[main, STAMP] = 0
        meta[main, REFS], meta[:, OWNER] = 0, main
        self.meta, cached = meta, (self.keys != 0).any(axis=1)
        first = self.add_account(0, self.blocks)
        meta[: self.blocks, OWNER] = np.where(cached | (old[:-1, REFS] > 0), first, main)
        for queue, rows in ((first, order[cached[order]]), (main, order[~cached[order]])):
            _ring(meta, np.array([queue, *rows], dtype=np.int32))
        meta[first, HELD] = (meta[: self.blocks, OWNER] == first).sum()
        meta[first, IDLE] = cached[order].sum()

    def add_account(self, floor: int, ceiling: int) -> int:
        """Return a new account's row; below `floor` blocks its cache is kept from others."""
        row = int(self.meta[-1, OWNER]) - 1
        assert row >= self.blocks, "more accounts than were opened"
        self.meta[row, [HELD, IDLE]] = 0
        self.meta[row, [PREV, NEXT]] = row
        self.meta[-1, OWNER] = row
        self.set_quota(row, floor, ceiling)
        return row

    def set_quota(self, account: int, floor: int, ceiling: int) -> None:
        """Set an account's floor and ceiling, in blocks."""
        self.meta[account, [FLOOR, CEILING]] = floor, ceiling

    def available(self, account: int) -> int:
        """Return how many blocks an account may allocate."""
        return self.free - (protected(self.meta, account) if self.has_accounts else 0)

    def allocate(self, out: Ints, account: int | None = None) -> BlockHashes:
        """Fill `out` with blocks for an account; return removed hashes, shape (m, 2)."""
        own = self.nobody - self.has_accounts if account is None else account
        assert len(out) <= self.counts[FREE], "more blocks than are free"
        return self.take_removed(allocate(self.meta, self.hashes, self.counts, out, own, 0))

    def peek(self, count: int) -> Ints:
        """Return the next `count` blocks that `allocate` would take; those that anybody may."""
        assert count <= self.counts[FREE], "more blocks than are free"
        out = np.empty(count, dtype=np.int32)
        return out[: peek(self.meta, count, out)]

    def claim(self, blocks: Ints) -> BlockHashes:
        """Allocate these free blocks; return removed hashes, shape (m, 2)."""
        return self.take_removed(claim(self.meta, self.hashes, self.counts, blocks, 0))

    def forget(self, table: Ints, start: int, stop: int) -> BlockHashes:
        """Remove the hashes of `table[start:stop]`; return all removed hashes, shape (m, 2)."""
        return self.take_removed(forget(self.meta, self.hashes, self.counts, table, start, stop))

    def forget_tree(self, root: int) -> BlockHashes:
        """Uncache a block and its descendants, hand idle ones out first; return removed hashes."""
        return self.take_removed(forget_tree(self.meta, self.hashes, self.counts, root))

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
