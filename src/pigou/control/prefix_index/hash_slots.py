"""Hash slots: open addressing with linear probing from a 64-bit name to a row; compiled.

slots: uint64, a power of two; a 32-bit tag (where probing begins) and a row, 0 if empty. names:
uint64, shape (rows + 1,), 0 for free rows; row 0 means "none". Erasing closes gaps at once, so no
call pays for a rebuild.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined

Words: TypeAlias = NDArray[np.uint64]

#: Rows and slots are unsigned in kernels: an index that may be negative takes longer to use.
Row: TypeAlias = np.uint64

NONE = np.uint64(0)
ONE = np.uint64(1)
#: 2^64 over the golden ratio: a name times this is spread (Knuth, 6.4); its upper half is the tag.
SPREAD = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
#: Least slots of each row, while there are at most `_FEW` rows: of the holder table, and of a
#: worker's entries (one set for each worker, all of them in memory).
TABLE_SLOTS, ENTRY_SLOTS, _FEW = 8, 4, 2**18
#: Least slots of each row, where there are more.
_DENSE = 2


def _slots_for(rows: int, per_row: int) -> int:
    return rows * (per_row if rows <= _FEW else _DENSE)


_min_slots = inlined(_slots_for)


@inlined
def crowded(slots: Words, rows: int, per_row: int) -> bool:
    """True if `rows` rows need more slots."""
    size: int = slots.shape[0]
    return size < _min_slots(rows, per_row)


def new_slots(rows: int, per_row: int) -> Words:
    """Return empty slots for `rows` rows, at least 1."""
    return np.zeros(1 << (_slots_for(rows, per_row) - 1).bit_length(), dtype=np.uint64)


def grow_slots(slots: Words, rows: int, per_row: int) -> Words:
    """Return slots with room for `rows` rows: these, or a larger copy."""
    if _slots_for(rows, per_row) <= len(slots):
        return slots
    more = new_slots(rows, per_row)
    _rehash(slots, more)
    return more


@inlined
def tag_of(name: np.uint64) -> np.uint64:
    """Return a name's tag; the masked tag is where its search begins."""
    return (name * SPREAD) >> HALF


@inlined
def probe(names: Words, slots: Words, name: np.uint64) -> tuple[Row, Row]:
    """Return the row of a name, or 0, and the slot where probing ended."""
    mask = np.uint64(slots.shape[0] - 1)
    tag = tag_of(name)
    i = tag & mask
    while slots[i] != 0:
        if slots[i] >> HALF == tag:
            row = slots[i] & _LOW
            if names[row] == name:
                return row, i
        i = (i + ONE) & mask
    return NONE, i


@inlined
def find(names: Words, slots: Words, name: np.uint64) -> Row:
    """Return the row of a name, or 0."""
    return probe(names, slots, name)[0]


@inlined
def put(slots: Words, slot: Row, name: np.uint64, row: Row) -> None:
    """Insert a row at `slot`, where probing for its name ended."""
    slots[slot] = (tag_of(name) << HALF) | row


@inlined
def insert(slots: Words, name: np.uint64, row: Row) -> None:
    """Insert a row under a new name."""
    mask = np.uint64(slots.shape[0] - 1)
    i = tag_of(name) & mask
    while slots[i] != 0:
        i = (i + ONE) & mask
    put(slots, i, name, row)


@inlined
def erase(slots: Words, name: np.uint64, row: Row) -> None:
    """Remove a row and close the gap (Knuth, 6.4, algorithm R)."""
    mask = np.uint64(slots.shape[0] - 1)
    tag = tag_of(name)
    slot = (tag << HALF) | row
    gap = tag & mask
    while slots[gap] != slot:
        gap = (gap + ONE) & mask
    i = gap
    while True:
        i = (i + ONE) & mask
        if slots[i] == 0:
            break
        start = slots[i] >> HALF
        if ((i - start) & mask) >= ((i - gap) & mask):
            slots[gap] = slots[i]
            gap = i
    slots[gap] = 0


@bare_kernel
def _rehash(old: Words, slots: Words) -> None:
    mask = np.uint64(slots.shape[0] - 1)
    for slot in old:
        if slot != 0:
            i = (slot >> HALF) & mask
            while slots[i] != 0:
                i = (i + ONE) & mask
            slots[i] = slot


@inlined
def prefetch(slots: Words, names: Words) -> np.uint64:
    """Load the first slots for names (their last column), in parallel; return part of them."""
    mask, name_column, loaded = np.uint64(slots.shape[0] - 1), names.shape[1] - 1, NONE
    for i in range(names.shape[0]):
        loaded |= slots[tag_of(names[i, name_column]) & mask]
    return loaded
