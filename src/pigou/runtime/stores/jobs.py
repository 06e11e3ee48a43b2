"""Jobs: what links run, made of copies between the device, the arena and the stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.kv.checksum import Checksums
from pigou.request import BlockHashes, Ints
from pigou.runtime.stores.copies import Copy
from pigou.runtime.stores.device import Blocks, copy_in, copy_out
from pigou.runtime.stores.entries import Bools, Entries
from pigou.runtime.stores.host import HostStore
from pigou.runtime.stores.link import Job, Moved
from pigou.runtime.stores.store import Store

Done: TypeAlias = Callable[[Moved], None]

#: Reason of a job that found no staging row.
NO_ROWS = "no staging row is free"


class Jobs:
    """Makes jobs; what they need of the arena they take when they run, unless it is given."""

    def __init__(self, device: Blocks, host: HostStore, batch: int) -> None:
        """Copy by way of the host store's arena, `batch` blocks at once."""
        self._device = device
        self._host = host
        self._batch = batch

    def copy_out(self, blocks: Ints, rows: Ints, copy: Copy, done: Callable[[Copy], None]) -> Job:
        """Copy device blocks into the rows of a copy."""

        def run() -> None:
            for part in self._parts(len(blocks)):
                sums = copy_out(self._device, blocks[part], self._host.arena, rows[part])
                copy.sums[part] = sums
                job.good[part] = True

        def end(moved: Moved) -> None:
            copy.good, copy.reason = moved.good, moved.reason
            done(copy)

        job = Job(nobody(len(blocks)), run, _nothing, end)
        return job

    def put(
        self,
        entries: Entries,
        rows: Ints,
        sums: Checksums,
        target: Store,
        release: Callable[[], None],
        done: Done | None,
    ) -> Job:
        """Put rows of the arena into a store; rows of -1 are missing."""

        def run() -> None:
            for part in self._parts(len(entries)):
                there = np.flatnonzero(rows[part] >= 0) + part.start
                self._put(job, there, entries.take(there), target, rows[there], sums[there])

        job = Job(nobody(len(entries)), run, release, done or _ignore)
        return job

    def between(self, entries: Entries, source: Store, target: Store, done: Done | None) -> Job:
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

        job = Job(nobody(len(entries)), run, _nothing, done or _ignore)
        return job

    def restore(self, keys: BlockHashes, source: Store, blocks: Ints, done: Done) -> Job:
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

        job = Job(nobody(len(keys)), run, _nothing, done)
        return job

    def restore_rows(self, rows: Ints, blocks: Ints, done: Done) -> Job:
        """Copy pinned rows of the host store into device blocks; rows of -1 are missing."""
        host = self._host

        def run() -> None:
            for part in self._parts(len(rows)):
                there = np.flatnonzero(rows[part] >= 0) + part.start
                sums = copy_in(self._device, blocks[there], host.arena, rows[there])
                job.good[there] = host.verify(rows[there], sums)
            host.missed(int(np.count_nonzero(rows < 0)))

        def release() -> None:
            host.unpin(rows)

        job = Job(nobody(len(rows)), run, release, done)
        return job

    def _put(
        self,
        job: Job,
        index: NDArray[np.int64],
        entries: Entries,
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


def delete(store: Store, keys: BlockHashes) -> Job:
    """Delete blocks of a store, whatever its state."""

    def run() -> None:
        store.delete(keys)

    return Job(nobody(0), run, _nothing, _ignore, patient=True)


def survey(store: Store, done: Callable[[Entries | None], None]) -> Job:
    """Ask a store for its entries."""
    found: list[Entries] = []

    def run() -> None:
        found.append(store.entries())

    def end(_moved: Moved) -> None:
        done(found[0] if found else None)

    return Job(nobody(0), run, _nothing, end)


def nobody(count: int) -> Bools:
    """Return that none of `count` blocks has arrived."""
    return np.zeros(count, dtype=np.bool_)


def _nothing() -> None:
    """Nothing is to be given back."""


def _ignore(_moved: Moved) -> None:
    """Nobody wants to know."""
