"""Attached members: servers that somebody else runs; used while they answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from pigou.fleet.config import AttachedWorker, WatchConfig
from pigou.fleet.errors import FleetError
from pigou.fleet.member import Backoff, Member
from pigou.fleet.probe import Found, ProbeFailed, Source, probe
from pigou.fleet.pulse import Bench
from pigou.gateway.pilot import Pilot


class AttachedMember(Member):
    """Uses one server, waits for it when it is away."""

    kind = "attached"

    def __init__(
        self, spec: AttachedWorker, pilot: Pilot, config: WatchConfig, bench: Bench | None = None
    ) -> None:
        super().__init__(spec.id, spec.role, pilot, config, bench)
        self._spec = spec
        self._row.url = spec.url
        self._backoff = Backoff(config)

    async def run(self) -> None:
        """Use the server while it is there, until cancelled."""
        while True:
            began = time.monotonic()
            try:
                found = await probe(self._spec.url, self._spec.key)
                found = self._pinned(found)
                why = await self.serve(self._spec.url, found, self._spec.key, self._sources(found))
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
                self._pilot.background.failed(self.id, error)
                why = f"{type(error).__name__}: {error}"
            wait = self._backoff.failed(time.monotonic() - began)
            self._say("down", why)
            await asyncio.sleep(wait)

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
            return (Source(spec.events, spec.replay, spec.topic),)
        return found.sources
