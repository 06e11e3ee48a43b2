"""The registry: entries of workers, with writes guarded by incarnation and epoch."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from pigou.config import ConfigError
from pigou.fleet.nats_connection import public_address
from pigou.fleet.registry.entry import EntryRefused, WorkerEntry, read_entry, write_entry
from pigou.fleet.registry.record_store import (
    Record,
    RecordStore,
    RegistryUnavailable,
    WriteConflict,
)
from pigou.registry import require
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import is_loopback

_log = logging.getLogger("pigou.registry")

#: Tries of a write that another process overtakes.
_TRIES = 8
#: Kinds of ignored records that are logged at a time.
_MAX_KINDS = 32


_Write = Callable[[Record | None, WorkerEntry | None], Awaitable[WorkerEntry]]
#: Forms of the URL, for messages.
FORMS = (
    "memory://NAME, file:///FOLDER, etcd://HOST:PORT/PREFIX, nats://HOST:PORT[/BUCKET] "
    "(or tls://), or k8s://NAMESPACE?selector=LABELS"
)
#: Scheme -> extra that its client is in.
_EXTRAS = {"etcd": "etcd", "nats": "nats", "tls": "nats"}


class EntryConflict(RuntimeError):
    """A write would replace a live worker of another incarnation, or a newer epoch."""


class LeaseLost(RuntimeError):
    """A worker is not registered any more: its lease has expired, or it was removed."""


class RegistrySnapshot(msgspec.Struct, frozen=True):
    """All entries of a registry at one time."""

    entries: tuple[WorkerEntry, ...]  # in the order of their workers' names
    # records that are no entries or not signed by this fleet, and what is no record.
    ignored: int = 0


class Registry:
    """Registry of workers over any store; writes return what is registered then.

    An incarnation never replaces a live one of another, nor an older epoch a newer one. May raise
    EntryConflict or RegistryUnavailable. Without a secret unsigned entries are accepted.
    """

    def __init__(self, store: RecordStore, secret: FleetSecret | None = None) -> None:
        self._store = store
        self._secret = secret
        self._logged: set[str] = set()

    async def register(self, entry: WorkerEntry) -> WorkerEntry:
        """Add a worker, or take its place again after its lease was lost; newer epochs stay."""

        async def write(record: Record | None, current: WorkerEntry | None) -> WorkerEntry:
            if current is not None:
                _check_incarnation(current, entry)
            if record is None or current is None or current.epoch < entry.epoch:
                await self._put(entry, record)
                return entry
            await self._store.renew(entry.worker, record, current.ttl_s)
            return current

        return await self._guarded(entry, write)

    async def renew(self, entry: WorkerEntry) -> WorkerEntry:
        """Renew a worker's lease; its epoch may be newer. Raises LeaseLost: register again."""

        async def write(record: Record | None, current: WorkerEntry | None) -> WorkerEntry:
            record, current = _registered(record, current, entry)
            await self._store.renew(entry.worker, record, current.ttl_s)
            return current

        return await self._guarded(entry, write)

    async def update(self, entry: WorkerEntry) -> WorkerEntry:
        """Replace an entry by one of a newer epoch, on its lease. Raises LeaseLost: none is."""

        async def write(record: Record | None, current: WorkerEntry | None) -> WorkerEntry:
            record, current = _registered(record, current, entry)
            if current == entry:
                return entry
            if current.epoch >= entry.epoch:
                raise EntryConflict(
                    f"{entry.identity} is registered at epoch {current.epoch}; the write is of "
                    f"epoch {entry.epoch}"
                )
            await self._put(entry, record)
            return entry

        return await self._guarded(entry, write)

    async def leave(self, entry: WorkerEntry) -> None:
        """Remove a worker; one of another incarnation stays. Raises RegistryUnavailable."""
        record = await self._store.get(entry.worker)
        current = self._read(entry.worker, record)
        if record is not None and current is not None and current.identity == entry.identity:
            await self._store.delete(entry.worker, record)

    async def relist(self) -> RegistrySnapshot:
        """Return all entries. Raises RegistryUnavailable."""
        records = await self._store.records()
        reasons: set[str] = set()
        entries = [self._read(key, records[key], reasons) for key in sorted(records)]
        self._logged &= reasons  # a reason that comes back is logged again
        known = tuple(entry for entry in entries if entry is not None)
        return RegistrySnapshot(known, len(entries) - len(known))

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after changes, until cancelled. Raises RegistryUnavailable when it ends."""
        await self._store.watch(wake)

    async def close(self) -> None:
        """Let the store go; entries stay until their leases expire."""
        await self._store.close()

    async def _guarded(self, entry: WorkerEntry, write: _Write) -> WorkerEntry:
        """Read, check and write; again where another process wrote meanwhile."""
        for _ in range(_TRIES):
            record = await self._store.get(entry.worker)
            try:
                return await write(record, self._read(entry.worker, record))
            except WriteConflict:
                continue
        raise RegistryUnavailable(f"others write the entry of {entry.identity} all the time")

    async def _put(self, entry: WorkerEntry, replaces: Record | None) -> None:
        record = write_entry(entry, self._secret)
        await self._store.put(entry.worker, record, entry.ttl_s, replaces)

    def _read(
        self, key: str, record: Record | str | None, reasons: set[str] | None = None
    ) -> WorkerEntry | None:
        if record is None:
            return None
        try:
            if isinstance(record, str):
                raise EntryRefused(record)
            entry = read_entry(record.value, None if record.vouched else self._secret)
            if entry.worker != key:
                raise EntryRefused("it names another worker than its key")
        except EntryRefused as error:
            self._ignore(key, str(error), reasons)
            return None
        return entry

    def _ignore(self, key: str, why: str, reasons: set[str] | None) -> None:
        """Log each kind of ignored record once."""
        kind = re.sub(r"\d+", "N", why)
        if reasons is not None:
            reasons.add(kind)
        if kind not in self._logged and len(self._logged) < _MAX_KINDS:
            self._logged.add(kind)
            _log.warning("the registry's %.140r, and what is like it, is ignored: %.300s", key, why)


def _registered(
    record: Record | None, current: WorkerEntry | None, entry: WorkerEntry
) -> tuple[Record, WorkerEntry]:
    """Return the registered incarnation; raises LeaseLost or EntryConflict."""
    if record is None or current is None:
        raise LeaseLost(f"{entry.identity} is not registered")
    _check_incarnation(current, entry)
    return record, current


def _check_incarnation(current: WorkerEntry, entry: WorkerEntry) -> None:
    if current.incarnation != entry.incarnation:
        raise EntryConflict(
            f"{current.identity} at {current.url} is registered, and its lease runs; "
            f"{entry.identity} needs another --worker-id, or waits for its end"
        )


def open_registry(url: str, secret: FleetSecret | None = None) -> Registry:
    """Return the registry of a URL in one of `FORMS`, unconnected; raises ConfigError."""
    store = open_store(url)
    parts = urlsplit(url)
    if secret is None and parts.scheme in _EXTRAS and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"registry is {public_address(url)!r}, which other machines reach, and there is no "
            "fleet secret, so that anybody could register a worker; give --fleet-secret-file "
            "FILE or PIGOU_FLEET_SECRET"
        )
    return Registry(store, secret)


def open_store(url: str) -> RecordStore:
    """Return the store of a URL. Raises ConfigError as `open_registry`."""
    parts = urlsplit(url)
    if parts.scheme in _EXTRAS:
        require(_EXTRAS[parts.scheme], f"registry {public_address(url)}")
    try:
        return _open(parts, url)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"registry is {public_address(url)!r}: {error}") from error


def _open(parts: SplitResult, url: str) -> RecordStore:
    if parts.scheme == "memory":
        from pigou.fleet.registry.record_store import MemoryStore

        return MemoryStore.shared(parts.netloc)
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
        from pigou.fleet.registry.file_store import FileStore

        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "etcd" and parts.hostname:
        from pigou.fleet.registry.etcd_store import EtcdStore

        return EtcdStore.of(parts)
    if parts.scheme in ("nats", "tls") and parts.hostname:
        from pigou.fleet.registry.nats_store import NatsStore

        return NatsStore.of(parts)
    if parts.scheme == "k8s" and parts.netloc:
        from pigou.fleet.registry.kubernetes_store import KubernetesStore

        return KubernetesStore.of(parts)
    raise ConfigError(f"registry is {public_address(url)!r}; give {FORMS}")
