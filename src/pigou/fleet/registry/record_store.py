"""What a backend of the registry is: records with leases, written by compare-and-swap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec


class Record(msgspec.Struct, frozen=True):
    """One record of a store."""

    value: bytes
    revision: str  # another one after each write
    lease: int = 0  # that it hangs on, where the store has leases of its own
    # the store itself made it of what it knows, so that it needs no signature.
    vouched: bool = False


class RegistryUnavailable(OSError):
    """The registry does not answer; what it held may still be there."""


class WriteConflict(RuntimeError):
    """The record is not what a write was to replace: read it again."""


class RecordStore(Protocol):
    """Records by key, each alive for as long as its lease is renewed.

    Writes compare: they replace the record that was read, or none. Whether a lease has expired is
    told by the server, or by how long this process has seen no renewal: never by comparing
    wall clocks.
    """

    async def get(self, key: str) -> Record | None:
        """Return a live record; None where there is none. Raises RegistryUnavailable."""
        ...

    async def records(self) -> Mapping[str, Record | str]:
        """Return all live records, and why anything else there is none. Raises RegistryUnavailable.

        One thing that cannot be read leaves the others readable.
        """
        ...

    async def put(self, key: str, value: bytes, ttl_s: float, replaces: Record | None) -> None:
        """Write a record that lives for `ttl_s` seconds more.

        Args:
            ttl_s: of its lease, in seconds; an existing lease stays as it is where the store has
                leases of its own.
            replaces: what is there, as it was read; None for nothing.

        Raises:
            WriteConflict: something else is there. RegistryUnavailable.
        """
        ...

    async def renew(self, key: str, record: Record, ttl_s: float) -> None:
        """Let a record live for `ttl_s` seconds from now.

        Raises:
            WriteConflict: it is gone, or another is there. RegistryUnavailable.
        """
        ...

    async def delete(self, key: str, record: Record) -> None:
        """Remove a record, unless another one is there by now. Raises RegistryUnavailable."""
        ...

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after changes, until cancelled; changes may be missed.

        Raises:
            RegistryUnavailable: the watch has ended.
        """
        ...

    async def close(self) -> None:
        """Free what the store uses; its records stay until their leases expire."""
        ...
