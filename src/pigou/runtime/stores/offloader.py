"""KVOffloader: moves blocks between the device, host memory and the other stores, off the step's
path.

How it is used (`kv/tiers.py` decides, the engine's driver calls this):

*Down.* `copy_out(blocks, done)` copies device blocks into staging rows of the host arena, soon and
fast, while the core may hand the blocks out again: `done(copy)` says when it was read, and only the
core can say whether what was read is void. Then, for the blocks that are not: `copy.publish` makes
them blocks of the host store, at once and without a copy; `send(copy, ...)` queues them for another
store; `copy.drop()` lets go of all the others, and must be called in any case. `demote` does all of
this for blocks that nobody hands out until it is done.

*Up.* `restore(keys, source, blocks, done)` copies blocks of a store into device blocks, which
belong to the restore until `done`. Each block is verified; one that is not `good` has undefined
contents.

*Between stores.* `move(entries, source, target, done)` copies; it deletes nothing at the source.
Blocks of the host store are held from the call on, so they may be deleted there right after it.

`delete(name, keys)` is in order with the writes to that store before and after it.
`seconds(source, target, blocks)` is what a move is expected to take if it is asked for now.

Each link (`device->host`, `host->device`, and `host->NAME` and `NAME->host` for each further store)
is one thread and one bounded queue. All methods return at once. What they answer with False is
**refused**, and nothing will be called: the queue is full, no staging row is free, or the link is
down. Otherwise `done` is called exactly once, on the link's thread, with a `Moved`: also when the
store failed, died or was closed. A callback must be quick; an exception in it is logged.

A block that a store did not hand over (not good, no reason) is no longer there: forget it. When a
link fails (`reason`), blocks may still be there; `store.has` knows what the store believes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
)

log = logging.getLogger(__name__)

DEVICE = "device"
HOST = "host"
#: Reason of a job whose second half was refused.
REFUSED = "its link is busy or down"


class KVOffloader:
    """The threads between the device's blocks and the stores (see the module)."""

    def __init__(
        self,
        device: DeviceBlocks,
        host: HostStore,
        stores: Mapping[str, Store] | None = None,
        settings: OffloaderSettings | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Start the threads, and own the stores: `close` closes them.

        Raises ValueError: a store has blocks of another size, or a name that is taken.
        """
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
        self._jobs = TransferJobs(device, host, self._settings.batch)
        self._reads: dict[str, TransferQueue] = {}
        self._writes: dict[str, TransferQueue] = {}
        for name, store in self.stores.items():
            near = DEVICE if name == HOST else HOST
            self._reads[name] = self._link(name, f"{name}->{near}", store)
            self._writes[name] = self._link(name, f"{near}->{name}", store)

    def copy_out(self, blocks: Ints, done: Callable[[StagedCopy], None]) -> bool:
        """Copy device blocks into staging rows; `done(copy)` when they have been read."""
        rows = self._host.stage(len(blocks))
        if rows is None:
            return False
        copy = StagedCopy(self._host, rows)
        if self._writes[HOST].offer(self._jobs.copy_out(blocks, rows, copy, done)):
            return True
        copy.drop()
        return False

    def send(
        self,
        copy: StagedCopy,
        index: Ints,
        entries: BlockRecords,
        target: str,
        done: Done | None = None,
    ) -> bool:
        """Store staged blocks in a store other than the host's.

        `index`: which of its blocks, shape (n,).
        """
        rows, sums = copy.take(index)

        def release() -> None:
            self._host.drop(rows)

        job = self._jobs.put(entries, rows, sums, self.stores[target], release, done)
        if self._writes[target].offer(job):
            return True
        copy.put_back(index)
        return False

    def demote(self, blocks: Ints, entries: BlockRecords, target: str, done: Done) -> bool:
        """Copy device blocks to a store; they stay as they are until `done`.

        `blocks`: ids of the device blocks, shape (n,).
        """

        def copied(copy: StagedCopy) -> None:
            index = np.flatnonzero(copy.good).astype(np.int32)
            good, reason = nobody(len(entries)), copy.reason
            if target == HOST:
                good[index] = copy.publish(index, entries.take(index))
            elif not reason and self.send(copy, index, entries, target, done):
                return
            copy.drop()
            done(OffloadResult(good, reason or ("" if target == HOST else REFUSED), 0))

        return self.copy_out(blocks, copied)

    def move(
        self, entries: BlockRecords, source: str, target: str, done: Done | None = None
    ) -> bool:
        """Copy blocks from one store to another. `entries`: of the blocks, shape (n,)."""
        if source == target:
            raise ValueError(f"the blocks are to be moved from {source} to {target}")
        if source != HOST:
            link = self._reads[source] if target == HOST else self._writes[target]
            job = self._jobs.between(entries, self.stores[source], self.stores[target], done)
            return link.offer(job)
        rows = self._host.pin(entries.keys)

        def release() -> None:
            self._host.unpin(rows)

        sums = self._host.sums(rows)
        job = self._jobs.put(entries, rows, sums, self.stores[target], release, done)
        if self._writes[target].offer(job):
            return True
        release()
        return False

    def restore(self, keys: BlockHashes, source: str, blocks: Ints, done: Done) -> bool:
        """Copy blocks of a store into device blocks, which nobody else writes until `done`.

        Args:
            keys: shape (n, 2).
            blocks: ids of the device blocks, shape (n,).
        """
        if source != HOST:
            return self._reads[source].offer(
                self._jobs.restore(keys, self.stores[source], blocks, done)
            )
        rows = self._host.pin(keys)
        if self._reads[HOST].offer(self._jobs.restore_rows(rows, blocks, done)):
            return True
        self._host.unpin(rows)
        return False

    def delete(self, name: str, keys: BlockHashes) -> None:
        """Forget blocks of a store; never refused, and in order with its writes."""
        if name == HOST:
            self._host.delete(keys)
            return
        self._writes[name].offer(delete(self.stores[name], keys))

    def survey(self, name: str, done: Callable[[BlockRecords | None], None]) -> bool:
        """Ask a store for all its entries (`Store.entries`), on its thread; None if it fails."""
        return self._reads[name].offer(survey(self.stores[name], done))

    def seconds(self, source: str, target: str, blocks: int) -> float:
        """Seconds until `blocks` blocks asked for now would have arrived, queues included."""
        if source == DEVICE:
            first = self._writes[HOST].seconds(blocks)
            return first if target == HOST else first + self._writes[target].seconds(blocks)
        if target in (DEVICE, HOST):
            return self._reads[source].seconds(blocks)
        return self._writes[target].seconds(blocks)

    def law(self, source: str) -> tuple[float, float]:
        """Seconds before the first block of a store comes, and for each block, as measured."""
        return self._reads[source].law()

    def status(self) -> dict[str, StoreStatus]:
        """Describe each store and its links, by name."""
        return {name: self._describe(name, store) for name, store in self.stores.items()}

    def close(self) -> None:
        """Finish what is queued, for `close_seconds` at most; end the threads, close the stores."""
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

    def _link(self, name: str, title: str, store: Store) -> TransferQueue:
        settings = self._settings
        latency, speed = settings.guesses.get(name, settings.guesses.get("other", (3e-2, 1e8)))
        return TransferQueue(
            title,
            CircuitBreaker(settings.failures, settings.pause, settings.longest_pause),
            TransferRate(latency, store.block_bytes / speed),
            store.probe,
            block_bytes=store.block_bytes,
            limit=settings.queue_blocks,
            clock=self._clock,
        )

    def _describe(self, name: str, store: Store) -> StoreStatus:
        reads, writes = self._reads[name].status(), self._writes[name].status()
        return StoreStatus(
            up=reads.up and writes.up,
            reason=reads.reason or writes.reason,
            used_bytes=store.used_bytes,
            cap_bytes=store.cap_bytes,
            capacity=store.capacity,
            counts=replace(store.counts),
            reads=reads,
            writes=writes,
        )


@dataclass(frozen=True, slots=True)
class OffloaderSettings:
    """Bounds of a mover."""

    # blocks that wait on a link at most, those under way included; but an idle link takes a job of
    # any size.
    queue_blocks: int = 4096
    batch: int = 64  # blocks that a store is given at once
    failures: int = 3  # in a row, that take a link down
    pause: int = SECOND  # nanoseconds until a link that is down is probed; doubled each time,
    longest_pause: int = 60 * SECOND
    close_seconds: float = 5.0  # that `close` waits for what is queued
    # latency in seconds and bytes per second of a link before it was measured, by the name of the
    # store; `other` for names that are not here.
    guesses: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"host": (1e-4, 5e9), "disk": (1e-3, 5e8), "other": (3e-2, 1e8)}
    )

    def __post_init__(self) -> None:
        for name in ("queue_blocks", "batch", "failures", "pause", "longest_pause"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A store and its links, to be shown."""

    up: bool  # whether both directions take work
    reason: str  # why not
    used_bytes: int  # bytes taken
    cap_bytes: int
    capacity: int  # blocks that have room
    counts: StoreCounts
    reads: TransferQueueStatus
    writes: TransferQueueStatus


Done: TypeAlias = Callable[[OffloadResult], None]

#: Reason of a job that found no staging row.
NO_ROWS = "no staging row is free"


class TransferJobs:
    """Makes jobs; what they need of the arena they take when they run, unless it is given."""

    def __init__(self, device: DeviceBlocks, host: HostStore, batch: int) -> None:
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
    """Staged blocks by their position in `KVOffloader.copy_out`; for one thread at a time."""

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
        """Make blocks of the copy, by index (n,), blocks of the host store, without copying.

        Returns which are in the store now, shape (n,); False: no room, or void.
        """
        rows, sums = self.take(index)
        return self._host.publish(entries, rows, sums)

    def take(self, index: Ints) -> tuple[Ints, Checksums]:
        """Take blocks out of the copy; returns their rows and checksums.

        Raises ValueError: one of them was not copied, is there twice, or has left already.
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
