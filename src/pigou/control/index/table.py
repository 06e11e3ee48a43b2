"""The table: who holds which key, in which tier."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pigou.control.index import table_kernels as kernels
from pigou.control.index.table_kernels import Counts, Words
from pigou.request import BlockKeys

_LEAST_ROWS = 1024
_LEAST_TWINS = 64


class Overlaps(NamedTuple):
    """Leading run of blocks that each worker holds, by the best tier of each block.

    Attributes:
        device: blocks of the run in device memory, shape (workers,).
        host: those in host memory, and not above.
        storage: those in storage only.
        run: length of the run, in any tier.
    """

    device: Counts
    host: Counts
    storage: Counts
    run: Counts


class Table:
    """Key to workers and tiers, one bit each; workers are small numbers from 0.

    Arrays are described in `pigou.control.index.table_kernels`.
    """

    def __init__(self) -> None:
        self.words = 1
        self._rows: Words = np.zeros((_LEAST_ROWS + 1, 1 + kernels.TIERS), dtype=np.uint64)
        self._slots: Words = np.zeros(2 * _LEAST_ROWS, dtype=np.uint64)
        self._twins: Words = np.zeros((_LEAST_TWINS, 3), dtype=np.uint64)
        self._totals: Counts = np.zeros(3, dtype=np.int64)
        self._scratch()

    @property
    def keys(self) -> int:
        """Different keys that somebody holds."""
        return int(self._totals[kernels.ROWS])

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self._rows.nbytes + self._slots.nbytes + self._twins.nbytes

    def admit(self, worker: int) -> None:
        """Make room for the bits of a worker."""
        words = self.words
        while worker >= 64 * words:
            words *= 2
        if words != self.words:
            self._rebuild(len(self._rows) - 1, words)
            self._scratch()

    def change(self, worker: int, gained: Words, lost: Words) -> None:
        """Note what a worker holds once more, and once less.

        Args:
            worker: its number.
            gained: keys and tiers (bits), shape (n, 2).
            lost: likewise; what is lost was gained before, or is gained by this call.
        """
        if len(gained):
            self._reserve(len(gained))
            kernels.hold_all(self._rows, self._slots, self._twins, self._totals, worker, gained)
        if len(lost):
            kernels.let_go_all(self._rows, self._slots, self._twins, self._totals, worker, lost)

    def overlaps(self, workers: Counts, keys: BlockKeys) -> Overlaps:
        """Return how much of a chain each worker holds.

        Args:
            workers: their numbers, shape (workers,).
            keys: of the chain, contiguous, shape (blocks,).
        """
        out = np.empty((4, len(workers)), dtype=np.int64)
        kernels.overlaps(
            self._rows, self._slots, keys, workers, self._planes, self._runs, out
        )  # fmt: skip
        return Overlaps(out[0], out[1], out[2], out[3])

    def _reserve(self, keys: int) -> None:
        rows, twins, _ = self._totals.tolist()
        size = len(self._rows) - 1
        if rows + keys > size:
            while rows + keys > size:
                size *= 2
            self._rebuild(size, self.words)
        # Each key may come with all its tiers, and each of these be a twin.
        size = len(self._twins)
        if 2 * (twins + kernels.TIERS * keys) > size:
            while 2 * (twins + kernels.TIERS * keys) > size:
                size *= 2
            before, self._twins = self._twins, np.zeros((size, 3), dtype=np.uint64)
            kernels.rehash_twins(before, self._twins)

    def _rebuild(self, size: int, words: int) -> None:
        rows, slots = self._rows, self._slots
        self._rows = np.zeros((size + 1, 1 + kernels.TIERS * words), dtype=np.uint64)
        kernels.widen(rows, self.words, self._rows, words)
        self.words = words
        if 2 * size > len(slots):
            self._slots = np.zeros(2 * size, dtype=np.uint64)
            kernels.enter_all(slots, self._slots)

    def _scratch(self) -> None:
        self._planes: Words = np.zeros((3, 32, self.words), dtype=np.uint64)
        self._runs: Counts = np.zeros(64 * self.words, dtype=np.int64)
