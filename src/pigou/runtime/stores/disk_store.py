"""DiskStore: blocks in segment files of one directory, which survive restarts and crashes."""

from __future__ import annotations

import fcntl
import heapq
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.kv.block import Bytes, keys_of
from pigou.kv.checksum import Checksums, checksums_of
from pigou.request import BlockHashes, Ints
from pigou.runtime.stores.segment import NotASegment, Segment
from pigou.runtime.stores.store import (
    HEADER_BYTES,
    BlockRecords,
    Bools,
    SlotMap,
    StoreCounts,
    StoreError,
    decode,
    encode,
)

log = logging.getLogger(__name__)

#: Block addresses, shape (n,).
Addresses: TypeAlias = NDArray[np.int64]
#: An address packs segment number (high bits) and slot.
_SHIFT = 32
_MASK = (1 << _SHIFT) - 1
_SUFFIX = ".pigou-kv"
_LOCK = "lock"
#: Target bytes of blocks per segment,
_SEGMENT_BYTES = 64 << 20
#: unless that exceeds this many files.
_SEGMENTS = 256
#: Stem of a segment file's name.
_NUMBER = re.compile(r"[0-9]{8,12}")


class DiskStore:
    """Stores blocks in segment files; one process owns the directory.

    New blocks fill holes, lowest first, so nothing is compacted. Nothing is fsynced: finished puts
    survive `kill -9`, and checksums catch blocks torn by a machine crash.
    """

    def __init__(
        self, path: Path | str, namespace: bytes, block_bytes: int, cap_bytes: int, *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        """Open or create a directory; raises StoreError if it is unusable or locked."""
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
        self.block_bytes, self.cap_bytes = block_bytes, cap_bytes
        self.capacity = self._folder.capacity()  # blocks, ignoring other layouts
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
    def used_bytes(self) -> int:
        """Bytes of all segment files: blocks, holes, headers and other layouts."""
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
        """Return which blocks are indexed, (n,), without reading them."""
        with self._lock:
            return np.array([key in self._slot_map for key in keys_of(keys)], dtype=np.bool_)

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        """Read and verify blocks (see `Store.get`)."""
        good: Bools = np.zeros(len(keys), dtype=np.bool_)
        void: Bools = np.zeros(len(keys), dtype=np.bool_)
        with self._pinned(keys) as addresses, self._trouble("read"):
            now = self._clock()
            for number, index, slots in _by_segment(addresses):
                segment = self._folder.segments[number]
                _, held, sums = self._decode(segment.headers(slots))
                alive = held.alive(now)
                void[index] = ~alive
                segment.read(slots[alive], out, rows[index[alive]])
                right = checksums_of(out, rows[index[alive]]) == sums[alive]
                good[index[alive]] = right & (held.keys == keys[index]).all(axis=1)[alive]
            bad = np.flatnonzero((addresses >= 0) & ~good & ~void)
        with self._lock:
            self.counts.count_reads(good)
            self.counts.corrupt += len(bad)
            self.counts.expired += int(np.count_nonzero(void))
        if len(bad):
            log.error("%s: %d blocks are torn or altered, and are misses", self.path, len(bad))
        if len(bad) or void.any():
            self._forget(keys[void | _mask(bad, len(keys))])
        return good

    def delete(self, keys: BlockHashes) -> int:
        """Delete blocks (see `Store.delete`)."""
        count = self._forget(keys)
        with self._lock:
            self.counts.deleted += count
        return count

    def entries(self) -> BlockRecords:
        """Return all valid blocks; after opening, those that survived."""
        with self._writing, self._trouble("read"):
            with self._lock:
                addresses = np.array(self._slot_map.slots(), dtype=np.int64)
            segments = self._folder.segments
            headers = [segments[n].headers(slots) for n, _, slots in _by_segment(addresses)]
        held = BlockRecords.join([self._decode(raw)[1] for raw in headers])
        return held.take(held.alive(self._clock()))

    def probe(self) -> None:
        """Check that the directory exists and has room for a block (see `Store.probe`)."""
        with self._trouble("reached"):
            stat = os.statvfs(self.path)
            free = stat.f_bavail * stat.f_frsize
            self._begin_again()
        if free < self.block_bytes and not self._holes:
            raise StoreError(f"{self.path}: the disk has {free} bytes left")

    def _begin_again(self) -> None:
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
        """Close all files and unlock the directory, after current reads and writes."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: not self._reading)
        with self._writing:
            self._folder.close()

    def _decode(self, headers: Bytes) -> tuple[Bools, BlockRecords, Checksums]:
        return decode(headers, self._folder.namespace, self.block_bytes)

    def _new(self, entries: BlockRecords, names: list[bytes]) -> NDArray[np.int64]:
        """Return indices of blocks to write: not stored, not void, each key once."""
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
        """Allocate up to `count` addresses in one segment, ascending; none without room."""
        if not self._holes:
            fresh = self._folder.fresh(count)
            if fresh is None:
                return np.empty(0, dtype=np.int64)
            number, first, count = fresh
            return (number << _SHIFT) + np.arange(first, first + count, dtype=np.int64)
        addresses: list[int] = []
        number = self._holes[0] >> _SHIFT
        while len(addresses) < count and self._holes and self._holes[0] >> _SHIFT == number:
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
        self._folder.segments.pop(number).remove()

    def _index(self, number: int, segment: Segment) -> None:
        """Index a segment's blocks; erase torn, void and duplicate ones."""
        raw = segment.table
        good, held, _ = self._decode(raw)
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
        """Convert OSError to StoreError; after `close`, only where `closing`."""
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
    """Group addresses other than -1 by segment: number, indices, ascending slots."""
    order = np.argsort(addresses, kind="stable")
    order = order[addresses[order] >= 0]
    numbers = addresses[order] >> _SHIFT
    for number in np.unique(numbers).tolist():
        index = order[numbers == number]
        yield number, index, _slots(addresses[index])


@dataclass(slots=True)
class _Foreign:
    """A segment of another layout, or unreadable; only counts towards the cap."""

    path: Path
    size: int
    age: float


class SegmentFolder:
    """Segments of one layout under a byte cap; segments of other layouts count too."""

    def __init__(self, path: Path, namespace: bytes, block_bytes: int, cap: int) -> None:
        """Lock the directory and open its segments; raises StoreError if unusable or locked."""
        self.path = path
        self.namespace = namespace
        self.block_bytes = block_bytes
        self.cap = cap
        self.segments: dict[int, Segment] = {}
        self._foreign: list[_Foreign] = []
        self._next = 0
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be used: {error}") from error
        try:
            self._open_all()
            self._fit()
        except OSError as error:
            self.close()
            raise StoreError(f"{path} cannot be used: {error}") from error

    @property
    def bytes(self) -> int:
        """Bytes of all segment files."""
        mine = sum(segment.size for segment in list(self.segments.values()))
        return mine + sum(foreign.size for foreign in list(self._foreign))

    @property
    def slots(self) -> int:
        """Slots of a full-size new segment."""
        size = max(_SEGMENT_BYTES, self.cap // _SEGMENTS)
        return max(1, size // self.block_bytes)

    def capacity(self) -> int:
        """Blocks that fit under the cap."""
        record = HEADER_BYTES + self.block_bytes
        full, rest = divmod(self.cap, HEADER_BYTES + self.slots * record)
        return full * self.slots + max(0, (rest - HEADER_BYTES) // record)

    def fresh(self, count: int) -> tuple[int, int, int] | None:
        """Return (segment, first unused slot, blocks that fit), None if full; raises OSError."""
        open_ones = [n for n, s in self.segments.items() if s.used < s.slots]
        segment = min(open_ones) if open_ones else self._create(count)
        if segment is None:
            return None
        chosen = self.segments[segment]
        count = min(count, chosen.slots - chosen.used)
        room = self._room(count * self.block_bytes) // self.block_bytes
        return (segment, chosen.used, min(count, room)) if room > 0 else None

    def lock_again(self) -> None:
        """Lock the directory anew if its lock file was removed; raises OSError and StoreError."""
        if os.fstat(self._lock).st_nlink == 0:
            lock = _lock(self.path)
            os.close(self._lock)
            self._lock = lock

    def close(self) -> None:
        """Close all files and unlock the directory."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        os.close(self._lock)

    def _create(self, count: int) -> int | None:
        record = HEADER_BYTES + self.block_bytes
        room = self._room(HEADER_BYTES + min(count, self.slots) * record)
        slots = min(self.slots, (room - HEADER_BYTES) // record)
        if slots < 1:
            return None
        number = self._next
        self._next += 1
        path = self.path / f"{number:08d}{_SUFFIX}"
        self.segments[number] = Segment.create(path, self.namespace, slots, self.block_bytes)
        return number

    def _room(self, wanted: int) -> int:
        while self._foreign and self.cap - self.bytes < wanted:
            foreign = min(self._foreign, key=lambda f: f.age)
            foreign.path.unlink(missing_ok=True)
            self._foreign.remove(foreign)
            log.info("%s of another layout was dropped to make room", foreign.path)
        return self.cap - self.bytes

    def _fit(self) -> None:
        self._room(0)
        while self.bytes > self.cap and self.segments:
            number = min(self.segments, key=lambda n: self.segments[n].live)
            log.info("%s was dropped: the cap is now lower", self.segments[number].path)
            self.segments.pop(number).remove()

    def _open_all(self) -> None:
        strangers = []
        for entry in sorted(os.scandir(self.path), key=lambda e: e.name):
            stem = entry.name.removesuffix(_SUFFIX)
            if stem == entry.name or not _NUMBER.fullmatch(stem) or entry.is_dir():
                strangers += [entry.name] if entry.name != _LOCK else []
                continue
            self._next = max(self._next, int(stem) + 1)
            self._open(int(stem), Path(entry.path))
        if strangers:
            log.warning("%s: files that are not ours are left alone: %s", self.path, strangers[:5])

    def _open(self, number: int, path: Path) -> None:
        try:
            segment = Segment.open(path)
        except NotASegment as error:
            log.warning("%s was removed: %s", path, error)
            path.unlink()
        except OSError as error:
            log.warning("%s cannot be read, and only takes room: %s", path, error)
            stat = path.lstat()
            self._foreign.append(_Foreign(path, stat.st_size, stat.st_mtime))
        else:
            if (segment.namespace, segment.block_bytes) == (self.namespace, self.block_bytes):
                self.segments[number] = segment
                return
            segment.close()
            log.warning("%s is of another layout: it takes room until that is needed", path)
            self._foreign.append(_Foreign(path, segment.size, path.stat().st_mtime))


def _lock(path: Path) -> int:
    fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreError(
            f"{path} is in use by another process; give each worker a directory of its own"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd
