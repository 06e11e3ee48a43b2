"""A whole fleet behind one gateway, from start to end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from pigou.background import cancel
from pigou.compiled import on_compiling
from pigou.config import ConfigError, ControlConfig
from pigou.control.degradation import Degradation
from pigou.control.journal import journal_config
from pigou.control.planner.config import PlannerConfig
from pigou.control.warm_up import warm_up
from pigou.fleet.config import (
    AttachedWorker,
    DeclaredModel,
    LocalWorker,
    WorkersConfig,
    sleeps,
)  # fmt: skip
from pigou.fleet.costs import follow_driver, make_plane
from pigou.fleet.live_fleet import LiveFleet, OperatorChanges
from pigou.fleet.peers.bus import PeerBus
from pigou.fleet.peers.exchange import PeerExchange, PeerMetrics
from pigou.fleet.planner_driver import PlannerDriver
from pigou.fleet.prefill_queue.messages import queue_address
from pigou.fleet.sources.local import WorkerTemplate, start_workers
from pigou.fleet.supervisor import FleetSetup, Supervisor
from pigou.gateway.app import GatewayServer
from pigou.gateway.auth.keys import Keys
from pigou.gateway.config import GatewayConfig
from pigou.gateway.fleet_status import FleetStatus, WorkerRow
from pigou.gateway.gateway import Gateway
from pigou.gateway.journal import Journal
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import GatewayModel, ModelRouting
from pigou.gateway.plan_status import PlanStatus
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.prompt_reader import PromptReader, PromptTokenizer
from pigou.gateway.startup_shutdown import StageListener, Startup
from pigou.registry import require
from pigou.request import EngineLimits
from pigou.stop_signals import END_S, StopSignals
from pigou.tracing.tracer import open_tracer
from pigou.wire import json_limits, kv_event_decoding
from pigou.wire.fleet_secret import FleetSecret


class Serving:
    """A gateway and its fleet; `start` and `stop` it, or `run` it until a signal."""

    def __init__(
        self,
        gateway: GatewayConfig,
        control: ControlConfig,
        fleet: FleetSetup,
        planner: PlannerConfig | None = None,
        on_stage: StageListener | None = None,
    ) -> None:
        """Put the parts together, within an event loop; raises ConfigError."""
        keys = Keys.read(Path(gateway.api_keys_file)) if gateway.api_keys_file else None
        planner = planner or PlannerConfig()
        self._secret = fleet.secret or FleetSecret.make()
        self._drain_s = fleet.watch.drain
        drivers: dict[str, PlaneDriver] = {}
        for model in fleet.models or (DeclaredModel(tokenizer=fleet.tokenizer),):
            sibling = next(iter(drivers.values()), None)
            drivers[model.name] = _plane_driver(gateway, control, planner, model, sibling)
        self.plane_driver, *others = drivers.values()
        by_name = drivers if fleet.models else {}
        self.supervisor = Supervisor(
            self.plane_driver, replace(fleet, secret=self._secret), by_name
        )
        if fleet.prefill_queue:
            _pull_prefills(drivers.values(), fleet, self._secret)
        self.live_fleet = LiveFleet(self.supervisor)
        meters = {name: driver.meter for name, driver in by_name.items()}
        self.plan_status = PlanStatus(self.plane_driver.meter, meters)
        self._planner: PlannerDriver | None = None
        if planner.plans:
            planner.check_size(len(fleet.workers))
            self._planner = PlannerDriver(
                planner, self.live_fleet, self.plane_driver, self.plan_status, self._drain_s,
                others,
            )  # fmt: skip
        self.startup = Startup(on_stage)
        self.supervisor.report_stages(self.startup.report)
        self.peers: PeerExchange | None = None  # shares this gateway's changes with others
        self._metrics = Metrics()
        registered = self.supervisor.registered
        self.gateway = Gateway(
            config=gateway,
            routing=self._routing(fleet.models, by_name),
            metrics=self._metrics,
            keys=keys,
            created=int(time.time()),
            startup=self.startup,
            changes=OperatorChanges(self.live_fleet),
            plan_status=self.plan_status,
            registry=None if registered is None else registered.status,
            tracer=open_tracer(gateway.tracing, "pigou-gateway"),
        )
        self._server = GatewayServer(self.gateway, shutdown_s=self._drain_s)

    def join_peers(self, bus: PeerBus) -> None:
        """Join the peer exchange; call before `start`."""
        if len(self.supervisor.models) > 1:
            raise ConfigError(
                f"peers is given, and {len(self.supervisor.models)} models; gateways exchange what "
                "they send for one model alone: leave one of the two out"
            )
        gateway = self.gateway
        self.peers = PeerExchange(
            self.plane_driver, bus, self._secret, gateway.caches, gateway.budgets
        )
        self.plane_driver.peers_health = self.peers.health
        self._metrics.scrape(PeerMetrics(self.peers).collect)

    def _routing(
        self, models: Sequence[DeclaredModel], drivers: Mapping[str, PlaneDriver]
    ) -> ModelRouting:
        if not models:
            status = FleetStatus(self.plane_driver, self.supervisor.rows)
            return ModelRouting([GatewayModel(self.plane_driver, self._metrics, status)])
        return ModelRouting([
            GatewayModel(
                drivers[model.name], Metrics(),
                FleetStatus(drivers[model.name], partial(self._rows_of, model.name)),
                model.name, model.aliases, model.overflow,
            )
            for model in models
        ])  # fmt: skip

    def _rows_of(self, model: str) -> list[WorkerRow]:
        own = {model, ""} if model == next(iter(self.supervisor.models)) else {model}
        return [row for row in self.supervisor.rows() if row.model in own]

    @property
    def port(self) -> int:
        """The gateway's TCP port, once started."""
        return self._server.port

    async def start(self) -> None:
        """Listen, start the workers and compile meanwhile; raises OSError or FleetError.

        Until a worker decodes, requests are answered 503 with the stage of the start.
        """
        self.plane_driver.compiled.clear()
        self.startup.active = True
        await self._server.start()
        if self.peers is not None:
            self.peers.start()
        try:
            await asyncio.gather(self._compile(), self.supervisor.start())
        finally:
            self.startup.active = False
            self.plane_driver.compiled.set()
        if self._planner is not None:
            self._planner.start(self.plane_driver.background)

    async def _compile(self) -> None:
        """Compile or load the gateway's kernels on a daemon thread."""
        loop = asyncio.get_running_loop()
        done = Future[None]()
        config, compiled = self.plane_driver.plane.config, 0

        def tell(stage: str) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.startup.report, "gateway", stage)

        def begun(_: str) -> None:
            nonlocal compiled
            compiled += 1
            tell(f"compiling kernel {compiled} (first start only)")

        def work() -> None:
            try:
                with on_compiling(begun):
                    warm_up(config)
                    json_limits.warm_up()
                    kv_event_decoding.warm_up()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        tell("loading kernels")
        done.set_running_or_notify_cancel()  # the thread ends by itself, also without a waiter
        threading.Thread(target=work, name="compile", daemon=True).start()
        await asyncio.wrap_future(done)
        self.plane_driver.compiled.set()
        self.startup.report("gateway", "ready")

    async def stop(self) -> None:
        """Finish running requests, then stop the workers."""
        if self._planner is not None:
            await self._planner.stop()
        await self._server.stop()
        if self.peers is not None:
            await self.peers.stop()
        await self.supervisor.stop()

    async def run(self, ready: Callable[[], None]) -> None:
        """Start, call `ready`, serve until SIGINT, SIGTERM or SIGHUP; a second ends at once."""
        over = asyncio.Event()
        with StopSignals(over.set, self._drain_s + END_S):
            starting = asyncio.create_task(self.start())
            leaving = asyncio.create_task(over.wait())
            try:
                await asyncio.wait((starting, leaving), return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    ready()
                    await leaving
            finally:
                await cancel(starting, leaving)
                await self.stop()


def _pull_prefills(drivers: Iterable[PlaneDriver], fleet: FleetSetup, secret: FleetSecret) -> None:
    from pigou.fleet.prefill_queue.publisher import NatsPrefillQueue

    address = queue_address(fleet.prefill_queue)
    for driver in drivers:
        driver.prefill_queue = NatsPrefillQueue(
            address, driver, secret, takes_unsigned=fleet.secret is None
        )


def _plane_driver(
    gateway: GatewayConfig, control: ControlConfig, planner: PlannerConfig, model: DeclaredModel,
    sibling: PlaneDriver | None,
) -> PlaneDriver:  # fmt: skip
    """Return a model's plane driver, with its journal if any."""
    prompts = PromptReader(
        PromptTokenizer.named(model.tokenizer) if model.tokenizer else None,
        allow_special_tokens=gateway.allow_special_tokens,
        token_endpoint=gateway.token_endpoint,
    )
    objectives = planner.objectives
    control = msgspec.structs.replace(control, classes=objectives.queue_classes)
    plane, journal = make_plane(control, gateway), None
    if gateway.journal is not None:
        path = Path(gateway.journal)
        if model.name:
            path = path.with_stem(f"{path.stem}.{model.name.replace('/', '_')}")
        journal = Journal(path, journal_config(plane))
    driver = PlaneDriver(plane, prompts, journal, objectives, model=model.name, sibling=sibling)
    driver.degradation = Degradation(gateway.degrade)
    driver.limits.classes = EngineLimits(max_batched_tokens=objectives.chunk_of(model.name))
    driver.places_adapters = gateway.place_adapters
    follow_driver(driver)
    return driver


def workers_of(
    config: WorkersConfig, arguments: Sequence[str] = ()
) -> list[LocalWorker | AttachedWorker]:
    """Return the workers to start, then those to attach; raises ConfigError."""
    attached = [AttachedWorker.parse(text, i) for i, text in enumerate(config.attach)]
    count = sum(config.counts)
    if count and not config.timing and not sleeps(arguments) and config.ray is None:
        require("worker", "a worker that computes")
    if config.timing and not count:
        raise ConfigError(
            f"--timing is {config.timing!r}, and no worker is started here; leave it out"
        )
    templates = WorkerTemplate.of_models(config, arguments)
    return [*start_workers(templates, config.model_counts), *attached]
