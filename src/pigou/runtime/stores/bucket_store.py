"""BucketStore: blocks as objects of an S3-compatible storage, or any that `obstore` supports."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from pigou.kv import checksum
from pigou.kv.block import Bytes, keys_of
from pigou.kv.checksum import Checksums, checksums_of
from pigou.request import BlockHashes, Ints
from pigou.runtime.stores.store import (
    HEADER_BYTES,
    BlockRecords,
    Bools,
    StoreCounts,
    StoreError,
    decode,
    encode,
    no_records,
)

log = logging.getLogger(__name__)

#: Key prefix of this format.
_FORMAT = "pigou-kv-1"
#: Headers read per batch.
_SLICE = 256
#: Objects per bulk delete.
_DELETES = 1000
#: Timeouts that a listing of many pages may take, and between retries of deletions.
_PATIENCE = 12
_ZERO = np.zeros(1, dtype=np.int32)
Request: TypeAlias = Callable[[], Awaitable[None]]


class BucketStore:
    """Stores each block as one object, `pigou-kv-1/LAYOUT/XX/KEY` (hex) below the url.

    Workers may share a bucket; the cap counts only objects that this store put or found. A batch
    that exceeds the timeout fails as a whole.
    """

    def __init__(
        self, location: BucketLocation | str, namespace: bytes, block_bytes: int, cap_bytes: int, *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        """Create a client without connecting; raises StoreError if the location is invalid."""
        self.counts = StoreCounts()
        if isinstance(location, str):
            location = BucketLocation.parse(location)
        self.location = location
        self._namespace = namespace
        self.block_bytes, self.cap_bytes = block_bytes, cap_bytes
        self.record_bytes = HEADER_BYTES + block_bytes
        self.capacity = cap_bytes // self.record_bytes
        self._clock = clock
        self._client = location.open()
        self._folder = f"{_FORMAT}/{namespace.hex()}"
        self._lock = threading.Lock()
        self._known: set[bytes] = set()
        self._uploading = 0
        self._doomed: set[bytes] = set()
        self._patience = 0.0
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of objects that this store put or found, until their deletion completes."""
        return self._objects * self.record_bytes

    @property
    def _objects(self) -> int:
        return len(self._known) + self._uploading + len(self._doomed - self._known)

    def put(
        self, entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        """Upload blocks (see `Store.put`)."""
        names = keys_of(entries.keys)
        new = self._reserve(names, entries.alive(self._clock()))
        payloads = checksums_of(data, rows[new]) if sums is None else sums[new]
        headers = encode(self._namespace, entries.take(new), payloads, self.block_bytes)

        async def upload(i: int) -> None:
            body = np.concatenate([headers[i], data[rows[new[i]]]])
            await obstore.put_async(
                self._client, self._path(names[new[i]]), body, use_multipart=False
            )
            with self._lock:
                self._known.add(names[new[i]])
                self.counts.written += 1

        try:
            self._run("written", [partial(upload, i) for i in range(len(new))])
        finally:
            with self._lock:
                self._uploading -= len(new)
        return self.has(entries.keys)

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        """Download and verify blocks (see `Store.get`)."""
        good: Bools = np.zeros(len(keys), dtype=np.bool_)
        bad: list[str] = []
        names = keys_of(keys)

        async def download(i: int) -> None:
            path = self._path(names[i])
            try:
                answer = await obstore.get_async(self._client, path)
                size = answer.meta["size"]
                raw = await answer.bytes_async() if size == self.record_bytes else b""
            except FileNotFoundError:
                self._forget([names[i]])
                return
            fault = self._unpack(_array(raw), keys[i], out, rows[i : i + 1])
            good[i] = not fault
            if fault:
                bad.append(f"{path} {fault}")
                self._forget([names[i]])
                await self._remove([path])

        try:
            self._run("read", [partial(download, i) for i in range(len(keys))])
        finally:
            with self._lock:
                self.counts.count_reads(good)
        if bad:
            log.warning("%s: %d objects are misses, as %s", self.location.url, len(bad), bad[0])
        return good

    def has(self, keys: BlockHashes) -> Bools:
        """Return which blocks this store has put or found, shape (n,)."""
        with self._lock:
            return np.array([key in self._known for key in keys_of(keys)], dtype=np.bool_)

    def delete(self, keys: BlockHashes) -> int:
        """Forget blocks and delete their objects, now or once the storage answers again."""
        names = keys_of(keys)
        count = self._forget(names)
        with self._lock:
            self.counts.deleted += count
            self._doomed.update(names)
        if time.monotonic() >= self._patience:
            self._bury()
        return count

    def _bury(self) -> None:
        with self._lock:
            self._doomed -= self._known  # stored again since
            gone = list(self._doomed)
        try:
            for i in range(0, len(gone), _DELETES):
                paths = [self._path(name) for name in gone[i : i + _DELETES]]
                self._run("deleted from", [partial(self._remove, paths)])
                with self._lock:
                    self._doomed.difference_update(gone[i : i + _DELETES])
        except StoreError as error:
            self._patience = time.monotonic() + _PATIENCE * self.location.timeout
            log.warning("%d objects are left to be deleted: %s", len(self._doomed), error)

    def entries(self) -> BlockRecords:
        """List stored blocks, newest first, up to the cap and `look_up`; one request per block."""
        listed = self._list()
        records = [no_records()]

        async def look(path: str) -> None:
            try:
                raw = await obstore.get_range_async(
                    self._client, path, start=0, length=HEADER_BYTES
                )
            except FileNotFoundError:
                return
            header = _array(raw).reshape(1, -1)
            if header.shape[1] != HEADER_BYTES:
                return
            good, entry, _ = decode(header, self._namespace, self.block_bytes)
            if good[0] and self._path(keys_of(entry.keys)[0]) == path:
                records.append(entry.take(entry.alive(self._clock())))

        for i in range(0, len(listed), _SLICE):
            self._run("looked through", [partial(look, path) for path in listed[i : i + _SLICE]])
        held = BlockRecords.join(records)
        with self._lock:
            self._known.update(keys_of(held.keys))
        return held

    def probe(self) -> None:
        """Request a nonexistent object (see `Store.probe`)."""

        async def ask() -> None:
            with suppress(FileNotFoundError):
                await obstore.head_async(self._client, f"{self._folder}/probe")

        self._run("reached", [ask])

    def close(self) -> None:
        """Refuse further calls; running ones end by their timeouts."""
        self._closed = True

    def _path(self, name: bytes) -> str:
        text = name.hex()
        return f"{self._folder}/{text[:2]}/{text}"

    def _reserve(self, names: list[bytes], alive: Bools) -> Ints:
        """Return indices of blocks to upload: new, not void, unique, and within the cap."""
        new: dict[bytes, int] = {}
        with self._lock:
            for i, name in enumerate(names):
                if alive[i] and name not in self._known:
                    new.setdefault(name, i)
            room = max(0, self.capacity - self._objects)
            self.counts.refused += max(0, len(new) - room)
            chosen = list(new.values())[:room]
            self._uploading += len(chosen)
        return np.array(chosen, dtype=np.int32)

    def _unpack(self, raw: Bytes, key: BlockHashes, out: Bytes, row: Ints) -> str:
        """Decode an object into its row; return the fault, empty if valid."""
        if len(raw) != self.record_bytes:
            return self._corrupt("is of another size")
        header, body = raw[:HEADER_BYTES].reshape(1, -1), raw[HEADER_BYTES:].reshape(1, -1)
        good, entry, sums = decode(header, self._namespace, self.block_bytes)
        if not good[0] or (entry.keys[0] != key).any():
            return self._corrupt("is altered, or foreign")
        if not entry.alive(self._clock())[0]:
            with self._lock:
                self.counts.expired += 1
            return "is void"
        if checksum.copy(body, _ZERO, out, row)[0] != sums[0]:
            return self._corrupt("is altered")
        return ""

    def _corrupt(self, fault: str) -> str:
        with self._lock:
            self.counts.corrupt += 1
        return fault

    def _forget(self, names: Sequence[bytes]) -> int:
        with self._lock:
            stored = self._known.intersection(names)
            self._known -= stored
        return len(stored)

    async def _remove(self, paths: list[str]) -> None:
        try:
            await obstore.delete_async(self._client, paths)
        except FileNotFoundError:
            for path in paths:
                with suppress(FileNotFoundError):
                    await obstore.delete_async(self._client, path)

    def _list(self) -> list[str]:
        listed: list[Any] = []

        async def fetch() -> None:
            async for chunk in obstore.list(self._client, self._folder, chunk_size=1000):
                listed.extend(chunk)

        self._run("listed", [fetch], patience=_PATIENCE)
        right = [meta for meta in listed if meta["size"] == self.record_bytes]
        if len(right) < len(listed):
            n = len(listed) - len(right)
            log.warning("%s: %d objects of another size are no blocks", self.location.url, n)
        right.sort(key=lambda meta: meta["last_modified"], reverse=True)
        return [meta["path"] for meta in right[: min(self.capacity, self.location.look_up)]]

    def _run(self, what: str, work: Iterable[Request], patience: int = 1) -> None:
        if self._closed:
            raise StoreError(f"{self.location.url} was closed")
        if error := asyncio.run(self._gather(work, patience * self.location.timeout)):
            raise StoreError(f"{self.location.url} cannot be {what}: {error}")

    async def _gather(self, work: Iterable[Request], seconds: float) -> str:
        gate = asyncio.Semaphore(self.location.requests)

        async def send(request: Request) -> None:
            async with gate:
                await request()

        try:
            async with asyncio.timeout(seconds):
                sent = asyncio.gather(*map(send, work), return_exceptions=True)
                errors = [error for error in await sent if error is not None]
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        for error in errors:
            if not isinstance(error, (BaseError, OSError)):
                raise error
        return first_line(errors[0]) if errors else ""


def _array(raw: Any) -> Bytes:
    return np.frombuffer(raw, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """An object storage; credentials come from the environment, as for the provider's tools."""

    url: str  # `s3://bucket/prefix`, `gs://...`, `az://...`, `file:///directory`, `memory://`
    # S3-compatible server, as `http://127.0.0.1:9000`; empty for `AWS_ENDPOINT_URL` or Amazon's.
    endpoint: str = ""
    region: str = ""  # S3 region; empty for the environment's
    timeout: float = 5.0  # seconds for a batch of blocks
    connect_timeout: float = 2.0  # seconds
    retries: int = 2  # on network errors and status >= 500
    requests: int = 16
    look_up: int = 10_000  # max objects whose headers `entries` reads

    def __post_init__(self) -> None:
        scheme = urlsplit(self.url).scheme
        if not scheme:
            raise ValueError(f"url is {self.url!r}; give one like s3://bucket/prefix")
        for name in ("endpoint", "region"):
            if getattr(self, name) and scheme != "s3":
                raise ValueError(f"{name} is for s3:// only; leave it out for {self.url}")
        for name in ("timeout", "connect_timeout", "requests", "look_up"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}; it must not be negative")

    @classmethod
    def parse(cls, uri: str) -> BucketLocation:
        """Parse `URL[?endpoint=URL][&region=NAME]`; raises ValueError if malformed."""
        url, _, query = uri.partition("?")
        given = dict(parse_qsl(query, keep_blank_values=True))
        if unknown := sorted(given.keys() - {"endpoint", "region"}):
            raise ValueError(f"{uri} has {unknown[0]!r} after '?'; give endpoint= or region=")
        return cls(url, given.get("endpoint", ""), given.get("region", ""))

    def open(self) -> ObjectStore:
        """Create a client without connecting; raises StoreError on a bad url or environment."""
        scheme = urlsplit(self.url).scheme
        try:
            if scheme == "file":
                return from_url(self.url, mkdir=True)
            if scheme == "memory":
                return from_url(self.url)
            return from_url(self.url, **self._options())
        except (BaseError, ValueError) as error:
            raise StoreError(f"{self.url}: {first_line(error)}") from error

    def _options(self) -> dict[str, Any]:
        given = {"endpoint": self.endpoint, "region": self.region}
        return {
            **{name: value for name, value in given.items() if value},
            "client_options": {
                "timeout": timedelta(seconds=self.timeout), "allow_http": True,
                "connect_timeout": timedelta(seconds=self.connect_timeout),
            },
            "retry_config": {
                "max_retries": self.retries, "retry_timeout": timedelta(seconds=self.timeout),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=1), "base": 2,
                },
            },
        }  # fmt: skip


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without client internals."""
    return (str(error).strip().split("\n", 1)[0] or type(error).__name__)[:600]
