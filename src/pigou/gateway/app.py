"""The gateway's HTTP application: its routes, and what they work with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from pigou.gateway.api_keys import KeyLoads, Keys
from pigou.gateway.config import GatewayConfig
from pigou.gateway.dashboard import ASSETS, asset, read_assets
from pigou.gateway.failure import Rejected, WorkerFailed
from pigou.gateway.fleet_changes import FleetChanges
from pigou.gateway.fleet_routes import FleetRoutes
from pigou.gateway.gateway_request import CHAT, COMPLETIONS, GatewayRequest
from pigou.gateway.metrics import Metrics
from pigou.gateway.middleware import add_cors, check_browser, current_key, guard
from pigou.gateway.passthrough import Passthrough
from pigou.gateway.plan_status import PlanStatus
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.registry_status import RegistryStatus
from pigou.gateway.reply_drivers import Generator
from pigou.gateway.request_parsing import ROUTING_HEADER, read, read_overrides
from pigou.gateway.request_tenure import ServerScope, read_tenure_headers
from pigou.gateway.server_routes import ROOT_PATHS
from pigou.gateway.sse_writer import ClientStalled, SSEWriter
from pigou.gateway.startup_shutdown import Shutdown, Startup
from pigou.gateway.status_api import FleetStatus
from pigou.gateway.status_routes import JSON, StatusRoutes, json_response
from pigou.gateway.upstream import Upstream
from pigou.logs import describe_access
from pigou.request import SECOND
from pigou.wire.connections import close_old_streams
from pigou.wire.errors import APIError, bad_request
from pigou.wire.json_limits import SMALL, read_fields
from pigou.wire.openai_replies import model_card
from pigou.wire.openai_requests import without_bom
from pigou.wire.request_body import FairThreadPool, no_interim_answer, read_json
from pigou.wire.request_validation import REQUEST_ID_HEADER as REQUEST_ID
from pigou.wire.request_validation import echo_request_id
from pigou.wire.unknown_fields import HEADER as UNKNOWN
from pigou.wire.unknown_fields import UnknownFields, header_value

_log = logging.getLogger("pigou.gateway")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes work with.

    Attributes:
        config: limits.
        plane_driver: drives the control plane.
        metrics: counters.
        fleet_status: the fleet's table.
        keys: accepted API keys; None lets everybody in.
        created: Unix time in seconds, which the model card shows.
        shutdown: knows who is under way, and ends that.
        startup: knows whether the fleet is still starting.
        changes: changes the fleet; None where that cannot be.
        plan_status: what a planner decided; None where there cannot be one.
        registry: returns the state of the registry; None without one.
    """

    config: GatewayConfig
    plane_driver: PlaneDriver
    metrics: Metrics
    fleet_status: FleetStatus
    keys: Keys | None
    created: int
    shutdown: Shutdown = field(default_factory=Shutdown)
    startup: Startup = field(default_factory=Startup)
    changes: FleetChanges | None = None
    plan_status: PlanStatus | None = None
    registry: Callable[[], RegistryStatus] | None = None


def build(gateway: Gateway) -> web.Application:
    """Return the application, whose start and end also start and end the plane driver."""
    app = web.Application(
        client_max_size=gateway.config.max_body,
        middlewares=[
            check_browser(gateway.config),
            guard(gateway.keys, gateway.metrics, gateway.shutdown),
        ],
    )
    routes = _Routes(gateway)
    status_routes = StatusRoutes(gateway, lambda: routes.scope().model)
    app.router.add_post(COMPLETIONS, routes.completions, expect_handler=no_interim_answer)
    app.router.add_post(CHAT, routes.chat, expect_handler=no_interim_answer)
    app.router.add_get("/v1/models", routes.models, allow_head=False)
    app.router.add_get("/v1/models/{model:.+}", routes.model, allow_head=False)
    app.router.add_post("/tokenize", routes.forward, expect_handler=no_interim_answer)
    app.router.add_post("/detokenize", routes.forward, expect_handler=no_interim_answer)
    status_routes.add_to(app.router)
    FleetRoutes(gateway).add_to(app.router)
    read_assets()
    for path in ASSETS:
        app.router.add_get(path, asset)
    for path in ROOT_PATHS:
        app.router.add_post(path, routes.passed)
    app.router.add_route("*", "/v1/{path:.*}", routes.passed)

    async def start(_: web.Application) -> None:
        gateway.plane_driver.start()
        status_routes.begin()

    async def stop(_: web.Application) -> None:
        status_routes.close()
        routes.close()
        await gateway.plane_driver.stop()

    app.on_response_prepare.append(close_old_streams)
    app.on_response_prepare.append(add_cors(gateway.config))
    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    return app


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._large = FairThreadPool()
        self._generator = Generator(gateway.plane_driver, gateway.metrics)
        self._usage = KeyLoads()
        self._passthrough = Passthrough(
            gateway.plane_driver, gateway.config, self._usage, self.scope
        )
        self._unknown = UnknownFields(gateway.config.unknown_fields, _log.warning)
        gateway.plane_driver.timed = gateway.metrics.decision.observe

    def close(self) -> None:
        """End the threads."""
        self._large.close()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def passed(self, request: web.Request) -> web.StreamResponse:
        """Pass a request of another route to an attached server that has it."""
        self._gateway.shutdown.check_open()
        key, headers = current_key(), read_tenure_headers(request.headers)
        tenure = key.policy.apply(key.tenant, headers, time.time_ns())
        return await self._passthrough.answer(request, key, tenure)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        self._gateway.shutdown.check_open()
        self._check_started()
        key, headers = current_key(), read_tenure_headers(request.headers)
        tenure = key.policy.apply(key.tenant, headers, time.time_ns())
        overrides = read_overrides(request.headers.get(ROUTING_HEADER))
        data = await read_json(request, self._gateway.config.max_body)
        work = partial(
            read,
            data,
            chat=chat,
            strict=self._gateway.config.strict or self._pigou_only(),
            tenure=tenure,
            scope=self.scope(),
            request_id=request.headers.get(REQUEST_ID),
            overrides=overrides,
            context=self._context(),
        )
        call = await self._off_loop(data, work)
        self._unknown.judge(call.unknown)
        self._check_model(call.body.get("model"))
        self._check_deadline(call)
        try:
            with (
                self._usage.accepted(key.digest, key.limits, call),
                self._gateway.plane_driver.meter.metering(call, request.headers),
            ):
                return await self._serve(request, call)
        finally:
            self._describe_access(call)

    def _describe_access(self, call: GatewayRequest) -> None:
        """Log a request's tokens, times and worker in the access log."""
        stats, first = call.stats, call.stats.first_token
        describe_access(
            request_id=call.wire_id,
            tenant=call.tenant,
            model=self.scope().model,
            stream=call.stream,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            ttft_s=round((first - call.arrival) / SECOND, 6) if first else None,
            worker=stats.worker,
        )

    async def _serve(self, request: web.Request, call: GatewayRequest) -> web.StreamResponse:
        await self._gateway.plane_driver.read(call)
        if not call.stream:
            reply = await self._generator.whole(call)
            return web.Response(body=reply, content_type=JSON, headers=_decided(call))
        echoed = echo_request_id(request.headers.get(REQUEST_ID))
        limit_s = self._gateway.config.client_timeout
        writer = SSEWriter(request, lambda: {**echoed, **_decided(call)}, limit_s)
        try:
            await self._stream(call, writer)
            return await writer.close()
        except ClientStalled as error:
            self._gateway.metrics.stalled.inc()
            _log.warning("request %s was cut off: %s", call.wire_id, error)
            raise

    async def _stream(self, call: GatewayRequest, writer: SSEWriter) -> None:
        try:
            with self._gateway.shutdown.reports_end():
                await self._generator.stream(call, writer)
        except (APIError, Rejected) as error:
            if not writer.open:
                raise
            _note_error(call, error)
            await writer.fail(error)
        except (ConnectionError, TimeoutError):
            raise  # the client is gone
        except Exception as error:
            if not writer.open:
                raise
            _log.exception("the stream of request %s failed", call.wire_id)
            failure = APIError(500, f"The gateway failed: {type(error).__name__}.")
            _note_error(call, failure)
            await writer.fail(failure)

    def _pigou_only(self) -> bool:
        """Whether all workers that are up are Pigou's own, which know no other fields."""
        upstreams = self._gateway.plane_driver.upstreams.values()
        return bool(upstreams) and not any(up.engine.stock for up in upstreams)

    def _check_started(self) -> None:
        ups = self._gateway.plane_driver.upstreams.values()
        self._gateway.startup.check(any(up.worker.role.decodes for up in ups))

    async def _off_loop(self, data: bytes, work: Callable[[], _T]) -> _T:
        """Return what work on a body returns; that on a large one is done on a thread."""
        if len(data) <= SMALL:
            return work()
        return await self._large.run(current_key().tenant, work)

    def _context(self) -> int:
        """Return the tokens that any worker can hold; 0 where one did not say."""
        sizes = [up.engine.max_model_len for up in self._gateway.plane_driver.upstreams.values()]
        return max(sizes) if sizes and all(sizes) else 0

    def _check_model(self, raw: msgspec.Raw | None) -> None:
        self._check_named(None if raw is None else msgspec.json.decode(raw))

    def _check_named(self, named: str | None) -> None:
        models = self._models()
        if named is not None and models and named not in models:
            valid = ", ".join(models)
            raise APIError(
                404, f"The model `{named}` does not exist. Valid aliases: {valid}.", "model"
            )

    def _check_deadline(self, call: GatewayRequest) -> None:
        plane_driver = self._gateway.plane_driver
        if (
            call.deadline_ms is not None
            and plane_driver.upstreams
            and not plane_driver.heeds_deadlines
        ):
            raise bad_request(
                f"deadline_ms is {call.deadline_ms}; nobody here goes by deadlines: start the "
                "gateway with --admission edf, or its workers with --order edf, or remove the "
                "field.",
                "deadline_ms",
            )

    def scope(self) -> ServerScope:
        """Return what the gateway itself knows of a request's tenure."""
        plane_driver = self._gateway.plane_driver
        engines = [up.engine for up in plane_driver.upstreams.values()]
        return ServerScope(
            model=engines[0].model if engines else "",
            release=self._gateway.config.release,
            releases=frozenset(engine.release for engine in engines if engine.release),
            template=plane_driver.prompts.template if plane_driver.prompts is not None else "",
        )

    def _models(self) -> dict[str, Upstream]:
        return {up.engine.model: up for up in self._gateway.plane_driver.upstreams.values()}

    async def models(self, _: web.Request) -> web.Response:
        cards = [self._card(name, up) for name, up in self._models().items()]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._check_named(name)
        upstream = self._models().get(name)
        if upstream is None:
            raise APIError(503, "No worker is up that could say its model.", retry_after=1)
        return json_response(self._card(name, upstream))

    def _card(self, name: str, upstream: Upstream) -> dict[str, Any]:
        return model_card(name, name, self._gateway.created, upstream.engine.max_model_len)

    async def forward(self, request: web.Request) -> web.Response:
        """Pass a request of `/tokenize` or `/detokenize` to any worker."""
        self._check_started()
        data = await read_json(request, self._gateway.config.max_body)
        body = await self._off_loop(data, partial(read_fields, without_bom(data)))
        last: WorkerFailed | None = None
        tenant = current_key().tenant
        for upstream in list(self._gateway.plane_driver.upstreams.values()):
            try:
                reply = await upstream.whole(request.path, body, "forward", tenant)
            except WorkerFailed as failure:
                last = failure
            else:
                return web.Response(body=reply, content_type=JSON)
        raise APIError(503, f"No worker answers: {last or 'none is up'}.", retry_after=1)


def _note_error(call: GatewayRequest, error: APIError | Rejected) -> None:
    """Note that a stream ended with an error."""
    if call.metered is not None:
        call.metered.error = error


def _decided(call: GatewayRequest) -> dict[str, str]:
    """Return the headers that tell who serves a request, and where the reason can be had."""
    unknown = {UNKNOWN: header_value(call.unknown)} if call.unknown else {}
    if call.choice is None:
        return unknown
    headers = unknown | {"x-pigou-decision": call.id, "x-pigou-worker": call.choice.decode}
    return headers if call.choice.prefill is None else headers | {
        "x-pigou-prefill-worker": call.choice.prefill
    }  # fmt: skip
