"""Records as files of one folder, which may be of a file system that hosts share."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec

from pigou.fleet.registry.entry import MAX_RECORD, NO_WORKER, WORKER_NAME, LeaseSeconds
from pigou.fleet.registry.record_store import Record, RegistryUnavailable, WriteConflict
from pigou.request import SECOND
from pigou.small_file import FileRefused, check_regular, read_bytes

#: Suffix of record files.
_SUFFIX = ".json"
_LOCK = ".lock"
#: Poll interval of a watch, in seconds.
_LOOK_S = 0.25
#: Seconds that the folder's lock is waited for, and between two tries.
_LOCK_S, _LOCK_POLL_S = 3.0, 0.005
#: Bytes of a file: each of a record may be escaped.
_MAX_FILE = 6 * MAX_RECORD + 1024
#: Names of files that are being written.
_FRESH = re.compile(rf"\.{WORKER_NAME.pattern}\.json\.[0-9a-f]+")
_T = TypeVar("_T")


class _File(msgspec.Struct, frozen=True):
    """Contents of a record's file; `renewals` rises with each renewal of its lease."""

    value: str
    revision: str
    ttl_s: LeaseSeconds
    renewals: int = 0


class FileStore:
    """Records in a folder, created if missing; no server is needed.

    A record is dead once this process saw no renewal for a lease, so hosts' clocks are not
    compared. Writes rename whole files, under a lock of the folder.
    """

    def __init__(self, folder: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._folder = folder
        self._clock = clock
        self._seen: dict[str, tuple[_File, int]] = {}
        # One thread, so that a file system that hangs takes no more of them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="registry files")

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none."""

        def read() -> Record | None:
            with suppress(ValueError):  # no record, in a worker's place
                return self._live(key, self._clock())
            return None

        return await self._off_loop(read)

    async def records(self) -> Mapping[str, Record | str]:
        """Return all live records, and for other files the reason why they are ignored."""
        return await self._off_loop(self._list)

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:
        """Replace a record if it is unchanged."""

        def write() -> None:
            with self._locked():
                self._checked(key, replaces)
                self._write(key, _File(value.decode(), uuid4().hex, ttl_s))

        await self._off_loop(write)

    async def renew(self, key: str, record: Record, ttl_s: float) -> None:
        """Let a record live on."""

        def write() -> None:
            with self._locked():
                file = self._checked(key, record)
                assert file is not None
                renewals = file.renewals + 1
                file = msgspec.structs.replace(file, renewals=renewals, ttl_s=ttl_s)
                self._write(key, file)

        await self._off_loop(write)

    async def delete(self, key: str, record: Record) -> None:
        """Delete a record if it is unchanged."""

        def remove() -> None:
            with self._locked(), suppress(WriteConflict):
                self._checked(key, record)
                self._path(key).unlink(missing_ok=True)

        await self._off_loop(remove)

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after changes, polled four times a second."""
        before = await self.records()
        while True:
            await asyncio.sleep(_LOOK_S)
            records = await self.records()
            if records != before:
                before = records
                wake()

    async def close(self) -> None:
        """Leave the files, and let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _off_loop(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise RegistryUnavailable(f"{self._folder}: {error}") from error

    def _list(self) -> dict[str, Record | str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        now, records = self._clock(), dict[str, Record | str]()
        for name in os.listdir(self._folder):
            key = name.removesuffix(_SUFFIX)
            if name == _LOCK or _FRESH.fullmatch(name):
                continue
            if key == name or not WORKER_NAME.fullmatch(key):
                records[name] = NO_WORKER
                continue
            try:
                record = self._live(key, now)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                records[key] = reason or type(error).__name__
            else:
                if record is not None:
                    records[key] = record
        for key in self._seen.keys() - records.keys():
            del self._seen[key]
        return records

    def _live(self, key: str, now: int) -> Record | None:
        file = self._read(key)
        return _record(file) if file is not None and self._lives(key, file, now) else None

    def _lives(self, key: str, file: _File, now: int) -> bool:
        """Whether a file's lease runs; one whose lease ended is removed."""
        seen, since = self._seen.setdefault(key, (file, now))
        if seen != file:
            self._seen[key] = file, now
            return True
        if now - since < file.ttl_s * SECOND:
            return True
        with suppress(OSError), self._locked(wait_s=0.0):  # others may tidy up
            if self._read(key) == file:
                self._path(key).unlink(missing_ok=True)
        return False

    def _checked(self, key: str, wanted: Record | None) -> _File | None:
        """Return the current file if it is the wanted one."""
        try:
            file = self._read(key)
        except ValueError:  # as `get`
            file = None
        if (None if file is None else _record(file)) != wanted:
            raise WriteConflict(f"{key} was written meanwhile")
        return file

    def _read(self, key: str) -> _File | None:
        """Return a file's content; None where it is gone. Raises OSError and ValueError."""
        try:
            data = read_bytes(self._path(key), _MAX_FILE, follow=False)
            return msgspec.json.decode(data, type=_File)
        except FileNotFoundError:
            return None
        except FileRefused as error:
            raise ValueError(error.strerror) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ValueError("it holds no record") from None

    def _write(self, key: str, file: _File) -> None:
        path = self._path(key)
        fresh = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            with fresh.open("xb") as out:
                out.write(msgspec.json.encode(file))
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        if not WORKER_NAME.fullmatch(key):
            raise RegistryUnavailable(f"{key!r} can be no file's name")
        return self._folder / f"{key}{_SUFFIX}"

    @contextmanager
    def _locked(self, wait_s: float = _LOCK_S) -> Iterator[None]:
        """Hold the folder's lock; it ends with the process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / _LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(path, flags, 0o666)
        try:
            check_regular(os.fstat(lock), path)
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise RegistryUnavailable(f"{path} is locked by another process") from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(lock)


def _record(file: _File) -> Record:
    return Record(file.value.encode(), file.revision)
