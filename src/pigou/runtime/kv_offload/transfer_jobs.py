"""Jobs: what links run, made of copies between the device, the arena and the stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.kv import checksum
from pigou.kv.block import Bytes, KVLayout
from pigou.kv.checksum import Checksums
from pigou.request import BlockHashes, Ints
from pigou.runtime.kv_offload.host_store import HostStore
from pigou.runtime.kv_offload.records import BlockRecords, Bools
from pigou.runtime.kv_offload.store import Store
from pigou.runtime.kv_offload.transfer_queue import OffloadResult, TransferJob

Done: TypeAlias = Callable[[OffloadResult], None]

#: Reason of a job that found no staging row.
NO_ROWS = "no staging row is free"


class TransferJobs:
    """Makes jobs; what they need of the arena they take when they run, unless it is given."""

    def __init__(self, device: DeviceBlocks, host: HostStore, batch: int) -> None:
        """Copy by way of the host store's arena, `batch` blocks at once."""
        self._device = device
        self._host = host
        self._batch = batch

    def copy_out(
        self, blocks: Ints, rows: Ints, copy: StagedCopy, done: Callable[[StagedCopy], None]
    ) -> TransferJob:
        """Copy device blocks into the rows of a copy."""

        def run() -> None:
            for part in self._parts(len(blocks)):
                sums = copy_out(self._device, blocks[part], self._host.arena, rows[part])
                copy.sums[part] = sums
                job.good[part] = True

        def end(moved: OffloadResult) -> None:
            copy.good, copy.reason = moved.good, moved.reason
            done(copy)

        job = TransferJob(nobody(len(blocks)), run, _nothing, end)
        return job

    def put(
        self,
        entries: BlockRecords,
        rows: Ints,
        sums: Checksums,
        target: Store,
        release: Callable[[], None],
        done: Done | None,
    ) -> TransferJob:
        """Put rows of the arena into a store; rows of -1 are missing."""

        def run() -> None:
            for part in self._parts(len(entries)):
                present = np.flatnonzero(rows[part] >= 0) + part.start
                self._put(job, present, entries.take(present), target, rows[present], sums[present])

        job = TransferJob(nobody(len(entries)), run, release, done or _ignore)
        return job

    def between(
        self, entries: BlockRecords, source: Store, target: Store, done: Done | None
    ) -> TransferJob:
        """Read from one store into staging rows, and put these into another."""

        def run() -> None:
            for part in self._parts(len(entries)):
                rows = self._host.stage(part.stop - part.start)
                if rows is None:
                    job.reason = NO_ROWS
                    return
                try:
                    good = source.get(entries.keys[part], self._host.arena, rows)
                    index = np.flatnonzero(good) + part.start
                    self._put(job, index, entries.take(index), target, rows[good], None)
                finally:
                    self._host.drop(rows)

        job = TransferJob(nobody(len(entries)), run, _nothing, done or _ignore)
        return job

    def restore(self, keys: BlockHashes, source: Store, blocks: Ints, done: Done) -> TransferJob:
        """Read from a store into device blocks: straight, where these are host memory."""
        data = self._device.as_bytes()

        def run() -> None:
            for part in self._parts(len(keys)):
                if data is not None:
                    job.good[part] = source.get(keys[part], data, blocks[part])
                    continue
                rows = self._host.stage(part.stop - part.start)
                if rows is None:
                    job.reason = NO_ROWS
                    return
                try:
                    good = source.get(keys[part], self._host.arena, rows)
                    copy_in(self._device, blocks[part][good], self._host.arena, rows[good])
                    job.good[part] = good
                finally:
                    self._host.drop(rows)

        job = TransferJob(nobody(len(keys)), run, _nothing, done)
        return job

    def restore_rows(self, rows: Ints, blocks: Ints, done: Done) -> TransferJob:
        """Copy pinned rows of the host store into device blocks; rows of -1 are missing."""
        host = self._host

        def run() -> None:
            for part in self._parts(len(rows)):
                present = np.flatnonzero(rows[part] >= 0) + part.start
                sums = copy_in(self._device, blocks[present], host.arena, rows[present])
                job.good[present] = host.verify(rows[present], sums)
            host.missed(int(np.count_nonzero(rows < 0)))

        def release() -> None:
            host.unpin(rows)

        job = TransferJob(nobody(len(rows)), run, release, done)
        return job

    def _put(
        self,
        job: TransferJob,
        index: NDArray[np.int64],
        entries: BlockRecords,
        target: Store,
        rows: Ints,
        sums: Checksums | None,
    ) -> None:
        try:
            job.good[index] = target.put(entries, self._host.arena, rows, sums)
        except BaseException:  # part of them may be there
            job.good[index] = target.has(entries.keys)
            raise

    def _parts(self, count: int) -> Iterator[slice]:
        return (slice(i, min(i + self._batch, count)) for i in range(0, count, self._batch))


def delete(store: Store, keys: BlockHashes) -> TransferJob:
    """Delete blocks of a store, whatever its state."""

    def run() -> None:
        store.delete(keys)

    return TransferJob(nobody(0), run, _nothing, _ignore, patient=True)


def survey(store: Store, done: Callable[[BlockRecords | None], None]) -> TransferJob:
    """Ask a store for its entries."""
    records: list[BlockRecords] = []

    def run() -> None:
        records.append(store.entries())

    def end(_moved: OffloadResult) -> None:
        done(records[0] if records else None)

    return TransferJob(nobody(0), run, _nothing, end)


def nobody(count: int) -> Bools:
    """Return that none of `count` blocks has arrived."""
    return np.zeros(count, dtype=np.bool_)


def _nothing() -> None:
    """Nothing is to be given back."""


def _ignore(_moved: OffloadResult) -> None:
    """Nobody wants to know."""


class StagedCopy:
    """Staged blocks, by their position in the call of `KVOffloader.copy_out`; for one thread at a
    time.

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

    def publish(self, index: Ints, entries: BlockRecords) -> Bools:
        """Make blocks of the copy blocks of the host store, at once and without copying.

        Args:
            index: which of the copy's blocks, shape (n,); they leave it.

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


class DeviceBlocks(Protocol):
    """A KV cache seen as bytes: `pigou.runtime.kv_cache.KVCache`, or an array of a test."""

    @property
    def layout(self) -> KVLayout:
        """How a block lies in memory."""
        ...

    def as_bytes(self) -> Bytes | None:
        """All blocks without a copy, shape (blocks, block_bytes); None if not in host memory."""
        ...

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks out, shape (n, block_bytes), in the order of `ids`."""
        ...

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, shape (n, block_bytes), into the blocks `ids`."""
        ...


def copy_out(blocks: DeviceBlocks, ids: Ints, arena: Bytes, rows: Ints) -> Checksums:
    """Copy the blocks `ids` into rows of an arena; returns checksums of what was copied.

    In host memory the blocks are read once, free of the GIL.
    """
    data = blocks.as_bytes()
    if data is not None:
        return checksum.copy(data, ids, arena, rows)
    arena[rows] = blocks.read(ids)
    return checksum.checksums_of(arena, rows)


def copy_in(blocks: DeviceBlocks, ids: Ints, arena: Bytes, rows: Ints) -> Checksums:
    """Copy rows of an arena into the blocks `ids`; returns checksums of what was copied."""
    data = blocks.as_bytes()
    if data is not None:
        return checksum.copy(arena, rows, data, ids)
    sums = checksum.checksums_of(arena, rows)
    blocks.write(ids, np.ascontiguousarray(arena[rows]))
    return sums


def make_arena(blocks: DeviceBlocks, rows: int) -> Bytes:
    """Allocate host memory for `rows` blocks, shape (rows, block_bytes).

    It is pinned where the blocks are not in host memory themselves.
    """
    shape = (rows, blocks.layout.block_bytes)
    if blocks.as_bytes() is not None:
        return np.zeros(shape, dtype=np.uint8)
    import torch  # not needed for blocks in host memory

    return np.asarray(torch.zeros(shape, dtype=torch.uint8, pin_memory=True).numpy())
