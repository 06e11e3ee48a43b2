"""WorkerServer: starts a worker's parts, serves, drains, and stops."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, Protocol
from uuid import uuid4

import msgspec
from aiohttp import web

from pigou import logs
from pigou.background import Background, run_async
from pigou.placement.topology import read_location
from pigou.registry import uncollected
from pigou.stop_signals import END_S, StopSignals
from pigou.tracing.exporter import exporter_families
from pigou.tracing.tracer import open_tracer
from pigou.wire.connections import ConnectionLimits, Factory
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import url_host
from pigou.worker.config import WorkerConfig
from pigou.worker.device_use import open_energy_counter
from pigou.worker.engine_thread.commands import Release, Report, Stop
from pigou.worker.engine_thread.engine_client import EngineClient
from pigou.worker.engine_thread.engine_thread import EngineThread
from pigou.worker.engine_thread.heartbeat import publish, watch_parent
from pigou.worker.engine_thread.kv_event_publisher import EventPublisher
from pigou.worker.engine_thread.kv_offload import OffloadConnector
from pigou.worker.http.fleet_auth import check_exposure
from pigou.worker.http.input_processor import InputProcessor
from pigou.worker.http.routes import Routes
from pigou.worker.kv_transfer.connector import KVTransfers, Transfers
from pigou.worker.kv_transfer.receiver import Receiver
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.side_channel_protocol import transfer_key
from pigou.worker.kv_transfer.transfer_params import BACKENDS
from pigou.worker.metrics import WorkerMetrics
from pigou.worker.startup.build import WorkerParts, transfer_config
from pigou.worker.startup.profiling import prepare

log = logging.getLogger(__name__)

#: Interpreter switch interval, in seconds.
_SWITCH = 0.0005
#: Idle seconds of a connection; longer than any client pool's.
_KEEPALIVE = 3600.0
#: Seconds for the engine thread to end, and for everything after a second signal.
_JOIN, _CUT_S = 5.0, 3.0


async def _report(report: Callable[[], dict[str, Any]], _: web.Request) -> web.Response:
    return web.json_response(await asyncio.to_thread(report))


class WorkerServer:
    """Runs one worker, from startup to shutdown."""

    def __init__(
        self, config: WorkerConfig, parts: WorkerParts, secret: FleetSecret | None = None,
        registrar: Registrar | None = None, advertise: str = "",
    ) -> None:  # fmt: skip
        """Assemble the process, within a running event loop; `advertise` is its public host."""
        self._config, self._parts, self._secret = config, parts, secret
        self._registrar, self._advertise = registrar, advertise
        self._incarnation = uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._failed = False
        self._stopping = False
        self._background = Background()
        model, core = parts.model, parts.core
        cache = {
            "block_size": str(core.config.block_size),
            "num_gpu_blocks": str(core.config.blocks),
            "enable_prefix_caching": str(core.config.prefix_caching),
        }
        self._metrics = WorkerMetrics(
            model.name, model.limits.max_model_len, cache, core.config.blocks, parts.work
        )
        if core.drafts is not None:
            self._metrics.show_drafts(core.drafts)
        if parts.experts is not None:
            self._metrics.show_experts(parts.experts)
        if (energy := open_energy_counter(config.device)) is not None:
            self._metrics.show_energy(energy)
        self._events = self._publisher()
        self.engine = EngineThread(
            core, parts.backend, self._report, self._crashed, self._events is not None
        )
        self.engine.meter, self.engine.gauges.work = parts.meter, parts.work
        self.engine.rest = parts.rest
        self._metrics.gauges = self.engine.gauges
        publish = self._events.publish if self._events is not None else lambda _: None
        max_in_engine = max(1, core.config.max_seqs // 2)  # leave half to other requests
        self._service = EngineClient(self.engine.put, self._metrics, publish, max_in_engine)
        key = b"" if secret is None else transfer_key(secret)
        self._intake = InputProcessor(model, config, self._service, parts.grammars, key)
        self.engine.transfers = self._transfers()
        self._tiers = self._start_tiers()
        if (adapters := model.adapters) is not None:
            self.engine.adapters, adapters.answer = adapters, self.engine.put
            self._metrics.scrape(partial(adapters.families, lambda: self._service.adapters))
        about = {**self._about(), "rehearsed": parts.rehearsed, "memory": parts.memory_report}
        self._tracer = open_tracer(config.tracing, "pigou-worker")
        if self._tracer is not None and self._tracer.exporter is not None:
            self._metrics.scrape(partial(exporter_families, self._tracer.exporter))
        routes = Routes(
            model, self._intake, self._service, config, events=self._events, about=about,
            heartbeat=self.engine.heartbeat, background=self._background, tiers=self._tiers,
            secret=secret, tracer=self._tracer,
        )  # fmt: skip
        app = routes.application()
        if parts.experts is not None:
            app.router.add_get("/experts", partial(_report, parts.experts))
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        self._routes = routes
        self._listener: asyncio.Server | None = None

    async def serve(self) -> int:
        """Serve until a signal or crash; return the exit status."""
        self.engine.start()
        if self._parts.ranks is not None:
            self._parts.ranks.watch(self._crashed)
        if self._events is not None:
            self._events.start(self._background)
        with StopSignals(self.stop, self._config.drain + END_S, self._over.set, _CUT_S):
            await self._runner.setup()
            line = self._announce(await self._listen())
            publish(self.engine.heartbeat)
            if self._registrar is not None:
                await self._registrar.ready(line, self.stop)
            await self._over.wait()
            if self._registrar is not None:
                await self._registrar.leave()
            await self._close()
        return 1 if self._failed else 0

    async def _listen(self) -> tuple[str, int]:
        server = self._runner.server
        assert server is not None
        factory = Factory(server, ConnectionLimits(keepalive_s=_KEEPALIVE))
        self._listener = await self._loop.create_server(
            factory, self._config.host, self._config.port, backlog=1024
        )
        name = self._listener.sockets[0].getsockname()
        return name[0], name[1]

    def stop(self) -> None:
        """Stop accepting requests and drain; a second call ends at once."""
        if self._stopping:
            self._over.set()
            return
        self._stopping = True
        self._service.draining = True
        if self._registrar is not None:
            self._background.start("registry: draining", self._registrar.draining)
        self._service.when_idle(self._over.set)
        self._loop.call_later(self._config.drain, self._over.set)

    # --- from other threads -----------------------------------------------------------------

    def _report(self, report: Report) -> None:
        self._loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: Report) -> None:
        try:
            self._service.deliver(report)
        except Exception as error:
            self._background.failed("engine reports", error)

    def _crashed(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._die, error)

    def _die(self, error: BaseException) -> None:
        if self._failed:
            return
        log.critical("the worker ends: %s", error)
        self._failed = True
        self._service.died(error)
        self._loop.call_later(0.2, self._over.set)  # let replies report it

    # --- parts ------------------------------------------------------------------------------

    def _publisher(self) -> EventPublisher | None:
        config = self._config
        if not (config.kv_events and config.prefix_caching):
            return None
        return EventPublisher(config.kv_events_endpoint, config.kv_replay_endpoint, self._secret)

    def _transfers(self) -> Transfers:
        parts, put = self._parts, self.engine.put
        if self._config.kv_transfer == "none":
            return Transfers(put)
        # GPU blocks are staged in shared memory; host blocks must already lie in it.
        by_shm = parts.memory is not None or parts.store.as_bytes() is None
        named = self._config.kv_transfer
        backends = BACKENDS if named == "auto" else tuple(dict.fromkeys(named.split(",")))
        if not by_shm and len(backends) > 1:
            backends = tuple(name for name in backends if name != "shm")
        limits = transfer_config(self._config, backends, self._advertise)
        key = b"" if self._secret is None else transfer_key(self._secret)
        sender = Sender(
            parts.store, lambda request: put(Release(request)), limits, parts.memory,
            background=self._background, key=key,
        )  # fmt: skip
        receiver = Receiver(parts.store, limits, self._background, key)
        return KVTransfers(sender, receiver, put, parts.link)

    def _start_tiers(self) -> OffloadConnector | None:
        parts = self._parts
        if parts.core.tiers is None or parts.tiers is None:
            return None
        tiers = OffloadConnector(parts.core.tiers, *parts.tiers, self.engine.put)
        self.engine.tiers = tiers
        self._metrics.show_tiers(tiers)
        tiers.recover()
        return tiers

    def _about(self) -> dict[str, Any]:
        core, model = self._parts.core.config, self._parts.model
        limits = (
            "block_size", "blocks", "max_seqs", "max_batched_tokens", "max_background_tokens",
            "max_model_len", "max_waiting",
        )  # fmt: skip
        return {
            "model": model.name,
            "release": model.release,
            "role": self._config.role.value,
            "tensor_parallel_size": self._config.tensor_parallel_size,
            **{name: getattr(core, name) for name in limits},
            "repeat": core.max_repeat,
            "order": core.order,
            "long_lane": self._config.long_lane,
            "kv_transfer": self._config.kv_transfer,
            "kv_layout": self._layout(),
            "deployment_version": self._config.deployment_version,
            "location": read_location(self._config.location)._asdict(),
            "pid": os.getpid(),
            "incarnation": self._incarnation,
        }

    def _layout(self) -> str:
        """Return the key shared by workers that can exchange caches; "" for none."""
        transfer = self._config.kv_transfer
        if transfer == "none" or not self._config.prefix_caching:
            return ""
        return f"{transfer}:{self._parts.store.layout.fingerprint()}"

    def _announce(self, address: tuple[str, int]) -> dict[str, Any]:
        url = f"http://{url_host(address[0])}:{address[1]}"
        line = {"ready": True, "url": url, **self._about()}
        if self._events is not None:
            line["kv_events"] = self._events.endpoint
            line["kv_replay"] = self._events.replay_endpoint
        print(msgspec.json.encode(line).decode(), flush=True)
        return line

    async def _close(self) -> None:
        if cut := self._service.cut_off():
            log.warning("%d requests were cut off at the end, and told so", cut)
        self._intake.close()
        self._parts.grammars.close()
        if self._parts.model.adapters is not None:
            self._parts.model.adapters.close()
        self._routes.close()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        self.engine.put(Stop())
        ended = await asyncio.to_thread(self.engine.join, _JOIN)
        if not ended:
            log.error("the engine thread did not end within %s seconds", _JOIN)
        await asyncio.to_thread(self.engine.transfers.close)
        if self._tiers is not None:
            await asyncio.to_thread(self._tiers.close)
        if self._parts.ranks is not None:
            await asyncio.to_thread(self._parts.ranks.close)
        if self._events is not None:
            await self._events.close()
        if self._parts.memory is not None:
            self._parts.memory.close()


def run(
    config: WorkerConfig, make_registrar: MakeRegistrar | None = None, advertise: str = ""
) -> int:
    """Run a worker and return its exit status; raises as `build`, and OSError on a used address."""
    logs.configure(config.log_format, config.log_level, access=config.access_log)
    # Malformed HTTP is answered with 400; handler errors are logged there.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    secret = FleetSecret.given(config.fleet_secret_file)
    check_exposure(config, secret)
    if config.exit_with_parent:
        watch_parent()
    if not config.sleeps:
        from pigou.runtime.resources import prepare_environment

        prepare_environment(config.threads)
        with uncollected():
            import_module("pigou.runtime.models.load")  # mostly torch
    sys.setswitchinterval(_SWITCH)
    preparation = ThreadPoolExecutor(1)
    try:
        parts = preparation.submit(prepare, config).result()
    finally:
        preparation.shutdown(wait=False)

    async def main() -> int:
        registrar = None if make_registrar is None else make_registrar(secret)
        return await WorkerServer(config, parts, secret, registrar, advertise).serve()

    return run_async(main())


class Registrar(Protocol):
    """Announces a running worker; its failures never end the worker."""

    async def ready(self, about: dict[str, Any], stop: Callable[[], None]) -> None:
        """Announce the worker as serving."""

    async def draining(self) -> None:
        """Announce that it accepts no more requests."""

    async def leave(self) -> None:
        """Announce that it is gone."""


#: Builds a worker's registrar from the fleet's secret.
MakeRegistrar = Callable[[FleetSecret | None], Registrar]
