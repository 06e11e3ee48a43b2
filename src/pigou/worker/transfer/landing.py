"""Landing: where pulled blocks arrive, and where each one is verified before it counts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from xxhash import xxh3_64_intdigest

from pigou.request import Ints
from pigou.worker.transfer.checksum import Checksums
from pigou.worker.transfer.outcome import Reason, TransferError
from pigou.worker.transfer.store import BlockStore, Bytes

#: Bytes that are moved before they are verified: few enough to be in the cache still.
CHUNK_BYTES = 256 << 10


class Landing:
    """Destination blocks of one pull, filled from the first to the last.

    Attributes:
        good: leading blocks that arrived and are verified.
    """

    def __init__(
        self,
        store: BlockStore,
        dest: Ints,
        checksums: Checksums,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Expect `len(dest)` blocks with these checksums."""
        self.good = 0
        self.block_bytes = store.layout.block_bytes
        self._store = store
        self._dest = dest
        self._checksums = checksums
        self._cancelled = cancelled
        self._rows = store.as_bytes()
        self._stage = np.empty((0, self.block_bytes), dtype=np.uint8)

    @property
    def left(self) -> int:
        """Blocks that are still to come."""
        return len(self._dest) - self.good

    @property
    def chunk(self) -> int:
        """Blocks that are best moved at once; 0 when none are left."""
        return min(self.left, max(1, CHUNK_BYTES // self.block_bytes))

    def targets(self, count: int) -> list[Bytes]:
        """Where the next `count` blocks belong: consecutive runs, each of shape (n, block_bytes).

        What is written there counts only after `accept`.
        """
        if self._rows is None:
            if len(self._stage) < count:
                self._stage = np.empty((count, self.block_bytes), dtype=np.uint8)
            return [self._stage[:count]]
        return runs_of(self._rows, self._dest[self.good : self.good + count])

    def accept(self, count: int) -> None:
        """Verify the next `count` blocks, now that they are written.

        Raises:
            TransferError: CORRUPT at the first block that is not what was offered (those before
                it count); STORE, when the store cannot take them; CANCELLED.
        """
        if self._cancelled():
            raise TransferError(Reason.CANCELLED, "nobody waits for these blocks any more")
        wanted = self._checksums[self.good : self.good + count].tolist()
        rows = [row for run in self.targets(count) for row in run]
        digests = (xxh3_64_intdigest(row) for row in rows)
        same = zip(digests, wanted, strict=True)
        good = next((i for i, (got, want) in enumerate(same) if got != want), count)
        if self._rows is None and good:
            self._write(good)
        self.good += good
        if good < count:
            raise TransferError(Reason.CORRUPT, f"block {self.good} is not what was offered")

    def _write(self, count: int) -> None:
        try:
            self._store.write(self._dest[self.good : self.good + count], self._stage[:count])
        except Exception as error:
            raise TransferError(Reason.STORE, f"cannot write blocks: {error!r}") from error


def runs_of(rows: Bytes, ids: Ints) -> list[Bytes]:
    """Views of the rows `ids`, in order, consecutive ids merged; each of shape (n, row bytes)."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    edges = [0, *cuts.tolist(), len(ids)]
    return [rows[int(ids[a]) : int(ids[a]) + (b - a)] for a, b in pairwise(edges) if b > a]
