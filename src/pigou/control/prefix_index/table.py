"""The table: who holds which key, in which tier."""

from __future__ import annotations

import numpy as np

from pigou.control.prefix_index import table_kernels as kernels
from pigou.control.prefix_index.slots import TABLE, Counts, Words, roomy, slots_for
from pigou.request import BlockKeys

_LEAST_ROWS = 1024
_LEAST_TWINS = 64
#: Rows become so many times as many: those before are copied, and both are there meanwhile.
_GROWTH = 4


class Overlaps:
    """Leading run of blocks that each worker holds, by the best tier of each block.

    Attributes:
        rows: its four properties, shape (4, workers).
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Counts) -> None:
        self.rows = rows  # cut when asked for: four views take as long as a short walk

    @property
    def device(self) -> Counts:
        """Blocks of the run in device memory, shape (workers,)."""
        found: Counts = self.rows[0]
        return found

    @property
    def host(self) -> Counts:
        """Those in host memory, and not above."""
        found: Counts = self.rows[1]
        return found

    @property
    def storage(self) -> Counts:
        """Those in storage only."""
        found: Counts = self.rows[2]
        return found

    @property
    def run(self) -> Counts:
        """Length of the run, in any tier."""
        found: Counts = self.rows[3]
        return found


class Table:
    """Key to workers and tiers, one bit each; workers are small numbers from 0.

    Arrays are described in `pigou.control.prefix_index.table_kernels`; `words` are those of a tier.
    """

    def __init__(self) -> None:
        self.words = 1
        self.rows: Words = np.zeros((_LEAST_ROWS + 1, 1 + kernels.TIERS), dtype=np.uint64)
        self.slots: Words = slots_for(_LEAST_ROWS, TABLE)
        self.twins: Words = np.zeros((_LEAST_TWINS, 3), dtype=np.uint64)
        self.totals: Counts = np.zeros(5, dtype=np.int64)
        self._scratch()

    @property
    def keys(self) -> int:
        """Different keys that somebody holds."""
        return int(self.totals[kernels.ROWS])

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.rows.nbytes + self.slots.nbytes + self.twins.nbytes

    def admit(self, worker: int) -> None:
        """Make room for the bits of a worker."""
        words = self.words
        while worker >= 64 * words:
            words *= 2
        if words != self.words:
            self._rebuild(len(self.rows) - 1, words)
            self._scratch()

    def change(self, worker: int, gained: Words, lost: Words) -> None:
        """Note what a worker holds once more, and once less.

        Args:
            worker: its number.
            gained: keys and tiers (bits), shape (n, 2).
            lost: likewise; what is lost was gained before, or is gained by this call.
        """
        self.reserve(len(gained), int(np.bitwise_or.reduce(gained[:, 1])))
        kernels.change(self.rows, self.slots, self.twins, self.totals, worker, gained, lost)

    def overlaps(self, workers: Counts, keys: BlockKeys) -> Overlaps:
        """Return how much of a chain each worker holds.

        Args:
            workers: their numbers, shape (workers,).
            keys: of the chain, contiguous, shape (blocks,).
        """
        out = np.empty((4, len(workers)), dtype=np.int64)
        kernels.overlaps(self.rows, self.slots, keys, workers, self._planes, self._runs, out)
        return Overlaps(out)

    def reserve(self, keys: int, media: int) -> None:
        """Make room for so many more keys, each new and in all of these tiers (bits)."""
        self.totals[kernels.LOWER] |= media >> kernels.HOST
        rows, twins = self.totals[: kernels.TOP].tolist()
        size = len(self.rows) - 1
        while rows + keys > size:
            size *= _GROWTH
        if (size + 1, self._columns(self.words)) != self.rows.shape:
            self._rebuild(size, self.words)
        # Each key may come with all its tiers, and each of these be a twin.
        size = len(self.twins)
        if 2 * (twins + kernels.TIERS * keys) > size:
            while 2 * (twins + kernels.TIERS * keys) > size:
                size *= 2
            before, self.twins = self.twins, np.zeros((size, 3), dtype=np.uint64)
            kernels.rehash_twins(before, self.twins)

    def _columns(self, words: int) -> int:
        """How many columns rows should have, with so many words of a tier."""
        lower = self.totals.item(kernels.LOWER) != 0
        return 1 + words * (kernels.TIERS if lower or words == 1 else 1)

    def _rebuild(self, size: int, words: int) -> None:
        rows = self.rows
        self.rows = np.zeros((size + 1, self._columns(words)), dtype=np.uint64)
        kernels.widen(rows, self.rows)
        self.words = words
        self.slots = roomy(self.slots, size, TABLE)

    def _scratch(self) -> None:
        self._planes: Words = np.zeros((3, 32, self.words), dtype=np.uint64)
        self._runs: Counts = np.zeros(64 * self.words, dtype=np.int64)
