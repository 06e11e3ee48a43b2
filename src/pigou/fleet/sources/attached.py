"""Attached servers, which somebody else runs: their members and their provider."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pigou.fleet.config import AttachedWorker, FleetError
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.probe import EventSource, ProbeFailed, ProbeResult, fleet_key, probe
from pigou.fleet.provider import ProvidedPool
from pigou.gateway.proxy.upstream import Engine
from pigou.request import Location, Role


class ServerProvider:
    """Names the pools of servers that run already, starts none, and flips those of Pigou."""

    kind: ClassVar[str]
    not_started: ClassVar[str]  # why no further server can be started
    not_flipped: ClassVar[str]  # what is said of a server that is not Pigou's

    @property
    def room(self) -> int | None:
        """None: the servers that run already."""
        return None

    def pool(self, role: Role, model: str = "") -> str:
        """Return the name of the pool of a role, and model, like `decode.attached`."""
        return pool_of(self.kind, role, model)

    def start_refusal(self, pool: str) -> str:  # noqa: ARG002 (as every provider has it)
        """Return why no further server can be started."""
        return self.not_started

    def make(self, pool: str) -> FleetMember:
        """Refuse.

        Raises:
            FleetError: always; `start_refusal` says why.
        """
        raise FleetError(self.start_refusal(pool))

    def flip_refusal(self, member: FleetMember, pool: str) -> str:
        """Return why a server cannot serve in another pool; empty where it can."""
        if pool == member.pool or pool not in [self.pool(role, member.model) for role in Role]:
            return f"{member.id} cannot serve in pool {pool!r}"
        if not isinstance(member, AttachedMember) or member.stock is not False:
            return f"{member.id} {self.not_flipped}"
        return ""


def pool_of(kind: str, role: Role, model: str = "") -> str:
    """Return the name of a pool of servers of a kind, like `decode.attached`."""
    return f"{role.value}.{model}.{kind}" if model else f"{role.value}.{kind}"


class AttachedMember(FleetMember):
    """Uses one server that somebody else runs, while it answers.

    Attributes:
        stock: whether its engine is another than Pigou's; None before it was seen.
    """

    kind: ClassVar[str] = "attached"

    def __init__(self, spec: AttachedWorker, setup: MemberSetup) -> None:
        super().__init__(spec.id, spec.role, setup)
        self._spec = spec
        self.pool = pool_of(self.kind, spec.role)
        self.stock: bool | None = None
        self._row.url = spec.url
        self.location = Location(spec.host, spec.rack, spec.zone)

    def _join(self, engine: Engine) -> Engine:
        engine = super()._join(engine)
        self.pool = pool_of(self.kind, self.role, self.model)
        return engine

    @property
    def server(self) -> tuple[str, str]:
        """URL and pin, which no other member has."""
        return self._spec.url, self._spec.pin

    async def run(self) -> None:
        """Use the server while it is there, until cancelled, or until it ends and is leaving."""
        while True:
            self._begin_start()
            try:
                key = await self._key()
                probed = self._pinned(await probe(self._spec.url, key))
                self.stock = probed.engine.stock
                why = await self.serve(self._spec.url, probed, key, self._sources(probed))
                self._row.restarts += 1
            except ProbeFailed as error:
                why = str(error)
            except FleetError as error:
                self.failed = why = str(error)
                if self._never_up(why):
                    return
            except Exception as error:
                self.plane_driver.background.failed(self.id, error)
                why = f"{type(error).__name__}: {error}"
            if self.leaving:
                return
            await asyncio.sleep(self._ended(why, "down"))

    async def _key(self) -> str:
        """Return the bearer key of the server: its own, or the fleet's if it is of the fleet."""
        if self._spec.key or self._secret is None:
            return self._spec.key
        return await fleet_key(self._spec.url, self._secret)

    def _pinned(self, probed: ProbeResult) -> ProbeResult:
        """Return the probe's result, with the worker's id where the description pins one."""
        spec = self._spec
        if not spec.pin:
            return probed
        if not probed.engine.dynamo:
            raise FleetError(f"attach: {spec.url} has pin={spec.pin}, and is no frontend of Dynamo")
        return replace(probed, engine=replace(probed.engine, pin=spec.pin))

    def _sources(self, probed: ProbeResult) -> tuple[EventSource, ...]:
        spec = self._spec
        if spec.events:
            encrypted = any(source.encrypted for source in probed.sources)
            return (EventSource(spec.events, spec.replay, spec.topic, encrypted),)
        return probed.sources


class AttachedProvider(ServerProvider):
    """Uses servers by their URL. It starts none, and lets go of those that leave.

    A server of Pigou serves in any role. What a stock server can do was set at its start, so it
    is not flipped: it can be attached again in another role.
    """

    kind: ClassVar[str] = AttachedMember.kind
    not_started: ClassVar[str] = "servers are attached by their URL, and not started here"
    not_flipped: ClassVar[str] = (
        "is no server of Pigou, and its role was set when it was started; remove it, and attach "
        "it again in its new role"
    )

    def __init__(self, setup: MemberSetup) -> None:
        self._setup = setup
        self._members: dict[str, AttachedMember] = {}
        self._number = 0

    def adopt(self, spec: AttachedWorker) -> AttachedMember:
        """Return the member of a server."""
        member = AttachedMember(spec, self._setup)
        self._members[spec.id] = member
        self._number += 1
        return member

    def attach(self, text: str) -> AttachedMember:
        """Return the member of one more server, described as `AttachedWorker.parse` reads it.

        Raises:
            ConfigError: the description is not understood. FleetError: the server is attached.
        """
        spec = AttachedWorker.parse(text, self._number)
        for member in self._members.values():
            if member.server == (spec.url, spec.pin):
                raise FleetError(f"{spec.url} is attached as {member.id}")
        return self.adopt(spec)

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """One pool for each role that a server has now, and each model."""
        pairs = {(member.role, member.model) for member in self._members.values()}
        models = dict.fromkeys(member.model for member in self._members.values())
        return [
            ProvidedPool(name=self.pool(role, model), role=role, model=model)
            for model in models
            for role in Role
            if (role, model) in pairs
        ]

    def flipped(self, member: FleetMember) -> None:
        """A server is in another pool."""

    def discard(self, member: FleetMember) -> None:
        """A server is let go: its URL can be attached again."""
        self._members.pop(member.id, None)
