"""Mover: moves blocks between the device, host memory and the other stores, off the step's path.

How it is used (the decider is `kv/tiers.py`, whoever runs the core calls this):

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
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pigou.kv.checksum import Checksums
from pigou.request import BlockHashes, Ints
from pigou.runtime.stores.breaker import Breaker
from pigou.runtime.stores.copies import Copy
from pigou.runtime.stores.device import Blocks, copy_in, copy_out
from pigou.runtime.stores.entries import Bools, Entries
from pigou.runtime.stores.host import HostStore
from pigou.runtime.stores.link import Job, Link, Moved
from pigou.runtime.stores.rate import Rate
from pigou.runtime.stores.settings import MoverSettings
from pigou.runtime.stores.status import StoreStatus
from pigou.runtime.stores.store import Store

log = logging.getLogger(__name__)

DEVICE = "device"
HOST = "host"
#: Reason of a job that found no staging row.
NO_ROWS = "no staging row is free"
#: Reason of a job whose second half was refused.
REFUSED = "its link is busy or down"
Done = Callable[[Moved], None]


class Mover:
    """The threads between the device's blocks and the stores (see the module)."""

    def __init__(
        self,
        device: Blocks,
        host: HostStore,
        stores: Mapping[str, Store] | None = None,
        settings: MoverSettings | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Start the threads. The stores are the mover's from here on: `close` closes them.

        Args:
            device: blocks of the device.
            host: the host store; what its arena has beyond its capacity is for staging.
            stores: the other stores, by names other than `device` and `host`.
            settings: bounds.
            clock: monotonic nanoseconds.

        Raises:
            ValueError: a store has blocks of another size, or a name that is taken.
        """
        self._device = device
        self._settings = settings or MoverSettings()
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
        self._reads: dict[str, Link] = {}
        self._writes: dict[str, Link] = {}
        for name, store in self.stores.items():
            near = DEVICE if name == HOST else HOST
            self._reads[name] = self._link(name, f"{name}->{near}", store)
            self._writes[name] = self._link(name, f"{near}->{name}", store)

    def copy_out(self, blocks: Ints, done: Callable[[Copy], None]) -> bool:
        """Copy device blocks into staging rows; `done(copy)` when they have been read."""
        rows = self._host.stage(len(blocks))
        if rows is None:
            return False
        copy = Copy(self._host, rows)

        def run() -> None:
            for part in self._parts(len(blocks)):
                sums = copy_out(self._device, blocks[part], self._host.arena, rows[part])
                copy.sums[part] = sums
                job.good[part] = True

        def end(moved: Moved) -> None:
            copy.good, copy.reason = moved.good, moved.reason
            done(copy)

        job = Job(_none(len(blocks)), run, _nothing, end)
        if self._writes[HOST].offer(job):
            return True
        copy.drop()
        return False

    def send(
        self, copy: Copy, index: Ints, entries: Entries, target: str, done: Done | None = None
    ) -> bool:
        """Store staged blocks in a store other than the host's.

        Args:
            copy: of the blocks; refused ones stay in it.
            index: which of its blocks, shape (n,).
            entries: of these.
            target: name of the store.
            done: told which are there.
        """
        rows, sums = copy.take(index)

        def release() -> None:
            self._host.drop(rows)

        if self._put(entries, rows, sums, target, release, done):
            return True
        copy.put_back(index)
        return False

    def demote(self, blocks: Ints, entries: Entries, target: str, done: Done) -> bool:
        """Copy device blocks to a store; they stay as they are until `done`.

        Args:
            blocks: ids of the device blocks, shape (n,).
            entries: of these.
            target: name of the store.
            done: told which are there.
        """

        def copied(copy: Copy) -> None:
            index = np.flatnonzero(copy.good).astype(np.int32)
            good, reason = _none(len(entries)), copy.reason
            if target == HOST:
                good[index] = copy.publish(index, entries.take(index))
            elif not reason and self.send(copy, index, entries, target, done):
                return
            copy.drop()
            done(Moved(good, reason or ("" if target == HOST else REFUSED), 0))

        return self.copy_out(blocks, copied)

    def move(self, entries: Entries, source: str, target: str, done: Done | None = None) -> bool:
        """Copy blocks from one store to another.

        Args:
            entries: of the blocks, shape (n,).
            source: name of the store that has them.
            target: name of another one.
            done: told which are at the target.
        """
        if source == target:
            raise ValueError(f"the blocks are to be moved from {source} to {target}")
        if source == HOST:
            rows = self._host.pin(entries.keys)

            def release() -> None:
                self._host.unpin(rows)

            taken = self._put(entries, rows, self._host.sums(rows), target, release, done)
            if not taken:
                release()
            return taken
        link = self._reads[source] if target == HOST else self._writes[target]
        return link.offer(self._between(entries, source, target, done))

    def restore(self, keys: BlockHashes, source: str, blocks: Ints, done: Done) -> bool:
        """Copy blocks of a store into device blocks, which nobody else writes until `done`.

        Args:
            keys: shape (n, 2).
            source: name of the store.
            blocks: ids of the device blocks, shape (n,).
            done: told which were read, and are right.
        """
        if source == HOST:
            return self._restore_host(keys, blocks, done)
        data = self._device.as_bytes()
        store = self.stores[source]

        def run() -> None:
            for part in self._parts(len(keys)):
                if data is not None:
                    job.good[part] = store.get(keys[part], data, blocks[part])
                    continue
                job.good[part], job.reason = self._through(store, keys[part], blocks[part])

        job = Job(_none(len(keys)), run, _nothing, done)
        return self._reads[source].offer(job)

    def delete(self, name: str, keys: BlockHashes) -> None:
        """Forget blocks of a store; never refused, and in order with its writes."""
        if name == HOST:
            self._host.delete(keys)
            return
        store = self.stores[name]

        def run() -> None:
            store.delete(keys)

        self._writes[name].offer(Job(_none(0), run, _nothing, _ignore, patient=True))

    def survey(self, name: str, done: Callable[[Entries | None], None]) -> bool:
        """Ask a store for all its entries (`Store.entries`), on its thread; None if it fails."""
        store = self.stores[name]
        found: list[Entries] = []

        def run() -> None:
            found.append(store.entries())

        def end(_moved: Moved) -> None:
            done(found[0] if found else None)

        return self._reads[name].offer(Job(_none(0), run, _nothing, end))

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

    def _link(self, name: str, title: str, store: Store) -> Link:
        settings = self._settings
        latency, speed = settings.guesses.get(name, settings.guesses.get("other", (3e-2, 1e8)))
        return Link(
            title,
            Breaker(settings.failures, settings.pause, settings.longest_pause),
            Rate(latency, store.block_bytes / speed),
            store.probe,
            block_bytes=store.block_bytes,
            limit=settings.queue_blocks,
            clock=self._clock,
        )

    def _put(
        self,
        entries: Entries,
        rows: Ints,
        sums: Checksums,
        target: str,
        release: Callable[[], None],
        done: Done | None,
    ) -> bool:
        """Queue rows of the arena for a store; rows of -1 are missing."""

        def run() -> None:
            for part in self._parts(len(entries)):
                there = np.flatnonzero(rows[part] >= 0) + part.start
                self._store(job, there, entries.take(there), target, rows[there], sums[there])

        job = Job(_none(len(entries)), run, release, done or _ignore)
        return self._writes[target].offer(job)

    def _store(
        self,
        job: Job,
        index: NDArray[np.int64],
        entries: Entries,
        target: str,
        rows: Ints,
        sums: Checksums | None,
    ) -> None:
        store = self.stores[target]
        try:
            job.good[index] = store.put(entries, self._host.arena, rows, sums)
        except BaseException:
            job.good[index] = store.has(entries.keys)
            raise

    def _between(self, entries: Entries, source: str, target: str, done: Done | None) -> Job:
        """A job that reads from one store into staging rows, and from there into another."""

        def run() -> None:
            for part in self._parts(len(entries)):
                rows = self._host.stage(part.stop - part.start)
                if rows is None:
                    job.reason = NO_ROWS
                    return
                try:
                    good = self.stores[source].get(entries.keys[part], self._host.arena, rows)
                    index = np.flatnonzero(good) + part.start
                    self._store(job, index, entries.take(index), target, rows[good], None)
                finally:
                    self._host.drop(rows)

        job = Job(_none(len(entries)), run, _nothing, done or _ignore)
        return job

    def _restore_host(self, keys: BlockHashes, blocks: Ints, done: Done) -> bool:
        host = self._host
        rows = host.pin(keys)

        def run() -> None:
            for part in self._parts(len(keys)):
                there = np.flatnonzero(rows[part] >= 0) + part.start
                sums = copy_in(self._device, blocks[there], host.arena, rows[there])
                job.good[there] = host.verify(rows[there], sums)
            host.missed(int(np.count_nonzero(rows < 0)))

        def release() -> None:
            host.unpin(rows)

        job = Job(_none(len(keys)), run, release, done)
        if self._reads[HOST].offer(job):
            return True
        release()
        return False

    def _through(self, store: Store, keys: BlockHashes, blocks: Ints) -> tuple[Bools, str]:
        """Read blocks into staging rows, and from there into the device."""
        rows = self._host.stage(len(keys))
        if rows is None:
            return _none(len(keys)), NO_ROWS
        try:
            good = store.get(keys, self._host.arena, rows)
            copy_in(self._device, blocks[good], self._host.arena, rows[good])
        finally:
            self._host.drop(rows)
        return good, ""

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

    def _parts(self, count: int) -> Iterator[slice]:
        batch = self._settings.batch
        return (slice(i, min(i + batch, count)) for i in range(0, count, batch))


def _none(count: int) -> Bools:
    return np.zeros(count, dtype=np.bool_)


def _nothing() -> None:
    """Nothing is to be given back."""


def _ignore(_moved: Moved) -> None:
    """Nobody wants to know."""
