"""Compiled kernels of the index's table: who holds a key. `table` wraps them.

rows: uint64, shape (rows + 1, 1 + tiers words). A row has a key (0 where it is free) and, for
    each tier, one bit a worker, in words of 64, of which there are a power of two. There are
    three tiers, or, with two words or more, the device's alone: most fleets have no other, and
    rows are what all else waits for. Row 0 is the sentinel of the list of free rows, whose
    neighbours are in columns 1 and 2. Keys that are stored one after the other are in rows that
    follow one another, as far as these are free: who walks down a chain looks at the next row
    first.
slots: from a key to its row (`pigou.control.prefix_index.slots`).
twins: uint64, shape (a power of two, 3): key, place (3 worker + tier) and how often, beyond
    the first time, this worker holds this key in this tier (count 0 where empty).
totals: int64, shape (5,); rows and twins in use, the highest row ever used, whatever
    `slots.touch` returned last (so that the loads are not optimised away), and whether somebody
    was ever said to hold something below the device (then not 0).
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.slots import (
    NONE,
    ONE,
    Counts,
    Row,
    Words,
    find,
    probe,
    put,
    strike,
    tag_of,
)
from pigou.request import BlockKeys

#: Tiers, the nearest first.
DEVICE, HOST, STORAGE = range(3)
TIERS = 3
#: Columns of free `rows`.
NEXT, PREV = 1, 2
#: Stands for workers of which nothing is known, where others have their numbers.
NOBODY = -1
#: Entries of `totals`.
ROWS, TWINS, TOP, SEEN, LOWER = range(5)


# --- rows -----------------------------------------------------------------------------------


@inlined
def take_row(rows: Words, totals: Counts, after: Row) -> Row:
    """Return a free row: the one right behind `after` where that is possible."""
    totals[ROWS] += 1
    row, top = after + ONE, np.uint64(totals[TOP])
    if row <= top and rows[row, 0] != 0:
        row = top + ONE
    if row > top:
        head = rows[0, NEXT]
        if row < np.uint64(rows.shape[0]) and (after == top or head == 0):
            totals[TOP] = row
            return row
        row = head
    before, behind = rows[row, PREV], rows[row, NEXT]
    rows[before, NEXT] = behind
    rows[behind, PREV] = before
    rows[row, NEXT] = 0
    rows[row, PREV] = 0
    return row


@inlined
def give_row(rows: Words, totals: Counts, row: Row) -> None:
    """Free a row whose bits are all 0; it goes to the end of the list."""
    before = rows[0, PREV]
    rows[row, 0] = 0
    rows[row, PREV] = before
    rows[before, NEXT] = row
    rows[0, PREV] = row
    totals[ROWS] -= 1


@inlined
def row_of(rows: Words, slots: Words, key: np.uint64, after: Row) -> Row:
    """Row of a key, or 0; the ones beside `after` are looked at first."""
    behind, before = after + ONE, after - ONE
    if key == 0:
        return NONE
    if behind < np.uint64(rows.shape[0]) and rows[behind, 0] == key:
        return behind
    if after > ONE and rows[before, 0] == key:
        return before
    return find(rows[:, 0], slots, key)


@inlined
def tiers_of(rows: Words) -> int:
    """How many tiers rows have bits for."""
    return TIERS if (rows.shape[1] - 1) % TIERS == 0 else 1


@bare_kernel
def widen(old: Words, rows: Words) -> None:
    """Copy all rows into new ones, which may be more, or have more words or tiers."""
    tiers = tiers_of(old)
    old_words, words = (old.shape[1] - 1) // tiers, (rows.shape[1] - 1) // tiers_of(rows)
    for i in range(old.shape[0]):
        if old[i, 0] == 0:
            rows[i, NEXT] = old[i, NEXT]
            rows[i, PREV] = old[i, PREV]
            continue
        rows[i, 0] = old[i, 0]
        for tier in range(tiers):
            for w in range(old_words):
                rows[i, 1 + tier * words + w] = old[i, 1 + tier * old_words + w]


# --- twins ----------------------------------------------------------------------------------


@inlined
def home(key: np.uint64, place: np.uint64, mask: int) -> int:
    """Where the search for a twin begins."""
    start: int = np.int64(tag_of(key ^ place)) & mask  # type: ignore[assignment]
    return start


@inlined
def find_twin(twins: Words, key: np.uint64, place: np.uint64) -> int:
    """Row of a twin, or the empty one where it would go."""
    mask = twins.shape[0] - 1
    i = home(key, place, mask)
    while twins[i, 2] != 0 and (twins[i, 0] != key or twins[i, 1] != place):
        i = (i + 1) & mask
    return i


@inlined
def copy_twin(old: Words, i: int, twins: Words, to: int) -> None:
    """Copy a row of twins."""
    for column in range(3):
        twins[to, column] = old[i, column]


@bare_kernel
def rehash_twins(old: Words, twins: Words) -> None:
    """Copy all twins into a new, empty table."""
    for i in range(old.shape[0]):
        if old[i, 2] != 0:
            copy_twin(old, i, twins, find_twin(twins, old[i, 0], old[i, 1]))


@inlined
def drop_twin(twins: Words, totals: Counts, key: np.uint64, place: np.uint64) -> bool:
    """Take one off a twin's count; return whether there was one."""
    mask = twins.shape[0] - 1
    gap = find_twin(twins, key, place)
    if twins[gap, 2] == 0:
        return False
    twins[gap, 2] -= ONE
    if twins[gap, 2] != 0:
        return True
    totals[TWINS] -= 1
    i = gap
    while True:
        i = (i + 1) & mask
        if twins[i, 2] == 0:
            break
        if ((i - home(twins[i, 0], twins[i, 1], mask)) & mask) >= ((i - gap) & mask):
            copy_twin(twins, i, twins, gap)
            gap = i
    twins[gap, :] = 0
    return True


# --- who holds what -------------------------------------------------------------------------


@inlined
def add_twin(twins: Words, totals: Counts, key: np.uint64, place: np.uint64) -> None:
    """Add one to a twin's count."""
    at = find_twin(twins, key, place)
    if twins[at, 2] == 0:
        twins[at, 0] = key
        twins[at, 1] = place
        totals[TWINS] += 1
    twins[at, 2] += ONE


@inlined
def place_of(rows: Words, worker: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Column of a worker's bit for the first tier, columns from a tier to the next; its bit."""
    number = np.uint64(worker)
    words = np.uint64(rows.shape[1] - 1) // np.uint64(tiers_of(rows))
    return ONE + number // np.uint64(64), words, ONE << (number % np.uint64(64))


@inlined
def hold(
    rows: Words,
    slots: Words,
    twins: Words,
    totals: Counts,
    worker: int,
    key: np.uint64,
    media: int,
    after: Row,
) -> Row:
    """Note that a worker holds a key (once more) in tiers (bits), which rows have; return its row.

    `after` is the row of the key before it in its chain, or 0.
    """
    word, words, bit = place_of(rows, worker)
    row, place = after + ONE, NONE
    if row >= np.uint64(rows.shape[0]) or rows[row, 0] != key:
        row, place = probe(rows[:, 0], slots, key)
    if row == 0:
        row = take_row(rows, totals, after)
        rows[row, 0] = key
        put(slots, place, key, row)
    for tier in range(TIERS):
        if (media >> tier) & 1 == 0:
            continue
        column = word + np.uint64(tier) * words
        if rows[row, column] & bit == 0:
            rows[row, column] |= bit
        else:
            add_twin(twins, totals, key, np.uint64(TIERS * worker + tier))
    return row


@inlined
def let_go(
    rows: Words,
    slots: Words,
    twins: Words,
    totals: Counts,
    worker: int,
    key: np.uint64,
    media: int,
    after: Row,
) -> Row:
    """Note that a worker holds a key, which it held, no longer (once less) in tiers (bits).

    `after`, and what is returned: as of `hold`; perhaps the row is free now.
    """
    word, words, bit = place_of(rows, worker)
    row = row_of(rows, slots, key, after)
    for tier in range(TIERS):
        if (media >> tier) & 1 == 0:
            continue
        place = np.uint64(TIERS * worker + tier)
        if totals[TWINS] == 0 or not drop_twin(twins, totals, key, place):
            rows[row, word + np.uint64(tier) * words] &= ~bit
    others = NONE
    for w in range(1, rows.shape[1]):
        others |= rows[row, w]
    if others == 0:
        strike(slots, key, row)
        give_row(rows, totals, row)
    return row


@bare_kernel
def change(
    rows: Words,
    slots: Words,
    twins: Words,
    totals: Counts,
    worker: int,
    gained: Words,
    lost: Words,
) -> None:
    """Note what a worker holds once more, and then what it holds once less.

    Args:
        rows, slots, twins, totals: the table.
        worker: its number.
        gained, lost: keys and tiers (bits), shape (any, 2).
    """
    row = NONE
    for i in range(gained.shape[0]):
        media: int = np.int64(gained[i, 1])  # type: ignore[assignment]
        row = hold(rows, slots, twins, totals, worker, gained[i, 0], media, row)
    row = NONE
    for i in range(lost.shape[0]):
        media = np.int64(lost[i, 1])  # type: ignore[assignment]
        row = let_go(rows, slots, twins, totals, worker, lost[i, 0], media, row)


# --- walks ----------------------------------------------------------------------------------


@inlined
def count_up(planes: Words, w: int, mask: np.uint64) -> None:
    """Add one to each worker of a mask; bit b of planes[j, w] is bit j of worker b's count."""
    carry, j = mask, 0
    while carry != 0:
        over = planes[j, w] & carry
        planes[j, w] ^= carry
        carry = over
        j += 1


@inlined
def read_off(planes: Words, worker: int) -> int:
    """Return the count of a worker."""
    count, bit = 0, np.uint64(worker % 64)
    for j in range(planes.shape[0]):
        count |= np.int64((planes[j, worker // 64] >> bit) & ONE) << j  # type: ignore[assignment]
    return count


@inlined
def note_run(gone: np.uint64, w: int, length: int, runs: Counts) -> None:
    """Write the run of each worker of a mask."""
    worker = 64 * w
    while gone != 0:
        if gone & ONE:
            runs[worker] = length
        gone >>= ONE
        worker += 1


@inlined
def below(
    rows: Words, row: Row, w: int, words: int, asked: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Of the workers of a mask, those that hold a row in host memory, and in storage at best."""
    if rows.shape[1] == 1 + words:
        return NONE, NONE
    host = rows[row, 1 + words + w] & asked
    return host, rows[row, 1 + 2 * words + w] & asked & ~host


@bare_kernel
def overlaps(
    rows: Words,
    slots: Words,
    keys: BlockKeys,
    workers: Counts,
    planes: Words,
    runs: Counts,
    out: Counts,
) -> None:
    """Walk down a chain until nobody who is asked for holds the next block.

    Args:
        rows: the table.
        slots: the table.
        keys: of the chain.
        workers: numbers of those that are asked for, shape (n,); `NOBODY` holds nothing.
        planes, runs: scratch, shapes (3, 32, words) and (64 words,); planes are zeros, before
            and after.
        out: takes how many blocks of each one's leading run are best held in device memory, in
            host memory and in storage, and the whole run, shape (4, n).
    """
    words = planes.shape[2]
    depth, row, lower = 0, NONE, False
    alive = planes[2, 0]
    for worker in workers:
        if worker != NOBODY:
            alive[worker // 64] |= ONE << np.uint64(worker % 64)
    for i in range(keys.shape[0]):
        row = row_of(rows, slots, keys[i], row)
        if row == 0:
            break
        anybody = NONE
        for w in range(words):
            asked = alive[w]
            far = asked & ~rows[row, 1 + w]
            if far != 0:
                host, storage = below(rows, row, w, words, far)
                gone = far & ~host & ~storage
                note_run(gone, w, i, runs)
                count_up(planes[0], w, host)
                count_up(planes[1], w, storage)
                lower = lower or gone != far
                asked &= ~gone
                alive[w] = asked
            anybody |= asked
        if anybody == 0:
            break
        depth = i + 1
    for w in range(words):
        note_run(alive[w], w, depth, runs)
    for k in range(workers.shape[0]):
        out[0, k] = out[3, k] = runs[workers[k]] if workers[k] != NOBODY else 0
        out[1, k] = 0
        out[2, k] = 0
    alive[:] = 0
    if lower:
        for k in range(workers.shape[0]):
            if workers[k] == NOBODY:
                continue
            out[1, k] = read_off(planes[0], workers[k])
            out[2, k] = read_off(planes[1], workers[k])
            out[0, k] -= out[1, k] + out[2, k]
        planes[:] = 0
