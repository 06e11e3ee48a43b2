"""Local members: worker processes that are started, and started again when they end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pigou.fleet.config import LocalWorker, WatchConfig
from pigou.fleet.errors import FleetError
from pigou.fleet.member import Backoff, Member
from pigou.fleet.probe import ProbeFailed, probe
from pigou.fleet.process import WorkerProcess
from pigou.fleet.pulse import Bench
from pigou.gateway.plane_driver import PlaneDriver
from pigou.wire.fleet_secret import FleetSecret


class LocalMember(Member):
    """Keeps one worker process going."""

    kind = "local"

    def __init__(
        self,
        spec: LocalWorker,
        plane_driver: PlaneDriver,
        config: WatchConfig,
        bench: Bench | None = None,
        secret: FleetSecret | None = None,
    ) -> None:
        super().__init__(spec.id, spec.role, plane_driver, config, bench, secret)
        self._spec = spec
        self._backoff = Backoff(config)

    async def run(self) -> None:
        """Start the process again and again until cancelled; a first start must succeed."""
        while True:
            began = time.monotonic()
            try:
                why = await self._live()
            except (FleetError, ProbeFailed, OSError) as error:
                if not self.ready.is_set():
                    self.failed = str(error)
                    self._say("stopped", self.failed)
                    self.ready.set()
                    return
                why = str(error)
            except Exception as error:
                self._plane_driver.background.failed(self.id, error)
                why = f"{type(error).__name__}: {error}"
                if not self.ready.is_set():
                    self.failed = why
                    self._say("stopped", why)
                    self.ready.set()
                    return
            wait = self._backoff.failed(time.monotonic() - began)
            self._say("backoff", f"{why}; starts again in {wait:g} s")
            self._row.pid = 0
            await asyncio.sleep(wait)
            self._row.restarts += 1
            self._row.state = "starting"

    async def _live(self) -> str:
        """Run one process from start to end; return why it ended."""
        self._report("starting its process")
        process = await WorkerProcess.start(
            self.id, ["--role", self.role.value, *self._spec.arguments], self._secret
        )
        self._row.pid = process.pid
        drain = 0.0
        try:
            line = await process.ready(self._config.start, self._report)
            return await self._until_down(process, line)
        except asyncio.CancelledError:
            drain = self._config.drain  # the fleet ends, the worker has done nothing wrong
            self._row.state = "stopped"
            raise
        finally:
            await process.stop(drain)

    async def _until_down(self, process: WorkerProcess, line: dict[str, Any]) -> str:
        url = str(line["url"])
        key = "" if self._secret is None else self._secret.token
        found = await probe(url, key)
        serving = asyncio.create_task(self.serve(url, found, key, found.sources, process))
        exiting = asyncio.create_task(process.exited())
        try:
            done, _ = await asyncio.wait((serving, exiting), return_when=asyncio.FIRST_COMPLETED)
            return exiting.result() if exiting in done else serving.result()
        finally:
            for task in (serving, exiting):
                task.cancel()
            await asyncio.gather(serving, exiting, return_exceptions=True)
