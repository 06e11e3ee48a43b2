"""Ghosts: blocks that workers gave up of late, and how many of them were computed again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.control.index import ghost_kernels as kernels
from pigou.control.index.slots import Words

#: Blocks that are remembered, and a cacheful, at least.
_LEAST = 1024
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
        some: whether any block was given up; nothing is counted before.
    """

    def __init__(self) -> None:
        self._graves: Words = np.zeros((_LEAST, 2), dtype=np.uint64)
        self._again: NDArray[np.float64] = np.zeros(_WORKERS)
        self._stored: NDArray[np.float64] = np.zeros(_WORKERS)
        self._none: NDArray[np.float64] = np.zeros(0)
        self.some = False

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self._graves.nbytes

    def admit(self, worker: int) -> None:
        """Begin to count for a worker, by its number."""
        while worker >= len(self._again):
            self._again = np.concatenate([self._again, np.zeros_like(self._again)])
            self._stored = np.concatenate([self._stored, np.zeros_like(self._stored)])
        self._again[worker] = self._stored[worker] = 0.0
        self._graves[self._graves[:, 1] == worker] = 0

    def removed(self, worker: int, keys: Words, blocks: int) -> None:
        """Blocks are in no tier of a worker any more.

        Args:
            worker: its number.
            keys: of the blocks, none of them 0, (blocks,).
            blocks: that all workers hold.
        """
        self.some = True
        if blocks > len(self._graves):
            size = 1 << (blocks - 1).bit_length()
            self._graves = np.zeros((size, 2), dtype=np.uint64)
        kernels.bury(self._graves, keys, worker)

    def stored(self, worker: int, held: int, keys: Words, new: int) -> None:
        """Blocks were stored on a worker; need not be called before there are `some`.

        Args:
            worker: its number.
            held: blocks that it has.
            keys: in the last column, 0 where unknown, shape (blocks, any).
            new: how many of them had not been there.
        """
        keep = 0.5 ** (new / max(_LEAST, held))
        kernels.unbury(self._graves, keys, worker, keep, new, self._again, self._stored)

    def share(self, workers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return blocks computed again for each that was stored, 0 to 1, (workers,).

        A number of -1 stands for a worker that never spoke: 0. Not to be written to.
        """
        if not self.some and len(self._none) == len(workers):
            return self._none
        found: NDArray[np.float64] = np.zeros(len(workers))
        if self.some:
            kernels.share(self._again, self._stored, workers, found)
        else:
            self._none = found
        return found
