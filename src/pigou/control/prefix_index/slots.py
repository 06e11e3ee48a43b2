"""Slots: open addressing from a 64-bit name to a row; compiled, for the kernels of the index.

slots: uint64, a power of two, several times as many as there are rows; linear probing. A slot has
    a tag (32 bits of the spread name, where probing begins) and a row, and is 0 where it is empty.
    More of them end more searches where they begin, and cost more in memory that must be fetched,
    and be there at all; where there are many rows, more than they save.
names: uint64, shape (rows + 1,), the name of each row, 0 of a free one. Row 0 stands for "none".
    No row is named 0.

Slots of rows that go are emptied at once, and the gap is closed: no call has to fill all of them
anew, which decisions would wait for.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined

Words: TypeAlias = NDArray[np.uint64]
Counts: TypeAlias = NDArray[np.int64]

#: Rows and slots are unsigned in kernels: an index that may be negative takes longer to use.
Row: TypeAlias = np.uint64

NONE = np.uint64(0)
ONE = np.uint64(1)
#: 2^64 over the golden ratio: names times this are spread (Knuth, 6.4), tags their upper half.
SPREAD = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
#: Slots for each row, at least: of the table's and of what a worker holds (there are as many of
#: those as workers, and all must be in memory), while these are so few; and of more.
TABLE, HELD, _FEW, _DENSE = 8, 4, 2**18, 2


def least(rows: int, each: int) -> int:
    """Return how many slots so many rows should have, at least; `each` of them while few."""
    return rows * (each if rows <= _FEW else _DENSE)


_least = inlined(least)


@inlined
def crowded(slots: Words, rows: int, each: int) -> bool:
    """Whether so many rows should have more slots."""
    there: int = slots.shape[0]
    return there < _least(rows, each)


def slots_for(rows: int, each: int) -> Words:
    """Return empty slots for so many rows, at least 1."""
    return np.zeros(1 << (least(rows, each) - 1).bit_length(), dtype=np.uint64)


def roomy(slots: Words, rows: int, each: int) -> Words:
    """Return slots with all that these have, and room for so many rows: mostly these themselves."""
    if least(rows, each) <= len(slots):
        return slots
    more = slots_for(rows, each)
    move_all(slots, more)
    return more


@inlined
def tag_of(name: np.uint64) -> np.uint64:
    """Where the search for a name begins, but for the mask; what its slot has of it."""
    return (name * SPREAD) >> HALF


@inlined
def probe(names: Words, slots: Words, name: np.uint64) -> tuple[Row, Row]:
    """Row of a name, or 0; and the slot where the search ended."""
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
    """Row of a name, or 0."""
    return probe(names, slots, name)[0]


@inlined
def put(slots: Words, place: Row, name: np.uint64, row: Row) -> None:
    """Make a row findable by its name; the search for it ended at the empty slot `place`."""
    slots[place] = (tag_of(name) << HALF) | row


@inlined
def enter(slots: Words, name: np.uint64, row: Row) -> None:
    """Make a row findable by its name, which must not be there yet."""
    mask = np.uint64(slots.shape[0] - 1)
    i = tag_of(name) & mask
    while slots[i] != 0:
        i = (i + ONE) & mask
    put(slots, i, name, row)


@inlined
def strike(slots: Words, name: np.uint64, row: Row) -> None:
    """Make a row unfindable, and close the gap (Knuth, 6.4, algorithm R)."""
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
def move_all(old: Words, slots: Words) -> None:
    """Enter all that `old` has into new, empty slots."""
    mask = np.uint64(slots.shape[0] - 1)
    for slot in old:
        if slot != 0:
            i = (slot >> HALF) & mask
            while slots[i] != 0:
                i = (i + ONE) & mask
            slots[i] = slot


@inlined
def touch(slots: Words, names: Words) -> np.uint64:
    """Load the slots where searches for names (their last column) begin; return something of it.

    The loads do not wait for one another, as those of searches do, whose branches depend on them.
    """
    mask, last, seen = np.uint64(slots.shape[0] - 1), names.shape[1] - 1, NONE
    for i in range(names.shape[0]):
        seen |= slots[tag_of(names[i, last]) & mask]
    return seen
