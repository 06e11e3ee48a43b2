"""Compiled kernels of ghosts: blocks that workers gave up of late.

graves: keys, each at the upper bits of its spread: one drives out another, and so the oldest are
    forgotten, by chance. Shape (a power of two,).
owners: numbers of those who gave them up, in the same order.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.control.index.entry_kernels import MEDIA, WIDTH, Links
from pigou.control.index.slots import Counts, Words, find

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio (Knuth, 6.4)


@bare_kernel
def known(
    links: Links, names: Words, values: Words, slots: Words, hashes: Words, keys: Words
) -> None:
    """Write the keys of blocks to `keys`, (blocks,), 0 where they are not held or not known."""
    name_at = hashes.shape[1] - 1
    for i in range(hashes.shape[0]):
        entry = find(names, slots, hashes[i, name_at])
        keys[i] = values[entry] if links[entry * WIDTH + MEDIA] != 0 else np.uint64(0)


@inlined
def _shift(graves: Words) -> np.uint64:
    """Bits by which a spread key is shifted to its place."""
    return np.uint64(64 - int(math.log2(graves.shape[0]) + 0.5))


@bare_kernel
def bury(
    names: Words, slots: Words, hashes: Words, keys: Words,
    graves: Words, owners: Counts, worker: int,
) -> None:  # fmt: skip
    """Remember the blocks that a worker does not hold any more, in no tier.

    Args:
        names, slots: of its holdings.
        hashes: of the engine, in the last column, shape (blocks, any).
        keys: of these blocks, (blocks,); a key of 0 is not remembered.
        graves, owners: to write.
        worker: its number.
    """
    name_at = hashes.shape[1] - 1
    shift = _shift(graves)
    for i in range(hashes.shape[0]):
        if keys[i] != 0 and find(names, slots, hashes[i, name_at]) == 0:
            place = (keys[i] * _SPREAD) >> shift
            graves[place] = keys[i]
            owners[place] = worker


@bare_kernel
def unbury(graves: Words, owners: Counts, keys: Words, again: NDArray[np.float64]) -> None:
    """Count blocks that were stored, for those who gave them up; these are forgotten.

    Args:
        graves, owners: to look into.
        keys: of the blocks, in the last column, shape (blocks, any).
        again: counts by worker.
    """
    key_at = keys.shape[1] - 1
    shift = _shift(graves)
    for i in range(keys.shape[0]):
        key = keys[i, key_at]
        place = (key * _SPREAD) >> shift
        if key != 0 and graves[place] == key:
            again[owners[place]] += 1.0
            graves[place] = 0


@bare_kernel
def share(
    again: NDArray[np.float64], stored: NDArray[np.float64], workers: Counts,
    found: NDArray[np.float64],
) -> None:  # fmt: skip
    """Write what was computed again over what was stored, at most 1; `found` has zeros."""
    for i in range(workers.shape[0]):
        worker = workers[i]
        if worker >= 0:
            found[i] = min(1.0, again[worker] / max(stored[worker], 1.0))
