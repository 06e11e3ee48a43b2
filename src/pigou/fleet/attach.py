"""Attached members: servers that somebody else runs; used while they answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from pigou.fleet.config import AttachedWorker, WatchConfig
from pigou.fleet.errors import FleetError
from pigou.fleet.member import Backoff, Member
from pigou.fleet.probe import Found, ProbeFailed, Source, fleet_key, probe
from pigou.fleet.pulse import Bench
from pigou.gateway.plane_driver import PlaneDriver
from pigou.wire.fleet_secret import FleetSecret


class AttachedMember(Member):
    """Uses one server, waits for it when it is away."""

    kind = "attached"

    def __init__(
        self,
        spec: AttachedWorker,
        plane_driver: PlaneDriver,
        config: WatchConfig,
        bench: Bench | None = None,
        secret: FleetSecret | None = None,
    ) -> None:
        super().__init__(spec.id, spec.role, plane_driver, config, bench, secret)
        self._spec = spec
        self._row.url = spec.url
        self._backoff = Backoff(config)

    async def run(self) -> None:
        """Use the server while it is there, until cancelled."""
        while True:
            began = time.monotonic()
            try:
                key = await self._key()
                found = self._pinned(await probe(self._spec.url, key))
                why = await self.serve(self._spec.url, found, key, self._sources(found))
                self._row.restarts += 1
            except ProbeFailed as error:
                why = str(error)
            except FleetError as error:
                self.failed = why = str(error)
                if not self.ready.is_set():
                    self._say("stopped", why)
                    self.ready.set()
                    return
            except Exception as error:
                self._plane_driver.background.failed(self.id, error)
                why = f"{type(error).__name__}: {error}"
            wait = self._backoff.failed(time.monotonic() - began)
            self._say("down", why)
            await asyncio.sleep(wait)

    async def _key(self) -> str:
        """Return the bearer key of the server: its own, or the fleet's if it is of the fleet."""
        if self._spec.key or self._secret is None:
            return self._spec.key
        return await fleet_key(self._spec.url, self._secret)

    def _pinned(self, found: Found) -> Found:
        """Return what was found, meant for one worker where the description names one."""
        spec = self._spec
        if not spec.pin:
            return found
        if not found.engine.dynamo:
            raise FleetError(f"attach: {spec.url} has pin={spec.pin}, and is no frontend of Dynamo")
        return replace(found, engine=replace(found.engine, pin=spec.pin))

    def _sources(self, found: Found) -> tuple[Source, ...]:
        spec = self._spec
        if spec.events:
            encrypted = any(each.encrypted for each in found.sources)
            return (Source(spec.events, spec.replay, spec.topic, encrypted),)
        return found.sources
