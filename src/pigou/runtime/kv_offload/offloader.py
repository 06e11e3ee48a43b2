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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pigou.request import SECOND, BlockHashes, Ints
from pigou.runtime.kv_offload.circuit_breaker import CircuitBreaker
from pigou.runtime.kv_offload.host_store import HostStore
from pigou.runtime.kv_offload.records import BlockRecords
from pigou.runtime.kv_offload.store import Store, StoreCounts
from pigou.runtime.kv_offload.transfer_jobs import (
    DeviceBlocks,
    Done,
    StagedCopy,
    TransferJobs,
    delete,
    nobody,
    survey,
)
from pigou.runtime.kv_offload.transfer_queue import (
    OffloadResult,
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
        """Start the threads. The stores are the mover's from here on: `close` closes them.

        Args:
            host: the host store; what its arena has beyond its capacity is for staging.
            stores: the other stores, by names other than `device` and `host`.
            clock: monotonic nanoseconds.

        Raises:
            ValueError: a store has blocks of another size, or a name that is taken.
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

        Args:
            copy: of the blocks; refused ones stay in it.
            index: which of its blocks, shape (n,).
            target: name of the store.
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

        Args:
            blocks: ids of the device blocks, shape (n,).
            target: name of the store.
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
        """Copy blocks from one store to another.

        Args:
            entries: of the blocks, shape (n,).
            source: name of the store that has them.
            target: name of another one.
        """
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
            source: name of the store.
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
        default_factory=lambda: {
            "host": (1e-4, 5e9),
            "disk": (1e-3, 5e8),
            "other": (3e-2, 1e8),
        }
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
