"""Routes that show the gateway's state: health, metrics, workers, usage, decisions, version."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST

from pigou import __version__
from pigou.diagnosis.metric_pages import MetricPage
from pigou.gateway.api.costs import CostMetrics, Costs, cost_meter
from pigou.gateway.api.diagnosis import GatewayDiagnosis
from pigou.gateway.api.history import History
from pigou.gateway.api.metrics import WorkerFederation, page, page_without_tenants, samples
from pigou.gateway.attainment_metrics import AttainmentMetrics
from pigou.gateway.auth.guard import current_key, unauthorized
from pigou.gateway.auth.keys import NO_KEY, Key
from pigou.gateway.fleet_status import Decisions, ModelsStatus, RegistryMetrics
from pigou.gateway.model_routing import GatewayModel, ModelRouting
from pigou.gateway.plan_status import PlanMetrics, PlanStatus
from pigou.gateway.prices import PriceGauges
from pigou.wire.errors import APIError, bad_request

if TYPE_CHECKING:
    from pigou.gateway.app import Gateway

JSON = "application/json"
_PAGES = {
    "/history": "history",
    "/health": "health",
    "/health/ready": "health",
    "/health/live": "live",
    "/ping": "health",
    "/metrics": "metrics",
    "/metrics/workers": "worker_metrics",
    "/workers": "workers",
    "/plan": "plan",
    "/usage": "usage",
    "/costs": "costs",
    "/costs/{id}": "cost",
    "/decisions": "decisions",
    "/decisions/{id}": "decision",
    "/diagnosis": "diagnosis",
    "/version": "version",
}
#: Query parameters by path; probes and scrapers may send any, other paths have none.
_PARAMETERS = {"/history": ("since",), "/decisions": ("limit",)}
_LENIENT = ("health", "live", "metrics", "worker_metrics", "version")


class StatusRoutes:
    """Handlers of the routes that show state; they change nothing.

    Example:
        StatusRoutes(gateway, model).add_to(app.router)
    """

    def __init__(self, gateway: Gateway, models: ModelRouting) -> None:
        self._gateway = gateway
        self._models = models
        drivers = [model.plane_driver for model in models]
        # The gateway's own metrics count what comes before the model of a request is known.
        self._pages = [
            (model.metrics.registry, model.name)
            for model in models
            if model.metrics is not gateway.metrics
        ]
        self._status = ModelsStatus(
            {model.name: (model.fleet_status, model.aliases) for model in models}
        )
        self._history = History(
            self._status, gateway.metrics, self._status.rows,
            models=[model.metrics for model in models],
        )  # fmt: skip
        self._sampling: asyncio.Task[None] | None = None
        for model in models:
            _register(model)
        self._plan_status = gateway.plan_status or PlanStatus(drivers[0].meter)
        gateway.metrics.add(PlanMetrics(self._plan_status))
        if gateway.registry is not None:
            gateway.metrics.add(RegistryMetrics(gateway.registry))
        self._federation = WorkerFederation(models)
        self._costs = Costs(drivers)
        self._decisions = Decisions(*(driver.plane for driver in drivers))
        self._diagnosis = GatewayDiagnosis(self._metric_samples, self._status.view)
        self._diagnosing: asyncio.Task[None] | None = None

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        for path, handler in _PAGES.items():
            serve = getattr(self, handler)
            known = _PARAMETERS.get(path, ())
            router.add_get(path, serve if handler in _LENIENT else checked(serve, *known))

    def begin(self) -> None:
        """Begin to sample the history."""
        run = self._gateway.plane_driver.background.start
        self._sampling = run("history of the page", self._history.run)
        self._diagnosing = run("diagnosis of the fleet", self._diagnosis.run)

    def close(self) -> None:
        """End the history and the diagnosis."""
        for task in (self._sampling, self._diagnosing):
            if task is not None:
                task.cancel()

    async def health(self, _: web.Request) -> web.Response:
        """Answer 200 while requests can be served; 503 while the gateway starts or drains."""
        background = self._gateway.plane_driver.background
        decodes = self._models.decodes
        body: dict[str, Any] = {"status": "ok", "background": background.health()}
        if self._models.several:
            body["models"] = {model.name: _state(model) for model in self._models}
        if self._gateway.registry is not None:
            body["registry"] = self._gateway.registry().health()
        if (peers_health := self._gateway.plane_driver.peers_health) is not None:
            body["peers"] = peers_health()
        startup = self._gateway.startup
        if self._gateway.shutdown.begun:
            body["status"] = "closing"
        elif startup.active and not decodes:
            body |= {"status": "starting", "stages": startup.stages}
        elif not decodes:
            body["status"] = "no decode worker is up"
        elif background.failing or not all(model.decodes for model in self._models):
            body["status"] = "degraded"  # `models` says which one has no worker
        ready = decodes and not self._gateway.shutdown.begun
        if ready:
            return json_response(body)
        response = json_response(body, 503)
        response.headers["retry-after"] = "1"
        return response

    async def live(self, _: web.Request) -> web.Response:
        """Answer 200 for as long as the process serves, also while it starts or drains."""
        return json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        """Write all metrics for an admin key, its own for a tenant's, none without a key.

        With `open_metrics` those that name no tenant are for everybody.
        """
        keys = self._gateway.keys
        key = NO_KEY if keys is None else keys.find(request.headers.get("authorization"))
        if key is not None:
            body = self._metric_page(None if key.admin else key.tenant)
        elif self._gateway.config.open_metrics:
            self._set_gauges()
            registry, name = self._gateway.metrics.registry, self._page_model
            body = page_without_tenants(registry, name, self._pages)
        else:
            raise unauthorized()
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST})

    @property
    def _page_model(self) -> str:
        """The label `model_name` of the gateway's own metrics."""
        return "" if self._pages else self._models.models[0].served_name

    def _set_gauges(self) -> None:
        for model in self._models:
            model.metrics.queued.set(model.plane_driver.queued)
            queue = model.plane_driver.prefill_queue
            model.metrics.prefill_queue.set(0 if queue is None else queue.length)

    def _metric_page(self, tenant: str | None = None) -> bytes:
        """Return the metrics of a tenant; None for all."""
        self._set_gauges()
        registry = self._gateway.metrics.registry
        return page(registry, self._page_model, self._pages, tenant=tenant)

    def _metric_samples(self) -> MetricPage:
        """Return all metrics, read without their text."""
        self._set_gauges()
        registry = self._gateway.metrics.registry
        read = samples(registry, self._page_model, self._pages)
        return MetricPage((sample.name, sample.labels, sample.value) for sample in read)

    async def worker_metrics(self, request: web.Request) -> web.Response:
        """Write the metrics of all workers, for whom `/metrics` has all: they name no tenant."""
        keys = self._gateway.keys
        key = NO_KEY if keys is None else keys.find(request.headers.get("authorization"))
        if key is None and not self._gateway.config.open_metrics:
            raise unauthorized()
        if key is not None:
            _check_admin(key)
        body = await self._federation.page()
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST})

    async def workers(self, _: web.Request) -> web.Response:
        """Show the workers, to an administrator."""
        _check_admin()
        view, registry = self._status.view(), self._gateway.registry
        view["costs"] = self._costs.metered
        if registry is not None:
            view["registry"] = msgspec.to_builtins(registry())
        return json_response(view)

    async def plan(self, _: web.Request) -> web.Response:
        """Show what the planner decided, and why, to an administrator."""
        _check_admin()
        return json_response(self._plan_status.view())

    async def history(self, request: web.Request) -> web.Response:
        """Show samples and events after `since`, Unix time in seconds."""
        _check_admin()
        text = request.query.get("since", "0")
        try:
            since = float(text)
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise bad_request(f"since is {text[:40]!r}; it must be seconds.", "since")
        return json_response(self._history.view(since))

    async def diagnosis(self, _: web.Request) -> web.Response:
        """Show which failure modes the last half hour shows, to an administrator."""
        _check_admin()
        return json_response(self._diagnosis.view())

    async def usage(self, _: web.Request) -> web.Response:
        """Show a key's tenant, and how many tokens that used so far."""
        key = current_key()
        used = Counter[str]()
        for model in self._models:
            used.update(model.metrics.usage(key.tenant))
        return json_response({"tenant": key.tenant, "admin": key.admin, **used})

    async def costs(self, _: web.Request) -> web.Response:
        """Show what the fleet costs, and whom: all to an administrator, else a tenant's own."""
        return json_response(self._costs.view(_seen_by(current_key())))

    async def cost(self, request: web.Request) -> web.Response:
        """Show the bill of one request that the key may see."""
        return json_response(self._costs.one(request.match_info["id"], _seen_by(current_key())))

    async def decisions(self, request: web.Request) -> web.Response:
        """Show the latest decisions that the key may see."""
        return json_response(
            self._decisions.latest(request.query.get("limit"), _seen_by(current_key()))
        )

    async def decision(self, request: web.Request) -> web.Response:
        """Show one decision."""
        return json_response(self._decisions.one(request.match_info["id"], _seen_by(current_key())))

    async def version(self, _: web.Request) -> web.Response:
        """Show Pigou's version."""
        return json_response({"version": __version__})


def _register(model: GatewayModel) -> None:
    """Export what is known of a model with its metrics."""
    metrics, index = model.metrics, model.plane_driver.plane.index
    metrics.add_fleet(model.fleet_status.gauges)
    metrics.add(PriceGauges(model.fleet_status.prices))
    metrics.add(AttainmentMetrics(model.plane_driver.meter))
    if (costs := cost_meter(model.plane_driver)) is not None:
        metrics.add(CostMetrics(costs))
    metrics.add_count(
        "pigou_index_evicted_blocks",
        "Blocks that the prefix index forgot to stay within its limits.",
        lambda: index.evicted,
    )
    repeated = model.plane_driver.repeated
    metrics.add_count(
        "pigou_requests_repeated",
        "Requests whose prompt came again within 60 s after an attempt that was not served.",
        lambda: repeated.count,
    )


def _state(model: GatewayModel) -> str:
    return "ok" if model.decodes else "no decode worker is up"


def _check_admin(key: Key | None = None) -> None:
    if not (key or current_key()).admin:
        raise APIError(
            403,
            "The workers are shown to an administrator's key alone (`pigou key TENANT "
            "--admin` makes one); this key sees /usage and its own /decisions.",
            "authorization",
        )


def _seen_by(key: Key) -> str | None:
    """Return the tenant whose decisions a key sees; None for those of all."""
    return None if key.admin else key.tenant


def checked(serve: Handler, *parameters: str) -> Handler:
    """Return a handler that refuses query parameters other than these with 400."""

    async def serve_known(request: web.Request) -> web.StreamResponse:
        unknown = [name for name in request.query if name not in parameters]
        if unknown:
            known = f"has {' and '.join(parameters)} alone" if parameters else "has none"
            raise bad_request(
                f"The query parameter {unknown[0][:40]!r} is not known: {request.path} {known}.",
                unknown[0][:40],
            )
        return await serve(request)

    return serve_known


def json_response(value: object, status: int = 200) -> web.Response:
    """Return a response with a value as its JSON body."""
    return web.Response(body=msgspec.json.encode(value), content_type=JSON, status=status)
