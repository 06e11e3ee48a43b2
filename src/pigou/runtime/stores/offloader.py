"""KVOffloader: moves blocks between the device, host memory and further stores, off the step path.

Each link is one thread and one bounded queue, so methods return at once. False means refused;
otherwise `done` is called once, on the link's thread, even on failure or `close`. A block that is
not `good` is gone, unless `reason` names a link failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.kv import checksum
from pigou.kv.block import Bytes
from pigou.kv.checksum import Checksums
from pigou.request import SECOND, BlockHashes, Ints
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.store import BlockRecords, Bools, DeviceBlocks, Store, StoreCounts
from pigou.runtime.stores.transfer_queue import (
    CircuitBreaker,
    OffloadResult,
    TransferJob,
    TransferQueue,
    TransferQueueStatus,
    TransferRate,
    ignore,
)

log = logging.getLogger(__name__)

DEVICE = "device"
HOST = "host"
#: Reason when the second half of a job was refused.
REFUSED = "its link is busy or down"
Done: TypeAlias = Callable[[OffloadResult], None]
#: Reason when no staging row is free.
NO_ROWS = "no staging row is free"


class KVOffloader:
    """Copies blocks between the device and stores; `kv/tiers.py` decides which.

    Offload with `copy_out`, then `StagedCopy.publish` or `send`, and always `StagedCopy.drop`;
    `demote` does this for held blocks.
    """

    def __init__(
        self, device: DeviceBlocks, host: HostStore, stores: Mapping[str, Store] | None = None,
        settings: OffloaderSettings | None = None, *, clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:  # fmt: skip
        """Start the threads; own the stores. Raises ValueError on a block size or name conflict."""
        self._settings = settings or OffloaderSettings()
        self._clock = clock
        self._host = host
        others = dict(stores or {})
        if taken := {DEVICE, HOST} & set(others):
            raise ValueError(f"a store is named {sorted(taken)[0]}; choose another name")
        self.stores: dict[str, Store] = {HOST: host, **others}
        size = device.layout.block_bytes
        for name, store in self.stores.items():
            if store.block_bytes != size:
                raise ValueError(f"{name} has blocks of {store.block_bytes} bytes, not of {size}")
        self._device = device
        self._reads: dict[str, TransferQueue] = {}
        self._writes: dict[str, TransferQueue] = {}
        for name, store in self.stores.items():
            near = DEVICE if name == HOST else HOST
            self._reads[name] = self._link(name, f"{name}->{near}", store)
            self._writes[name] = self._link(name, f"{near}->{name}", store)

    def copy_out(self, blocks: Ints, done: Callable[[StagedCopy], None]) -> bool:
        """Copy device blocks into staging rows; call `done(copy)` once they have been read."""
        rows = self._host.stage(len(blocks))
        if rows is None:
            return False
        copy = StagedCopy(self._host, rows)

        def run() -> None:
            for part in self._parts(len(blocks)):
                copy.sums[part] = copy_out(self._device, blocks[part], self._host.arena, rows[part])
                job.good[part] = True

        def end(moved: OffloadResult) -> None:
            copy.good, copy.reason = moved.good, moved.reason
            done(copy)

        job = TransferJob(nobody(len(blocks)), run, done=end)
        if self._writes[HOST].offer(job):
            return True
        copy.drop()
        return False

    def send(
        self, copy: StagedCopy, index: Ints, entries: BlockRecords, target: str, done: Done = ignore
    ) -> bool:
        """Write staged blocks, positions `index` (n,), to a store other than the host store."""
        rows, sums = copy.take(index)
        release = partial(self._host.drop, rows)
        job = self._put_rows(entries, rows, sums, self.stores[target], release, done)
        if self._writes[target].offer(job):
            return True
        copy.put_back(index)
        return False

    def demote(self, blocks: Ints, entries: BlockRecords, target: str, done: Done) -> bool:
        """Copy device blocks, ids (n,), to a store; the caller holds them until `done`."""

        def copied(copy: StagedCopy) -> None:
            index = np.flatnonzero(copy.good).astype(np.int32)
            good, reason = nobody(len(entries)), copy.reason
            if target == HOST:
                good[index] = copy.publish(index, entries.take(index))
            elif not reason and self.send(copy, index, entries, target, done):
                return
            copy.drop()
            done(OffloadResult(good, reason or ("" if target == HOST else REFUSED)))

        return self.copy_out(blocks, copied)

    def move(self, entries: BlockRecords, source: str, target: str, done: Done = ignore) -> bool:
        """Copy blocks between stores; deletes nothing. Host blocks are pinned from this call on."""
        if source == target:
            raise ValueError(f"the blocks are to be moved from {source} to {target}")
        if source != HOST:
            link = self._reads[source] if target == HOST else self._writes[target]
            job = self._between(entries, self.stores[source], self.stores[target], done)
            return link.offer(job)
        rows = self._host.pin(entries.keys)
        sums, release = self._host.sums(rows), partial(self._host.unpin, rows)
        job = self._put_rows(entries, rows, sums, self.stores[target], release, done)
        if self._writes[target].offer(job):
            return True
        release()
        return False

    def restore(self, keys: BlockHashes, source: str, blocks: Ints, done: Done) -> bool:
        """Copy and verify blocks, keys (n, 2), into device blocks (n,), held until `done`."""
        if source != HOST:
            return self._reads[source].offer(self._read(keys, self.stores[source], blocks, done))
        rows = self._host.pin(keys)
        if self._reads[HOST].offer(self._read_rows(rows, blocks, done)):
            return True
        self._host.unpin(rows)
        return False

    def delete(self, name: str, keys: BlockHashes) -> None:
        """Delete blocks of a store, in order with its writes; never refused."""
        if name == HOST:
            self._host.delete(keys)
            return
        run = partial(self.stores[name].delete, keys)
        self._writes[name].offer(TransferJob(nobody(0), run, patient=True))

    def survey(self, name: str, done: Callable[[BlockRecords | None], None]) -> bool:
        """List a store's entries on its thread; `done` gets None if that fails."""
        records: list[BlockRecords] = []

        def run() -> None:
            records.append(self.stores[name].entries())

        def end(_moved: OffloadResult) -> None:
            done(records[0] if records else None)

        return self._reads[name].offer(TransferJob(nobody(0), run, done=end))

    def seconds(self, source: str, target: str, blocks: int) -> float:
        """Return the expected seconds to move `blocks` blocks now, queueing included."""
        if source == DEVICE:
            first = self._writes[HOST].seconds(blocks)
            return first if target == HOST else first + self._writes[target].seconds(blocks)
        if target in (DEVICE, HOST):
            return self._reads[source].seconds(blocks)
        return self._writes[target].seconds(blocks)

    def law(self, source: str) -> tuple[float, float]:
        """Return a store's measured read latency and seconds per block."""
        return self._reads[source].law()

    def status(self) -> dict[str, StoreStatus]:
        """Return each store's status by name."""
        statuses = {}
        for name, store in self.stores.items():
            reads, writes = self._reads[name].status(), self._writes[name].status()
            statuses[name] = StoreStatus(
                up=reads.up and writes.up, reason=reads.reason or writes.reason,
                used_bytes=store.used_bytes, cap_bytes=store.cap_bytes, capacity=store.capacity,
                counts=replace(store.counts), reads=reads, writes=writes,
            )  # fmt: skip
        return statuses

    def close(self) -> None:
        """Drain the queues for up to `close_seconds`, end the threads, close the stores."""
        end = time.monotonic() + self._settings.close_seconds
        busy = [
            link.name
            for link in (*self._writes.values(), *self._reads.values())
            if not link.close(max(0.0, end - time.monotonic()))
        ]
        if busy:
            log.warning("still at work after %g s: %s", self._settings.close_seconds, busy)
        for name, store in self.stores.items():
            if not any(name in link.split("->") for link in busy):
                store.close()

    def _put_rows(
        self, entries: BlockRecords, rows: Ints, sums: Checksums, target: Store,
        release: Callable[[], None], done: Done,
    ) -> TransferJob:  # fmt: skip
        """Put arena rows into a store; a row of -1 is missing."""

        def run() -> None:
            for part in self._parts(len(entries)):
                present = np.flatnonzero(rows[part] >= 0) + part.start
                self._put(job, present, entries.take(present), target, rows[present], sums[present])

        job = TransferJob(nobody(len(entries)), run, release, done)
        return job

    def _between(
        self, entries: BlockRecords, source: Store, target: Store, done: Done
    ) -> TransferJob:
        """Copy blocks from one store to another through staging rows."""

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

        job = TransferJob(nobody(len(entries)), run, done=done)
        return job

    def _read(self, keys: BlockHashes, source: Store, blocks: Ints, done: Done) -> TransferJob:
        """Read blocks into device blocks, without staging where these are host memory."""
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

        job = TransferJob(nobody(len(keys)), run, done=done)
        return job

    def _read_rows(self, rows: Ints, blocks: Ints, done: Done) -> TransferJob:
        """Copy pinned rows of the host store into device blocks; a row of -1 is missing."""
        host = self._host

        def run() -> None:
            for part in self._parts(len(rows)):
                present = np.flatnonzero(rows[part] >= 0) + part.start
                sums = copy_in(self._device, blocks[present], host.arena, rows[present])
                job.good[present] = host.verify(rows[present], sums)
            host.missed(int(np.count_nonzero(rows < 0)))

        job = TransferJob(nobody(len(rows)), run, partial(host.unpin, rows), done)
        return job

    def _put(
        self, job: TransferJob, index: NDArray[np.int64], entries: BlockRecords, target: Store,
        rows: Ints, sums: Checksums | None,
    ) -> None:  # fmt: skip
        try:
            job.good[index] = target.put(entries, self._host.arena, rows, sums)
        except BaseException:  # some may have been stored
            job.good[index] = target.has(entries.keys)
            raise

    def _parts(self, count: int) -> Iterator[slice]:
        step = self._settings.batch
        return (slice(i, min(i + step, count)) for i in range(0, count, step))

    def _link(self, name: str, title: str, store: Store) -> TransferQueue:
        settings = self._settings
        latency, speed = settings.guesses.get(name, settings.guesses.get("other", (3e-2, 1e8)))
        return TransferQueue(
            title, CircuitBreaker(settings.failures, settings.pause, settings.longest_pause),
            TransferRate(latency, store.block_bytes / speed), store.probe,
            limit=settings.queue_blocks, clock=self._clock,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OffloaderSettings:
    """Queue bounds and circuit-breaker settings of an offloader."""

    queue_blocks: int = 4096  # max blocks queued or running on a link; an idle one takes any job
    batch: int = 64  # blocks per store call
    failures: int = 3  # consecutive failures that take a link down
    pause: int = SECOND  # ns until a link that is down is probed; doubled each time
    longest_pause: int = 60 * SECOND
    close_seconds: float = 5.0  # time `close` waits for queued jobs
    # initial latency (s) and bandwidth (bytes/s) of a link, by store name; `other` is the default.
    guesses: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"host": (1e-4, 5e9), "disk": (1e-3, 5e8), "other": (3e-2, 1e8)}
    )

    def __post_init__(self) -> None:
        for name in ("queue_blocks", "batch", "failures", "pause", "longest_pause"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Status of a store and its links."""

    up: bool  # both directions take work
    reason: str  # why it is down
    used_bytes: int
    cap_bytes: int
    capacity: int  # blocks
    counts: StoreCounts
    reads: TransferQueueStatus
    writes: TransferQueueStatus


def nobody(count: int) -> Bools:
    """Return a mask (count,) of False: no block arrived."""
    return np.zeros(count, dtype=np.bool_)


class StagedCopy:
    """Staged blocks, indexed by position in `KVOffloader.copy_out`; not thread-safe."""

    def __init__(self, host: HostStore, rows: Ints) -> None:
        self.good: Bools = np.zeros(len(rows), dtype=np.bool_)
        self.reason = ""
        self.sums: Checksums = np.zeros(len(rows), dtype=np.uint64)
        self._host = host
        self._rows = rows
        self._held: Bools = np.ones(len(rows), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._rows)

    def publish(self, index: Ints, entries: BlockRecords) -> Bools:
        """Publish blocks to the host store without copying; False if void or without room."""
        rows, sums = self.take(index)
        return self._host.publish(entries, rows, sums)

    def take(self, index: Ints) -> tuple[Ints, Checksums]:
        """Take blocks out; returns rows and checksums. Raises ValueError if one is missing."""
        if not (self._held & self.good)[index].all() or len(np.unique(index)) != len(index):
            raise ValueError(f"blocks {index.tolist()} of the copy are not all there, once")
        self._held[index] = False
        return self._rows[index], self.sums[index]

    def put_back(self, index: Ints) -> None:
        """Undo `take`."""
        self._held[index] = True

    def drop(self) -> None:
        """Free the remaining rows; idempotent."""
        self._host.drop(self._rows[self._held])
        self._held[:] = False


def copy_out(blocks: DeviceBlocks, ids: Ints, arena: Bytes, rows: Ints) -> Checksums:
    """Copy blocks `ids` into arena rows; return their checksums. Releases the GIL on CPU."""
    data = blocks.as_bytes()
    if data is not None:
        return checksum.copy(data, ids, arena, rows)
    arena[rows] = blocks.read(ids)
    return checksum.checksums_of(arena, rows)


def copy_in(blocks: DeviceBlocks, ids: Ints, arena: Bytes, rows: Ints) -> Checksums:
    """Copy arena rows into blocks `ids`, and return checksums of the copied bytes."""
    data = blocks.as_bytes()
    if data is not None:
        return checksum.copy(arena, rows, data, ids)
    sums = checksum.checksums_of(arena, rows)
    blocks.write(ids, np.ascontiguousarray(arena[rows]))
    return sums


def make_arena(blocks: DeviceBlocks, rows: int) -> Bytes:
    """Allocate host memory, (rows, block_bytes); pinned where the device is not the CPU."""
    shape = (rows, blocks.layout.block_bytes)
    if blocks.as_bytes() is not None:
        return np.zeros(shape, dtype=np.uint8)
    import torch  # not needed for blocks in host memory

    return np.asarray(torch.zeros(shape, dtype=torch.uint8, pin_memory=True).numpy())
