"""What a backend of the registry is, and the one in this process's memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from pigou.request import SECOND

#: Seconds between two looks for leases that have ended.
_LOOK_S = 0.25


class Record(msgspec.Struct, frozen=True):
    """One record of a store."""

    value: bytes
    revision: str  # changes with each write
    lease: int = 0  # lease id, if the store has leases
    # the store itself made it of what it knows, so that it needs no signature.
    vouched: bool = False


class RegistryUnavailable(OSError):
    """The registry does not answer; its records may persist."""


class WriteConflict(RuntimeError):
    """The record has changed since it was read."""


class RecordStore(Protocol):
    """Records by key, alive while their lease is renewed; calls may raise RegistryUnavailable.

    Writes compare and swap. The server, or renewals seen here, decide expiry, never wall clocks.
    """

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none."""
        ...

    async def records(self) -> Mapping[str, Record | str]:
        """Return live records, and reasons for malformed ones."""
        ...

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:
        """Write a record for `ttl_s` seconds; raises WriteConflict if `replaces` is stale."""
        ...

    async def renew(self, key: str, record: Record, ttl_s: float) -> None:
        """Let a record live for `ttl_s` seconds from now. Raises WriteConflict: it is gone."""
        ...

    async def delete(self, key: str, record: Record) -> None:
        """Remove a record, unless another one is there by now."""
        ...

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after changes, until cancelled; some may be missed."""
        ...

    async def close(self) -> None:
        """Close the store; records live until their leases expire."""
        ...


#: Stores of this process, by name.
_SHARED: dict[str, MemoryStore] = {}


class MemoryStore:
    """Records of this process, alive by its monotonic clock."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._records: dict[str, tuple[Record, int]] = {}
        self._writes = 0
        self._changed = asyncio.Condition()

    @classmethod
    def shared(cls, name: str) -> MemoryStore:
        """Return the store of a name, the same for all of this process."""
        return _SHARED.setdefault(name, cls())

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none."""
        return (await self.records()).get(key)

    async def records(self) -> Mapping[str, Record]:
        """Return all live records."""
        now = self._clock()
        self._records = {k: held for k, held in self._records.items() if held[1] > now}
        return {key: record for key, (record, _) in self._records.items()}

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:
        """Replace a record if it is unchanged."""
        self._check(key, await self.get(key), replaces)
        self._writes += 1
        record = Record(value, str(self._writes))
        self._records[key] = record, self._clock() + round(ttl_s * SECOND)
        await self._tell()

    async def renew(self, key: str, record: Record, ttl_s: float) -> None:
        """Let a record live on."""
        self._check(key, await self.get(key), record)
        self._records[key] = record, self._clock() + round(ttl_s * SECOND)

    async def delete(self, key: str, record: Record) -> None:
        """Delete a record if it is unchanged."""
        if await self.get(key) == record:
            del self._records[key]
            await self._tell()

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after writes, and soon after the end of a lease."""
        before = await self.records()
        while True:
            with suppress(TimeoutError):
                async with self._changed, asyncio.timeout(_LOOK_S):
                    await self._changed.wait()
            records = await self.records()
            if records != before:
                before = records
                wake()

    async def close(self) -> None:
        """Keep the records: others of this process may use them."""

    def _check(self, key: str, record: Record | None, wanted: Record | None) -> None:
        if record != wanted:
            raise WriteConflict(f"{key} was written meanwhile")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
