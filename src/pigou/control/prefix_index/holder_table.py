"""The holder table: which workers hold which key, in which tiers, and how long their runs are."""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import (
    NONE,
    ONE,
    TABLE_SLOTS,
    Counts,
    Row,
    Words,
    grow_slots,
    new_slots,
)
from pigou.control.prefix_index.holder_rows import (
    BELOW_DEVICE,
    BITS,
    DUP_WIDTH,
    DUPLICATES,
    HOST,
    ROWS,
    STORAGE,
    TIERS,
    TOTALS,
    TableArrays,
    TableTuple,
    add_holder,
    drop_holder,
    rehash_duplicates,
    row_of,
    widen,
)
from pigou.control.prefix_index.worker_entries import CHANGED_KEY, CHANGED_MEDIA, BlockChanges
from pigou.request import BlockKeys

#: The number of a worker of which nothing is known.
UNKNOWN_WORKER = -1
#: Rows of overlaps: blocks of the run by their best tier, and the whole run.
ON_DEVICE, ON_HOST, ON_STORAGE, RUN = range(4)
#: Planes of a walk: counts of blocks best held on the host and in storage, and who is still in.
HOST_PLANE, STORAGE_PLANE, ALIVE_PLANE = range(3)

_MIN_ROWS = 1024
_MIN_DUPLICATES = 64
#: Rows grow by this factor: the old ones are copied, and both are in memory meanwhile.
_GROWTH = 4


class Overlaps:
    """Leading run of blocks that each worker holds, by the best tier of each block.

    Attributes:
        rows: its four properties by the names above, shape (4, workers).
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Counts) -> None:
        self.rows = rows  # cut when asked for: four views take as long as a short walk

    @property
    def device(self) -> Counts:
        """Blocks of the run in device memory, shape (workers,)."""
        row: Counts = self.rows[ON_DEVICE]
        return row

    @property
    def host(self) -> Counts:
        """Those in host memory, and not above."""
        row: Counts = self.rows[ON_HOST]
        return row

    @property
    def storage(self) -> Counts:
        """Those in storage only."""
        row: Counts = self.rows[ON_STORAGE]
        return row

    @property
    def run(self) -> Counts:
        """Length of the run, in any tier."""
        row: Counts = self.rows[RUN]
        return row


class HolderTable:
    """Key to workers and tiers, one bit each; workers are small numbers from 0.

    Attributes:
        words: of a tier in each row.
        arrays: fields of `TableArrays`, for kernels.
    """

    def __init__(self) -> None:
        self.words = 1
        self._totals: Counts = np.zeros(TOTALS, dtype=np.int64)
        self.arrays: TableTuple = (
            np.zeros((_MIN_ROWS + 1, BITS + TIERS), dtype=np.uint64),
            new_slots(_MIN_ROWS, TABLE_SLOTS),
            np.zeros((_MIN_DUPLICATES, DUP_WIDTH), dtype=np.uint64),
            self._totals,
        )
        self._new_scratch()

    @property
    def keys(self) -> int:
        """Different keys that any worker holds."""
        return int(self._totals[ROWS])

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        rows, slots, duplicates, _ = self.arrays
        return rows.nbytes + slots.nbytes + duplicates.nbytes

    def admit(self, worker: int) -> None:
        """Make room for the bits of a worker."""
        words = self.words
        while worker >= 64 * words:
            words *= 2
        if words != self.words:
            self._rebuild(len(TableArrays(*self.arrays).rows) - 1, words)
            self._new_scratch()

    def change(self, worker: int, changes: BlockChanges) -> None:
        """Add and drop a worker, by its number, as holder of keys.

        What is lost was gained before, or is gained by this call.
        """
        gained, lost = changes.gained, changes.lost
        self.reserve(len(gained), int(np.bitwise_or.reduce(gained[:, CHANGED_MEDIA])))
        change_holders(self.arrays, worker, gained, lost)

    def overlaps(self, workers: Counts, keys: BlockKeys) -> Overlaps:
        """Return how much of a chain each worker holds.

        Args:
            workers: their numbers, shape (workers,).
            keys: of the chain, contiguous, shape (blocks,).
        """
        out = np.empty((4, len(workers)), dtype=np.int64)
        walk(self.arrays[0], self.arrays[1], keys, workers, self._planes, self._runs, out)
        return Overlaps(out)

    def reserve(self, keys: int, media: int) -> None:
        """Make room for so many more keys, each new and in all of these tiers (bits)."""
        self._totals[BELOW_DEVICE] |= media >> HOST
        used_rows, used_duplicates = self._totals.item(ROWS), self._totals.item(DUPLICATES)
        shape = TableArrays(*self.arrays).rows.shape
        size = shape[0] - 1
        while used_rows + keys > size:
            size *= _GROWTH
        if (size + 1, self._columns(self.words)) != shape:
            self._rebuild(size, self.words)
        # Each key may come with all its tiers, and each of these be a duplicate.
        rows, slots, duplicates, totals = self.arrays
        size = len(duplicates)
        if 2 * (used_duplicates + TIERS * keys) > size:
            while 2 * (used_duplicates + TIERS * keys) > size:
                size *= 2
            more = np.zeros((size, DUP_WIDTH), dtype=np.uint64)
            rehash_duplicates(duplicates, more)
            self.arrays = rows, slots, more, totals

    def _columns(self, words: int) -> int:
        """How many columns rows should have, with so many words of a tier."""
        below_device = self._totals.item(BELOW_DEVICE) != 0
        return BITS + words * (TIERS if below_device or words == 1 else 1)

    def _rebuild(self, size: int, words: int) -> None:
        old, slots, duplicates, totals = self.arrays
        rows = np.zeros((size + 1, self._columns(words)), dtype=np.uint64)
        widen(old, rows)
        self.words = words
        self.arrays = rows, grow_slots(slots, size, TABLE_SLOTS), duplicates, totals

    def _new_scratch(self) -> None:
        self._planes: Words = np.zeros((3, 32, self.words), dtype=np.uint64)
        self._runs: Counts = np.zeros(64 * self.words, dtype=np.int64)


# --- changes --------------------------------------------------------------------------------


@bare_kernel
def change_holders(arrays: TableTuple, worker: int, gained: Words, lost: Words) -> None:
    """Add what a worker holds once more, and then drop what it holds once less.

    Args:
        gained, lost: keys and tiers (bits), shape (any, 2).
    """
    table = TableArrays(*arrays)
    row = NONE
    for i in range(gained.shape[0]):
        media: int = np.int64(gained[i, CHANGED_MEDIA])  # type: ignore[assignment]
        row = add_holder(table, worker, gained[i, CHANGED_KEY], media, row)
    row = NONE
    for i in range(lost.shape[0]):
        media = np.int64(lost[i, CHANGED_MEDIA])  # type: ignore[assignment]
        row = drop_holder(table, worker, lost[i, CHANGED_KEY], media, row)


# --- walks ----------------------------------------------------------------------------------


@inlined
def count_workers(planes: Words, w: int, mask: np.uint64) -> None:
    """Add one to each worker of a mask; bit b of planes[j, w] is bit j of worker b's count."""
    carry, j = mask, 0
    while carry != 0:
        over = planes[j, w] & carry
        planes[j, w] ^= carry
        carry = over
        j += 1


@inlined
def count_of(planes: Words, worker: int) -> int:
    """Return the count of a worker."""
    count, bit = 0, np.uint64(worker % 64)
    for j in range(planes.shape[0]):
        count |= np.int64((planes[j, worker // 64] >> bit) & ONE) << j  # type: ignore[assignment]
    return count


@inlined
def write_run(mask: np.uint64, w: int, length: int, runs: Counts) -> None:
    """Write the run of each worker of a mask."""
    worker = 64 * w
    while mask != 0:
        if mask & ONE:
            runs[worker] = length
        mask >>= ONE
        worker += 1


@inlined
def lower_holders(
    rows: Words, row: Row, w: int, words: int, mask: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Of the workers of a mask, those that hold a row in host memory, and in storage at best."""
    if rows.shape[1] == BITS + words:
        return NONE, NONE
    host = rows[row, BITS + HOST * words + w] & mask
    return host, rows[row, BITS + STORAGE * words + w] & mask & ~host


@bare_kernel
def walk(
    rows: Words,
    slots: Words,
    keys: BlockKeys,
    workers: Counts,
    planes: Words,
    runs: Counts,
    out: Counts,
) -> None:
    """Walk down a chain until none of some workers holds the next block.

    Args:
        workers: numbers of those workers, shape (n,); `UNKNOWN_WORKER` holds nothing.
        planes, runs: scratch, shapes (3, 32, words) and (64 words,); planes are zeros, before
            and after.
        out: takes the overlaps by the names of rows above, shape (4, n).
    """
    words = planes.shape[2]
    depth, row, lower = 0, NONE, False
    alive = planes[ALIVE_PLANE, 0]
    for worker in workers:
        if worker != UNKNOWN_WORKER:
            alive[worker // 64] |= ONE << np.uint64(worker % 64)
    for i in range(keys.shape[0]):
        row = row_of(rows, slots, keys[i], row)
        if row == 0:
            break
        any_alive = NONE
        for w in range(words):
            holders = alive[w]
            off_device = holders & ~rows[row, BITS + w]
            if off_device != 0:
                host, storage = lower_holders(rows, row, w, words, off_device)
                ended = off_device & ~host & ~storage
                write_run(ended, w, i, runs)
                count_workers(planes[HOST_PLANE], w, host)
                count_workers(planes[STORAGE_PLANE], w, storage)
                lower = lower or ended != off_device
                holders &= ~ended
                alive[w] = holders
            any_alive |= holders
        if any_alive == 0:
            break
        depth = i + 1
    for w in range(words):
        write_run(alive[w], w, depth, runs)
    for k in range(workers.shape[0]):
        out[ON_DEVICE, k] = out[RUN, k] = runs[workers[k]] if workers[k] != UNKNOWN_WORKER else 0
        out[ON_HOST, k] = 0
        out[ON_STORAGE, k] = 0
    alive[:] = 0
    if lower:
        for k in range(workers.shape[0]):
            if workers[k] == UNKNOWN_WORKER:
                continue
            out[ON_HOST, k] = count_of(planes[HOST_PLANE], workers[k])
            out[ON_STORAGE, k] = count_of(planes[STORAGE_PLANE], workers[k])
            out[ON_DEVICE, k] -= out[ON_HOST, k] + out[ON_STORAGE, k]
        planes[:] = 0
