"""The gateway's shared parts: models, keys, metrics and state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pigou.gateway.auth.keys import KeyLoads, Keys, current_key
from pigou.gateway.config import GatewayConfig
from pigou.gateway.fleet_status import FleetChanges, FleetStatus, ModelsStatus, RegistryStatus
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import GatewayModel, ModelRouting
from pigou.gateway.plan_status import PlanStatus
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.server_routes import ServerRoutes
from pigou.gateway.startup_shutdown import Shutdown, Startup
from pigou.tracing.tracer import Tracer
from pigou.wire.bodies import FairThreadPool
from pigou.wire.json_limits import SMALL

_T = TypeVar("_T")


@dataclass(slots=True)
class Gateway:
    """Parts of a gateway, shared by its pages."""

    config: GatewayConfig
    plane_driver: PlaneDriver  # the first model's
    metrics: Metrics  # the first model's; also for requests whose model is not known yet
    fleet_status: FleetStatus
    keys: Keys | None  # accepted API keys; None lets everybody in
    created: int  # Unix time in seconds, which the model card shows
    shutdown: Shutdown = field(default_factory=Shutdown)
    startup: Startup = field(default_factory=Startup)
    changes: FleetChanges | None = None  # changes the fleet; None where that cannot be
    plan_status: PlanStatus | None = None  # the planner's decisions; None without a planner
    registry: Callable[[], RegistryStatus] | None = None  # reads its state; None without one
    models: ModelRouting | None = None  # where they are declared; None for that of `plane_driver`
    tracer: Tracer | None = None  # None if requests are not traced
    # made of these:
    routing: ModelRouting = field(init=False)
    status: ModelsStatus = field(init=False)
    key_loads: KeyLoads = field(default_factory=KeyLoads, init=False)
    server_routes: ServerRoutes = field(default_factory=ServerRoutes, init=False)
    _threads: FairThreadPool = field(init=False)

    def __post_init__(self) -> None:
        self._threads = FairThreadPool()
        one = GatewayModel(self.plane_driver, self.metrics, self.fleet_status)
        self.routing = self.models or ModelRouting([one])
        self.status = ModelsStatus(
            {model.name: (model.fleet_status, model.aliases) for model in self.routing}
        )

    async def off_loop(self, data: bytes, work: Callable[[], _T]) -> _T:
        """Process a body, on a thread if it is large."""
        if len(data) <= SMALL:
            return work()
        return await self._threads.run(current_key().tenant, work)

    def close(self) -> None:
        """Shut down the threads."""
        self._threads.close()
