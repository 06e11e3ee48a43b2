"""The supervisor: all members of a fleet, from start to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pigou.fleet.config import AttachedWorker, FleetError, LocalWorker, WatchConfig
from pigou.fleet.hang_detection import HangArbiter
from pigou.fleet.member import AttachedMember, FleetMember, LocalMember
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.status_api import WorkerRow
from pigou.wire.fleet_secret import FleetSecret

_log = logging.getLogger("pigou.fleet")

#: Seconds that the start waits for attached servers.
_ATTACH_S = 15.0


class Supervisor:
    """Runs the members of a fleet; every one in a task of its own.

    Example:
        supervisor = Supervisor(plane_driver, [LocalWorker(id="w0", role=Role.BOTH)])
        await supervisor.start()
    """

    def __init__(
        self,
        plane_driver: PlaneDriver,
        workers: Sequence[LocalWorker | AttachedWorker],
        config: WatchConfig | None = None,
        secret: FleetSecret | None = None,
    ) -> None:
        """Prepare the members; within the event loop. They begin with `start`.

        Local workers are given the `secret`; None leaves them open to this machine.
        """
        config = config or WatchConfig()
        self._plane_driver = plane_driver
        arbiter = HangArbiter(config.hang)
        self._members: list[FleetMember] = [
            LocalMember(worker, plane_driver, config, arbiter, secret)
            if isinstance(worker, LocalWorker)
            else AttachedMember(worker, plane_driver, config, arbiter, secret)
            for worker in workers
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def report_stages(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener` with a worker's id and the stage of its start, at each change."""
        for member in self._members:
            member.on_stage = listener

    def rows(self) -> list[WorkerRow]:
        """Return what the status API shows of each member."""
        return [member.row() for member in self._members]

    async def start(self) -> None:
        """Start all members, and wait until each was up once.

        Attached servers that are away do not hold up the start.

        Raises:
            FleetError: a local worker did not come up, or one does not fit the others.
        """
        self._tasks = [
            self._plane_driver.background.start(member.id, member.run) for member in self._members
        ]
        ready_tasks = {asyncio.create_task(member.ready.wait()): member for member in self._members}
        local = [task for task, member in ready_tasks.items() if isinstance(member, LocalMember)]
        if local:
            await asyncio.wait(local, return_when=asyncio.ALL_COMPLETED)
        await asyncio.wait(ready_tasks, timeout=_ATTACH_S)
        for task in ready_tasks:
            task.cancel()
        for member in self._members:
            if member.failed:
                raise FleetError(member.failed)

    async def stop(self) -> None:
        """End all members; local workers are drained, then ended."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.error("a member of the fleet failed", exc_info=result)
