"""Segment: a disk file of blocks with a table of their headers."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from pigou.kv.block import Bytes
from pigou.request import Ints
from pigou.runtime.stores.store import HEADER_BYTES
from pigou.small_file import check_regular

_MAGIC = b"PIGOUSG1"
_PREFACE = struct.Struct("<8s16sIQ84sQ")
#: Buffers per preadv or pwritev (IOV_MAX is 1,024).
_VECTOR = 512


class NotASegment(Exception):
    """Raised for a file that is not a segment."""


class Segment:
    """An open segment file."""

    def __init__(
        self, path: Path, fd: int, namespace: bytes, slots: int, block_bytes: int, used: int
    ) -> None:
        self.path, self._fd = path, fd
        self.namespace, self.slots, self.block_bytes = namespace, slots, block_bytes
        self.used = used  # first slot never used
        self.live = 0  # slots in use
        #: Header table as stored, shape (slots, 128).
        self.table: Bytes = np.zeros((slots, HEADER_BYTES), dtype=np.uint8)

    @staticmethod
    def overhead(slots: int) -> int:
        """Return the bytes of a segment besides its blocks."""
        return (1 + slots) * HEADER_BYTES

    @property
    def size(self) -> int:
        """File size in bytes."""
        return Segment.overhead(self.slots) + self.used * self.block_bytes

    @classmethod
    def create(cls, path: Path, namespace: bytes, slots: int, block_bytes: int) -> Segment:
        """Create an empty segment; raises OSError, leaving no file behind."""
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
        """Open a segment and truncate a torn tail; raises NotASegment or OSError."""
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
        table = segment.table.reshape(-1)
        if _transfer(os.preadv, fd, [table], HEADER_BYTES) < table.nbytes:
            raise NotASegment("its table is cut off")
        segment.live = int(np.count_nonzero(segment.table.any(axis=1)))
        if size != segment.size:
            os.ftruncate(fd, segment.size)
        return segment

    def headers(self, slots: Ints) -> Bytes:
        """Return headers of slots as stored, (n, 128)."""
        return np.ascontiguousarray(self.table[slots])

    def write(self, slots: Ints, data: Bytes, rows: Ints, headers: Bytes) -> None:
        """Write blocks, then headers, to ascending `slots`; raises OSError."""
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
        self._write_headers(slots, headers)
        self.table[slots] = headers
        self.live += len(slots)

    def read(self, slots: Ints, out: Bytes, rows: Ints) -> None:
        """Read ascending `slots` into rows, unchanged past the file's end; raises OSError."""
        for begin, end in runs(slots):
            parts = [out[row] for row in rows[begin:end].tolist()]
            _transfer(os.preadv, self._fd, parts, self._offset(int(slots[begin])))

    def erase(self, slots: Ints) -> None:
        """Zero the headers of live, ascending slots; raises OSError."""
        self.live -= len(slots)
        self.table[slots] = 0
        self._write_headers(slots, self.table[slots])

    def _write_headers(self, slots: Ints, headers: Bytes) -> None:
        for begin, end in runs(slots):
            offset = (1 + int(slots[begin])) * HEADER_BYTES
            _transfer(os.pwritev, self._fd, [headers[begin:end].reshape(-1)], offset)

    @property
    def removed(self) -> bool:
        """True if the file was deleted externally."""
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
    """Yield (begin, end) of runs of consecutive slots."""
    if not len(slots):
        return
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    for i in range(len(edges) - 1):
        for begin in range(edges[i], edges[i + 1], _VECTOR):
            yield begin, min(begin + _VECTOR, edges[i + 1])


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, parts: Sequence[Bytes],
    offset: int,
) -> int:  # fmt: skip
    """Read or write all parts from `offset`; return the bytes done, fewer only at the end."""
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
