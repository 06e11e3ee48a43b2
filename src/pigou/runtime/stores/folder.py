"""Folder: the segment files of a disk store, and the cap on all of them together."""

from __future__ import annotations

import fcntl
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from pigou.runtime.stores.record import HEADER_BYTES
from pigou.runtime.stores.segment import NotASegment, Segment
from pigou.runtime.stores.store import StoreError

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


class Folder:
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
            if stem == entry.name or not stem.isdecimal():
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
