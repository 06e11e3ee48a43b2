"""Folder: the segment files of a disk store, and the cap on all of them together."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from pigou.kv.block import Bytes
from pigou.request import Ints
from pigou.runtime.kv_offload.records import HEADER_BYTES
from pigou.runtime.kv_offload.store import StoreError
from pigou.small_file import check_regular

log = logging.getLogger(__name__)

_SUFFIX = ".pigou-kv"
_LOCK = "lock"
#: Blocks of a segment take about this many bytes,
_SEGMENT_BYTES = 64 << 20
#: unless that made more files than this.
_SEGMENTS = 256


@dataclass(slots=True)
class _Foreign:
    """A file of another layout, or one that cannot be opened; it only takes room."""

    path: Path
    size: int
    age: float


class SegmentFolder:
    """Segments by number, of one layout, under a cap; the bytes of other layouts count."""

    def __init__(self, path: Path, namespace: bytes, block_bytes: int, cap: int) -> None:
        """Lock the directory and open what is in it, within the cap.

        Raises:
            StoreError: the directory cannot be used, or another process uses it.
        """
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
        """Slots of a new segment, where there is room for all of them."""
        size = max(_SEGMENT_BYTES, self.cap // _SEGMENTS)
        return max(1, size // self.block_bytes)

    def capacity(self) -> int:
        """Blocks that the cap has room for."""
        record = HEADER_BYTES + self.block_bytes
        full, rest = divmod(self.cap, HEADER_BYTES + self.slots * record)
        return full * self.slots + max(0, (rest - HEADER_BYTES) // record)

    def fresh(self, count: int) -> tuple[int, int, int] | None:
        """Room for up to `count` blocks where none was before.

        Makes a segment, and drops files of other layouts, oldest first, as needed.

        Returns:
            Number of a segment, its first unused slot, and for how many blocks there is room; None
            where there is no room at all.

        Raises:
            OSError: a file cannot be made or removed.
        """
        open_ones = [n for n, s in self.segments.items() if s.used < s.slots]
        segment = min(open_ones) if open_ones else self._create(count)
        if segment is None:
            return None
        chosen = self.segments[segment]
        count = min(count, chosen.slots - chosen.used)
        room = self._room(count * self.block_bytes) // self.block_bytes
        return (segment, chosen.used, min(count, room)) if room > 0 else None

    def drop(self, number: int) -> None:
        """Delete a segment; raises OSError."""
        self.segments.pop(number).remove()

    def lock_again(self) -> None:
        """Lock the directory where its lock was removed; raises OSError and StoreError."""
        if os.fstat(self._lock).st_nlink == 0:
            lock = _lock(self.path)
            os.close(self._lock)
            self._lock = lock

    def close(self) -> None:
        """Close all files, and unlock the directory."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        os.close(self._lock)

    def _create(self, count: int) -> int | None:
        """Make a segment as large as there is room, for one that `count` blocks need."""
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
        """Bytes left under the cap, after dropping foreign files for the wanted ones."""
        while self._foreign and self.cap - self.bytes < wanted:
            foreign = min(self._foreign, key=lambda f: f.age)
            foreign.path.unlink(missing_ok=True)
            self._foreign.remove(foreign)
            log.info("%s of another layout was dropped to make room", foreign.path)
        return self.cap - self.bytes

    def _fit(self) -> None:
        """Drop what is over the cap: other layouts, then the segments with the fewest blocks."""
        self._room(0)
        while self.bytes > self.cap and self.segments:
            number = min(self.segments, key=lambda n: self.segments[n].live)
            log.info("%s was dropped: the cap is now lower", self.segments[number].path)
            self.drop(number)

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


#: Names of segment files, less their end.
_NUMBER = re.compile(r"[0-9]{8,12}")
_MAGIC = b"PIGOUSG1"
_PREFACE = struct.Struct("<8s16sIQ84sQ")
#: Buffers in one call of preadv or pwritev (IOV_MAX is 1,024).
_VECTOR = 512


class NotASegment(Exception):
    """A file that is no segment; says why."""


class Segment:
    """An open segment file."""

    def __init__(
        self, path: Path, fd: int, namespace: bytes, slots: int, block_bytes: int, used: int
    ) -> None:
        self.path = path
        self.namespace = namespace
        self.slots = slots
        self.block_bytes = block_bytes
        #: Slots that the file has room for; those from here on are used for the first time.
        self.used = used
        #: The table as it is in the file, shape (slots, 128).
        self.table: Bytes = np.zeros((slots, HEADER_BYTES), dtype=np.uint8)
        #: Slots whose header is not empty.
        self.live = 0
        self._fd = fd

    @staticmethod
    def overhead(slots: int) -> int:
        """Bytes of a segment without its blocks."""
        return (1 + slots) * HEADER_BYTES

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return Segment.overhead(self.slots) + self.used * self.block_bytes

    @classmethod
    def create(cls, path: Path, namespace: bytes, slots: int, block_bytes: int) -> Segment:
        """Make an empty file; raises OSError, and then leaves nothing behind."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        segment = cls(path, fd, namespace, slots, block_bytes, 0)
        try:
            os.pwrite(fd, _preface(namespace, slots, block_bytes), 0)
            os.ftruncate(fd, segment.size)
        except OSError:
            segment.remove()
            raise
        return segment

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Open a file and read its table; a torn tail is cut off.

        Raises:
            NotASegment: it is none, or of another format.
            OSError: it cannot be read.
        """
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return cls._read(path, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _read(cls, path: Path, fd: int) -> Segment:
        check_regular(os.fstat(fd), path, sys.maxsize)
        namespace, slots, block_bytes = _parse(os.pread(fd, HEADER_BYTES, 0))
        size = os.fstat(fd).st_size
        if size < cls.overhead(slots):
            raise NotASegment(f"{size} bytes; its table alone takes {cls.overhead(slots)}")
        used = min(slots, (size - cls.overhead(slots)) // block_bytes)
        segment = cls(path, fd, namespace, slots, block_bytes, used)
        if (
            _transfer(os.preadv, fd, [segment.table.reshape(-1)], HEADER_BYTES)
            < slots * HEADER_BYTES
        ):
            raise NotASegment("its table is cut off")
        segment.live = int(np.count_nonzero(segment.table.any(axis=1)))
        if size != segment.size:
            os.ftruncate(fd, segment.size)
        return segment

    def headers(self, slots: Ints) -> Bytes:
        """Headers of slots as the file has them, shape (n, 128)."""
        return np.ascontiguousarray(self.table[slots])

    def write(self, slots: Ints, data: Bytes, rows: Ints, headers: Bytes) -> None:
        """Write blocks, then their headers; `slots` ascend. Raises OSError."""
        top = int(slots[-1]) + 1
        try:
            for begin, end in runs(slots):
                parts = [data[row] for row in rows[begin:end].tolist()]
                offset = self._offset(int(slots[begin]))
                _transfer(os.pwritev, self._fd, parts, offset)
            self.used = max(self.used, top)
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        for begin, end in runs(slots):
            offset = (1 + int(slots[begin])) * HEADER_BYTES
            _transfer(os.pwritev, self._fd, [headers[begin:end].reshape(-1)], offset)
        self.table[slots] = headers
        self.live += len(slots)

    def read(self, slots: Ints, out: Bytes, rows: Ints) -> None:
        """Read blocks, `slots` ascending, into rows of `out`; a short file leaves rows as they are.

        Raises:
            OSError: it cannot be read.
        """
        for begin, end in runs(slots):
            parts = [out[row] for row in rows[begin:end].tolist()]
            _transfer(os.preadv, self._fd, parts, self._offset(int(slots[begin])))

    def erase(self, slots: Ints) -> None:
        """Zero the headers of slots that have one, ascending; raises OSError."""
        self.live -= len(slots)
        self.table[slots] = 0
        for begin, end in runs(slots):
            offset = (1 + int(slots[begin])) * HEADER_BYTES
            _transfer(os.pwritev, self._fd, [self.table[slots[begin:end]].reshape(-1)], offset)

    @property
    def removed(self) -> bool:
        """Whether somebody has deleted the file; what is written to it ends with the process."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def remove(self) -> None:
        """Delete the file; raises OSError."""
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _offset(self, slot: int) -> int:
        return Segment.overhead(self.slots) + slot * self.block_bytes


def runs(slots: Ints) -> Iterator[tuple[int, int]]:
    """Where slots follow one another: begins and ends in `slots`, ascending, of runs."""
    if not len(slots):
        return
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    for i in range(len(edges) - 1):
        for begin in range(edges[i], edges[i + 1], _VECTOR):
            yield begin, min(begin + _VECTOR, edges[i + 1])


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    parts: Sequence[Bytes],
    offset: int,
) -> int:
    """Read or write all parts from an offset on; returns the bytes done, fewer only at the end."""
    views = [part.data.cast("B") for part in parts]
    done = 0
    while views:
        moved = call(fd, views, offset + done)
        if moved == 0:
            break
        done += moved
        while views and moved >= len(views[0]):
            moved -= len(views.pop(0))
        if views and moved:
            views[0] = views[0][moved:]
    return done


def _preface(namespace: bytes, slots: int, block_bytes: int) -> bytes:
    raw = _PREFACE.pack(_MAGIC, namespace, slots, block_bytes, bytes(84), 0)[:-8]
    return raw + struct.pack("<Q", xxh3_64_intdigest(raw))


def _parse(raw: bytes) -> tuple[bytes, int, int]:
    if len(raw) < HEADER_BYTES or raw[:8] != _MAGIC:
        raise NotASegment("it does not begin as a segment does")
    _, namespace, slots, block_bytes, _, check = _PREFACE.unpack(raw)
    if check != xxh3_64_intdigest(raw[:-8]) or not slots or not block_bytes:
        raise NotASegment("its first bytes are altered")
    return namespace, slots, block_bytes
