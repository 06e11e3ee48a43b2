"""Holder table: which workers hold which key in which tiers, and the length of their prefixes.

Keys stored in sequence take adjacent rows if free: a walk checks the next row first.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from pigou.compiled import DirectCalls, bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import (
    HALF,
    NONE,
    ONE,
    SPREAD,
    TABLE_SLOTS,
    Row,
    Slots,
    Words,
    erase,
    find,
    grow_slots,
    new_slots,
    probe,
    put,
)
from pigou.control.prefix_index.worker_entries import (
    CHANGED_KEY,
    CHANGED_MEDIA,
    HOST,
    STORAGE,
    TIERS,
    BlockChanges,
)
from pigou.request import BlockKeys, Counts

#: Fields of `TableArrays`: kernels are called with a plain tuple, which costs less to hand over.
TableTuple: TypeAlias = tuple[Words, Slots, Words, Counts]

#: Columns of a row's key, and of its first bits; a free row has its neighbours in the list there.
KEY, BITS, NEIGHBOURS = 0, 1, 1
#: Columns of duplicates.
DUP_KEY, DUP_HOLDER, DUP_COUNT = range(3)
DUP_WIDTH = 3
#: Entries of `totals`: rows and duplicates in use; the highest row ever used; what `prefetch`
#: returned last (so that its loads are not optimised away); and not 0 if anybody ever held a block
#: below the device.
ROWS, DUPLICATES, TOP, PREFETCHED, BELOW_DEVICE = range(5)
TOTALS = 5

#: The number of a worker of which nothing is known.
UNKNOWN_WORKER = -1
#: Rows of overlaps: blocks of the run by their best tier, and the whole run.
ON_DEVICE, ON_HOST, ON_STORAGE, RUN = range(4)
#: Planes of a walk: counts of blocks best held on the host and in storage, and who is still in.
HOST_PLANE, STORAGE_PLANE, ALIVE_PLANE = range(3)

_LOW = np.uint64(2**32 - 1)
_MIN_ROWS = 1024
_MIN_DUPLICATES = 64
#: Rows grow by this factor: the old ones are copied, and both are in memory meanwhile.
_GROWTH = 4


class TableArrays(NamedTuple):
    """Arrays of the holder table, as kernels read them."""

    # uint64, shape (rows + 1, 1 + tiers words). A row has a key (0 where it is free) and, for each
    # tier, one bit a worker, in words of 64, of which there are a power of two. There are three
    # tiers, or the device's alone until a block is held below it: most fleets have no other, and
    # memory for rows is what takes the time. Row 0 is the sentinel of the list of free rows, whose
    # neighbours are in column NEIGHBOURS: the next in its lower half, the one before in its upper.
    rows: Words
    slots: Slots  # from a key to its row (`pigou.control.prefix_index.hash_slots`)
    # uint64, shape (a power of two, 3): key, holder (3 worker + tier) and how often, beyond the
    # first time, this worker holds this key in this tier (0 where empty).
    duplicates: Words
    totals: Counts  # int64, shape (5,), by the names above


class HolderTable:
    """Maps keys to workers and tiers, one bit each; workers are numbered from 0."""

    def __init__(self) -> None:
        self.words = 1  # words per tier in each row
        self._totals: Counts = np.zeros(TOTALS, dtype=np.int64)
        self.arrays: TableTuple = (
            np.zeros((_MIN_ROWS + 1, self._columns(self.words)), dtype=np.uint64),
            new_slots(_MIN_ROWS, TABLE_SLOTS),
            np.zeros((_MIN_DUPLICATES, DUP_WIDTH), dtype=np.uint64),
            self._totals,
        )
        self._new_scratch()

    @property
    def keys(self) -> int:
        """Number of distinct keys."""
        return int(self._totals[ROWS])

    def admit(self, worker: int) -> None:
        """Grow the table for a worker's bits."""
        words = self.words
        while worker >= 64 * words:
            words *= 2
        if words != self.words:
            self._rebuild(len(TableArrays(*self.arrays).rows) - 1, words)
            self._new_scratch()

    def change(self, worker: int, changes: BlockChanges) -> None:
        """Add and drop a worker as holder of keys."""
        gained, lost = changes.gained, changes.lost
        self.reserve(len(gained), int(np.bitwise_or.reduce(gained[:, CHANGED_MEDIA])))
        _change_holders(self.arrays, worker, gained, lost)

    def overlaps(self, workers: Counts, keys: BlockKeys) -> Counts:
        """Return the blocks of a chain (blocks,) that workers hold, (4, workers), by `RUN` etc."""
        out = np.empty((4, len(workers)), dtype=np.int64)
        _calls.walk(self.arrays[0], self.arrays[1], keys, workers, self._planes, self._runs, out)
        return out

    def reserve(self, keys: int, media: int) -> None:
        """Reserve rows for new keys, each in all of these tiers (bits)."""
        self._totals[BELOW_DEVICE] |= media >> HOST
        used_rows, used_duplicates = self._totals.item(ROWS), self._totals.item(DUPLICATES)
        shape = TableArrays(*self.arrays).rows.shape
        size = shape[0] - 1
        while used_rows + keys > size:
            size *= _GROWTH
        if (size + 1, self._columns(self.words)) != shape:
            self._rebuild(size, self.words)
        # Each key may come with all its tiers, and each of these be a duplicate.
        rows, slots, duplicates, totals = self.arrays
        size = len(duplicates)
        if 2 * (used_duplicates + TIERS * keys) > size:
            while 2 * (used_duplicates + TIERS * keys) > size:
                size *= 2
            more = np.zeros((size, DUP_WIDTH), dtype=np.uint64)
            _rehash_duplicates(duplicates, more)
            self.arrays = rows, slots, more, totals

    def _columns(self, words: int) -> int:
        return BITS + words * (TIERS if self._totals.item(BELOW_DEVICE) else 1)

    def _rebuild(self, size: int, words: int) -> None:
        old, slots, duplicates, totals = self.arrays
        rows = np.zeros((size + 1, self._columns(words)), dtype=np.uint64)
        _widen(old, rows)
        self.words = words
        slots = grow_slots(slots, rows[:, KEY], size, TABLE_SLOTS, size)
        self.arrays = rows, slots, duplicates, totals

    def _new_scratch(self) -> None:
        self._planes: Words = np.zeros((3, 32, self.words), dtype=np.uint64)
        self._runs: Counts = np.zeros(64 * self.words, dtype=np.int64)


# --- rows -----------------------------------------------------------------------------------


@inlined
def _allocate_row(rows: Words, totals: Counts, previous: Row) -> Row:
    """Return a free row, after `previous` if possible."""
    totals[ROWS] += 1
    row, top = previous + ONE, np.uint64(totals[TOP])
    if row <= top and rows[row, KEY] != 0:
        row = top + ONE
    if row > top:
        head = rows[0, NEIGHBOURS] & _LOW
        if row < np.uint64(rows.shape[0]) and (previous == top or head == 0):
            totals[TOP] = row
            return row
        row = head
    before, after = rows[row, NEIGHBOURS] >> HALF, rows[row, NEIGHBOURS] & _LOW
    rows[before, NEIGHBOURS] = (rows[before, NEIGHBOURS] & ~_LOW) | after
    rows[after, NEIGHBOURS] = (rows[after, NEIGHBOURS] & _LOW) | (before << HALF)
    rows[row, NEIGHBOURS] = 0
    return row


@inlined
def _free_row(rows: Words, totals: Counts, row: Row) -> None:
    before = rows[0, NEIGHBOURS] >> HALF
    rows[row, KEY] = 0
    rows[row, NEIGHBOURS] = before << HALF
    rows[before, NEIGHBOURS] = (rows[before, NEIGHBOURS] & ~_LOW) | row
    rows[0, NEIGHBOURS] = (rows[0, NEIGHBOURS] & _LOW) | (row << HALF)
    totals[ROWS] -= 1


@inlined
def _row_of(rows: Words, slots: Slots, key: np.uint64, neighbour: Row) -> Row:
    """Return the row of a key, or 0; checks the rows beside `neighbour` first."""
    after, before = neighbour + ONE, neighbour - ONE
    if key == 0:
        return NONE
    if after < np.uint64(rows.shape[0]) and rows[after, KEY] == key:
        return after
    if neighbour > ONE and rows[before, KEY] == key:
        return before
    return find(rows[:, KEY], slots, key)


@inlined
def tiers_of(rows: Words) -> int:
    """Return how many tiers rows have bits for."""
    return TIERS if (rows.shape[1] - BITS) % TIERS == 0 else 1


@bare_kernel
def _widen(old: Words, rows: Words) -> None:
    """Copy rows into an array with more rows, words or tiers."""
    tiers = tiers_of(old)
    old_words, words = (old.shape[1] - BITS) // tiers, (rows.shape[1] - BITS) // tiers_of(rows)
    for i in range(old.shape[0]):
        if old[i, KEY] == 0:
            rows[i, NEIGHBOURS] = old[i, NEIGHBOURS]
            continue
        rows[i, KEY] = old[i, KEY]
        for tier in range(tiers):
            for w in range(old_words):
                rows[i, BITS + tier * words + w] = old[i, BITS + tier * old_words + w]


# --- duplicates -----------------------------------------------------------------------------


@inlined
def _first_slot(key: np.uint64, holder: np.uint64, mask: int) -> int:
    start: int = np.int64(((key ^ holder) * SPREAD) >> HALF) & mask  # type: ignore[assignment]
    return start


@inlined
def _find_duplicate(duplicates: Words, key: np.uint64, holder: np.uint64) -> int:
    """Return a duplicate's row, or the empty one for it."""
    mask = duplicates.shape[0] - 1
    i = _first_slot(key, holder, mask)
    while duplicates[i, DUP_COUNT] != 0 and (
        duplicates[i, DUP_KEY] != key or duplicates[i, DUP_HOLDER] != holder
    ):
        i = (i + 1) & mask
    return i


@inlined
def _copy_duplicate(old: Words, i: int, duplicates: Words, to: int) -> None:
    for column in range(DUP_WIDTH):
        duplicates[to, column] = old[i, column]


@bare_kernel
def _rehash_duplicates(old: Words, duplicates: Words) -> None:
    for i in range(old.shape[0]):
        if old[i, DUP_COUNT] != 0:
            row = _find_duplicate(duplicates, old[i, DUP_KEY], old[i, DUP_HOLDER])
            _copy_duplicate(old, i, duplicates, row)


@inlined
def _add_duplicate(duplicates: Words, totals: Counts, key: np.uint64, holder: np.uint64) -> None:
    row = _find_duplicate(duplicates, key, holder)
    if duplicates[row, DUP_COUNT] == 0:
        duplicates[row, DUP_KEY] = key
        duplicates[row, DUP_HOLDER] = holder
        totals[DUPLICATES] += 1
    duplicates[row, DUP_COUNT] += ONE


@inlined
def _drop_duplicate(duplicates: Words, totals: Counts, key: np.uint64, holder: np.uint64) -> bool:
    """Decrement a duplicate's count; return False if there is none."""
    mask = duplicates.shape[0] - 1
    gap = _find_duplicate(duplicates, key, holder)
    if duplicates[gap, DUP_COUNT] == 0:
        return False
    duplicates[gap, DUP_COUNT] -= ONE
    if duplicates[gap, DUP_COUNT] != 0:
        return True
    totals[DUPLICATES] -= 1
    i = gap
    while True:
        i = (i + 1) & mask
        if duplicates[i, DUP_COUNT] == 0:
            break
        start = _first_slot(duplicates[i, DUP_KEY], duplicates[i, DUP_HOLDER], mask)
        if ((i - start) & mask) >= ((i - gap) & mask):
            _copy_duplicate(duplicates, i, duplicates, gap)
            gap = i
    duplicates[gap, :] = 0
    return True


# --- holders --------------------------------------------------------------------------------


@inlined
def _bit_of(rows: Words, worker: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Return the column of a worker's bit in the first tier, the columns per tier, and the bit."""
    number = np.uint64(worker)
    words = np.uint64(rows.shape[1] - BITS) // np.uint64(tiers_of(rows))
    return ONE + number // np.uint64(64), words, ONE << (number % np.uint64(64))


@inlined
def add_holder(table: TableArrays, worker: int, key: np.uint64, media: int, previous: Row) -> Row:
    """Add a worker as holder of a key in tiers (bits); return the row, after `previous` if free."""
    rows, slots, duplicates, totals = table
    first, words, bit = _bit_of(rows, worker)
    row, slot = previous + ONE, NONE
    if row >= np.uint64(rows.shape[0]) or rows[row, KEY] != key:
        row, slot = probe(rows[:, KEY], slots, key)
    if row == 0:
        row = _allocate_row(rows, totals, previous)
        rows[row, KEY] = key
        put(slots, slot, key, row)
    for tier in range(TIERS):
        if (media >> tier) & 1 == 0:
            continue
        column = first + np.uint64(tier) * words
        if rows[row, column] & bit == 0:
            rows[row, column] |= bit
        else:
            _add_duplicate(duplicates, totals, key, np.uint64(TIERS * worker + tier))
    return row


@inlined
def drop_holder(table: TableArrays, worker: int, key: np.uint64, media: int, neighbour: Row) -> Row:
    """Drop a worker as holder of a key in tiers (bits); return the row, perhaps free now."""
    rows, slots, duplicates, totals = table
    first, words, bit = _bit_of(rows, worker)
    row = _row_of(rows, slots, key, neighbour)
    for tier in range(TIERS):
        if (media >> tier) & 1 == 0:
            continue
        holder = np.uint64(TIERS * worker + tier)
        if totals[DUPLICATES] == 0 or not _drop_duplicate(duplicates, totals, key, holder):
            rows[row, first + np.uint64(tier) * words] &= ~bit
    others = NONE
    for column in range(BITS, rows.shape[1]):
        others |= rows[row, column]
    if others == 0:
        erase(rows[:, KEY], slots, row)
        _free_row(rows, totals, row)
    return row


# --- changes --------------------------------------------------------------------------------


@bare_kernel
def _change_holders(arrays: TableTuple, worker: int, gained: Words, lost: Words) -> None:
    """Add a worker's gained keys, then drop its lost ones; shapes (any, 2)."""
    table = TableArrays(*arrays)
    row = NONE
    for i in range(gained.shape[0]):
        media: int = np.int64(gained[i, CHANGED_MEDIA])  # type: ignore[assignment]
        row = add_holder(table, worker, gained[i, CHANGED_KEY], media, row)
    row = NONE
    for i in range(lost.shape[0]):
        media = np.int64(lost[i, CHANGED_MEDIA])  # type: ignore[assignment]
        row = drop_holder(table, worker, lost[i, CHANGED_KEY], media, row)


# --- walks ----------------------------------------------------------------------------------


@inlined
def _count_workers(planes: Words, w: int, mask: np.uint64) -> None:
    """Add one to each worker of a mask; bit b of planes[j, w] is bit j of worker b's count."""
    carry, j = mask, 0
    while carry != 0:
        over = planes[j, w] & carry
        planes[j, w] ^= carry
        carry = over
        j += 1


@inlined
def _count_of(planes: Words, worker: int) -> int:
    count, bit = 0, np.uint64(worker % 64)
    for j in range(planes.shape[0]):
        count |= np.int64((planes[j, worker // 64] >> bit) & ONE) << j  # type: ignore[assignment]
    return count


@inlined
def _write_run(mask: np.uint64, w: int, length: int, runs: Counts) -> None:
    worker = 64 * w
    while mask != 0:
        if mask & ONE:
            runs[worker] = length
        mask >>= ONE
        worker += 1


@inlined
def _lower_holders(
    rows: Words, row: Row, w: int, words: int, mask: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Return the workers of a mask that hold a row at best in host memory, and in storage."""
    if rows.shape[1] == BITS + words:
        return NONE, NONE
    host = rows[row, BITS + HOST * words + w] & mask
    return host, rows[row, BITS + STORAGE * words + w] & mask & ~host


@bare_kernel
def _walk(
    rows: Words, slots: Slots, keys: BlockKeys, workers: Counts, planes: Words, runs: Counts,
    out: Counts,
) -> None:  # fmt: skip
    """Walk down a chain until no worker holds the next block."""
    words = planes.shape[2]
    depth, row, lower = 0, NONE, False
    alive = planes[ALIVE_PLANE, 0]
    for worker in workers:
        if worker != UNKNOWN_WORKER:
            alive[worker // 64] |= ONE << np.uint64(worker % 64)
    for i in range(keys.shape[0]):
        row = _row_of(rows, slots, keys[i], row)
        if row == 0:
            break
        any_alive = NONE
        for w in range(words):
            holders = alive[w]
            off_device = holders & ~rows[row, BITS + w]
            if off_device != 0:
                host, storage = _lower_holders(rows, row, w, words, off_device)
                ended = off_device & ~host & ~storage
                _write_run(ended, w, i, runs)
                _count_workers(planes[HOST_PLANE], w, host)
                _count_workers(planes[STORAGE_PLANE], w, storage)
                lower = lower or ended != off_device
                holders &= ~ended
                alive[w] = holders
            any_alive |= holders
        if any_alive == 0:
            break
        depth = i + 1
    for w in range(words):
        _write_run(alive[w], w, depth, runs)
    for k in range(workers.shape[0]):
        out[ON_DEVICE, k] = out[RUN, k] = runs[workers[k]] if workers[k] != UNKNOWN_WORKER else 0
        out[ON_HOST, k] = 0
        out[ON_STORAGE, k] = 0
    alive[:] = 0
    if lower:
        for k in range(workers.shape[0]):
            if workers[k] == UNKNOWN_WORKER:
                continue
            out[ON_HOST, k] = _count_of(planes[HOST_PLANE], workers[k])
            out[ON_STORAGE, k] = _count_of(planes[STORAGE_PLANE], workers[k])
            out[ON_DEVICE, k] -= out[ON_HOST, k] + out[ON_STORAGE, k]
        planes[:] = 0


_calls = DirectCalls(
    walk=(_walk, "void(u8[:, ::1], u4[::1], u8[::1], i8[::1], u8[:, :, ::1], i8[::1], i8[:, ::1])")
)
