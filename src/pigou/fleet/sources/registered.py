"""Registered workers: their members, and the provider that follows the registry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import msgspec

from pigou.control.messages import WorkerDraining
from pigou.fleet.config import AttachedWorker
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.probe import ProbeFailed, ProbeResult, fleet_key, probe
from pigou.fleet.provider import ProvidedPool
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
from pigou.fleet.sources.attached import AttachedMember, ServerProvider
from pigou.gateway.fleet_status import RegistryStatus
from pigou.request import Role
from pigou.wire.fleet_secret import FleetSecret

#: Seconds that a suspect may take to show that it lives.
_PROBE_S = 3.0


class RegisteredMember(AttachedMember):
    """Uses one worker of a registry, for as long as it is that incarnation.

    Attributes:
        suspected: why it gets nothing new; empty while it is trusted.
    """

    kind: ClassVar[str] = "registered"

    def __init__(self, id: str, entry: WorkerEntry, setup: MemberSetup) -> None:
        events, replay, node = entry.kv_events, entry.kv_replay, entry.topology
        spec = AttachedWorker(
            id=id, url=entry.url, role=entry.role, events=events, replay=replay if events else "",
            host=node.host, rack=node.rack, zone=node.zone,
        )  # fmt: skip
        super().__init__(spec, setup)
        self.entry = entry
        self.suspected = ""

    def suspect(self, why: str) -> None:
        """Send it nothing new; its streams go on."""
        self.suspected = why
        if self.id in self.plane_driver.upstreams and self._row.state == "up":
            self._say("draining", f"suspect: {why}")
            self.plane_driver.observe(WorkerDraining(self.id))

    def trust(self) -> None:
        """Send it requests again, unless it drains for another reason."""
        suspected, self.suspected = self.suspected, ""
        drains = self.leaving or self.next_role is not None
        if suspected and not drains and self.id in self.plane_driver.upstreams:
            self.plane_driver.flip(self.id, self.role)
            self._say("up", "")

    def change_role(self, role: Role, pool: str) -> None:
        """Have another role; a suspect gets nothing in that one, either."""
        super().change_role(role, pool)
        if self.suspected:
            self.suspect(self.suspected)

    def _is_up(self, url: str) -> None:
        super()._is_up(url)
        if self.suspected:
            self.suspect(self.suspected)

    def _pinned(self, probed: ProbeResult) -> ProbeResult:
        """Return the probe's result, where it is of this incarnation.

        A stock engine knows no version of its deployment; its entry, or its pod's label, does.
        """
        check_incarnation(self.entry, probed)
        return replace(probed, version=probed.version or self.entry.version)


def check_incarnation(entry: WorkerEntry, probed: ProbeResult) -> None:
    """Refuse another process at the address of a worker; a stock engine has no incarnation.

    Raises:
        ProbeFailed: it is another one.
    """
    if probed.engine.incarnation not in ("", entry.incarnation):
        raise ProbeFailed(f"{entry.url} is another worker's by now, and not {entry.identity}'s")


async def lives(entry: WorkerEntry, secret: FleetSecret | None) -> bool:
    """Ask a worker itself whether it lives, as that incarnation."""
    key = "" if secret is None else await fleet_key(entry.url, secret, _PROBE_S)
    try:
        check_incarnation(entry, await probe(entry.url, key, _PROBE_S))
    except ProbeFailed:
        return False
    return True


_log = logging.getLogger("pigou.fleet")

#: Seconds of one write, and between two tries.
_WRITE_S, _RETRY_S = 5.0, 1.0


class FollowedFleet(Protocol):
    """What the registry's news changes: the supervisor."""

    def add(self, member: FleetMember) -> None:
        """Start a member."""

    def drain(self, member: FleetMember, limit_s: float | None = None) -> None:
        """Let a member end what it has, then go."""

    def flip(
        self, member: FleetMember, role: Role, pool: str, limit_s: float | None = None
    ) -> None:
        """Let a member drain, then serve in another role."""

    def remove(self, member: FleetMember) -> None:
        """Let a member go at once."""

    def member(self, id: str) -> FleetMember | None:
        """Return a member that is not gone."""


class RegistryProvider(ServerProvider):
    """Uses the workers of a registry. It starts none; the entries are what it changes.

    A flip is written into the worker's entry, so that all gateways follow. A worker that this
    fleet lets go is marked as draining there: it ends by itself, on its host.
    """

    kind: ClassVar[str] = RegisteredMember.kind
    not_started: ClassVar[str] = "workers of a registry are started on their hosts, and not here"
    not_flipped: ClassVar[str] = "is no worker of Pigou, and its role was set when it was started"

    def __init__(self, registry: Registry, setup: MemberSetup) -> None:
        """Begin without workers.

        Args:
            setup: of the fleet's members.
        """
        self._registry = registry
        self._setup = setup
        self._fleet: FollowedFleet | None = None
        self._members: dict[Identity, RegisteredMember] = {}
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
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await self._registry.close()

    def status(self) -> RegistryStatus:
        """Return what is shown of the registry."""
        return self.discovery.status()

    # --- as a provider ------------------------------------------------------------------------

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """One pool for each role that a worker has now, as wide as its widest one."""
        gpus: dict[tuple[Role, str], int] = {}
        for member in self._members.values():
            pool, topology = (member.role, member.model), member.entry.topology
            gpus[pool] = max(gpus.get(pool, 1), topology.gpus)
        return [
            ProvidedPool(name=self.pool(*pool), role=pool[0], gpus=gpus[pool], model=pool[1])
            for pool in sorted(gpus, key=lambda pool: (pool[1], list(Role).index(pool[0])))
        ]

    def flipped(self, member: FleetMember) -> None:
        """A worker is in another pool: say so to all gateways."""
        assert isinstance(member, RegisteredMember)
        if member.entry.role is not member.role:
            self._order(member.entry, role=member.role)

    def discard(self, member: FleetMember) -> None:
        """A worker is let go: one that is still registered ends by itself."""
        assert isinstance(member, RegisteredMember)
        entry = member.entry
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
        """Follow an entry that is new, or has another epoch."""
        member = self._members.get(entry.identity)
        if member is None:
            if not entry.draining and entry.identity not in self._released:
                self._add(entry)
            return
        member.entry = entry
        if entry.draining:
            if not member.leaving:
                self._running.drain(member)
        elif entry.role is not (member.next_role or member.role) and not member.leaving:
            self._running.flip(member, entry.role, self.pool(entry.role, member.model))

    def _add(self, entry: WorkerEntry) -> None:
        member = RegisteredMember(self._name(entry), entry, self._setup)
        self._members[entry.identity] = member
        _log.info("%s is registered at %s as %s", member.id, entry.url, entry.role.value)
        self._running.add(member)

    def _name(self, entry: WorkerEntry) -> str:
        """Return an id that no member ever had."""
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

    def _is_last_decoder(self, member: RegisteredMember) -> bool:
        """Whether no other worker of its model that is up would decode."""
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
