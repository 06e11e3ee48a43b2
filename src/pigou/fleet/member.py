"""A member of a fleet: a worker that comes and goes under one name, wherever it comes from."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from pigou.background import Backoff
from pigou.control.messages import WorkerDraining
from pigou.control.planner.actuation import UNPLACEABLE
from pigou.fleet.config import FleetError, WatchConfig
from pigou.fleet.fork_server import ForkServer
from pigou.fleet.hang_detection import HangArbiter
from pigou.fleet.probe import EventSource, ProbeFailed, ProbeResult
from pigou.fleet.worker_process import OUT_OF_MEMORY, MemberProcess
from pigou.fleet.worker_watch import WorkerWatch
from pigou.gateway.fleet_status import WorkerRow
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import Engine
from pigou.lifecycle.suspicion import WorkerEnd
from pigou.request import UNKNOWN_LOCATION, Role, Worker
from pigou.windows.planner_window import WorkerState
from pigou.wire.fleet_secret import FleetSecret

_log = logging.getLogger("pigou.fleet")

#: States of `/workers` after a worker's start.
_STATES = {"up": WorkerState.READY, "draining": WorkerState.DRAINING}
#: Signals sent from outside the process.
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds for a process to exit after its server is gone.
_EXIT_S = 0.5


@dataclass(frozen=True, slots=True)
class MemberSetup:
    """What the members of one fleet share."""

    plane_driver: PlaneDriver
    config: WatchConfig
    arbiter: HangArbiter
    secret: FleetSecret | None = None  # None leaves local workers open to this machine
    models: Mapping[str, PlaneDriver] = field(default_factory=dict)  # by name, where several
    forks: ForkServer | None = None  # forks local workers on the CPU

    def driver_of(self, model: str) -> PlaneDriver:
        """Return the plane driver of a model. Raises FleetError."""
        if self.models and model not in self.models:
            raise FleetError(
                f"the server serves {model!r}, and this gateway has {', '.join(self.models)}; "
                f"start the gateway with --model-pool {model} too"
            )
        return self.models.get(model, self.plane_driver)


class Source(Protocol):
    """How the worker of one member comes up: a process is started, or a server is found."""

    kind: str  # shown in `/workers`: local, ray, attached or registered
    starts: bool  # whether this fleet starts and stops its process

    async def live(self, member: Member) -> str:
        """Bring the worker up and let the member serve until it is down; return why it is."""
        ...


def pool_name(role: Role, model: str = "", kind: str = "") -> str:
    """Return the name of a pool: `decode` of local workers, `decode.MODEL.attached` of servers."""
    return ".".join(part for part in (role.value, model, kind) if part)


class Member:
    """A fleet member: a worker that restarts under one name."""

    def __init__(
        self, id: str, role: Role, setup: MemberSetup, source: Source, model: str = ""
    ) -> None:
        self.id, self.role = id, role  # the id is never used again
        self.model = model  # empty in a fleet of one model, or if unknown
        self.source, self.setup = source, setup
        self.pool = self._pool()
        self.epoch = 0  # changes of its role
        self.location = UNKNOWN_LOCATION  # location of its node, in place of the worker's own
        self.stock: bool | None = None  # another engine than Pigou's; None before it was seen
        self.ready = asyncio.Event()  # set once up, or failed for good
        self.failed, self.failed_status = "", 1  # why it never came up, and the command's status
        self.may_fail = False  # a first start that fails is tried again
        self.leaving = False
        self.suspected = ""  # why nothing new is routed to it; empty if trusted
        self.next_role: Role | None = None  # role after the drain; its own if it restarts
        self.failed_starts = 0  # in a row
        self.start_up_s: float | None = None  # seconds of the last start
        self.since_ns = time.monotonic_ns()  # when its state began
        self.on_stage: Callable[[str, str], None] | None = None  # gets id and stage of a start
        self.plane_driver = setup.driver_of(model) if model else setup.plane_driver
        self._backoff = Backoff(setup.config.min_backoff_s, setup.config.max_backoff_s)
        self._began_s, self._served = time.monotonic(), False
        self._row = WorkerRow(
            id=id, url="", role=role.value, state="starting", kind=source.kind, pool=self.pool
        )

    def row(self) -> WorkerRow:
        """Return its row of the status API."""
        row = self._row
        row.role, row.pool, row.epoch = self.role.value, self.pool, self.epoch
        row.unplaceable, row.model = self.unplaceable, self.model
        return row

    @property
    def state(self) -> WorkerState:
        """Where the worker is in its life, as planners see it."""
        return _STATES.get(self._row.state, WorkerState.STARTING)

    @property
    def unplaceable(self) -> bool:
        """Whether it fails its start again and again."""
        failing = self.failed_starts >= UNPLACEABLE or bool(self.failed)
        return failing and self.state is WorkerState.STARTING

    # --- orders -------------------------------------------------------------------------------

    def begin_drain(self, next_role: Role | None) -> None:
        """Send it nothing new: it is to have another role, or to go."""
        self.next_role, self.leaving = next_role, next_role is None
        self.say("draining", "")
        if next_role is self.role:
            self._row.note = "it will start again"
        else:
            self._row.note = "it leaves" if next_role is None else f"it will be {next_role.value}"
        self.plane_driver.observe(WorkerDraining(self.id))

    def let_go(self) -> None:
        """Mark it as leaving: it is not restarted."""
        self.leaving = True
        self.say("stopped", "")

    def change_role(self, role: Role, pool: str) -> None:
        """Have another role, at once where it is up: its connections and cache stay."""
        self.role, self.pool, self.next_role = role, pool, None
        self.epoch += 1
        if self.id in self.plane_driver.upstreams:
            self.plane_driver.flip(self.id, role)
            self.say("up", "")
        self.suspect(self.suspected)

    def suspect(self, why: str) -> None:
        """Route nothing new to it, for a reason; its streams continue."""
        self.suspected = why
        if why and self.id in self.plane_driver.upstreams and self._row.state == "up":
            self.say("draining", f"suspect: {why}")
            self.plane_driver.observe(WorkerDraining(self.id))

    def trust(self) -> None:
        """Route requests to a suspect again, unless it drains for another reason."""
        suspected, self.suspected = self.suspected, ""
        drains = self.leaving or self.next_role is not None
        if suspected and not drains and self.id in self.plane_driver.upstreams:
            self.plane_driver.flip(self.id, self.role)
            self.say("up", "")

    # --- life ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Bring the worker up again and again, until cancelled, or until it is down and leaves."""
        while True:
            self._began_s, self._served = time.monotonic(), False
            if self._row.state == "stopped":
                self.say("starting", "")
            try:
                why = await self.source.live(self)
            except (FleetError, ProbeFailed, OSError) as error:
                why = str(error)
                if self._gives_up(error, why):
                    return
            except Exception as error:
                self.plane_driver.background.failed(self.id, error)
                why = f"{type(error).__name__}: {error}"
                if self._gives_up(error, why):
                    return
            if self.leaving:
                return
            await asyncio.sleep(self._down(why))

    def _gives_up(self, error: Exception, why: str) -> bool:
        """Give up where the first start failed for good; return whether it did."""
        misfit = isinstance(error, FleetError) and not self.source.starts
        if misfit:
            self.failed = why
        if self.ready.is_set() or self.may_fail or not (misfit or self.source.starts):
            return False
        self.failed, self.failed_status = why, getattr(error, "status", 1)
        self.say("stopped", why)
        self.ready.set()
        return True

    def _down(self, why: str) -> float:
        """Note why the worker ended, or did not start; return the seconds to wait then."""
        self.failed_starts += not self._served
        self._row.out_of_memory += OUT_OF_MEMORY in why
        wait_s = self._backoff.failed(time.monotonic() - self._began_s)
        if self.failed_starts >= UNPLACEABLE:
            why = f"{why} ({self.failed_starts} starts failed)"
        if self.source.starts:
            self.say("backoff", f"{why}; starts again in {wait_s:g} s")
            self._row.pid = 0
        else:
            self.say("down", why)
        return wait_s

    async def serve(
        self,
        url: str,
        probed: ProbeResult,
        key: str,
        sources: tuple[EventSource, ...],
        process: MemberProcess | None = None,
        load: EventSource | None = None,
    ) -> str:
        """Serve until the worker is down; return why. Raises FleetError for a misfit."""
        sources = self._readable(sources)
        load = next(iter(self._readable((load,) if load else ())), None)
        self.stock = probed.engine.stock
        engine = self._join(probed.engine)
        worker = Worker(
            self.id,
            url,
            self.role,
            probed.block_size,
            probed.blocks,
            probed.max_seqs,
            bool(sources),
            engine.ranks,
            probed.layout,
            probed.startup_profile,
            version=probed.version,
            location=self.location if self.location.host else probed.location,
            long_lane=probed.long_lane,
        )
        self._row.host, self._row.rack, self._row.zone = worker.location
        if not self.plane_driver.compiled.is_set():
            self.report("waiting for the gateway's kernels")
            await self.plane_driver.compiled.wait()
        async with self.plane_driver.joining:
            others = [up for up in self.plane_driver.upstreams.values() if up.worker.id != self.id]
            check_fit([(self.role, engine), *((up.worker.role, up.engine) for up in others)])
            await self.plane_driver.up(worker, engine, key)
        self.report("ready")
        self._up(url)
        watch = WorkerWatch(
            self.plane_driver,
            self.plane_driver.upstreams[self.id],
            self.setup.config,
            self.setup.arbiter,
            None if process is None else process.process_state,
            None if process is None else lambda: process.heartbeat,
        )
        try:
            why = await watch.until_down(sources, load)
            if process is not None and not watch.hung:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT_S):
                        await process.exited()
            return why
        finally:
            self._row.gaps += watch.gaps
            await self.plane_driver.down(self.id, self._end(watch, process))

    def _join(self, engine: Engine) -> Engine:
        models = self.setup.models
        if models:
            model = next((name for name in engine.names if name in models), engine.model)
            self.plane_driver, self.model = self.setup.driver_of(model), model
            engine = engine.named(model)
        self.pool = self._pool()
        return engine

    def _pool(self) -> str:
        return pool_name(self.role, self.model, "" if self.source.starts else self.source.kind)

    def _up(self, url: str) -> None:
        self.say("up", "")
        self._row.url = url
        self.failed, self.failed_starts, self._served = "", 0, True
        self.start_up_s = time.monotonic() - self._began_s
        self.ready.set()
        self.suspect(self.suspected)

    def _end(self, watch: WorkerWatch, process: MemberProcess | None) -> WorkerEnd:
        if self.leaving:
            return WorkerEnd.LIVES
        if watch.hung:
            return WorkerEnd.KILLED if watch.stopped else WorkerEnd.CRASHED
        if process is None or process.code is None:
            return WorkerEnd.LOST
        return WorkerEnd.KILLED if -process.code in _OUTSIDE else WorkerEnd.CRASHED

    def _readable(self, sources: tuple[EventSource, ...]) -> tuple[EventSource, ...]:
        """Return KV event sources with the secret; none without it."""
        secret = self.setup.secret
        if any(source.encrypted for source in sources) and secret is None:
            _log.error(
                "%s encrypts its KV events or load, and there is no fleet secret here, so they are "
                "not read: give --fleet-secret-file or PIGOU_FLEET_SECRET",
                self.id,
            )
            return ()
        return tuple(
            replace(source, secret=secret) if source.encrypted else source for source in sources
        )

    def report(self, stage: str) -> None:
        """Report the stage of a start."""
        if self._row.state == "starting" and not self.unplaceable:
            self._row.note = stage
        if self.on_stage is not None:
            self.on_stage(self.id, stage)

    def say(self, state: str, note: str) -> None:
        """Show a state, and why it is in it."""
        if note:
            # The last words of a worker that ends the start are in the error of the fleet.
            shown = note.partition("\n")[0] if state == "stopped" else note
            _log.warning("%s is %s: %s", self.id, state, shown)
            self._row.last_end = note
        before = self.state
        self._row.state, self._row.note = state, note
        if self.state is not before:
            self.since_ns = time.monotonic_ns()


def check_fit(workers: Sequence[tuple[Role, Engine]]) -> None:
    """Raise FleetError unless the workers fit together."""
    models: list[set[str]] = []  # the names of each, which workers of one model share
    for _, engine in workers:
        same = [names for names in models if not names.isdisjoint(engine.names)]
        models = [names for names in models if names not in same]
        models.append(set(engine.names).union(*same))
    if len(models) > 1:
        listed = ", ".join(sorted(map(min, models)))
        raise FleetError(
            f"the workers serve different models ({listed}); a fleet serves one: declare each with "
            "--model-pool NAME"
        )
    splits = any(role is not Role.BOTH for role, _ in workers)
    if splits and len({(engine.stock, engine.family) for _, engine in workers}) > 1:
        raise FleetError(
            "workers of different engines cannot pass blocks to one another; "
            "give them all role=both, or run two fleets"
        )
