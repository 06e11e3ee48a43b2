"""Landing: where pulled blocks arrive, and where each one is verified before it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from pigou.kv import checksum
from pigou.kv.block import Bytes
from pigou.kv.checksum import Checksums
from pigou.request import Ints
from pigou.worker.kv_transfer.block_store import BlockStore
from pigou.worker.kv_transfer.result import TransferError, TransferReason

#: Bytes that are moved before they are verified: few enough to be in the cache still.
CHUNK_BYTES = 512 << 10
#: Bytes that one call copies and digests at once, without the GIL; some 200 microseconds.
COPY_BYTES = 4 << 20


class ReceiveBuffer:
    """Destination blocks of one pull; several threads may fill different parts at once.

    Blocks are digested as they arrive, while they are in the cache, and verified as soon as the
    sender's checksums are known, which may be before or after.
    """

    def __init__(
        self, store: BlockStore, dest: Ints, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        self.good = 0
        self.block_bytes = store.layout.block_bytes
        self._store = store
        self._dest = dest
        self._cancelled = cancelled
        self._rows = store.as_bytes()
        self._lock = threading.Lock()
        self._digests: Checksums = np.zeros(len(dest), dtype=np.uint64)
        self._arrived = np.zeros(len(dest) + 1, dtype=np.bool_)  # the last stays False
        self._wanted: Checksums | None = None

    def __len__(self) -> int:
        return len(self._dest)

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut blocks `first` to `last` (default all) into (first, count) of a size good to move."""
        return self._cut(first, len(self) if last is None else last, CHUNK_BYTES)

    def copies(self) -> Iterator[tuple[int, int]]:
        """Cut all blocks into (first, count) of a size good for `copy`."""
        return self._cut(0, len(self), CHUNK_BYTES if self._rows is None else COPY_BYTES)

    def _cut(self, first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
        step = max(1, size // self.block_bytes)
        return ((i, min(step, last - i)) for i in range(first, last, step))

    def targets(self, first: int, count: int) -> list[Bytes]:
        """Where blocks `first` to `first + count` belong: runs in order, each (n, block_bytes).

        What is written there counts only after `accept`.
        """
        if self._rows is None:
            return [np.empty((count, self.block_bytes), dtype=np.uint8)]
        return runs_of(self._rows, self._dest[first : first + count])

    def accept(self, first: int, targets: list[Bytes]) -> None:
        """Take the blocks from `first` on, now that they are written to `targets(first, ...)`.

        Raises:
            TransferError: CORRUPT at the first block that is not what was offered (those before
                it count); STORE, when the store cannot take them; CANCELLED.
        """
        self._check()
        count = sum(len(run) for run in targets)
        if self._rows is None:
            digests = checksum.checksums_of(targets[0], np.arange(count, dtype=np.int32))
            self._write(first, targets[0])
        else:
            digests = checksum.checksums_of(self._rows, self._dest[first : first + count])
        self._note(first, digests)

    def copy(self, first: int, source: Bytes, ids: Ints) -> None:
        """Copy the rows `ids` of `source`, C-contiguous, to the blocks from `first` on.

        Each byte is read once, and digested as it is written.

        Raises:
            TransferError: as `accept`.
        """
        if self._rows is None:
            targets = self.targets(first, len(ids))
            np.take(source, ids, axis=0, out=targets[0])
            self.accept(first, targets)
            return
        self._check()
        places = self._dest[first : first + len(ids)]
        self._note(first, checksum.copy(source, ids, self._rows, places))

    def _check(self) -> None:
        if self._cancelled():
            raise TransferError(TransferReason.CANCELLED, "nobody waits for these blocks any more")

    def _note(self, first: int, digests: Checksums) -> None:
        with self._lock:
            self._digests[first : first + len(digests)] = digests
            self._arrived[first : first + len(digests)] = True
            self._verify()

    def verify(self, checksums: Checksums) -> None:
        """Learn what the blocks should be, shape (len(self),): those there, and those to come.

        Raises:
            TransferError: CORRUPT at the first that is not what was offered.
        """
        with self._lock:
            self._wanted = checksums
            self._verify()

    def _verify(self) -> None:
        if self._wanted is None:
            return
        last = self.good + int(self._arrived[self.good :].argmin())
        wrong = self._digests[self.good : last] != self._wanted[self.good : last]
        if not wrong.any():
            self.good = last
            return
        self.good += int(wrong.argmax())
        raise TransferError(TransferReason.CORRUPT, f"block {self.good} is not what was offered")

    def _write(self, first: int, data: Bytes) -> None:
        try:
            self._store.write(self._dest[first : first + len(data)], data)
        except Exception as error:
            raise TransferError(TransferReason.STORE, f"cannot write blocks: {error!r}") from error


def runs_of(rows: Bytes, ids: Ints) -> list[Bytes]:
    """Views of the rows `ids`, in order, consecutive ids merged; each of shape (n, row bytes)."""
    cuts = (ids[1:] - ids[:-1] != 1).nonzero()[0] + 1
    edges = [0, *cuts.tolist(), len(ids)]
    return [rows[int(ids[a]) : int(ids[a]) + (b - a)] for a, b in pairwise(edges) if b > a]
