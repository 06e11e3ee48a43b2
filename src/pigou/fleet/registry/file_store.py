"""Records as files of one folder, which may be of a file system that hosts share."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec

from pigou.fleet.registry.record_store import Record, RegistryUnavailable, WriteConflict
from pigou.request import SECOND

#: Ends the names of the records' files.
_SUFFIX = ".json"
_LOCK = ".lock"
#: What may be a key, so that no key leaves the folder.
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
#: Seconds between two looks of a watch.
_LOOK_S = 0.25
_T = TypeVar("_T")


class _File(msgspec.Struct, frozen=True):
    """Contents of a record's file; `renewals` rises with each renewal of its lease."""

    value: str
    revision: str
    ttl_s: float
    renewals: int = 0


class FileStore:
    """Records in a folder; no server is needed.

    A record is dead once this process has seen no renewal of it for as long as its lease lasts:
    clocks of hosts are not compared. Writes rename whole files, under a lock of the folder.
    """

    def __init__(self, folder: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Use a folder, which is made where it is missing.

        Args:
            folder: of the records, and of nothing else.
            clock: monotonic, in nanoseconds.
        """
        self._folder = folder
        self._clock = clock
        self._seen: dict[str, tuple[_File, int]] = {}

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none."""
        return await self._off_loop(lambda: self._live(key, self._clock()))

    async def records(self) -> Mapping[str, Record]:
        """Return all live records."""
        return await self._off_loop(self._list)

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:
        """Write a record in place of the one that was read."""

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
        """Remove a record that is still the one that was read."""

        def remove() -> None:
            with self._locked(), suppress(WriteConflict):
                self._checked(key, record)
                self._path(key).unlink(missing_ok=True)

        await self._off_loop(remove)

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after changes, which are looked for four times a second."""
        before = await self.records()
        while True:
            await asyncio.sleep(_LOOK_S)
            records = await self.records()
            if records != before:
                before = records
                wake()

    async def close(self) -> None:
        """Leave the files: nothing is open."""

    async def _off_loop(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise RegistryUnavailable(f"{self._folder}: {error}") from error

    def _list(self) -> dict[str, Record]:
        self._folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in self._folder.iterdir()]
        keys = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
        now = self._clock()
        records = {key: self._live(key, now) for key in keys}
        for key in self._seen.keys() - records.keys():
            del self._seen[key]
        return {key: record for key, record in records.items() if record is not None}

    def _live(self, key: str, now: int) -> Record | None:
        """Return the record of a key whose lease runs."""
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
        with suppress(PermissionError), self._locked():  # others may tidy up
            if self._read(key) == file:
                self._path(key).unlink(missing_ok=True)
        return False

    def _checked(self, key: str, wanted: Record | None) -> _File | None:
        """Return what is there, which must be what is wanted; the folder is locked."""
        file = self._read(key)
        if (None if file is None else _record(file)) != wanted:
            raise WriteConflict(f"{key} was written meanwhile")
        return file

    def _read(self, key: str) -> _File | None:
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=_File)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def _write(self, key: str, file: _File) -> None:
        path = self._path(key)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(file))
        fresh.replace(path)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise RegistryUnavailable(f"{key!r} can be no file's name")
        return self._folder / f"{key}{_SUFFIX}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only writer; the lock ends with the process that has it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _record(file: _File) -> Record:
    return Record(file.value.encode(), file.revision)
