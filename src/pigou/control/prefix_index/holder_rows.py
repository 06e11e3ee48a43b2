"""Rows of the holder table: which workers hold a key, in which tiers; compiled kernels.

Keys that are stored one after the other are in rows that follow one another, as far as these are
free: a walk down a chain looks at the next row first. `TableArrays` has the arrays.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import (
    NONE,
    ONE,
    Counts,
    Row,
    Words,
    erase,
    find,
    probe,
    put,
    tag_of,
)

#: Fields of `TableArrays`: kernels are called with a plain tuple, which costs less to hand over.
TableTuple: TypeAlias = tuple[Words, Words, Words, Counts]

#: Tiers, the nearest first.
DEVICE, HOST, STORAGE = range(3)
TIERS = 3
DEVICE_BIT = 1 << DEVICE
#: Column of a row's key; first column of its bits; columns of a free row's neighbours in the list.
KEY, BITS, NEXT, PREV = 0, 1, 1, 2
#: Columns of duplicates.
DUP_KEY, DUP_HOLDER, DUP_COUNT = range(3)
DUP_WIDTH = 3
#: Entries of `totals`: rows and duplicates in use; the highest row ever used; what `prefetch`
#: returned last (so that its loads are not optimised away); and not 0 if anybody ever held a block
#: below the device.
ROWS, DUPLICATES, TOP, PREFETCHED, BELOW_DEVICE = range(5)
TOTALS = 5


class TableArrays(NamedTuple):
    """Arrays of the holder table, as kernels see them."""

    # uint64, shape (rows + 1, 1 + tiers words). A row has a key (0 where it is free) and, for each
    # tier, one bit a worker, in words of 64, of which there are a power of two. There are three
    # tiers, or, with two words or more, the device's alone: most fleets have no other, and memory
    # for rows is what takes the time. Row 0 is the sentinel of the list of free rows, whose
    # neighbours are in columns NEXT and PREV.
    rows: Words
    slots: Words  # from a key to its row (`pigou.control.prefix_index.hash_slots`)
    # uint64, shape (a power of two, 3): key, holder (3 worker + tier) and how often, beyond the
    # first time, this worker holds this key in this tier (0 where empty).
    duplicates: Words
    totals: Counts  # int64, shape (5,), by the names above


# --- rows -----------------------------------------------------------------------------------


@inlined
def allocate_row(rows: Words, totals: Counts, previous: Row) -> Row:
    """Return a free row: the one right after `previous` where that is possible."""
    totals[ROWS] += 1
    row, top = previous + ONE, np.uint64(totals[TOP])
    if row <= top and rows[row, KEY] != 0:
        row = top + ONE
    if row > top:
        head = rows[0, NEXT]
        if row < np.uint64(rows.shape[0]) and (previous == top or head == 0):
            totals[TOP] = row
            return row
        row = head
    before, after = rows[row, PREV], rows[row, NEXT]
    rows[before, NEXT] = after
    rows[after, PREV] = before
    rows[row, NEXT] = 0
    rows[row, PREV] = 0
    return row


@inlined
def free_row(rows: Words, totals: Counts, row: Row) -> None:
    """Free a row whose bits are all 0; it goes to the end of the list."""
    before = rows[0, PREV]
    rows[row, KEY] = 0
    rows[row, PREV] = before
    rows[before, NEXT] = row
    rows[0, PREV] = row
    totals[ROWS] -= 1


@inlined
def row_of(rows: Words, slots: Words, key: np.uint64, neighbour: Row) -> Row:
    """Return the row of a key, or 0; the ones beside `neighbour` are looked at first."""
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
    """How many tiers rows have bits for."""
    return TIERS if (rows.shape[1] - BITS) % TIERS == 0 else 1


@bare_kernel
def widen(old: Words, rows: Words) -> None:
    """Copy all rows into new ones, which may be more, or have more words or tiers."""
    tiers = tiers_of(old)
    old_words, words = (old.shape[1] - BITS) // tiers, (rows.shape[1] - BITS) // tiers_of(rows)
    for i in range(old.shape[0]):
        if old[i, KEY] == 0:
            rows[i, NEXT] = old[i, NEXT]
            rows[i, PREV] = old[i, PREV]
            continue
        rows[i, KEY] = old[i, KEY]
        for tier in range(tiers):
            for w in range(old_words):
                rows[i, BITS + tier * words + w] = old[i, BITS + tier * old_words + w]


# --- duplicates -----------------------------------------------------------------------------


@inlined
def first_slot(key: np.uint64, holder: np.uint64, mask: int) -> int:
    """Where the search for a duplicate begins."""
    start: int = np.int64(tag_of(key ^ holder)) & mask  # type: ignore[assignment]
    return start


@inlined
def find_duplicate(duplicates: Words, key: np.uint64, holder: np.uint64) -> int:
    """Return the row of a duplicate, or the empty one where it would go."""
    mask = duplicates.shape[0] - 1
    i = first_slot(key, holder, mask)
    while duplicates[i, DUP_COUNT] != 0 and (
        duplicates[i, DUP_KEY] != key or duplicates[i, DUP_HOLDER] != holder
    ):
        i = (i + 1) & mask
    return i


@inlined
def copy_duplicate(old: Words, i: int, duplicates: Words, to: int) -> None:
    """Copy a row of duplicates."""
    for column in range(DUP_WIDTH):
        duplicates[to, column] = old[i, column]


@bare_kernel
def rehash_duplicates(old: Words, duplicates: Words) -> None:
    """Copy all duplicates into a new, empty array."""
    for i in range(old.shape[0]):
        if old[i, DUP_COUNT] != 0:
            row = find_duplicate(duplicates, old[i, DUP_KEY], old[i, DUP_HOLDER])
            copy_duplicate(old, i, duplicates, row)


@inlined
def add_duplicate(duplicates: Words, totals: Counts, key: np.uint64, holder: np.uint64) -> None:
    """Add one to a duplicate's count."""
    row = find_duplicate(duplicates, key, holder)
    if duplicates[row, DUP_COUNT] == 0:
        duplicates[row, DUP_KEY] = key
        duplicates[row, DUP_HOLDER] = holder
        totals[DUPLICATES] += 1
    duplicates[row, DUP_COUNT] += ONE


@inlined
def drop_duplicate(duplicates: Words, totals: Counts, key: np.uint64, holder: np.uint64) -> bool:
    """Take one off a duplicate's count; return whether there was one."""
    mask = duplicates.shape[0] - 1
    gap = find_duplicate(duplicates, key, holder)
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
        start = first_slot(duplicates[i, DUP_KEY], duplicates[i, DUP_HOLDER], mask)
        if ((i - start) & mask) >= ((i - gap) & mask):
            copy_duplicate(duplicates, i, duplicates, gap)
            gap = i
    duplicates[gap, :] = 0
    return True


# --- holders --------------------------------------------------------------------------------


@inlined
def bit_of(rows: Words, worker: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Return the column of a worker's bit in the first tier, the columns of a tier, the bit."""
    number = np.uint64(worker)
    words = np.uint64(rows.shape[1] - BITS) // np.uint64(tiers_of(rows))
    return ONE + number // np.uint64(64), words, ONE << (number % np.uint64(64))


@inlined
def add_holder(table: TableArrays, worker: int, key: np.uint64, media: int, previous: Row) -> Row:
    """Add that a worker holds a key (once more) in tiers (bits), which rows have; return its row.

    `previous` is the row of the key before it in its chain, or 0.
    """
    rows, slots, duplicates, totals = table
    first, words, bit = bit_of(rows, worker)
    row, slot = previous + ONE, NONE
    if row >= np.uint64(rows.shape[0]) or rows[row, KEY] != key:
        row, slot = probe(rows[:, KEY], slots, key)
    if row == 0:
        row = allocate_row(rows, totals, previous)
        rows[row, KEY] = key
        put(slots, slot, key, row)
    for tier in range(TIERS):
        if (media >> tier) & 1 == 0:
            continue
        column = first + np.uint64(tier) * words
        if rows[row, column] & bit == 0:
            rows[row, column] |= bit
        else:
            add_duplicate(duplicates, totals, key, np.uint64(TIERS * worker + tier))
    return row


@inlined
def drop_holder(table: TableArrays, worker: int, key: np.uint64, media: int, neighbour: Row) -> Row:
    """Drop that a worker holds a key, which it held (once less), in tiers (bits); return its row.

    `neighbour` is a row that is likely beside the key's, or 0. The row may be free afterwards.
    """
    rows, slots, duplicates, totals = table
    first, words, bit = bit_of(rows, worker)
    row = row_of(rows, slots, key, neighbour)
    for tier in range(TIERS):
        if (media >> tier) & 1 == 0:
            continue
        holder = np.uint64(TIERS * worker + tier)
        if totals[DUPLICATES] == 0 or not drop_duplicate(duplicates, totals, key, holder):
            rows[row, first + np.uint64(tier) * words] &= ~bit
    others = NONE
    for column in range(BITS, rows.shape[1]):
        others |= rows[row, column]
    if others == 0:
        erase(slots, key, row)
        free_row(rows, totals, row)
    return row
