"""Copy: device blocks that were copied into staging rows, until somebody says what they are."""

from __future__ import annotations

import numpy as np

from pigou.kv.checksum import Checksums
from pigou.request import Ints
from pigou.runtime.stores.entries import Bools, Entries
from pigou.runtime.stores.host import HostStore


class Copy:
    """Staged blocks, by their position in the call of `Mover.copy_out`; for one thread at a time.

    Attributes:
        good: which were copied, shape (n,); all, unless there is a reason.
        reason: why not.
        sums: checksums of what was copied, shape (n,).
    """

    def __init__(self, host: HostStore, rows: Ints) -> None:
        """Own `rows`, staged rows of the host store."""
        self.good: Bools = np.zeros(len(rows), dtype=np.bool_)
        self.reason = ""
        self.sums: Checksums = np.zeros(len(rows), dtype=np.uint64)
        self._host = host
        self._rows = rows
        self._held: Bools = np.ones(len(rows), dtype=np.bool_)

    def __len__(self) -> int:
        """Blocks that were asked for."""
        return len(self._rows)

    def publish(self, index: Ints, entries: Entries) -> Bools:
        """Make blocks of the copy blocks of the host store, at once and without copying.

        Args:
            index: which of the copy's blocks, shape (n,); they leave it.
            entries: of these.

        Returns:
            Which are in the store now, shape (n,); False: no room, or void.
        """
        rows, sums = self.take(index)
        return self._host.publish(entries, rows, sums)

    def take(self, index: Ints) -> tuple[Ints, Checksums]:
        """Take blocks out of the copy; returns their rows and checksums.

        Raises:
            ValueError: one of them was not copied, is there twice, or has left already.
        """
        if not (self._held & self.good)[index].all() or len(np.unique(index)) != len(index):
            raise ValueError(f"blocks {index.tolist()} of the copy are not all there, once")
        self._held[index] = False
        return self._rows[index], self.sums[index]

    def put_back(self, index: Ints) -> None:
        """Undo `take`."""
        self._held[index] = True

    def drop(self) -> None:
        """Let go of what is left; the second time there is nothing."""
        self._host.drop(self._rows[self._held])
        self._held[:] = False
