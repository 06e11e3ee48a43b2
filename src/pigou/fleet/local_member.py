"""A member of a fleet that is a process of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from pigou.fleet.config import FleetError, LocalWorker
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.probe import ProbeFailed, probe
from pigou.fleet.worker_process import MemberProcess, WorkerProcess

#: Seconds that the process of a worker that was let go is given to end.
_LEAVE_S = 2.0
#: The same for one of a fleet that ends: its requests have ended or were cut off.
_END_S = 8.0


class LocalMember(FleetMember):
    """Keeps one worker process going: starts it, and starts it again when it ends."""

    kind: ClassVar[str] = "local"

    def __init__(self, spec: LocalWorker, setup: MemberSetup) -> None:
        super().__init__(spec.id, spec.role, setup, spec.model)
        self._spec = spec

    @property
    def device(self) -> str:
        """What it computes on: cpu, cuda or cuda:N."""
        return self._spec.device

    async def run(self) -> None:
        """Start the process again and again until cancelled, or until it ends and is leaving."""
        while True:
            self._begin_start()
            try:
                why = await self._live()
            except (FleetError, ProbeFailed, OSError) as error:
                why = str(error)
                if self._never_up(why):
                    return
            except Exception as error:
                self.plane_driver.background.failed(self.id, error)
                why = f"{type(error).__name__}: {error}"
                if self._never_up(why):
                    return
            if self.leaving:
                return
            wait_s = self._ended(why, "backoff")
            self._row.pid = 0
            await asyncio.sleep(wait_s)
            self._row.restarts += 1
            self._row.state = "starting"

    async def _live(self) -> str:
        """Run one process from start to end; return why it ended."""
        self._report("starting its process")
        process = await self._start_process(["--role", self.role.value, *self._spec.arguments])
        self._row.pid = process.pid
        drain = 0.0
        try:
            line = await process.ready(self._config.start, self._report)
            return await self._until_down(process, line)
        except asyncio.CancelledError:
            # The fleet ends, or the worker is let go: it has done nothing wrong.
            drain = min(self._config.drain, _LEAVE_S if self.leaving else _END_S)
            self._say("stopped", "")
            raise
        finally:
            await process.stop(drain)

    async def _start_process(self, arguments: Sequence[str]) -> MemberProcess:
        """Start a process with these arguments of `pigou worker`."""
        return await WorkerProcess.start(self.id, arguments, self._secret)

    async def _until_down(self, process: MemberProcess, line: dict[str, Any]) -> str:
        url = str(line["url"])
        key = "" if self._secret is None else self._secret.token
        probed = await probe(url, key)
        serving = asyncio.create_task(self.serve(url, probed, key, probed.sources, process))
        exiting = asyncio.create_task(process.exited())
        try:
            done, _ = await asyncio.wait((serving, exiting), return_when=asyncio.FIRST_COMPLETED)
            return exiting.result() if exiting in done else serving.result()
        finally:
            for task in (serving, exiting):
                task.cancel()
            await asyncio.gather(serving, exiting, return_exceptions=True)
