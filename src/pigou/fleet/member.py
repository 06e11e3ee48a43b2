"""Members of the fleet: local worker processes, and attached servers."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pigou.fleet.config import AttachedWorker, FleetError, LocalWorker, WatchConfig
from pigou.fleet.hang_detection import HangArbiter
from pigou.fleet.probe import EventSource, ProbeFailed, ProbeResult, fleet_key, probe
from pigou.fleet.worker_process import ProcessState, WorkerProcess
from pigou.fleet.worker_watch import WorkerWatch
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


class FleetMember(ABC):
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
        arbiter: HangArbiter | None = None,
        secret: FleetSecret | None = None,
    ) -> None:
        self._arbiter = arbiter or HangArbiter(config.hang)
        self.id = id
        self.role = role
        self.ready = asyncio.Event()
        self.failed = ""
        self.on_stage: Callable[[str, str], None] | None = None
        self._plane_driver = plane_driver
        self._config = config
        self._secret = secret
        self._backoff = Backoff(config)
        self._row = WorkerRow(id=id, url="", role=role.value, state="starting", kind=self.kind)

    def row(self) -> WorkerRow:
        """Return what the status API shows of it."""
        return self._row

    @abstractmethod
    async def run(self) -> None:
        """Keep the worker going until cancelled."""

    def _never_up(self, why: str) -> bool:
        """Give up where the first start failed; return whether it did."""
        if self.ready.is_set():
            return False
        self.failed = why
        self._say("stopped", why)
        self.ready.set()
        return True

    async def serve(
        self,
        url: str,
        probed: ProbeResult,
        key: str,
        sources: tuple[EventSource, ...],
        process: WorkerProcess | None = None,
    ) -> str:
        """Put the worker to use until it is down; return why.

        Args:
            url: of its server.
            probed: what a probe read of it.
            key: sent as bearer key.
            sources: of its KV events.
            process: that it runs in, where it was started here.

        Raises:
            FleetError: it does not fit the workers that are there.
        """
        sources = self._readable(sources)
        others = [up for up in self._plane_driver.upstreams.values() if up.worker.id != self.id]
        check_fit([(self.role, probed.engine), *((up.worker.role, up.engine) for up in others)])
        worker = Worker(
            self.id,
            url,
            self.role,
            probed.block_size,
            probed.blocks,
            probed.max_seqs,
            bool(sources),
            probed.engine.ranks,
            probed.layout,
            probed.startup_profile,
        )
        if not self._plane_driver.compiled.is_set():
            self._report("waiting for the gateway's kernels")
            await self._plane_driver.compiled.wait()
        await self._plane_driver.up(worker, probed.engine, key)
        self._report("ready")
        self._say("up", "")
        self._row.url = url
        self.ready.set()
        watch = WorkerWatch(
            self._plane_driver,
            self._plane_driver.upstreams[self.id],
            self._config,
            self._arbiter,
            None if process is None else ProcessState(process.pid),
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

    def _end(self, watch: WorkerWatch, process: WorkerProcess | None) -> WorkerEnd:
        """Return how the worker ended."""
        if watch.hung:
            return WorkerEnd.KILLED if watch.stopped else WorkerEnd.CRASHED
        if process is None or process.code is None:
            return WorkerEnd.LOST
        return WorkerEnd.KILLED if -process.code in _OUTSIDE else WorkerEnd.CRASHED

    def _report(self, stage: str) -> None:
        """Report the stage of a start."""
        if self._row.state == "starting":
            self._row.note = stage
        if self.on_stage is not None:
            self.on_stage(self.id, stage)

    def _readable(self, sources: tuple[EventSource, ...]) -> tuple[EventSource, ...]:
        """Return the sources of KV events with what is needed to read them."""
        if any(source.encrypted for source in sources) and self._secret is None:
            _log.error(
                "%s encrypts its KV events, and there is no fleet secret here, so what is cached "
                "there is not seen: give --fleet-secret-file or PIGOU_FLEET_SECRET",
                self.id,
            )
            return ()
        return tuple(
            replace(source, secret=self._secret) if source.encrypted else source
            for source in sources
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
        self._next = config.min_backoff_s

    def failed(self, lived_s: float) -> float:
        """Return the seconds to wait after a worker that lived for `lived_s` seconds."""
        if lived_s > 2 * self._config.max_backoff_s:
            self._next = self._config.min_backoff_s
        wait = self._next
        self._next = min(2 * wait, self._config.max_backoff_s)
        return wait


class LocalMember(FleetMember):
    """Keeps one worker process going: starts it, and starts it again when it ends."""

    kind = "local"

    def __init__(
        self,
        spec: LocalWorker,
        plane_driver: PlaneDriver,
        config: WatchConfig,
        arbiter: HangArbiter | None = None,
        secret: FleetSecret | None = None,
    ) -> None:
        super().__init__(spec.id, spec.role, plane_driver, config, arbiter, secret)
        self._spec = spec

    async def run(self) -> None:
        """Start the process again and again until cancelled; a first start must succeed."""
        while True:
            began = time.monotonic()
            try:
                why = await self._live()
            except (FleetError, ProbeFailed, OSError) as error:
                why = str(error)
                if self._never_up(why):
                    return
            except Exception as error:
                self._plane_driver.background.failed(self.id, error)
                why = f"{type(error).__name__}: {error}"
                if self._never_up(why):
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


class AttachedMember(FleetMember):
    """Uses one server that somebody else runs, while it answers."""

    kind = "attached"

    def __init__(
        self,
        spec: AttachedWorker,
        plane_driver: PlaneDriver,
        config: WatchConfig,
        arbiter: HangArbiter | None = None,
        secret: FleetSecret | None = None,
    ) -> None:
        super().__init__(spec.id, spec.role, plane_driver, config, arbiter, secret)
        self._spec = spec
        self._row.url = spec.url

    async def run(self) -> None:
        """Use the server while it is there, until cancelled."""
        while True:
            began = time.monotonic()
            try:
                key = await self._key()
                probed = self._pinned(await probe(self._spec.url, key))
                why = await self.serve(self._spec.url, probed, key, self._sources(probed))
                self._row.restarts += 1
            except ProbeFailed as error:
                why = str(error)
            except FleetError as error:
                self.failed = why = str(error)
                if self._never_up(why):
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
