"""Ghosts: blocks that workers evicted recently, and how many of them were computed again."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import SPREAD, Counts, Words

Rates: TypeAlias = NDArray[np.float64]
#: Fields of `GhostArrays`: kernels are called with a plain tuple, which costs less to hand over.
GhostTuple: TypeAlias = tuple[Words, Rates]

#: Columns of `blocks`.
GHOST_KEY, GHOST_WORKER = range(2)
#: Rows of `counts`: blocks that were computed again, and blocks that were stored.
RECOMPUTED, STORED = range(2)
#: Blocks of a cacheful, at least.
_MIN_BLOCKS = 1024
_WORKERS = 8


class GhostArrays(NamedTuple):
    """Arrays of ghosts, as kernels see them."""

    # uint64, shape (a power of two, 2): a key, at the upper bits of its spread, and the number of
    # the worker that evicted it; 0 where empty. A new ghost replaces another, and so the oldest are
    # forgotten, by chance. Of no rows until something is evicted.
    blocks: Words
    counts: Rates  # float64, shape (2, workers), by the rows above


class Ghosts:
    """What a block of memory is worth on each worker, in blocks that were computed again.

    A block that a worker evicts, from all tiers, is remembered among about as many as all workers
    hold. If any worker stores it anew, it had to be computed for want of memory on the worker that
    evicted it. The price is such blocks for each block that is stored there. With LRU eviction,
    one block more in a cache of C blocks pushes out those that are used again just beyond C others;
    what is remembered is a sample of those between C and 2 C. (Lists of "ghosts", as long as the
    cache, say what more of it would be worth in Megiddo and Modha, "ARC", FAST 2003.)

    Counts halve with every cacheful that is stored on the worker. Blocks of unknown keys, and
    predictions, are no ghosts.

    Attributes:
        arrays: fields of `GhostArrays`; the kernels of events write them.
        capacity: blocks that it has room for.
    """

    def __init__(self) -> None:
        blocks: Words = np.zeros((0, 2), dtype=np.uint64)
        self.arrays: GhostTuple = blocks, np.zeros((2, _WORKERS))
        self.capacity = 0
        self._zeros: Rates = np.zeros(0)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return GhostArrays(*self.arrays).blocks.nbytes

    def admit(self, worker: int) -> None:
        """Begin to count for a worker, by its number."""
        blocks, counts = self.arrays
        while worker >= counts.shape[1]:
            counts = np.concatenate([counts, np.zeros_like(counts)], axis=1)
        counts[:, worker] = 0.0
        blocks[blocks[:, GHOST_WORKER] == worker] = 0
        self.arrays = blocks, counts

    def reserve(self, held: int) -> None:
        """Make room before evictions; all workers hold so many blocks."""
        if held > self.capacity:
            self.capacity = max(_MIN_BLOCKS, 1 << (held - 1).bit_length())
            self.arrays = np.zeros((self.capacity, 2), dtype=np.uint64), self.arrays[1]

    def recomputed_share(self, workers: NDArray[np.int64]) -> Rates:
        """Return blocks computed again for each that was stored, 0 to 1, (workers,).

        A number of -1 stands for a worker that never spoke: 0. Not to be written to.
        """
        blocks, counts = self.arrays
        if not len(blocks) and len(self._zeros) == len(workers):
            return self._zeros
        shares: Rates = np.zeros(len(workers))
        if len(blocks):
            recomputed_share(counts, workers, shares)
        else:
            self._zeros = shares
        return shares


# --- kernels --------------------------------------------------------------------------------


@inlined
def ghost_shift(blocks: Words) -> np.uint64:
    """Return the bits by which a spread key is shifted to its row of `blocks`."""
    return np.uint64(64 - int(math.log2(blocks.shape[0]) + 0.5))


@inlined
def add_ghost(blocks: Words, shift: np.uint64, key: np.uint64, worker: int) -> None:
    """Remember a block that a worker evicted from its last tier; `shift`: of `blocks`."""
    row = (key * SPREAD) >> shift
    blocks[row, GHOST_KEY] = key
    blocks[row, GHOST_WORKER] = worker


@inlined
def count_stored(ghosts: GhostArrays, keys: Words, worker: int, held: int, new: int) -> None:
    """Count stored blocks, those that were ghosts for who evicted them; these are forgotten.

    Args:
        keys: of the blocks, in the last column, shape (blocks, any).
        held: blocks that it has.
        new: how many of those stored it had not held.
    """
    blocks, counts = ghosts
    keep = 0.5 ** (new / max(_MIN_BLOCKS, held))
    counts[RECOMPUTED, worker] *= keep
    counts[STORED, worker] = keep * counts[STORED, worker] + new
    key_column = keys.shape[1] - 1
    shift = ghost_shift(blocks)
    for i in range(keys.shape[0]):
        key = keys[i, key_column]
        row = (key * SPREAD) >> shift
        if key != 0 and blocks[row, GHOST_KEY] == key:
            counts[RECOMPUTED, blocks[row, GHOST_WORKER]] += 1.0
            blocks[row, GHOST_KEY] = 0


@bare_kernel
def recomputed_share(counts: Rates, workers: Counts, shares: Rates) -> None:
    """Write blocks computed again over blocks stored, at most 1; `shares` has zeros."""
    for i in range(workers.shape[0]):
        worker = workers[i]
        if worker >= 0:
            shares[i] = min(1.0, counts[RECOMPUTED, worker] / max(counts[STORED, worker], 1.0))
