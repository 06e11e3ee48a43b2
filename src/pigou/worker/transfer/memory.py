"""Shared memory: a file in memory that holds a worker's KV cache, for receivers on the host.

The creator holds a lock on the file for as long as it lives, so that a file without one is an
orphan (its creator was killed) and is removed by the next creator.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import tempfile
import weakref
from pathlib import Path

import numpy as np

from pigou.kv.layout import Bytes

#: Where the files are: a file system in memory, where there is one.
SHARED_DIR = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
PREFIX = "pigou-kv-"
#: Bytes before the buffer: they name the creator, so that a re-used name is noticed.
HEADER = 4096
_MAGIC = b"pigou-kv/1 "


def host_id() -> str:
    """Name this boot of this machine and its shared-memory file system.

    Two processes with the same id see the same files in `SHARED_DIR`; two containers on one
    machine differ unless they share it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return f"{machine}:{os.stat(SHARED_DIR).st_dev}"


def remove_orphans() -> list[str]:
    """Remove the files whose creator is dead, and return their names."""
    removed = []
    for path in SHARED_DIR.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone already, or another user's
        try:
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

        Raises:
            OSError: there is no room; says how many bytes were wanted, and where.
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
        fd = os.open(SHARED_DIR / name, os.O_RDONLY | os.O_NOFOLLOW)
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
