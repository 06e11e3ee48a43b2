"""DeviceBlocks: the KV blocks of a worker, seen as bytes."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from pigou.kv import checksum
from pigou.kv.block import Bytes, KVLayout
from pigou.kv.checksum import Checksums, checksums_of
from pigou.request import Ints
from pigou.runtime.stores.store import DeviceBlocks
from pigou.small_file import check_regular, read_text
from pigou.worker.kv_transfer.transfer_params import TransferError, TransferReason


class HostBlockStore:
    """Blocks in an array of host memory."""

    def __init__(self, layout: KVLayout, data: Bytes) -> None:
        """Wrap `data`, C-contiguous, shape (blocks, layout.block_bytes).

        Raises ValueError: the array does not have that shape or is not contiguous.
        """
        if data.ndim != 2 or data.shape[1] != layout.block_bytes or not data.flags.c_contiguous:
            raise ValueError(
                f"data has shape {data.shape}; give a contiguous (blocks, {layout.block_bytes})"
            )
        self._layout = layout
        self._data = data

    @property
    def layout(self) -> KVLayout:
        """How a block lies in memory."""
        return self._layout

    def as_bytes(self) -> Bytes:
        """All blocks without a copy, shape (blocks, block_bytes)."""
        return self._data

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks out, shape (n, block_bytes)."""
        return np.asarray(self._data[ids])

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, shape (n, block_bytes), into the blocks `ids`."""
        self._data[ids] = data


#: Bytes that are read at once from a store that is not in host memory.
STAGE_BYTES = 8 << 20
#: Bytes that are digested at once, in some 50 microseconds.
PIECE_BYTES = 2 << 20


def checksums_in(store: DeviceBlocks, ids: Ints) -> Checksums:
    """Checksums of the blocks `ids`, shape (n,), without copying when they are in host memory.

    Lets other threads run between two pieces: who waits for a core here mostly waits to be told
    of these very blocks.
    """
    parts = []
    data = store.as_bytes()
    step = max(1, (STAGE_BYTES if data is None else PIECE_BYTES) // store.layout.block_bytes)
    for i in range(0, len(ids), step):
        piece = ids[i : i + step]
        if data is not None:
            parts.append(checksums_of(data, piece))
        else:
            rows = np.ascontiguousarray(store.read(piece))
            parts.append(checksums_of(rows, np.arange(len(rows), dtype=np.int32)))
        os.sched_yield()
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


#: Where the files are: a file system in memory, where there is one.
SHARED_DIR = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
PREFIX = "pigou-kv-"
#: Process id of the creator, and a random part.
_NAME = re.compile(rf"{PREFIX}\d+-[0-9a-f]{{32}}")
#: Bytes before the buffer: they name the creator, so that a re-used name is noticed.
HEADER = 4096
_MAGIC = b"pigou-kv/1 "


def host_id() -> str:
    """Name this boot of this machine and its shared-memory file system.

    Two processes with the same id see the same files in `SHARED_DIR`; two containers on one
    machine differ unless they share it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = read_text(boot).strip() if boot.exists() else os.uname().nodename
    return f"{machine}:{os.stat(SHARED_DIR).st_dev}"


def remove_orphans() -> list[str]:
    """Remove the files whose creator is dead, and return their names.

    Nothing else is touched: a creator holds a lock for as long as it lives.
    """
    removed = []
    for path in SHARED_DIR.glob(f"{PREFIX}*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone already, another user's, or no file
        try:
            check_regular(os.fstat(fd), path, sys.maxsize)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
        except OSError:
            pass  # its creator lives, or somebody else removes it
        finally:
            os.close(fd)
    return removed


class SharedMemory:
    """A zeroed buffer that other processes of this user can map; its file goes with `close`."""

    def __init__(self, size: int) -> None:
        """Create `size` bytes, and remove orphans first.

        Raises OSError: there is no room; says how many bytes were wanted, and where.
        """
        if size < 1:
            raise ValueError(f"size is {size}; it must be at least 1")
        remove_orphans()
        self.key = secrets.token_hex(16)
        self.path, self._fd = _create()
        try:
            # Reserve now: memory that is missing at the first touch would kill the process.
            os.posix_fallocate(self._fd, 0, HEADER + size)
            memory = mmap.mmap(self._fd, HEADER + size)
        except OSError as error:
            _unlink(self.path, self._fd, os.getpid())
            raise OSError(
                error.errno,
                f"no room for {size} bytes in {SHARED_DIR} (in a container, raise --shm-size; "
                f"or leave the backend shm out): {error.strerror}",
            ) from error
        memory[: len(_MAGIC) + 32] = _MAGIC + self.key.encode()
        self._bytes: Bytes | None = np.frombuffer(memory, dtype=np.uint8, offset=HEADER)
        self._remove = weakref.finalize(self, _unlink, self.path, self._fd, os.getpid())

    @property
    def name(self) -> str:
        """Name of the file in `SHARED_DIR`."""
        return self.path.name

    @property
    def buffer(self) -> Bytes:
        """The buffer, writable, shape (size,); page-aligned. Valid until `close`."""
        if self._bytes is None:
            raise ValueError("this shared memory is closed")
        return self._bytes

    def offset_of(self, data: Bytes) -> int | None:
        """Where `data` begins within the buffer, in bytes; None when it does not lie in it."""
        offset = data.ctypes.data - self.buffer.ctypes.data
        inside = offset >= 0 and offset + data.nbytes <= self.buffer.nbytes
        return offset if inside else None

    def close(self) -> None:
        """Remove the file; the memory itself goes when the last array upon it does."""
        self._bytes = None
        self._remove()


def _unlink(path: Path, fd: int, creator: int) -> None:
    """Remove a file and its lock, unless this is a forked child at its exit."""
    if os.getpid() == creator:
        path.unlink(missing_ok=True)
    os.close(fd)


def _create() -> tuple[Path, int]:
    """Create and lock a file; a remover that locked it first has taken it away: try again."""
    while True:
        path = SHARED_DIR / f"{PREFIX}{os.getpid()}-{secrets.token_hex(16)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if path.exists():
            return path, fd
        os.close(fd)


class MappedMemory:
    """Somebody else's SharedMemory, mapped read-only until the last view of it is gone."""

    def __init__(self, name: str, key: str) -> None:
        """Map the file `name` of `SHARED_DIR`, if its creator wrote `key` into it.

        Raises:
            OSError: there is no such file, or it is not ours to read.
            ValueError: the name is no plain name of such a file, or the key differs.
        """
        if not name.startswith(PREFIX) or os.sep in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a shared memory")
        fd = os.open(SHARED_DIR / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        if memory[: len(_MAGIC) + 32] != _MAGIC + key.encode():
            memory.close()
            raise ValueError(f"{name} belongs to another process than the one asked")
        self._bytes: Bytes = np.frombuffer(memory, dtype=np.uint8, offset=HEADER)

    def blocks(self, offset: int, block_bytes: int) -> Bytes:
        """View the memory from `offset` on as whole blocks, shape (blocks, block_bytes)."""
        if not 0 <= offset < self._bytes.nbytes:
            raise ValueError(f"offset {offset} lies outside {self._bytes.nbytes} bytes")
        rows = (self._bytes.nbytes - offset) // block_bytes
        return self._bytes[offset : offset + rows * block_bytes].reshape(rows, block_bytes)


#: Bytes that are moved before they are verified: few enough to be in the cache still.
CHUNK_BYTES = 512 << 10
#: Bytes that one call copies and digests at once, without the GIL; some 200 microseconds.
COPY_BYTES = 4 << 20


class ReceiveBuffer:
    """Destination blocks of one pull; several threads may fill different parts at once.

    Blocks are digested as they arrive, while they are in the cache, and verified as soon as the
    sender's checksums are known, which may be before or after.
    """

    def __init__(
        self, store: DeviceBlocks, dest: Ints, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        self.good = 0
        self.block_bytes = store.layout.block_bytes
        self._store = store
        self._dest = dest
        self._cancelled = cancelled
        self._rows = store.as_bytes()
        self._lock = threading.Lock()
        self._digests: Checksums = np.zeros(len(dest), dtype=np.uint64)
        self._arrived = np.zeros(len(dest) + 1, dtype=np.bool_)  # the last stays False
        self._wanted: Checksums | None = None

    def __len__(self) -> int:
        return len(self._dest)

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut blocks `first` to `last` (default all) into (first, count) of a size good to move."""
        return self._cut(first, len(self) if last is None else last, CHUNK_BYTES)

    def copies(self) -> Iterator[tuple[int, int]]:
        """Cut all blocks into (first, count) of a size good for `copy`."""
        return self._cut(0, len(self), CHUNK_BYTES if self._rows is None else COPY_BYTES)

    def _cut(self, first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
        step = max(1, size // self.block_bytes)
        return ((i, min(step, last - i)) for i in range(first, last, step))

    def targets(self, first: int, count: int) -> list[Bytes]:
        """Where blocks `first` to `first + count` belong: runs in order, each (n, block_bytes).

        What is written there counts only after `accept`.
        """
        if self._rows is None:
            return [np.empty((count, self.block_bytes), dtype=np.uint8)]
        return runs_of(self._rows, self._dest[first : first + count])

    def accept(self, first: int, targets: list[Bytes]) -> None:
        """Take the blocks from `first` on, now that they are written to `targets(first, ...)`.

        Raises:
            TransferError: CORRUPT at the first block that is not what was offered (those before
                it count); STORE, when the store cannot take them; CANCELLED.
        """
        self._check()
        count = sum(len(run) for run in targets)
        if self._rows is None:
            digests = checksum.checksums_of(targets[0], np.arange(count, dtype=np.int32))
            self._write(first, targets[0])
        else:
            digests = checksum.checksums_of(self._rows, self._dest[first : first + count])
        self._note(first, digests)

    def copy(self, first: int, source: Bytes, ids: Ints) -> None:
        """Copy the rows `ids` of `source`, C-contiguous, to the blocks from `first` on.

        Each byte is read once, and digested as it is written.

        Raises:
            TransferError: as `accept`.
        """
        if self._rows is None:
            targets = self.targets(first, len(ids))
            np.take(source, ids, axis=0, out=targets[0])
            self.accept(first, targets)
            return
        self._check()
        places = self._dest[first : first + len(ids)]
        self._note(first, checksum.copy(source, ids, self._rows, places))

    def _check(self) -> None:
        if self._cancelled():
            raise TransferError(TransferReason.CANCELLED, "nobody waits for these blocks any more")

    def _note(self, first: int, digests: Checksums) -> None:
        with self._lock:
            self._digests[first : first + len(digests)] = digests
            self._arrived[first : first + len(digests)] = True
            self._verify()

    def verify(self, checksums: Checksums) -> None:
        """Learn what the blocks should be, shape (len(self),): those there, and those to come.

        Raises TransferError: CORRUPT at the first that is not what was offered.
        """
        with self._lock:
            self._wanted = checksums
            self._verify()

    def _verify(self) -> None:
        if self._wanted is None:
            return
        last = self.good + int(self._arrived[self.good :].argmin())
        wrong = self._digests[self.good : last] != self._wanted[self.good : last]
        if not wrong.any():
            self.good = last
            return
        self.good += int(wrong.argmax())
        raise TransferError(TransferReason.CORRUPT, f"block {self.good} is not what was offered")

    def _write(self, first: int, data: Bytes) -> None:
        try:
            self._store.write(self._dest[first : first + len(data)], data)
        except Exception as error:
            raise TransferError(TransferReason.STORE, f"cannot write blocks: {error!r}") from error


def runs_of(rows: Bytes, ids: Ints) -> list[Bytes]:
    """Views of the rows `ids`, in order, consecutive ids merged; each of shape (n, row bytes)."""
    cuts = (ids[1:] - ids[:-1] != 1).nonzero()[0] + 1
    edges = [0, *cuts.tolist(), len(ids)]
    return [rows[int(ids[a]) : int(ids[a]) + (b - a)] for a, b in pairwise(edges) if b > a]
