"""Ghosts: blocks that workers gave up of late, and how many of them were computed again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.control.prefix_index import ghost_kernels as kernels
from pigou.control.prefix_index.ghost_kernels import Tally
from pigou.control.prefix_index.slots import Words

_WORKERS = 8


class Ghosts:
    """What a block of memory is worth on each worker, in blocks that were computed again.

    A block that a worker gives up, in all tiers, is remembered among about as many as all
    workers hold. Where one of them is stored anew, by anybody, it had to be computed for want of
    memory on the worker that gave it up. The price is that, for each block that is stored there:
    with eviction in order of use, one block more in a cache of C blocks pushes out those that are
    used again just beyond C others, and what is remembered is a sample of those between C and
    2 C. (Lists of "ghosts", as long as the cache, say what more of it would be worth in Megiddo
    and Modha, "ARC", FAST 2003.)

    Counts are forgotten by half with every cacheful that is stored on the worker. Keys that are
    not known, and predictions, are no ghosts.

    Attributes:
        graves, tally: as of `pigou.control.prefix_index.ghost_kernels`; the kernels of events
            write them.
    """

    def __init__(self) -> None:
        self.graves: Words = np.zeros((0, 2), dtype=np.uint64)
        self.tally: Tally = np.zeros((2, _WORKERS))
        self._none: NDArray[np.float64] = np.zeros(0)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.graves.nbytes

    def admit(self, worker: int) -> None:
        """Begin to count for a worker, by its number."""
        while worker >= self.tally.shape[1]:
            self.tally = np.concatenate([self.tally, np.zeros_like(self.tally)], axis=1)
        self.tally[:, worker] = 0.0
        self.graves[self.graves[:, 1] == worker] = 0

    def reserve(self, blocks: int) -> None:
        """Blocks are about to be given up, of so many that all workers hold."""
        if blocks > len(self.graves):
            size = max(kernels.LEAST, 1 << (blocks - 1).bit_length())
            self.graves = np.zeros((size, 2), dtype=np.uint64)

    def share(self, workers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return blocks computed again for each that was stored, 0 to 1, (workers,).

        A number of -1 stands for a worker that never spoke: 0. Not to be written to.
        """
        some = len(self.graves) > 0
        if not some and len(self._none) == len(workers):
            return self._none
        found: NDArray[np.float64] = np.zeros(len(workers))
        if some:
            kernels.share(self.tally, workers, found)
        else:
            self._none = found
        return found
