"""Records in etcd, each on a lease of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self
from urllib.parse import SplitResult, unquote

import aetcd

from pigou.config import ConfigError
from pigou.fleet.registry.entry import MAX_RECORD
from pigou.fleet.registry.record_store import Record, RegistryUnavailable, WriteConflict

_PORT = 2379
#: Seconds that a call may take.
_CALL_S = 3
#: Longest pause between two tries of the connection, in milliseconds: gRPC's own is 120 s.
_OPTIONS = {
    "grpc.initial_reconnect_backoff_ms": 250,
    "grpc.max_reconnect_backoff_ms": 2000,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5000,
}


class EtcdStore:
    """Records below an etcd prefix, on etcd leases."""

    def __init__(
        self, host: str, port: int, prefix: str, user: str | None = None,
        password: str | None = None,
    ) -> None:  # fmt: skip
        self._client = aetcd.Client(
            host, port, username=user, password=password, timeout=_CALL_S, options=_OPTIONS
        )
        self._prefix = prefix.encode()

    @classmethod
    def of(cls, parts: SplitResult) -> Self:
        """Return the store of `etcd://[USER:PASSWORD@]HOST:PORT/PREFIX`. Raises ConfigError."""
        assert parts.hostname is not None
        if parts.query:
            raise ConfigError(
                f"registry: etcd takes no parameters, and has no TLS here: leave ?{parts.query} out"
            )
        prefix = parts.path.strip("/") or "pigou"
        user, password = (
            None if text is None else unquote(text) for text in (parts.username, parts.password)
        )
        return cls(parts.hostname, parts.port or _PORT, f"/{prefix}/", user, password)

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none."""
        async with _calls():
            value = await self._client.get(self._key(key))
        return None if value is None else _record(value)

    async def records(self) -> Mapping[str, Record | str]:
        """Return all live records."""
        async with _calls():
            try:
                values = list(await self._client.get_prefix(self._prefix))
            except aetcd.ClientError as error:
                code = getattr(error.__cause__ or error.__context__, "code", None)
                if code is None or code().name != "RESOURCE_EXHAUSTED":
                    raise
                return await self._one_by_one()
        return {self._name(value.key): _record(value) for value in values}

    async def _one_by_one(self) -> dict[str, Record | str]:
        """Return all records where they are too large together: some are no workers'."""
        records: dict[str, Record | str] = {}
        for listed in await self._client.get_prefix(self._prefix, keys_only=True):
            value = await self._client.get(listed.key)
            if value is not None:
                records[self._name(listed.key)] = _record(value)
        return records

    def _name(self, key: bytes) -> str:
        return key.removeprefix(self._prefix).decode("utf-8", "replace")

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:
        """Write a record, on the lease of the replaced one."""
        async with _calls():
            lease = 0 if replaces is None else replaces.lease
            new = not lease
            if new:
                lease = (await self._client.lease(math.ceil(ttl_s))).id
            name, write = self._key(key), self._client.transactions
            revision = 0 if replaces is None else int(replaces.revision)
            written, _ = await self._client.transaction(
                compare=[write.mod(name) == revision],
                success=[write.put(name, value, lease=lease)],
                failure=[],
            )
            if not written:
                if new:
                    await self._client.revoke_lease(lease)
                raise WriteConflict(f"{key} was written meanwhile")

    async def renew(self, key: str, record: Record, ttl_s: float) -> None:  # noqa: ARG002
        """Keep the lease of a record alive; it lasts as long as when it was granted."""
        async with _calls():
            reply = await self._client.refresh_lease(record.lease) if record.lease else None
        if reply is None or reply.TTL <= 0:
            raise WriteConflict(f"the lease of {key} has ended")

    async def delete(self, key: str, record: Record) -> None:
        """Delete a record if it is unchanged."""
        async with _calls():
            name, write = self._key(key), self._client.transactions
            removed, _ = await self._client.transaction(
                compare=[write.mod(name) == int(record.revision)],
                success=[write.delete(name)],
                failure=[],
            )
            if removed and record.lease:
                with suppress(aetcd.ClientError):
                    await self._client.revoke_lease(record.lease)

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after writes and ends of leases."""
        async with _calls():
            events = await self._client.watch_prefix(self._prefix)
            wake()
            try:
                async for _ in events:
                    wake()
            finally:
                with suppress(Exception):
                    await events.cancel()
        raise RegistryUnavailable("etcd ended the watch")

    async def close(self) -> None:
        """Close the connection."""
        with suppress(aetcd.ClientError, asyncio.TimeoutError):
            await self._client.close()

    def _key(self, key: str) -> bytes:
        return self._prefix + key.encode()


@asynccontextmanager
async def _calls() -> AsyncIterator[None]:
    try:
        yield
    except (aetcd.ClientError, TimeoutError) as error:
        raise RegistryUnavailable(f"etcd: {error or type(error).__name__}") from error


def _record(value: Any) -> Record:
    return Record(value.value[: MAX_RECORD + 1], str(value.mod_revision), value.lease)
