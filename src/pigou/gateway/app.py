"""The gateway's HTTP application: its routes, and what they work with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from pigou.gateway.api.fleet import FleetRoutes
from pigou.gateway.api.history import ASSETS, asset, read_assets
from pigou.gateway.api.status import JSON, StatusRoutes, json_response
from pigou.gateway.api.traces import TraceRoutes
from pigou.gateway.auth.guard import add_cors, check_browser, count_for, current_key, guard
from pigou.gateway.auth.keys import KeyLoads, Keys
from pigou.gateway.auth.tenure import read_tenure_headers
from pigou.gateway.config import GatewayConfig
from pigou.gateway.failure import Rejected, WorkerFailed
from pigou.gateway.fleet_status import FleetChanges, FleetStatus, RegistryStatus
from pigou.gateway.loop_watch import LoopWatch
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import GatewayModel, ModelRouting, count_request
from pigou.gateway.plan_status import PlanStatus
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.prefix_advice import ADVICE_HEADER, RequestAdvisor
from pigou.gateway.proxy.overflow import OVERFLOW_HEADER, OtherFleets, unless_full, with_model
from pigou.gateway.proxy.passthrough import ROOT_PATHS, Passthrough
from pigou.gateway.proxy.spans import TracedRequest, end_request, status_of, within_leg
from pigou.gateway.proxy.writer import ClientStalled, SSEWriter
from pigou.gateway.request import CHAT, COMPLETIONS, GatewayRequest
from pigou.gateway.request_parsing import ROUTING_HEADER, read, read_overrides
from pigou.gateway.startup_shutdown import Shutdown, Startup
from pigou.logs import describe_access, note_request
from pigou.request import SECOND
from pigou.tracing.metrics import SpanExporterMetrics
from pigou.tracing.trace_context import header_lines, passed_on
from pigou.tracing.tracer import Tracer
from pigou.wire.bodies import REPLIES, FairThreadPool, no_interim_answer, read_json
from pigou.wire.connections import close_old_streams, note_reply_id, tell_request_id
from pigou.wire.errors import APIError, bad_request
from pigou.wire.json_limits import SMALL, read_fields
from pigou.wire.openai_requests import HEADER as UNKNOWN
from pigou.wire.openai_requests import UnknownFields, header_value, without_bom
from pigou.wire.request_validation import REQUEST_ID_HEADER as REQUEST_ID
from pigou.wire.request_validation import reply_id

_log = logging.getLogger("pigou.gateway")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes work with."""

    config: GatewayConfig
    plane_driver: PlaneDriver  # drives the control plane
    metrics: Metrics
    fleet_status: FleetStatus  # the fleet's table
    keys: Keys | None  # accepted API keys; None lets everybody in
    created: int  # Unix time in seconds, which the model card shows
    shutdown: Shutdown = field(default_factory=Shutdown)  # knows who is under way, and ends that
    startup: Startup = field(default_factory=Startup)  # knows whether the fleet is still starting
    changes: FleetChanges | None = None  # changes the fleet; None where that cannot be
    plan_status: PlanStatus | None = None  # what a planner decided; None where there cannot be one
    # returns the state of the registry; None without one.
    registry: Callable[[], RegistryStatus] | None = None
    # that are served, where they are declared; None for the one of `plane_driver`.
    models: ModelRouting | None = None
    tracer: Tracer | None = None  # of requests; None where they are not traced


def build(gateway: Gateway) -> web.Application:
    """Return the application, whose start and end also start and end the plane driver."""
    app = web.Application(
        client_max_size=gateway.config.max_body,
        middlewares=[
            check_browser(gateway.config),
            guard(gateway.keys, gateway.metrics, gateway.shutdown),
        ],
    )
    models = gateway.models
    if models is None:
        one = GatewayModel(gateway.plane_driver, gateway.metrics, gateway.fleet_status)
        models = ModelRouting([one])
    routes, status_routes = _Routes(gateway, models), StatusRoutes(gateway, models)
    app.router.add_post(COMPLETIONS, routes.completions, expect_handler=no_interim_answer)
    app.router.add_post(CHAT, routes.chat, expect_handler=no_interim_answer)
    app.router.add_get("/v1/models", routes.models, allow_head=False)
    app.router.add_get("/v1/models/{model:.+}", routes.model, allow_head=False)
    app.router.add_post("/tokenize", routes.forward, expect_handler=no_interim_answer)
    app.router.add_post("/detokenize", routes.forward, expect_handler=no_interim_answer)
    status_routes.add_to(app.router)
    FleetRoutes(gateway).add_to(app.router)
    TraceRoutes(gateway.tracer, models).add_to(app.router)
    if gateway.tracer is not None and gateway.tracer.exporter is not None:
        gateway.metrics.add(SpanExporterMetrics(gateway.tracer.exporter))
    read_assets()
    for path in ASSETS:
        app.router.add_get(path, asset)
    for path in ROOT_PATHS:
        app.router.add_post(path, routes.passed)
    app.router.add_route("*", "/v1/{path:.*}", routes.passed)

    loop_watch, watching = LoopWatch(gateway.metrics.registry), list[asyncio.Task[None]]()

    async def start(_: web.Application) -> None:
        for model in models:
            model.plane_driver.start()
        background = gateway.plane_driver.background
        watching.append(background.start("event loop", loop_watch.run))
        status_routes.begin()

    async def stop(_: web.Application) -> None:
        for task in watching:
            task.cancel()
        status_routes.close()
        await routes.close()
        for model in models:
            await model.plane_driver.stop()
        if gateway.tracer is not None:
            await asyncio.to_thread(gateway.tracer.close)

    app.on_response_prepare.append(close_old_streams)
    app.on_response_prepare.append(tell_request_id)
    app.on_response_prepare.append(add_cors(gateway.config))
    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    return app


class _Routes:
    def __init__(self, gateway: Gateway, models: ModelRouting) -> None:
        self._gateway, self._models = gateway, models
        self._large = FairThreadPool()
        self._fleets = OtherFleets()
        self._usage = KeyLoads()
        self._passthrough = Passthrough(models, gateway.config, self._usage)
        self._unknown = UnknownFields(gateway.config.unknown_fields, _log.warning)
        self._advisor = RequestAdvisor()

    async def close(self) -> None:
        """End the threads, and connections to other fleets."""
        self._large.close()
        await self._fleets.close()

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
        tracer = self._gateway.tracer
        if tracer is None:
            return await self._generated(request, None, chat=chat)
        traced, status = TracedRequest(tracer.begin(request.headers)), 500
        try:
            response = await self._generated(request, traced, chat=chat)
            status = response.status
            return response
        except BaseException as error:
            status = status_of(error)
            raise
        finally:
            address = (self._gateway.config.host, self._gateway.config.port)
            end_request(tracer, traced, request.path, status, address)

    async def _generated(
        self, request: web.Request, traced: TracedRequest | None, *, chat: bool
    ) -> web.StreamResponse:
        self._gateway.shutdown.check_open()
        self._gateway.startup.check(self._models.decodes)
        key, headers = current_key(), read_tenure_headers(request.headers)
        tenure = key.policy.apply(key.tenant, headers, time.time_ns())
        overrides = read_overrides(request.headers.get(ROUTING_HEADER))
        data = await read_json(request, self._gateway.config.max_body)
        request_id, config = request.headers.get(REQUEST_ID), self._gateway.config

        def work(model: GatewayModel | None = None) -> tuple[GatewayModel, GatewayRequest]:
            model, name = (model, model.name) if model else self._models.of_body(data)
            call = read(
                data,
                chat=chat,
                strict=config.strict or model.pigou_only,
                tenure=tenure,
                scope=model.scope(config.release),
                request_id=request_id,
                overrides=overrides,
                context=model.context,
                model=name,
            )
            call.adapter = model.adapter(call.fields.model)
            return model, call

        model, call = await self._off_loop(data, work)
        call.trace_headers = passed_on(request.headers)
        if traced is not None:
            traced.take(call)
        note_request(call.wire_id, call.trace_id)
        note_reply_id(request, call.wire_id)
        self._unknown.judge(call.unknown)
        self._models.check(call.fields.model)
        if ADVICE_HEADER in request.headers:
            call.advice = self._advisor.advise(call)
        count_for(model.metrics)
        overflow = model.overflow
        if overflow is None or OVERFLOW_HEADER in request.headers:
            return await self._accepted(request, call, model)
        serve = partial(self._accepted, request, call, model)
        reply = await unless_full(call, overflow.price_s, serve)
        if reply is not None:
            return reply
        self._gateway.shutdown.check_open()
        model.metrics.overflowed.labels(overflow.to).inc()
        if overflow.is_url:
            data = await self._off_loop(data, partial(with_model, data, model.name))
            with self._usage.accepted(key.digest, key.limits, call):
                if call.quota is not None:
                    await call.quota.take(call.id, model.plane_driver.queue_timeout_s)
                    call.quota.sent()
                sent = self._fleets.forward(request, data, call, overflow)
                if traced is None:
                    return await sent
                return await within_leg(call, "overflow", overflow.to, sent)
        fallback = self._models.find(overflow.to)
        _, call = await self._off_loop(data, partial(work, fallback))
        call.trace_headers = passed_on(request.headers)
        call.overflow = model.name
        if traced is not None:
            traced.take(call)
        return await self._accepted(request, call, fallback)

    async def _accepted(
        self, request: web.Request, call: GatewayRequest, model: GatewayModel
    ) -> web.StreamResponse:
        """Serve a request within the limits of its key."""
        key = current_key()
        try:
            with count_request(call, model):
                if self._models.several:  # the only one was checked before its body was read
                    self._gateway.startup.check(model.decodes)
                _check_deadline(call, model.plane_driver)
                with (
                    self._usage.accepted(key.digest, key.limits, call),
                    model.plane_driver.meter.metering(call, request.headers),
                ):
                    return await self._serve(request, call, model)
        finally:
            _describe_access(call, model)

    async def _serve(
        self, request: web.Request, call: GatewayRequest, model: GatewayModel
    ) -> web.StreamResponse:
        if call.single and model.plane_driver.prompts is not None:
            start_ns = time.monotonic_ns()
            await model.plane_driver.read(call)
            model.metrics.stages.tokenize.observe((time.monotonic_ns() - start_ns) / SECOND)
        stages = model.metrics.stages
        writer = SSEWriter(
            request, lambda: _decided(call), self._gateway.config.client_timeout,
            on_blocked=stages.client_blocked,
        )  # fmt: skip
        try:
            if not call.stream:
                reply = await model.generator.whole(call)
                return await writer.send(web.Response(body=reply, content_type=JSON))
            await self._stream(call, writer, model)
            return await writer.close()
        except ClientStalled as error:
            model.metrics.stalled.inc()
            _log.warning("request %s was cut off: %s", call.wire_id, error)
            raise
        finally:
            call.reply_bytes.close()
            writer.end_blocked()
            if call.stream:
                stages.delivered(writer.blocked_ns)
            if call.trace is not None and writer.blocked_ns:
                pauses = (("pigou.wait_s",), (writer.blocked_ns / SECOND,))
                call.trace.event("client slow", time.monotonic_ns(), pauses)

    async def _stream(self, call: GatewayRequest, writer: SSEWriter, model: GatewayModel) -> None:
        try:
            with self._gateway.shutdown.reports_end():
                await model.generator.stream(call, writer)
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

    async def _off_loop(self, data: bytes, work: Callable[[], _T]) -> _T:
        """Return what work on a body returns; that on a large one is done on a thread."""
        if len(data) <= SMALL:
            return work()
        return await self._large.run(current_key().tenant, work)

    async def models(self, _: web.Request) -> web.Response:
        cards = [
            await self._card(model, name)
            for model in self._models
            for name, upstream in model.names.items()
            if upstream is not None
        ]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return json_response(await self._card(self._models.find(name), name))

    async def _card(self, model: GatewayModel, name: str) -> dict[str, Any]:
        """Return the card of a name, with the routes that answer it."""
        card = model.card(name, self._gateway.created)
        endpoints = await self._passthrough.endpoints(model.serving(name))
        return card | {"supported_endpoints": endpoints}

    async def forward(self, request: web.Request) -> web.Response:
        """Pass a request of `/tokenize` or `/detokenize` to any worker."""
        self._gateway.startup.check(self._models.decodes)
        data = await read_json(request, self._gateway.config.max_body)
        model, name = self._models.of_body(data)
        body = await self._off_loop(data, partial(read_fields, without_bom(data)))
        if name and "model" in body:
            body["model"] = msgspec.Raw(msgspec.json.encode(name))
        last: WorkerFailed | None = None
        tenant, lines = current_key().tenant, header_lines(passed_on(request.headers))
        id = reply_id(request.headers.get(REQUEST_ID))
        note_reply_id(request, id)
        named = str(msgspec.json.decode(body.get("model", b'""')))
        for upstream in sorted(model.upstreams, key=lambda up: not up.engine.serves(named)):
            try:
                with REPLIES.reserve() as held:
                    reply = await upstream.whole(request.path, body, id, tenant, lines, held=held)
            except WorkerFailed as failure:
                last = failure
            else:
                return web.Response(body=reply, content_type=JSON)
        raise APIError(503, f"No worker answers: {last or 'none is up'}.", retry_after=1)


def _check_deadline(call: GatewayRequest, plane_driver: PlaneDriver) -> None:
    if call.deadline_ms is not None and plane_driver.upstreams and not plane_driver.heeds_deadlines:
        raise bad_request(
            f"deadline_ms is {call.deadline_ms}; nobody here goes by deadlines: start the "
            "gateway with --admission edf, or its workers with --order edf, or remove the field.",
            "deadline_ms",
        )


def _describe_access(call: GatewayRequest, model: GatewayModel) -> None:
    """Log a request's tokens, times and worker in the access log."""
    stats, first = call.stats, call.stats.first_token
    describe_access(
        request_id=call.wire_id,
        trace_id=call.trace_id or None,
        tenant=call.tenant,
        model=call.adapter or model.served_name,
        stream=call.stream,
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        ttft_s=round((first - call.arrival) / SECOND, 6) if first else None,
        worker=stats.worker,
    )


def _note_error(call: GatewayRequest, error: APIError | Rejected) -> None:
    """Note that a stream ended with an error."""
    if call.metered is not None:
        call.metered.error = error


def _decided(call: GatewayRequest) -> dict[str, str]:
    """Return the headers that tell who serves a request, and where the reason can be had."""
    unknown = {UNKNOWN: header_value(call.unknown)} if call.unknown else {}
    if call.choice is None:
        return unknown
    unknown |= {OVERFLOW_HEADER: call.overflow} if call.overflow else {}
    unknown |= {ADVICE_HEADER: call.advice} if call.advice else {}
    headers = unknown | {"x-pigou-decision": call.id, "x-pigou-worker": call.choice.decode}
    return headers if call.choice.prefill is None else headers | {
        "x-pigou-prefill-worker": call.choice.prefill
    }  # fmt: skip
