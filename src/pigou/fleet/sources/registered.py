"""Registered workers, on any host: the provider that follows a registry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from pigou.background import cancel
from pigou.fleet.config import AttachedWorker
from pigou.fleet.member import Member, MemberSetup
from pigou.fleet.probe import ProbeFailed, fleet_key, probe
from pigou.fleet.provider import ProvidedPool, Provider
from pigou.fleet.registry.discovery import (
    Discovery,
    EntryChanged,
    ViewEffect,
    WorkerDeparted,
    WorkerRegistered,
    WorkerSuspected,
    WorkerTrusted,
)
from pigou.fleet.registry.entry import Identity, WorkerEntry
from pigou.fleet.registry.registry import EntryConflict, LeaseLost, Registry
from pigou.fleet.sources.attached import ServerSource, check_incarnation
from pigou.gateway.fleet_status import RegistryStatus
from pigou.request import Role
from pigou.wire.fleet_secret import FleetSecret

_log = logging.getLogger("pigou.fleet")

#: Seconds for a suspect to prove it is alive.
_PROBE_S = 3.0
#: Seconds of one write, and between two tries.
_WRITE_S, _RETRY_S = 5.0, 1.0


async def lives(entry: WorkerEntry, secret: FleetSecret | None) -> bool:
    """Probe whether a worker lives, as that incarnation."""
    key = "" if secret is None else await fleet_key(entry.url, secret, _PROBE_S)
    try:
        check_incarnation(entry, await probe(entry.url, key, _PROBE_S))
    except ProbeFailed:
        return False
    return True


class FollowedFleet(Protocol):
    """What the registry's news changes: the supervisor."""

    def add(self, member: Member) -> None:
        """Start a member."""

    def drain(self, member: Member, limit_s: float | None = None) -> None:
        """Drain a member, then remove it."""

    def flip(self, member: Member, role: Role, pool: str, limit_s: float | None = None) -> None:
        """Let a member drain, then serve in another role."""

    def remove(self, member: Member) -> None:
        """Let a member go at once."""

    def member(self, id: str) -> Member | None:
        """Return a live member."""


class RegistryProvider(Provider):
    """Uses registered workers; flips and drains them by writing their entries."""

    kind: ClassVar[str] = "registered"
    not_started: ClassVar[str] = "workers of a registry are started on their hosts, and not here"
    not_flipped: ClassVar[str] = "is no worker of Pigou, and its role was set when it was started"

    def __init__(self, registry: Registry, setup: MemberSetup) -> None:
        self._registry = registry
        self._setup = setup
        self._fleet: FollowedFleet | None = None
        self._members: dict[Identity, Member] = {}
        self._entries: dict[str, WorkerEntry] = {}  # newest entry, by member id
        self._used: set[str] = set()
        self._released: set[Identity] = set()
        self._orders: dict[Identity, WorkerEntry] = {}
        self._ordered = asyncio.Event()
        background = setup.plane_driver.background
        self.discovery = Discovery(registry, self._apply, self._probe, background=background)

    async def follow(self, fleet: FollowedFleet) -> None:
        """Follow the registry until cancelled; `fleet` gets its members."""
        self._fleet = fleet
        background = self._setup.plane_driver.background
        writing = background.start("registry orders", self._write_orders)
        try:
            await self.discovery.run()
        finally:
            await cancel(writing)
            await self._registry.close()

    def status(self) -> RegistryStatus:
        """Return the registry's status."""
        return self.discovery.status()

    # --- as a provider ------------------------------------------------------------------------

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """Pools by role of live workers, sized by the widest one."""
        gpus: dict[tuple[Role, str], int] = {}
        for member in self._members.values():
            pool, entry = (member.role, member.model), self._entries[member.id]
            gpus[pool] = max(gpus.get(pool, 1), entry.topology.gpus)
        return [
            ProvidedPool(name=self.pool(*pool), role=pool[0], gpus=gpus[pool], model=pool[1])
            for pool in sorted(gpus, key=lambda pool: (pool[1], list(Role).index(pool[0])))
        ]

    def flipped(self, member: Member) -> None:
        """A worker is in another pool: say so to all gateways."""
        entry = self._entries[member.id]
        if entry.role is not member.role:
            self._order(entry, role=member.role)

    def discard(self, member: Member) -> None:
        """Release a worker; a registered one ends by itself."""
        entry = self._entries.pop(member.id, None)
        if entry is None:
            return
        self._members.pop(entry.identity, None)
        known = self.discovery.view.entry(entry.identity)
        if known is not None:
            self._released.add(entry.identity)
            if not known.draining:
                self._order(known, draining=True)

    # --- what the registry says ---------------------------------------------------------------

    def _apply(self, effect: ViewEffect) -> None:
        match effect:
            case WorkerRegistered(entry) | EntryChanged(entry):
                self._change(entry)
            case WorkerSuspected(identity, why) if member := self._members.get(identity):
                if self._is_last_decoder(member):
                    _log.warning("%s: %s; it serves on, as the last one", member.id, why)
                else:
                    member.suspect(why)
            case WorkerTrusted(identity) if member := self._members.get(identity):
                member.trust()
            case WorkerDeparted(identity, why):
                self._released.discard(identity)
                self._orders.pop(identity, None)
                if member := self._members.get(identity):
                    _log.warning("%s is gone: %s", member.id, why)
                    self._running.remove(member)
            case _:
                pass

    def _change(self, entry: WorkerEntry) -> None:
        member = self._members.get(entry.identity)
        if member is None:
            if not entry.draining and entry.identity not in self._released:
                self._add(entry)
            return
        self._entries[member.id] = entry
        if entry.draining:
            if not member.leaving:
                self._running.drain(member)
        elif entry.role is not (member.next_role or member.role) and not member.leaving:
            self._running.flip(member, entry.role, self.pool(entry.role, member.model))

    def _add(self, entry: WorkerEntry) -> None:
        events, node = entry.kv_events, entry.topology
        spec = AttachedWorker(
            id=self._name(entry), url=entry.url, role=entry.role, events=events,
            replay=entry.kv_replay if events else "", host=node.host, rack=node.rack,
            zone=node.zone,
        )  # fmt: skip
        member = ServerSource(spec, entry).member(self._setup)
        self._members[entry.identity], self._entries[member.id] = member, entry
        _log.info("%s is registered at %s as %s", member.id, entry.url, entry.role.value)
        self._running.add(member)

    def _name(self, entry: WorkerEntry) -> str:
        base = f"{entry.worker}.{entry.incarnation[:8]}"
        names = [entry.worker, base, *(f"{base}.{number}" for number in range(2, 1000))]
        name = next(
            name for name in names if name not in self._used and self._running.member(name) is None
        )
        self._used.add(name)
        return name

    @property
    def _running(self) -> FollowedFleet:
        assert self._fleet is not None
        return self._fleet

    def _is_last_decoder(self, member: Member) -> bool:
        if not member.role.decodes:
            return False
        others = (
            upstream.worker
            for upstream in member.plane_driver.upstreams.values()
            if upstream.worker.id != member.id and upstream.worker.role.decodes
        )
        suspects = {own.id for own in self._members.values() if own.suspected or own.leaving}
        return all(worker.id in suspects for worker in others)

    async def _probe(self, entry: WorkerEntry) -> bool:
        member = self._members.get(entry.identity)
        if member is not None and not member.suspected and not self._is_last_decoder(member):
            member.suspect("it is not registered any more")  # another decoder is up by now
        return await lives(entry, self._setup.secret)

    # --- what is written ----------------------------------------------------------------------

    def _order(self, entry: WorkerEntry, **fields: object) -> None:
        """Write fields of an entry, in a new epoch, as soon as the registry takes it."""
        pending = self._orders.get(entry.identity, entry)
        epoch = max(entry.epoch, pending.epoch) + 1
        changed = msgspec.structs.replace(pending, epoch=epoch, **fields)
        self._orders[entry.identity] = changed
        self._ordered.set()

    async def _write_orders(self) -> None:
        while True:
            await self._ordered.wait()
            for identity, entry in list(self._orders.items()):
                try:
                    async with asyncio.timeout(_WRITE_S):
                        await self._registry.update(entry)
                except (TimeoutError, OSError, LeaseLost) as error:
                    if self.discovery.view.entry(identity) is not None:
                        _log.info("the registry did not take %s's entry: %s", identity, error)
                        continue
                except EntryConflict as error:
                    _log.info("%s is not changed in the registry: %s", identity, error)
                if self._orders.get(identity) is entry:
                    del self._orders[identity]
            if self._orders:
                await asyncio.sleep(_RETRY_S)
            else:
                self._ordered.clear()
