"""A member of the fleet: what all have in common, whoever started them."""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from pigou.fleet.config import WatchConfig
from pigou.fleet.errors import FleetError
from pigou.fleet.probe import Found, Source
from pigou.fleet.process import WorkerProcess
from pigou.fleet.process_facts import ProcessFacts
from pigou.fleet.pulse import Bench
from pigou.fleet.watch import Watch
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.status_api import WorkerRow
from pigou.gateway.upstream import Engine
from pigou.lifecycle.suspicion import WorkerEnd
from pigou.request import Role, Worker
from pigou.wire.fleet_secret import FleetSecret

_log = logging.getLogger("pigou.fleet")

#: Signals that a process does not send itself.
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds that a process whose server is gone is given to end.
_EXIT_S = 0.5


class Member(ABC):
    """One place in the fleet: a worker that comes and goes under one name.

    Attributes:
        ready: set once the worker was up for the first time, or failed for good.
        failed: why it never came up; empty otherwise.
        on_stage: gets its id and the stage of its start.
    """

    kind = ""

    def __init__(
        self,
        id: str,
        role: Role,
        plane_driver: PlaneDriver,
        config: WatchConfig,
        bench: Bench | None = None,
        secret: FleetSecret | None = None,
    ) -> None:
        self._bench = bench or Bench(config.hang)
        self.id = id
        self.role = role
        self.ready = asyncio.Event()
        self.failed = ""
        self.on_stage: Callable[[str, str], None] | None = None
        self._plane_driver = plane_driver
        self._config = config
        self._secret = secret
        self._row = WorkerRow(id=id, url="", role=role.value, state="starting", kind=self.kind)

    def row(self) -> WorkerRow:
        """Return what the status API shows of it."""
        return self._row

    @abstractmethod
    async def run(self) -> None:
        """Keep the worker going until cancelled."""

    async def serve(
        self,
        url: str,
        found: Found,
        key: str,
        sources: tuple[Source, ...],
        process: WorkerProcess | None = None,
    ) -> str:
        """Put the worker to use until it is down; return why.

        Args:
            url: of its server.
            found: what it told.
            key: sent as bearer key.
            sources: of its KV events.
            process: that it runs in, where it was started here.

        Raises:
            FleetError: it does not fit the workers that are there.
        """
        sources = self._readable(sources)
        others = [up for up in self._plane_driver.upstreams.values() if up.worker.id != self.id]
        check_fit([(self.role, found.engine), *((up.worker.role, up.engine) for up in others)])
        worker = Worker(
            self.id,
            url,
            self.role,
            found.block_size,
            found.blocks,
            found.max_seqs,
            bool(sources),
            found.engine.ranks,
            found.layout,
            found.rehearsed,
        )
        if not self._plane_driver.compiled.is_set():
            self._report("waiting for the gateway's kernels")
            await self._plane_driver.compiled.wait()
        await self._plane_driver.up(worker, found.engine, key)
        self._report("ready")
        self._say("up", "")
        self._row.url = url
        self.ready.set()
        watch = Watch(
            self._plane_driver,
            self._plane_driver.upstreams[self.id],
            self._config,
            self._bench,
            None if process is None else ProcessFacts(process.pid),
            None if process is None else lambda: process.heartbeat,
        )
        try:
            why = await watch.until_down(sources)
            if process is not None and not watch.hung:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT_S):
                        await process.exited()
            return why
        finally:
            self._row.gaps += watch.gaps
            await self._plane_driver.down(self.id, self._end(watch, process))

    def _end(self, watch: Watch, process: WorkerProcess | None) -> WorkerEnd:
        """Return how the worker ended."""
        if watch.hung:
            return WorkerEnd.KILLED if watch.stopped else WorkerEnd.CRASHED
        if process is None or process.code is None:
            return WorkerEnd.LOST
        return WorkerEnd.KILLED if -process.code in _OUTSIDE else WorkerEnd.CRASHED

    def _report(self, stage: str) -> None:
        """Tell the stage of a start."""
        if self._row.state == "starting":
            self._row.note = stage
        if self.on_stage is not None:
            self.on_stage(self.id, stage)

    def _readable(self, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        """Return the sources of KV events with what is needed to read them."""
        if any(each.encrypted for each in sources) and self._secret is None:
            _log.error(
                "%s encrypts its KV events, and there is no fleet secret here, so what is cached "
                "there is not seen: give --fleet-secret-file or PIGOU_FLEET_SECRET",
                self.id,
            )
            return ()
        return tuple(
            replace(each, secret=self._secret) if each.encrypted else each for each in sources
        )

    def _say(self, state: str, note: str) -> None:
        if note:
            _log.warning("%s is %s: %s", self.id, state, note)
        self._row.state, self._row.note = state, note


def check_fit(workers: Sequence[tuple[Role, Engine]]) -> None:
    """Refuse workers that do not fit together.

    Raises:
        FleetError: they serve different models, or blocks would have to move between engines of
            different makes.
    """
    models = sorted({engine.model for _, engine in workers})
    if len(models) > 1:
        raise FleetError(
            f"the workers serve different models ({', '.join(models)}); a fleet serves one"
        )
    splits = any(role is not Role.BOTH for role, _ in workers)
    if splits and len({engine.stock for _, engine in workers}) > 1:
        raise FleetError(
            "Pigou's workers and others cannot pass blocks to one another; "
            "give them all role=both, or run two fleets"
        )


class Backoff:
    """Waits longer after each failure, until a worker has stayed up."""

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._next = config.least_backoff

    def failed(self, lived_s: float) -> float:
        """Return the seconds to wait after a worker that lived for `lived_s` seconds."""
        if lived_s > 2 * self._config.most_backoff:
            self._next = self._config.least_backoff
        wait = self._next
        self._next = min(2 * wait, self._config.most_backoff)
        return wait
