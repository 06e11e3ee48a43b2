"""Compiled kernels of ghosts: blocks that workers gave up of late.

graves: uint64, shape (a power of two, 2): a key, at the upper bits of its spread, and the number of
    who gave it up; 0 where empty. One drives out another, and so the oldest are forgotten, by
    chance.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.slots import SPREAD, Counts, Words

Tally: TypeAlias = NDArray[np.float64]

#: Rows of `tally`.
AGAIN, STORED = range(2)
#: A cacheful, at least.
LEAST = 1024


@inlined
def shift_of(graves: Words) -> np.uint64:
    """Bits by which a spread key is shifted to its place."""
    return np.uint64(64 - int(math.log2(graves.shape[0]) + 0.5))


@inlined
def bury(graves: Words, shift: np.uint64, key: np.uint64, worker: int) -> None:
    """Remember a block that a worker does not hold any more, in no tier; `shift`: of the graves."""
    place = (key * SPREAD) >> shift
    graves[place, 0] = key
    graves[place, 1] = worker


@inlined
def unbury(graves: Words, tally: Tally, keys: Words, worker: int, held: int, new: int) -> None:
    """Count blocks that were stored, also for those who gave them up; these are forgotten.

    Args:
        graves: to look into.
        tally: see above.
        keys: of the blocks, in the last column, shape (blocks, any).
        worker: who stored them.
        held: blocks that it has.
        new: how many of those stored it had not held.
    """
    keep = 0.5 ** (new / max(LEAST, held))
    tally[AGAIN, worker] *= keep
    tally[STORED, worker] = keep * tally[STORED, worker] + new
    key_at = keys.shape[1] - 1
    shift = shift_of(graves)
    for i in range(keys.shape[0]):
        key = keys[i, key_at]
        place = (key * SPREAD) >> shift
        if key != 0 and graves[place, 0] == key:
            tally[AGAIN, graves[place, 1]] += 1.0
            graves[place, 0] = 0


@bare_kernel
def share(tally: Tally, workers: Counts, found: NDArray[np.float64]) -> None:
    """Write what was computed again over what was stored, at most 1; `found` has zeros."""
    for i in range(workers.shape[0]):
        worker = workers[i]
        if worker >= 0:
            found[i] = min(1.0, tally[AGAIN, worker] / max(tally[STORED, worker], 1.0))
