"""A member of a fleet that is a server which somebody else runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

from pigou.fleet.config import AttachedWorker, FleetError
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.probe import EventSource, ProbeFailed, ProbeResult, fleet_key, probe
from pigou.gateway.upstream import Engine
from pigou.request import Location, Role


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
