"""Hash slots: open addressing with linear probing from a 64-bit name to a row; compiled.

slots: uint32, a power of two above the rows; 0 if empty, else, from the lowest bit: a row, the tag,
which is a part of the name, and the distance from where its search begins. names: uint64, shape
(rows + 1,), 0 for free rows; row 0 means "none". Erasing closes gaps at once, so no call pays for a
rebuild; distances spare it the other rows' names, which are far away in memory.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined

Words: TypeAlias = NDArray[np.uint64]
Slots: TypeAlias = NDArray[np.uint32]

#: Rows and slots are unsigned in kernels: an index that may be negative takes longer to use.
Row: TypeAlias = np.uint64

NONE = np.uint64(0)
ONE = np.uint64(1)
#: 2^64 over the golden ratio: a name times this is spread (Knuth, 6.4); a search begins at its
#: upper half.
SPREAD = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
#: Bits of a slot below its distance, and the largest distance: one that may be larger still.
_SPREAD_BITS, _FAR = np.uint64(29), np.uint64(7)
_SPREAD_SHIFT, _SPREAD_MASK = np.uint64(64 - 29), np.uint64(2**29 - 1)
#: Least slots of each row, while there are at most `_FEW` rows: of the holder table, and of a
#: worker's entries (one set for each worker, all of them in memory).
TABLE_SLOTS, ENTRY_SLOTS, _FEW = 8, 4, 2**18
#: Least slots of each row, where there are more.
_DENSE = 2


def _slots_for(rows: int, per_row: int) -> int:
    return rows * (per_row if rows <= _FEW else _DENSE)


_min_slots = inlined(_slots_for)


@inlined
def crowded(slots: Slots, rows: int, per_row: int) -> bool:
    """True if `rows` rows need more slots."""
    size: int = slots.shape[0]
    return size < _min_slots(rows, per_row)


def new_slots(rows: int, per_row: int) -> Slots:
    """Return empty slots for `rows` rows, at least 1."""
    return np.zeros(1 << (_slots_for(rows, per_row) - 1).bit_length(), dtype=np.uint32)


def grow_slots(slots: Slots, names: Words, rows: int, per_row: int, limit: int) -> Slots:
    """Return slots with room for `rows` rows: these, or a copy for twice as many, up to `limit`."""
    if _slots_for(rows, per_row) <= len(slots):
        return slots
    more = new_slots(max(rows, min(2 * rows, limit)), per_row)
    _rehash(names, more)
    return more


@inlined
def spread_of(name: np.uint64) -> np.uint64:
    """Return 29 bits of a name: under the mask where its search begins, above it the tag."""
    return (name * SPREAD) >> _SPREAD_SHIFT


@inlined
def probe(names: Words, slots: Slots, name: np.uint64) -> tuple[Row, Row]:
    """Return the row of a name, or 0, and the slot where probing ended."""
    mask = np.uint64(slots.shape[0] - 1)
    spread = spread_of(name)
    i = spread & mask
    while slots[i] != 0:
        if (slots[i] & _SPREAD_MASK) ^ spread <= mask:
            row = slots[i] & mask
            if names[row] == name:
                return row, i
        i = (i + ONE) & mask
    return NONE, i


@inlined
def find(names: Words, slots: Slots, name: np.uint64) -> Row:
    """Return the row of a name, or 0."""
    return probe(names, slots, name)[0]


@inlined
def put(slots: Slots, slot: Row, name: np.uint64, row: Row) -> None:
    """Insert a row at `slot`, where probing for its name ended."""
    mask = np.uint64(slots.shape[0] - 1)
    spread = spread_of(name)
    distance = min((slot - spread) & mask, _FAR)
    slots[slot] = (distance << _SPREAD_BITS) | (spread & ~mask) | row


@inlined
def insert(slots: Slots, name: np.uint64, row: Row) -> None:
    """Insert a row under a new name."""
    mask = np.uint64(slots.shape[0] - 1)
    i = spread_of(name) & mask
    while slots[i] != 0:
        i = (i + ONE) & mask
    put(slots, i, name, row)


@inlined
def erase(names: Words, slots: Slots, row: Row) -> None:
    """Remove a row, whose name is still known, and close the gap (Knuth, 6.4, algorithm R)."""
    mask = np.uint64(slots.shape[0] - 1)
    spread = spread_of(names[row])
    value = (spread & ~mask) | row
    gap = spread & mask
    while slots[gap] & _SPREAD_MASK != value:
        gap = (gap + ONE) & mask
    i = (gap + ONE) & mask
    while slots[i] != 0:
        distance, width = slots[i] >> _SPREAD_BITS, (i - gap) & mask
        if distance == _FAR:
            other = slots[i] & mask
            if ((i - spread_of(names[other])) & mask) >= width:
                put(slots, gap, names[other], other)
                gap = i
        elif distance >= width:
            slots[gap] = slots[i] - (width << _SPREAD_BITS)
            gap = i
        i = (i + ONE) & mask
    slots[gap] = 0


@bare_kernel
def _rehash(names: Words, slots: Slots) -> None:
    for row in range(1, names.shape[0]):
        if names[row] != 0:
            insert(slots, names[row], np.uint64(row))


@inlined
def prefetch(slots: Slots, names: Words) -> np.uint64:
    """Load the first slots for names (their last column), in parallel; return part of them."""
    mask, name_column, loaded = np.uint64(slots.shape[0] - 1), names.shape[1] - 1, NONE
    for i in range(names.shape[0]):
        loaded |= slots[spread_of(names[i, name_column]) & mask]
    return loaded
