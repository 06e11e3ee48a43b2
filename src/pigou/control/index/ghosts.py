"""Ghosts: blocks that workers gave up of late, and how many of them were computed again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.control.index import ghost_kernels as kernels
from pigou.control.index.holdings import Holdings
from pigou.control.index.slots import Counts, Words

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
    """

    def __init__(self) -> None:
        self._graves: Words = np.zeros(_LEAST, dtype=np.uint64)
        self._owners: Counts = np.zeros(_LEAST, dtype=np.int64)
        self._again: NDArray[np.float64] = np.zeros(_WORKERS)
        self._stored: NDArray[np.float64] = np.zeros(_WORKERS)
        self._some = False

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self._graves.nbytes + self._owners.nbytes

    def admit(self, worker: int) -> None:
        """Begin to count for a worker, by its number."""
        while worker >= len(self._again):
            self._again = np.concatenate([self._again, np.zeros_like(self._again)])
            self._stored = np.concatenate([self._stored, np.zeros_like(self._stored)])
        self._again[worker] = self._stored[worker] = 0.0
        self._graves[self._owners == worker] = 0

    def keys(self, holdings: Holdings, hashes: Words) -> Words:
        """Return the keys of blocks of a worker, for `removed`, (blocks,); 0 where unknown."""
        found: Words = np.empty(len(hashes), dtype=np.uint64)
        kernels.known(
            holdings.links, holdings.names, holdings.values, holdings.slots, hashes, found
        )
        return found

    def removed(
        self, worker: int, holdings: Holdings, hashes: Words, keys: Words, blocks: int
    ) -> None:
        """Blocks were removed from a tier of a worker.

        Args:
            worker: its number.
            holdings: its own, without them.
            hashes: of the engine, in the last column, shape (blocks, any).
            keys: what `keys` said of them before.
            blocks: that all workers hold.
        """
        self._some = True
        if blocks > len(self._graves):
            size = 1 << (blocks - 1).bit_length()
            self._graves = np.zeros(size, dtype=np.uint64)
            self._owners = np.zeros(size, dtype=np.int64)
        kernels.bury(
            holdings.names, holdings.slots, hashes, keys,
            self._graves, self._owners, worker,
        )  # fmt: skip

    def stored(self, worker: int, holdings: Holdings, keys: Words, new: int) -> None:
        """Blocks were stored on a worker.

        Args:
            worker: its number.
            holdings: its own.
            keys: in the last column, 0 where unknown, shape (blocks, any).
            new: how many of them had not been there.
        """
        if not self._some:
            return
        keep = 0.5 ** (new / max(_LEAST, len(holdings)))
        self._again[worker] *= keep
        self._stored[worker] = keep * self._stored[worker] + new
        kernels.unbury(self._graves, self._owners, keys, self._again)

    def share(self, workers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return blocks computed again for each that was stored, 0 to 1, (workers,).

        A number of -1 stands for a worker that never spoke: 0.
        """
        found: NDArray[np.float64] = np.zeros(len(workers))
        if self._some:
            kernels.share(self._again, self._stored, workers, found)
        return found
