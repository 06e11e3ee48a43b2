"""Slots: open addressing from a 64-bit name to a row; compiled, for the kernels of the index.

slots: uint64, a power of two, at least four times as many as there are rows, so that most searches
    end where they begin; linear probing. A slot has a tag (32 bits of the spread name, where
    probing begins) and a row, and is 0 where it is empty.
names: uint64, shape (rows + 1,), the name of each row. Row 0 stands for "none".
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined

Words: TypeAlias = NDArray[np.uint64]
Counts: TypeAlias = NDArray[np.int64]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio (Knuth, 6.4)
_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
#: Slots for each row, at least.
_ROOM = 4


def slots_for(rows: int) -> Words:
    """Return empty slots for so many rows, at least 1."""
    return np.zeros(1 << (_ROOM * rows - 1).bit_length(), dtype=np.uint64)


@inlined
def probe(names: Words, slots: Words, name: np.uint64) -> tuple[int, int]:
    """Row of a name, or 0; and the slot where the search ended."""
    mask = slots.shape[0] - 1
    tag = (name * _SPREAD) >> _HALF
    i = np.int64(tag) & mask
    while slots[i] != 0:
        if slots[i] >> _HALF == tag:
            row: int = np.int64(slots[i] & _LOW)  # type: ignore[assignment]
            if names[row] == name:
                return row, i
        i = (i + 1) & mask
    return 0, i


@inlined
def find(names: Words, slots: Words, name: np.uint64) -> int:
    """Row of a name, or 0."""
    return probe(names, slots, name)[0]


@inlined
def put(slots: Words, place: int, name: np.uint64, row: int) -> None:
    """Make a row findable by its name; the search for it ended at the empty slot `place`."""
    slots[place] = (((name * _SPREAD) >> _HALF) << _HALF) | np.uint64(row)


@inlined
def enter(slots: Words, name: np.uint64, row: int) -> None:
    """Make a row findable by its name, which must not be there yet."""
    mask = slots.shape[0] - 1
    i = np.int64((name * _SPREAD) >> _HALF) & mask
    while slots[i] != 0:
        i = (i + 1) & mask
    put(slots, i, name, row)


@bare_kernel
def enter_all(old: Words, slots: Words) -> None:
    """Enter all that `old` has into new, empty slots."""
    mask = slots.shape[0] - 1
    for slot in old:
        if slot != 0:
            i = np.int64(slot >> _HALF) & mask
            while slots[i] != 0:
                i = (i + 1) & mask
            slots[i] = slot


@inlined
def touch(slots: Words, names: Words) -> np.uint64:
    """Load the slots where searches for names (their last column) begin; return something of it.

    The loads do not wait for one another, as those of searches do, whose branches depend on them.
    """
    mask, last, seen = slots.shape[0] - 1, names.shape[1] - 1, np.uint64(0)
    for i in range(names.shape[0]):
        seen |= slots[np.int64((names[i, last] * _SPREAD) >> _HALF) & mask]
    return seen


@inlined
def strike(slots: Words, name: np.uint64, row: int) -> None:
    """Make a row unfindable, closing the gap (no tombstones)."""
    mask = slots.shape[0] - 1
    tag = (name * _SPREAD) >> _HALF
    slot = (tag << _HALF) | np.uint64(row)
    gap = np.int64(tag) & mask
    while slots[gap] != slot:
        gap = (gap + 1) & mask
    i = gap
    while True:
        i = (i + 1) & mask
        if slots[i] == 0:
            break
        start = np.int64(slots[i] >> _HALF)
        if ((i - start) & mask) >= ((i - gap) & mask):
            slots[gap] = slots[i]
            gap = i
    slots[gap] = 0
