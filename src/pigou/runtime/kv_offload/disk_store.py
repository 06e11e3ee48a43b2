"""DiskStore: blocks in segment files of one directory, which survive restarts and crashes."""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.kv.block import Bytes, keys_of
from pigou.kv.checksum import Checksums, checksums_of
from pigou.request import BlockHashes, Ints
from pigou.runtime.kv_offload.records import HEADER_BYTES, BlockRecords, Bools, decode, encode
from pigou.runtime.kv_offload.segment_files import Segment, SegmentFolder
from pigou.runtime.kv_offload.slot_map import SlotMap
from pigou.runtime.kv_offload.store import StoreCounts, StoreError

log = logging.getLogger(__name__)

#: Where blocks lie, shape (n,).
Addresses: TypeAlias = NDArray[np.int64]
#: An address is a segment's number and a slot in it, in one integer.
_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


class DiskStore:
    """Blocks in a directory that belongs to one process at a time.

    Blocks are appended to segment files (see `segment.py`). A deleted block leaves a hole, which
    later blocks fill, lowest first; a segment that is all holes is deleted. So nothing is ever
    compacted, nothing is written twice, and the cap (of all files, tables included) is reached
    with whole blocks. Files of another layout take room until it is needed.

    Nothing is synced to the disk: after `kill -9` everything is there whose `put` had returned;
    after a crash of the machine blocks may be missing or torn, which their checksums show.
    """

    def __init__(
        self,
        path: Path | str,
        namespace: bytes,
        block_bytes: int,
        cap_bytes: int,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open a directory, make it if need be, and find what is there.

        Args:
            path: of the directory; its files of the name `*.pigou-kv` are the store's own.
            namespace: the layout's fingerprint, 16 bytes.
            cap_bytes: of all segment files together; what is over it is deleted.
            clock: nanoseconds since 1970.

        Raises:
            StoreError: the directory cannot be used, or another process uses it.
        """
        self.counts = StoreCounts()
        self._clock = clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._slot_map = SlotMap()
        self._holes: list[int] = []
        self._reading = 0
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self.path = path = Path(path)
        self._folder = SegmentFolder(path, namespace, block_bytes, cap_bytes)
        try:
            for number, segment in list(self._folder.segments.items()):
                self._index(number, segment)
                if not segment.live:
                    self._drop(number)
            heapq.heapify(self._holes)
        except OSError as error:
            self._folder.close()
            raise StoreError(f"{path} cannot be used: {error}") from error

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._folder.block_bytes

    @property
    def cap_bytes(self) -> int:
        """What all segment files together never exceed."""
        return self._folder.cap

    @property
    def record_bytes(self) -> int:
        """Bytes of the cap that a block takes, besides 128 for each segment."""
        return HEADER_BYTES + self.block_bytes

    @property
    def capacity(self) -> int:
        """Blocks that the cap has room for when no other layout's files are there."""
        return self._folder.capacity()

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files: blocks, holes, tables, and other layouts."""
        return self._folder.bytes

    def put(
        self, entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        """Write blocks (see `Store.put`)."""
        names = keys_of(entries.keys)
        with self._writing, self._trouble("written"):
            new = self._new(entries, names)
            payloads = checksums_of(data, rows[new]) if sums is None else sums[new]
            headers = encode(self._folder.namespace, entries.take(new), payloads, self.block_bytes)
            done = 0
            while done < len(new) and len(addresses := self._take(len(new) - done)):
                part = slice(done, done + len(addresses))
                self._write(addresses, data, rows[new[part]], headers[part])
                with self._lock:
                    for i, address in zip(new[part].tolist(), addresses.tolist(), strict=True):
                        self._slot_map.put(names[i], address)
                    self.counts.written += len(addresses)
                done += len(addresses)
        with self._lock:
            self.counts.refused += len(new) - done
        return self.has(entries.keys)

    def has(self, keys: BlockHashes) -> Bools:
        """Which blocks are there, as far as known without reading them, shape (n,)."""
        with self._lock:
            return np.array([key in self._slot_map for key in keys_of(keys)], dtype=np.bool_)

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        """Read blocks and verify them (see `Store.get`)."""
        good: Bools = np.zeros(len(keys), dtype=np.bool_)
        void: Bools = np.zeros(len(keys), dtype=np.bool_)
        with self._pinned(keys) as addresses, self._trouble("read"):
            now = self._clock()
            for number, index, slots in _by_segment(addresses):
                segment = self._folder.segments[number]
                _, held, sums = decode(
                    segment.headers(slots), self._folder.namespace, self.block_bytes
                )
                alive = held.alive(now)
                void[index] = ~alive
                segment.read(slots[alive], out, rows[index[alive]])
                right = checksums_of(out, rows[index[alive]]) == sums[alive]
                good[index[alive]] = right & (held.keys == keys[index]).all(axis=1)[alive]
            bad = np.flatnonzero((addresses >= 0) & ~good & ~void)
        with self._lock:
            self.counts.hits += int(np.count_nonzero(good))
            self.counts.misses += int(np.count_nonzero(~good))
            self.counts.corrupt += len(bad)
            self.counts.expired += int(np.count_nonzero(void))
        if len(bad):
            log.error("%s: %d blocks are torn or altered, and are misses", self.path, len(bad))
        if len(bad) or void.any():
            self._forget(keys[void | _mask(bad, len(keys))])
        return good

    def delete(self, keys: BlockHashes) -> int:
        """Forget blocks (see `Store.delete`)."""
        count = self._forget(keys)
        with self._lock:
            self.counts.deleted += count
        return count

    def entries(self) -> BlockRecords:
        """All blocks in the store that are not void; after opening, what survived."""
        with self._writing, self._trouble("read"):
            with self._lock:
                addresses = np.array(self._slot_map.slots(), dtype=np.int64)
            parts = [
                decode(
                    self._folder.segments[number].headers(slots),
                    self._folder.namespace,
                    self.block_bytes,
                )[1]
                for number, _, slots in _by_segment(addresses)
            ]
        held = BlockRecords.join(parts)
        return held.take(held.alive(self._clock()))

    def probe(self) -> None:
        """Find out whether the directory is there and has room for a block (see `Store.probe`)."""
        with self._trouble("reached"):
            stat = os.statvfs(self.path)
            free = stat.f_bavail * stat.f_frsize
            self._begin_again()
        if free < self.block_bytes and not self._holes:
            raise StoreError(f"{self.path}: the disk has {free} bytes left")

    def _begin_again(self) -> None:
        """Forget the blocks of files that somebody has removed, once nobody reads them."""
        with self._writing, self._lock:
            gone = [n for n, segment in self._folder.segments.items() if segment.removed]
            if not gone:
                return
            if self._reading:
                raise StoreError(f"{self.path}: files were removed that are still read")
            self._folder.lock_again()
            names = self._slot_map.keys()
            keys = [name for name in names if (self._slot_map.find(name) or 0) >> _SHIFT in gone]
            self._slot_map.remove(keys)
            self._holes = [hole for hole in self._holes if hole >> _SHIFT not in gone]
            heapq.heapify(self._holes)
            for number in gone:
                self._folder.segments.pop(number).close()
        log.error("%s: %d files were removed, and %d blocks", self.path, len(gone), len(keys))

    def close(self) -> None:
        """Close all files and unlock the directory, once nobody reads or writes."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: not self._reading)
        with self._writing:
            self._folder.close()

    def _new(self, entries: BlockRecords, names: list[bytes]) -> NDArray[np.int64]:
        """Which are to be written: not there, not void, each key once."""
        alive = entries.alive(self._clock())
        seen: set[bytes] = set()
        new = []
        with self._lock:
            for i, key in enumerate(names):
                if alive[i] and key not in self._slot_map and key not in seen:
                    seen.add(key)
                    new.append(i)
        return np.array(new, dtype=np.int64)

    def _take(self, count: int) -> Addresses:
        """Addresses for up to `count` blocks, in one segment, ascending; none without room."""
        if not self._holes:
            fresh = self._folder.fresh(count)
            if fresh is None:
                return np.empty(0, dtype=np.int64)
            number, first, count = fresh
            return (number << _SHIFT) + np.arange(first, first + count, dtype=np.int64)
        addresses = [heapq.heappop(self._holes)]
        while (
            len(addresses) < count
            and self._holes
            and self._holes[0] >> _SHIFT == addresses[0] >> _SHIFT
        ):
            addresses.append(heapq.heappop(self._holes))
        return np.array(addresses, dtype=np.int64)

    def _write(self, addresses: Addresses, data: Bytes, rows: Ints, headers: Bytes) -> None:
        segment = self._folder.segments[int(addresses[0]) >> _SHIFT]
        slots = _slots(addresses)
        holes = slots < segment.used
        try:
            if segment.removed:
                raise FileNotFoundError(f"{segment.path.name} was removed")
            segment.write(slots, data, rows, headers)
        except OSError:
            for address in addresses[holes].tolist():
                heapq.heappush(self._holes, address)
            raise

    @contextmanager
    def _pinned(self, keys: BlockHashes) -> Iterator[Addresses]:
        """Addresses of keys, -1 for none, that stay as they are for so long."""
        with self._lock:
            self._check_open()
            self._reading += 1
            addresses = self._slot_map.pin(keys_of(keys))
        try:
            yield np.array(addresses, dtype=np.int64).reshape(len(keys))
        finally:
            with self._lock:
                empty = self._slot_map.unpin(addresses)
            try:
                if empty:
                    with self._writing, self._trouble("deleted from", closing=True):
                        self._free_slots(empty)
            finally:
                with self._lock:
                    self._reading -= 1
                    self._idle.notify_all()

    def _forget(self, keys: BlockHashes) -> int:
        with self._writing, self._trouble("deleted from"):
            with self._lock:
                self._check_open()
                count, empty = self._slot_map.remove(keys_of(keys))
            self._free_slots(empty)
        return count

    def _free_slots(self, addresses: list[int]) -> None:
        """Make holes of addresses that nobody needs; raises OSError."""
        for number, _, slots in _by_segment(np.array(addresses, dtype=np.int64)):
            segment = self._folder.segments[number]
            for slot in slots.tolist():
                heapq.heappush(self._holes, (number << _SHIFT) + slot)
            segment.erase(slots)
            if not segment.live:
                self._drop(number)

    def _drop(self, number: int) -> None:
        self._holes = [hole for hole in self._holes if hole >> _SHIFT != number]
        heapq.heapify(self._holes)
        self._folder.drop(number)

    def _index(self, number: int, segment: Segment) -> None:
        """Enter what a segment holds, and erase what is torn, void, or there twice."""
        raw = segment.table
        good, held, _ = decode(raw, self._folder.namespace, self.block_bytes)
        taken = raw.any(axis=1)
        whole = good & (np.arange(segment.slots) < segment.used)
        torn = taken & ~whole
        void = whole & ~held.alive(self._clock())
        names = keys_of(held.keys)
        keep = []
        for slot in np.flatnonzero(whole & ~void).tolist():
            if names[slot] not in self._slot_map:
                self._slot_map.put(names[slot], (number << _SHIFT) + slot)
                keep.append(slot)
        gone = taken & ~_mask(np.array(keep, dtype=np.int64), segment.slots)
        if torn.any():
            log.warning("%s: %d records are torn or altered", segment.path, torn.sum())
        self.counts.corrupt += int(torn.sum())
        self.counts.expired += int(void.sum())
        segment.erase(np.flatnonzero(gone).astype(np.int32))
        empty = np.flatnonzero(~taken | gone)
        self._holes += ((number << _SHIFT) + empty[empty < segment.used]).tolist()

    @contextmanager
    def _trouble(self, what: str, *, closing: bool = False) -> Iterator[None]:
        """Turn trouble with files into a StoreError; after `close` only what was `closing`."""
        if not closing:
            self._check_open()
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self.path} cannot be {what}: {error}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path} was closed")


def _slots(addresses: Addresses) -> Ints:
    return (addresses & _MASK).astype(np.int32)


def _mask(index: NDArray[np.int64], size: int) -> Bools:
    mask: Bools = np.zeros(size, dtype=np.bool_)
    mask[index] = True
    return mask


def _by_segment(addresses: Addresses) -> Iterator[tuple[int, NDArray[np.int64], Ints]]:
    """Addresses by segment, -1 left out: number, which of `addresses`, and slots, ascending."""
    order = np.argsort(addresses, kind="stable")
    order = order[addresses[order] >= 0]
    numbers = addresses[order] >> _SHIFT
    for number in np.unique(numbers).tolist():
        index = order[numbers == number]
        yield number, index, _slots(addresses[index])
