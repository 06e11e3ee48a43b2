"""Host block storage, shared memory, and the verified destination of a pull."""

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

#: Bytes read at once from a device store.
STAGE_BYTES = 8 << 20
#: Bytes hashed at once, in about 50 microseconds.
PIECE_BYTES = 2 << 20
#: Folder of the files: an in-memory file system if available.
SHARED_DIR = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
PREFIX = "pigou-kv-"
#: Creator's process id, and a random part.
_NAME = re.compile(rf"{PREFIX}\d+-[0-9a-f]{{32}}")
#: Bytes before the buffer; they hold the key, to detect a re-used name.
HEADER = 4096
_MAGIC = b"pigou-kv/1 "
#: Bytes moved per verification, few enough to stay in CPU cache.
CHUNK_BYTES = 512 << 10
#: Bytes copied and hashed per call without the GIL; about 200 microseconds.
COPY_BYTES = 4 << 20


class HostBlockStore:
    """Blocks in an array of host memory."""

    def __init__(self, layout: KVLayout, data: Bytes) -> None:
        """Wrap contiguous `data`, (blocks, layout.block_bytes); raises ValueError if misshaped."""
        if data.ndim != 2 or data.shape[1] != layout.block_bytes or not data.flags.c_contiguous:
            raise ValueError(
                f"data has shape {data.shape}; give a contiguous (blocks, {layout.block_bytes})"
            )
        self._layout = layout
        self._data = data

    @property
    def layout(self) -> KVLayout:
        """Memory layout of a block."""
        return self._layout

    def as_bytes(self) -> Bytes:
        """Return a view of all blocks, (blocks, block_bytes)."""
        return self._data

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks out, shape (n, block_bytes)."""
        return np.asarray(self._data[ids])

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, (n, block_bytes), into blocks `ids`."""
        self._data[ids] = data


def checksums_in(store: DeviceBlocks, ids: Ints) -> Checksums:
    """Return checksums of blocks `ids`, (n,), yielding to other threads between pieces."""
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


def host_id() -> str:
    """Identify this boot and its shared-memory file system; equal ids see the same files."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = read_text(boot).strip() if boot.exists() else os.uname().nodename
    return f"{machine}:{os.stat(SHARED_DIR).st_dev}"


def remove_orphans() -> list[str]:
    """Remove files of dead creators, who hold a lock while alive; return their names."""
    removed = []
    for path in SHARED_DIR.glob(f"{PREFIX}*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone, another user's, or no file
        try:
            check_regular(os.fstat(fd), path, sys.maxsize)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
        except OSError:
            pass  # creator alive, or another remover is at work
        finally:
            os.close(fd)
    return removed


class SharedMemory:
    """A zeroed buffer that other processes of this user can map; `close` removes its file."""

    def __init__(self, size: int) -> None:
        """Create `size` bytes, and remove orphans; raises OSError without room."""
        if size < 1:
            raise ValueError(f"size is {size}; it must be at least 1")
        remove_orphans()
        self.key = secrets.token_hex(16)
        self.path, self._fd = _create()
        try:
            # Reserve now: running out of memory at first touch would kill the process.
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
        """File name in `SHARED_DIR`."""
        return self.path.name

    @property
    def buffer(self) -> Bytes:
        """The writable buffer, (size,), page-aligned; valid until `close`."""
        if self._bytes is None:
            raise ValueError("this shared memory is closed")
        return self._bytes

    def fileno(self) -> int:
        """Return the file's descriptor; the buffer lies in it from `HEADER` on."""
        return self._fd

    def offset_of(self, data: Bytes) -> int | None:
        """Return the byte offset of `data` in the buffer; None if outside."""
        offset = data.ctypes.data - self.buffer.ctypes.data
        inside = offset >= 0 and offset + data.nbytes <= self.buffer.nbytes
        return offset if inside else None

    def close(self) -> None:
        """Remove the file; the memory lives until its last array is freed."""
        self._bytes = None
        self._remove()


def _unlink(path: Path, fd: int, creator: int) -> None:
    if os.getpid() == creator:
        path.unlink(missing_ok=True)
    os.close(fd)


def _create() -> tuple[Path, int]:
    """Create and lock a file; retry if an orphan remover locked it first."""
    while True:
        path = SHARED_DIR / f"{PREFIX}{os.getpid()}-{secrets.token_hex(16)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if path.exists():
            return path, fd
        os.close(fd)


class MappedMemory:
    """Another process's SharedMemory, mapped read-only until its last view is freed."""

    def __init__(self, name: str, key: str) -> None:
        """Map file `name`, checking `key`; raises OSError or ValueError if it does not match."""
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
        """View the memory from `offset` as whole blocks, (blocks, block_bytes)."""
        if not 0 <= offset < self._bytes.nbytes:
            raise ValueError(f"offset {offset} lies outside {self._bytes.nbytes} bytes")
        rows = (self._bytes.nbytes - offset) // block_bytes
        return self._bytes[offset : offset + rows * block_bytes].reshape(rows, block_bytes)


class ReceiveBuffer:
    """Destination blocks of one pull, hashed on arrival and verified. Thread-safe by part."""

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
        self._arrived = np.zeros(len(dest) + 1, dtype=np.bool_)  # sentinel: the last stays False
        self._wanted: Checksums | None = None

    def __len__(self) -> int:
        return len(self._dest)

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Split blocks `first` to `last` into (first, count) of about `CHUNK_BYTES`."""
        return self._cut(first, len(self) if last is None else last, CHUNK_BYTES)

    def copies(self) -> Iterator[tuple[int, int]]:
        """Split all blocks into (first, count) of about `COPY_BYTES`, for `copy`."""
        return self._cut(0, len(self), CHUNK_BYTES if self._rows is None else COPY_BYTES)

    def _cut(self, first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
        step = max(1, size // self.block_bytes)
        return ((i, min(step, last - i)) for i in range(first, last, step))

    def targets(self, first: int, count: int) -> list[Bytes]:
        """Return destinations of blocks, as runs (n, block_bytes); call `accept` once written."""
        if self._rows is None:
            return [np.empty((count, self.block_bytes), dtype=np.uint8)]
        return runs_of(self._rows, self._dest[first : first + count])

    def accept(self, first: int, targets: list[Bytes]) -> None:
        """Accept the blocks from `first` on, as written to `targets`.

        Raises TransferError: CORRUPT at the first mismatch (earlier blocks count), STORE, or
        CANCELLED.
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
        """Copy and hash rows `ids` to blocks from `first` on; raises TransferError as `accept`."""
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
        """Set the expected checksums, (len(self),); raises TransferError CORRUPT on a mismatch."""
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
    """Return views of rows `ids`, merging consecutive ids, each (n, row bytes)."""
    cuts = (ids[1:] - ids[:-1] != 1).nonzero()[0] + 1
    edges = [0, *cuts.tolist(), len(ids)]
    return [rows[int(ids[a]) : int(ids[a]) + (b - a)] for a, b in pairwise(edges) if b > a]
