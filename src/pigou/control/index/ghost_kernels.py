"""Compiled kernels of ghosts: blocks that workers gave up of late.

graves: uint64, shape (a power of two, 2): a key, at the upper bits of its spread, and the number of
    who gave it up; 0 where empty. One drives out another, and so the oldest are forgotten, by
    chance.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.control.index.slots import Counts, Words

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio (Knuth, 6.4)


@inlined
def _shift(graves: Words) -> np.uint64:
    """Bits by which a spread key is shifted to its place."""
    return np.uint64(64 - int(math.log2(graves.shape[0]) + 0.5))


@bare_kernel
def bury(graves: Words, keys: Words, worker: int) -> None:
    """Remember blocks that a worker does not hold any more, in no tier.

    Args:
        graves: to write.
        keys: of the blocks, none of them 0, (blocks,).
        worker: its number.
    """
    shift = _shift(graves)
    for key in keys:
        place = (key * _SPREAD) >> shift
        graves[place, 0] = key
        graves[place, 1] = worker


@bare_kernel
def unbury(
    graves: Words, keys: Words, worker: int, keep: float, new: int,
    again: NDArray[np.float64], stored: NDArray[np.float64],
) -> None:  # fmt: skip
    """Count blocks that were stored, also for those who gave them up; these are forgotten.

    Args:
        graves: to look into.
        keys: of the blocks, in the last column, shape (blocks, any).
        worker: who stored them.
        keep: by how much its counts are forgotten before.
        new: how many of them it had not held.
        again: blocks computed again, by who gave them up.
        stored: blocks that were stored, by worker.
    """
    again[worker] *= keep
    stored[worker] = keep * stored[worker] + new
    key_at = keys.shape[1] - 1
    shift = _shift(graves)
    for i in range(keys.shape[0]):
        key = keys[i, key_at]
        place = (key * _SPREAD) >> shift
        if key != 0 and graves[place, 0] == key:
            again[graves[place, 1]] += 1.0
            graves[place, 0] = 0


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
