"""The gateway's shared parts: models, keys, metrics and state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pigou.background import cancel
from pigou.gateway.auth.budgets import BudgetLedger, read_budgets
from pigou.gateway.auth.keys import KeyLoads, Keys, check_known, current_key, kv_quotas
from pigou.gateway.caches.layers import Caches
from pigou.gateway.config import GatewayConfig
from pigou.gateway.fleet_status import FleetChanges, RegistryStatus
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import ModelRouting
from pigou.gateway.plan_status import PlanStatus
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.server_routes import ServerRoutes
from pigou.gateway.startup_shutdown import Shutdown, Startup
from pigou.tracing.tracer import Tracer
from pigou.wire.fair_turns import FairThreadPool
from pigou.wire.json_limits import SMALL

_T = TypeVar("_T")


@dataclass(slots=True)
class Gateway:
    """Parts of a gateway, shared by its pages."""

    config: GatewayConfig
    routing: ModelRouting
    metrics: Metrics  # the only model's; or for requests whose model is not known yet
    keys: Keys | None  # accepted API keys; None lets everybody in
    created: int  # Unix time in seconds, which the model card shows
    shutdown: Shutdown = field(default_factory=Shutdown)
    startup: Startup = field(default_factory=Startup)
    changes: FleetChanges | None = None  # changes the fleet; None where that cannot be
    plan_status: PlanStatus | None = None  # the planner's decisions; None without a planner
    registry: Callable[[], RegistryStatus] | None = None  # reads its state; None without one
    tracer: Tracer | None = None  # None if requests are not traced
    caches: Caches = field(init=False)  # above the engine
    key_loads: KeyLoads = field(default_factory=KeyLoads, init=False)
    budgets: BudgetLedger = field(init=False)
    server_routes: ServerRoutes = field(default_factory=ServerRoutes, init=False)
    _threads: FairThreadPool = field(default_factory=FairThreadPool, init=False)
    _ending: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.caches = Caches(config.caches)
        self.caches.on_session_end = self._end_tenures
        default = read_budgets(config.key_budgets)
        began = time.time_ns() - time.monotonic_ns()  # gateways count by the same slots
        self.budgets = BudgetLedger(
            default, self.keys or (), bool(config.prices), lambda: began + time.monotonic_ns()
        )
        self.metrics.scrape(self.budgets.families)
        for layer, option in self.caches.options.items():
            check_known(f"cache {layer}: quota", option.quotas, self.keys or ())
        quotas = kv_quotas(config.kv_quotas, self.keys or ())
        for model in self.routing:
            model.plane_driver.limits.kv_quotas = quotas or None

    @property
    def plane_driver(self) -> PlaneDriver:
        """Driver of the first model."""
        return self.routing.models[0].plane_driver

    async def off_loop(self, data: bytes, work: Callable[[], _T]) -> _T:
        """Process a body, on a thread if it is large."""
        if len(data) <= SMALL:
            return work()
        return await self._threads.run(current_key().tenant, work)

    def start(self) -> None:
        """Start the models' drivers; call it on the event loop."""
        for model in self.routing:
            model.plane_driver.start()

    def _end_tenures(self, salts: list[str]) -> None:
        for upstream in [up for model in self.routing for up in model.upstreams]:
            if not upstream.engine.stock:
                task = asyncio.create_task(upstream.end_tenures(salts))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stop threads, drivers and tracer."""
        await cancel(*self._ending)
        self._threads.close()
        for model in self.routing:
            await model.plane_driver.stop()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
