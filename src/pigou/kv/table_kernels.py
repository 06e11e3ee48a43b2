"""Compiled functions of the table of a pool: from a hash to the block that is cached under it.

Arrays are those of `pigou.kv.kernels`: `keys` and `slots`. A slot is a hint, and the keys are what
counts: a block that is cached no longer stays in its slot, which is passed by, until the table is
made anew. To find the slots of blocks that go, and close the gaps, would take longer.
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
def renew(keys: BlockHashes, slots: Ints) -> int:
    """Make the table anew, of the cached blocks alone; return how many there are."""
    mask, filled = slots.shape[0] - 1, 0
    slots[:] = -1
    for block in range(keys.shape[0]):
        if keys[block, 0] != 0 or keys[block, 1] != 0:
            i = home(keys[block, 0], keys[block, 1], mask)
            while slots[i] >= 0:
                i = (i + 1) & mask
            slots[i] = block
            filled += 1
    return filled
