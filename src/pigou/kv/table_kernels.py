"""Compiled functions of the table of a pool: from a hash to the block that is cached under it.

Arrays are those of `pigou.kv.kernels`: `keys` and `slots`.
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import inlined
from pigou.request import BlockHashes, Ints

_MIX_1 = np.uint64(0x9E3779B97F4A7C15)
_MIX_2 = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


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
        if block < 0 or (keys[block, 0] == high and keys[block, 1] == low):
            return block, i
        i = (i + 1) & mask


@inlined
def find(keys: BlockHashes, slots: Ints, high: np.uint64, low: np.uint64) -> int:
    """Block that is cached under a hash, or -1; the hash (0, 0) is nobody's."""
    if high == 0 and low == 0:
        return -1
    return probe(keys, slots, high, low)[0]


@inlined
def touch(keys: BlockHashes, slots: Ints, hashes: BlockHashes, start: int, stop: int) -> np.int64:
    """Load what searches for `hashes[start:stop]` look at first; return something of it.

    The loads do not wait for one another, as those of searches do, whose branches depend on them.
    """
    mask, seen = slots.shape[0] - 1, np.uint64(0)
    for i in range(start, stop):
        block = slots[home(hashes[i, 0], hashes[i, 1], mask)]
        seen |= keys[max(block, 0), 0]
    return np.int64(seen)


@inlined
def strike(keys: BlockHashes, slots: Ints, block: int) -> None:
    """Remove a block from the table, closing the gap (no tombstones)."""
    mask = slots.shape[0] - 1
    gap = home(keys[block, 0], keys[block, 1], mask)
    while slots[gap] != block:
        gap = (gap + 1) & mask
    i = gap
    while True:
        i = (i + 1) & mask
        other = slots[i]
        if other < 0:
            break
        start = home(keys[other, 0], keys[other, 1], mask)
        if ((i - start) & mask) >= ((i - gap) & mask):
            slots[gap] = other
            gap = i
    slots[gap] = -1
