"""Records in a key-value bucket of NATS JetStream."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self
from urllib.parse import SplitResult

from nats.aio.client import Client
from nats.errors import Error
from nats.js.api import Header
from nats.js.errors import APIError, BucketNotFoundError, KeyDeletedError, KeyNotFoundError
from nats.js.kv import KV_DEL, KV_OP, KV_PURGE, MSG_ROLLUP_SUBJECT, KeyValue

from pigou.config import ConfigError
from pigou.fleet.nats_connection import NatsAddress, connect_nats
from pigou.fleet.registry.entry import MAX_RECORD, NO_WORKER, WORKER_NAME
from pigou.fleet.registry.record_store import Record, RegistryUnavailable, WriteConflict

_BUCKET = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEFAULT_BUCKET = "pigou"
#: Error codes of the server: the last sequence is not the expected one.
_WRONG_SEQUENCE = (10071, 10164)
#: Seconds for an answer, and for which the mark of a deletion stays.
_CONNECT_S, _MARKER_S = 2, 60
#: Seconds between two looks of a watch for a bucket that no worker has made yet.
_NO_BUCKET_S = 0.3
#: Records read at once; seconds until the server forgets a consumer without its client.
_READS, _CONSUMER_S = 100, 10.0
#: Level of the API from which messages have lifetimes of their own (NATS 2.11).
_MESSAGE_TTL_LEVEL = 1


class NatsStore:
    """Records in a NATS bucket, created by the first worker that registers."""

    def __init__(self, address: NatsAddress, bucket: str) -> None:
        self._address = address
        self._bucket = bucket
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._reconnected = asyncio.Event()

    @classmethod
    def of(cls, parts: SplitResult) -> Self:
        """Return the store of `nats://[USER:PASSWORD@]HOST:PORT[/BUCKET]`, or `tls://`."""
        bucket = parts.path.strip("/") or _DEFAULT_BUCKET
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"registry: {bucket!r} is no bucket of NATS; write nats://HOST:PORT/BUCKET with "
                "letters, digits, '_' and '-'"
            )
        server = f"{parts.scheme}://{parts.netloc}?{parts.query}"
        return cls(NatsAddress.parse([server], "registry"), bucket)

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none."""
        async with self._calls() as client:
            bucket = await self._open(client)
            return None if bucket is None else (await _last(bucket, key))[0]

    async def records(self) -> Mapping[str, Record | str]:
        """Return all live records."""
        async with self._calls() as client:
            bucket = await self._open(client)
            return {} if bucket is None else await self._all(client, bucket)

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:
        """Replace a record if it is unchanged."""
        async with self._calls() as client:
            bucket = await self._open(client) or await self._make(client, ttl_s)
            sequence = 0 if replaces is None else int(replaces.revision)
            if replaces is None:
                record, sequence = await _last(bucket, key)
                if record is not None:
                    raise WriteConflict(f"{key} was written meanwhile")
            await self._publish(client, key, value, ttl_s, {}, sequence)

    async def renew(self, key: str, record: Record, ttl_s: float) -> None:
        """Write a record again: its time to live begins anew."""
        await self.put(key, record.value, ttl_s, record)

    async def delete(self, key: str, record: Record) -> None:
        """Delete a record if it is unchanged."""
        headers = {KV_OP: KV_PURGE, Header.ROLLUP.value: MSG_ROLLUP_SUBJECT}
        async with self._calls() as client:
            with suppress(WriteConflict):
                sequence = int(record.revision)
                await self._publish(client, key, b"", _MARKER_S, headers, sequence)

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after changes other than renewals."""
        async with self._calls() as client:
            self._reconnected.clear()
            while (bucket := await self._open(client)) is None:
                await asyncio.sleep(_NO_BUCKET_S)
            lease_s = (await bucket.status()).ttl  # where the server tells of no ends
            watcher: Any = await bucket.watch(">", inactive_threshold=_CONSUMER_S)
            values: dict[str, bytes | None] = {}
            wake()
            try:
                while not self._reconnected.is_set():
                    try:
                        async with asyncio.timeout(min(0.5, (lease_s or 1.0) / 2)):
                            entry = await anext(watcher)
                    except TimeoutError:
                        if lease_s:
                            wake()
                        continue
                    if entry is None:
                        continue
                    gone = entry.operation in (KV_DEL, KV_PURGE)
                    value = None if gone else entry.value
                    if values.get(entry.key, b"") != value:
                        values[entry.key] = value
                        wake()
            finally:
                with suppress(Exception):
                    await watcher.stop()
        raise RegistryUnavailable("the connection to NATS was lost, and made again")

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Error, OSError, TimeoutError):
                await client.close()

    # --- within -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _calls(self) -> AsyncIterator[Client]:
        try:
            yield await self._connection()
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client may have swallowed it
                raise asyncio.CancelledError
        except APIError as error:
            if error.err_code in _WRONG_SEQUENCE:
                raise WriteConflict("it was written meanwhile") from error
            raise RegistryUnavailable(f"NATS: {error}") from error
        except (Error, OSError, TimeoutError) as error:
            raise RegistryUnavailable(f"NATS: {error or type(error).__name__}") from error

    async def _connection(self) -> Client:
        async with self._connecting:
            if self._client is None:
                self._client = await connect_nats(self._address, None, closed=self._closed)
            return self._client

    async def _closed(self) -> None:
        self._client = None
        self._reconnected.set()

    async def _open(self, client: Client) -> KeyValue | None:
        try:
            return await client.jetstream(timeout=_CONNECT_S).key_value(self._bucket)
        except BucketNotFoundError:
            return None

    async def _all(self, client: Client, bucket: KeyValue) -> dict[str, Record | str]:
        """Return all live records, by reads alone: a watch would leave a consumer behind."""
        prefix, stream = self._subject(""), client.jetstream(timeout=_CONNECT_S)
        name = f"KV_{self._bucket}"  # as NATS names it
        info = await stream.stream_info(name, subjects_filter=f"{prefix}>")
        keys = [subject.removeprefix(prefix) for subject in info.state.subjects or {}]
        names = [key for key in keys if WORKER_NAME.fullmatch(key)]
        records: dict[str, Record | str] = dict.fromkeys(set(keys) - set(names), NO_WORKER)
        for at in range(0, len(names), _READS):
            part = names[at : at + _READS]
            reads = await asyncio.gather(*(_last(bucket, key) for key in part))
            records |= {key: own for key, (own, _) in zip(part, reads, strict=True) if own}
        return records

    def _subject(self, key: str) -> str:
        return f"$KV.{self._bucket}.{key}"

    async def _make(self, client: Client, ttl_s: float) -> KeyValue:
        stream = client.jetstream(timeout=_CONNECT_S)
        info = await stream.account_info()
        if (info.api.level or 0) >= _MESSAGE_TTL_LEVEL:
            lifetime: dict[str, Any] = {"limit_marker_ttl": _MARKER_S}
        else:
            lifetime = {"ttl": ttl_s}
        with suppress(APIError):  # another worker makes it at the same time
            return await stream.create_key_value(bucket=self._bucket, **lifetime)
        return await stream.key_value(self._bucket)

    async def _publish(
        self, client: Client, key: str, value: bytes, ttl_s: float, headers: dict[str, str],
        sequence: int,
    ) -> None:  # fmt: skip
        expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(sequence)}
        await client.jetstream(timeout=_CONNECT_S).publish(
            self._subject(key), value, headers=headers | expected,
            msg_ttl=math.ceil(ttl_s),
        )  # fmt: skip


async def _last(bucket: KeyValue, key: str) -> tuple[Record | None, int]:
    try:
        entry = await bucket._get(key)
    except KeyDeletedError as error:
        return None, error.entry.revision
    except KeyNotFoundError:
        return None, 0
    if not entry.value:  # the server's mark of a record whose time is over
        return None, entry.revision or 0
    value = entry.value[: MAX_RECORD + 1]  # a longer one is ignored
    return Record(value, str(entry.revision)), entry.revision or 0
