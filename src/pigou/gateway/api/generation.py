"""Completions and chats: parses, limits and serves requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
from aiohttp import web

from pigou.control.degradation import Mode
from pigou.control.planner.config import CLASS_HEADER
from pigou.diagnosis.prefix_lint import MAX_PIECES, PrefixAdvisor, prompt_pieces
from pigou.gateway import degraded
from pigou.gateway.api.costs import request_bill
from pigou.gateway.api.models import ask_any
from pigou.gateway.api.page import JSON, APIPage, APIPages
from pigou.gateway.auth.guard import count_for
from pigou.gateway.auth.keys import current_key
from pigou.gateway.auth.tenure import read_tenure_headers
from pigou.gateway.caches import answers
from pigou.gateway.caches.answers import AnswerCache
from pigou.gateway.caches.layers import (
    CACHE_HEADER,
    CONTEXT_HEADER,
    EVERYBODY,
    SAMPLED,
    SEMANTIC,
    AnswerLookup,
    CacheControl,
    CacheLayer,
)
from pigou.gateway.caches.semantic import (
    SemanticCache,
    SemanticLookup,
    hashed_ngrams,
    split_text,
    unit,
)
from pigou.gateway.gateway import Gateway
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import GatewayModel
from pigou.gateway.proxy import sequences
from pigou.gateway.proxy.driver import ReplyDriver, StreamDriver
from pigou.gateway.proxy.overflow import OVERFLOW_HEADER, OtherFleets, unless_full, with_fields
from pigou.gateway.proxy.relay import Relay
from pigou.gateway.proxy.spans import TracedRequest, traced_request, within_leg
from pigou.gateway.proxy.writer import ClientStalled, SSEWriter
from pigou.gateway.request import CHAT, COMPLETIONS, GatewayRun
from pigou.gateway.request_parsing import (
    DEGRADED_HEADER,
    ROUTING_HEADER,
    check_headers,
    read,
    read_overrides,
)
from pigou.kv.tenure import Tenure
from pigou.logs import describe_access, note_request
from pigou.request import SECOND
from pigou.tracing.trace_context import passed_on
from pigou.wire.bodies import read_json
from pigou.wire.chat_translation import ChatTranslation
from pigou.wire.connections import note_reply_id
from pigou.wire.errors import APIError
from pigou.wire.openai_requests import HEADER as UNKNOWN
from pigou.wire.openai_requests import UnknownFields, header_value
from pigou.wire.request_validation import REQUEST_ID_HEADER as REQUEST_ID

_log = logging.getLogger("pigou.gateway")
EMBEDDINGS = "/v1/embeddings"
#: A request that has it, with any value, is answered with advice on its prompt.
ADVICE_HEADER = "x-pigou-prefix-advice"
#: Bytes of messages that are read for advice.
_MAX_ADVICE_BYTES = 2**18


def pages(gateway: Gateway) -> APIPages:
    """Return the pages of both generation routes."""
    api = GenerationAPI(gateway)
    return APIPages(
        [
            APIPage(path, api.generate, method="POST", parameters=None, late_body=True)
            for path in (COMPLETIONS, CHAT)
        ],
        close=api.fleets.close,
    )


class GenerationAPI:
    """Answers completions and chats."""

    def __init__(self, gateway: Gateway) -> None:
        degraded.check_modes(gateway)
        self._gateway = gateway
        self.fleets = OtherFleets()
        self._unknown = UnknownFields(gateway.config.unknown_fields, _log.warning)
        self._advisor = PrefixAdvisor()
        self._answers = AnswerCache(gateway.caches)
        self._semantic = SemanticCache(gateway.caches)
        gateway.metrics.scrape(gateway.caches.families)

    async def generate(
        self, request: web.Request, translate: Callable[[bytes], ChatTranslation] | None = None
    ) -> web.StreamResponse:
        """Answer a completion or a chat, or let it overflow if its model is full.

        `translate` makes a chat of another API's body.
        """
        gateway, config, key = self._gateway, self._gateway.config, current_key()
        address = (config.host, config.port)
        with traced_request(gateway.tracer, request.headers, request.path, address) as traced:
            gateway.shutdown.check_open()
            gateway.startup.check(gateway.routing.decodes)
            check_headers(request.headers)
            headers = read_tenure_headers(request.headers)
            tenure = key.policy.apply(key.tenant, headers, time.time_ns())
            tenure = gateway.caches.in_session(tenure, request.headers)
            dropped = ""
            overrides = read_overrides(request.headers.get(ROUTING_HEADER))
            data = await read_json(request, config.max_body)
            if request.path == CHAT:
                compile_ = partial(gateway.caches.with_context, tenure, data)
                data, dropped = await gateway.off_loop(data, compile_)
            sent, translation = data, None
            if translate is not None:
                translation = await gateway.off_loop(data, partial(translate, data))
                data = translation.body
            parse = partial(self._parse, request, data, tenure, overrides, translation)
            run, model = await gateway.off_loop(data, parse)
            run.dropped, run.payer = dropped, key.payer
            if traced is not None:
                traced.take(run)
            note_request(run.parsed.wire_id, run.trace_id)
            note_reply_id(request, run.parsed.wire_id)
            self._unknown.judge(run.parsed.unknown)
            gateway.routing.check(run.parsed.fields.model)
            if ADVICE_HEADER in request.headers:
                run.advice = self._advice(run)
            count_for(model.metrics)
            response = None
            if CLASS_HEADER in request.headers or model.plane_driver.meter.objectives.classes:
                run.workload = model.plane_driver.meter.class_named(run, request.headers)
            if CacheLayer.ANSWER in gateway.caches.layers:
                response = await self._from_cache(request, run, model, tenure)
            if response is None and gateway.config.degrade:
                run, model = await self._degrade(request, run, model, data, parse, traced)
            gateway.caches.note_salt(tenure, run.parsed.salt)
            if response is None:
                with self._answers.single_flight(run.lookup):
                    if model.overflow is None or OVERFLOW_HEADER in request.headers:
                        response = await self.serve(request, run, model)
                    else:
                        serve = partial(self.serve, request, run, model)
                        response = await unless_full(run, model.overflow.price_s, serve)
                        response = response or await self._overflow(
                            request, run, model, sent, parse, traced
                        )
            if traced is not None:
                traced.status = response.status
            return response

    async def _from_cache(
        self, request: web.Request, run: GatewayRun, model: GatewayModel, tenure: Tenure
    ) -> web.StreamResponse | None:
        """Answer from the cache of answers, or wait for an equal request; None on a miss."""
        gateway, parsed = self._gateway, run.parsed
        own = CacheControl.read(request.headers)
        cacheable = answers.is_repeatable(parsed) or SAMPLED in own.wants
        control = degraded.cache_control(own, cacheable, run, model, request.headers)
        scope = model.scope(gateway.config.release)
        whole = scope.whole(tenure, parsed.fields, parsed.body, chat=parsed.chat)
        run.lookup = self._answers.ask(run, whole, control)
        while run.lookup is not None:
            cached = self._answers.find(run.lookup)
            if cached is not None:
                if not cacheable:
                    self._note_degraded(run, model, "cached")
                return await self._replay(request, run, model, cached)
            if await self._answers.lead(run.lookup):
                similar = await self._similar(request, run, whole)
                if similar is not None:
                    if SEMANTIC in control.wants - own.wants:
                        self._note_degraded(run, model, "cached")
                    return await self._replay(request, run, model, similar)
                break
        if control.only:
            raise APIError(504, "No cached answer, and Cache-Control is only-if-cached.")
        return None

    async def _similar(self, request: web.Request, run: GatewayRun, tenure: Tenure) -> bytes | None:
        """Return the answer to a similar question of the same tenure, for tenants that ask."""
        gateway, lookup = self._gateway, run.lookup
        option = gateway.caches.options.get(CacheLayer.SEMANTIC)
        if option is None or lookup is None:
            return None
        tenants = {*option.tenants.split("+")} - {""}
        if SEMANTIC not in lookup.control.wants and not {EVERYBODY, tenure.tenant} & tenants:
            return None
        split = split_text(run.parsed, lookup.content)
        if split is None:
            return None
        group, text = split
        if option.embedding:
            embedding = gateway.routing.find(option.embedding).scope(gateway.config.release)
            tenure = replace(tenure, model=repr((tenure.model, *sorted(embedding.releases))))
            body = msgspec.json.encode({"model": option.embedding, "input": text})
            reply = msgspec.json.decode(await ask_any(gateway, request, EMBEDDINGS, body))
            vector = unit(np.array(reply["data"][0]["embedding"], dtype=np.float32))
        else:
            vector = hashed_ngrams(text)
        bound = gateway.caches.bind(CacheLayer.SEMANTIC, tenure)
        lookup.semantic = SemanticLookup(bound, group, text, vector)
        if not lookup.control.reads:
            return None
        near = self._semantic.find(lookup.semantic, lookup.control.max_age_s)
        if near is None:
            return None
        lookup.status = f"hit; semantic; distance={near[1]:.3f}"
        return near[0]

    async def _replay(
        self, request: web.Request, run: GatewayRun, model: GatewayModel, reply: bytes
    ) -> web.StreamResponse:
        """Answer with a cached reply, whole or as a stream."""
        headers = partial(_decision_headers, run)
        self._gateway.caches.note_served(run.parsed.tenant, answers.reply_id(run), reply)
        with counted(run, model):
            timeout_s = self._gateway.config.client_timeout
            writer = SSEWriter(request, headers, timeout_s, translation=run.translation)
            if run.parsed.stream:
                await writer.write(answers.chunks(reply, run))
                return await writer.close()
            body = answers.whole(reply, run)
            if run.translation is not None:
                body = run.translation.whole(body)
            return await writer.send(web.Response(body=body, content_type=JSON))

    def _parse(
        self, request: web.Request, data: bytes, tenure: Tenure, overrides: dict[str, float],
        translation: ChatTranslation | None, model: GatewayModel | None = None,
    ) -> tuple[GatewayRun, GatewayModel]:  # fmt: skip
        config, routing = self._gateway.config, self._gateway.routing
        model, name = (model, model.name) if model else routing.of_body(data)
        parsed = read(
            data,
            chat=request.path != COMPLETIONS,
            strict=config.strict or model.pigou_only,
            tenure=tenure,
            scope=model.scope(config.release),
            request_id=request.headers.get(REQUEST_ID),
            overrides=overrides,
            context=model.context,
            model=name,
            adapter=model.adapter,
        )
        if translation is not None:
            parsed = replace(parsed, unknown=[*map(translation.field, parsed.unknown)])
        headers = passed_on(request.headers)
        return GatewayRun.of(parsed, trace_headers=headers, translation=translation), model

    async def _read_for(
        self, to: str, run: GatewayRun, data: bytes,
        parse: Callable[..., tuple[GatewayRun, GatewayModel]], traced: TracedRequest | None,
    ) -> tuple[GatewayRun, GatewayModel]:  # fmt: skip
        """Return a request as another model reads it, and that model."""
        model = self._gateway.routing.find(to)
        other, _ = await self._gateway.off_loop(data, partial(parse, model))
        other.payer, other.workload = run.payer, run.workload
        other.dropped, other.advice, other.degraded = run.dropped, run.advice, run.degraded
        if traced is not None:
            traced.take(other)
        return other, model

    async def _degrade(
        self, request: web.Request, run: GatewayRun, model: GatewayModel, data: bytes,
        parse: Callable[..., tuple[GatewayRun, GatewayModel]], traced: TracedRequest | None,
    ) -> tuple[GatewayRun, GatewayModel]:  # fmt: skip
        """Return a request as degraded modes that are on let it be served, and its model."""
        headers, first = request.headers, model
        if to := degraded.replaces(run, model, headers):
            run, model = await self._read_for(to, run, data, parse, traced)
            self._note_degraded(run, first, "model", f"model={to}")
        if degraded.shorten(run, first, headers):
            self._note_degraded(run, first, "max_tokens", f"max_tokens={run.parsed.max_tokens}")
        return run, model

    def _note_degraded(
        self, run: GatewayRun, model: GatewayModel, mode: Mode, text: str = ""
    ) -> None:
        run.degraded = (*run.degraded, text or mode)
        model.metrics.degraded.labels(mode).inc()

    async def _overflow(
        self, request: web.Request, run: GatewayRun, model: GatewayModel, data: bytes,
        parse: Callable[..., tuple[GatewayRun, GatewayModel]], traced: TracedRequest | None,
    ) -> web.StreamResponse:  # fmt: skip
        """Serve a request by another model or fleet."""
        gateway, overflow, key = self._gateway, model.overflow, current_key()
        assert overflow is not None
        gateway.shutdown.check_open()
        model.metrics.overflowed.labels(overflow.to).inc()
        if not overflow.is_url:
            run, fallback = await self._read_for(overflow.to, run, data, parse, traced)
            run.overflow = model.name
            return await self.serve(request, run, fallback)
        fields = {"model": model.name}
        if run.parsed.salt:  # the other fleet sees one key, and must not share KV across tenants
            fields["cache_salt"] = run.parsed.salt
        data = await gateway.off_loop(data, partial(with_fields, data, fields))
        bill = partial(request_bill, model.plane_driver)
        with (
            gateway.key_loads.accepted(key, *run.load) as run.quota,
            gateway.budgets.spending(key, run, request.headers, bill),
        ):
            await run.quota.take(run.parsed.id, model.plane_driver.queue_timeout_s)
            run.quota.sent(run.parsed.id)
            sent = self.fleets.forward(request, data, run, overflow)
            if traced is None:
                return await sent
            return await within_leg(run, "overflow", overflow.to, sent)

    async def serve(
        self, request: web.Request, run: GatewayRun, model: GatewayModel
    ) -> web.StreamResponse:
        """Serve a request within the limits of its key."""
        gateway, key, driver = self._gateway, current_key(), model.plane_driver
        with counted(run, model):
            if gateway.routing.several:  # the only one was checked before its body was read
                gateway.startup.check(model.decodes)
            driver.check_deadline(run.parsed.deadline_ms)
            with (
                gateway.key_loads.accepted(key, *run.load) as run.quota,
                gateway.budgets.spending(key, run, request.headers, partial(request_bill, driver)),
                driver.meter.metering(run, request.headers),
            ):
                if run.parsed.single and driver.prompts is not None:
                    start_ns = time.monotonic_ns()
                    await driver.read(run)
                    if driver.meter.objectives.classes:
                        run.workload = driver.meter.class_named(run, request.headers)
                    seconds = (time.monotonic_ns() - start_ns) / SECOND
                    model.metrics.stages.tokenize.observe(seconds)
                writer = SSEWriter(
                    request, partial(_decision_headers, run), gateway.config.client_timeout,
                    on_blocked=model.metrics.stages.client_blocked, translation=run.translation,
                    record=None if run.lookup is None else run.lookup.record,
                )  # fmt: skip
                metrics = model.metrics
                with _delivering(run, writer, metrics):
                    if not run.parsed.stream:
                        if sequences.splits(run):
                            reply = await sequences.whole(driver, run, metrics)
                        else:
                            reply = await ReplyDriver(driver, metrics, Relay(run)).drive()
                        _observe_duration(run, metrics)
                        if run.lookup is not None:
                            self._store(run.lookup, run, reply)
                        if run.translation is not None:
                            reply = await gateway.off_loop(
                                reply, partial(run.translation.whole, reply)
                            )
                        return await writer.send(web.Response(body=reply, content_type=JSON))
                    async with self._errors_in_stream(run, writer):
                        if sequences.splits(run):
                            await sequences.stream(driver, run, metrics, writer)
                        else:
                            await StreamDriver(driver, metrics, Relay(run), writer).drive()
                        _observe_duration(run, metrics)
                        if run.lookup is not None:
                            self._store(run.lookup, run)
                    return await writer.close()

    def _store(self, lookup: AnswerLookup, run: GatewayRun, reply: bytes | None = None) -> None:
        """Store a reply, or the stream that was recorded."""
        answer = self._answers.store(lookup, run, reply)
        if answer is not None and lookup.semantic is not None:
            self._semantic.store(lookup.semantic, answer, time.monotonic() - lookup.began)

    @asynccontextmanager
    async def _errors_in_stream(self, run: GatewayRun, writer: SSEWriter) -> AsyncIterator[None]:
        """Send errors as an event once a stream has begun (context)."""
        try:
            with self._gateway.shutdown.reports_end():
                yield
        except (ConnectionError, TimeoutError):
            raise  # the client is gone
        except Exception as error:
            if not writer.open:
                raise
            failure = error
            if not isinstance(failure, APIError):
                _log.exception("the stream of request %s failed", run.parsed.wire_id)
                failure = APIError(500, f"The gateway failed: {type(error).__name__}.")
            if run.metered is not None:
                run.metered.error = failure
            await writer.fail(failure)

    def _advice(self, run: GatewayRun) -> str:
        """Return advice on a request's first prompt."""
        body = {"prompt": run.parsed.prompts[0]}
        if run.parsed.chat:
            messages = memoryview(run.parsed.fields.messages)
            if len(messages) > _MAX_ADVICE_BYTES:
                return f"unknown; messages have over {_MAX_ADVICE_BYTES} bytes"
            body = {"messages": msgspec.json.decode(messages)}
        pieces = prompt_pieces(body, MAX_PIECES)
        if pieces is None:
            return "unknown; the prompt is neither text nor token ids"
        return self._advisor.advise(run.parsed.tenant, pieces)


@contextmanager
def counted(run: GatewayRun, model: GatewayModel) -> Iterator[None]:
    """Count a request by the exception that ended it (context)."""
    error, parsed, stats = "_OTHER", run.parsed, run.stats  # the conventions' word for the rest
    try:
        yield
        failure = None if run.metered is None else run.metered.error
        error = "" if failure is None else str(failure.status)
    except APIError as refusal:
        error = str(refusal.status)
        raise
    except (ConnectionError, TimeoutError, asyncio.CancelledError):
        error = "499"  # as in the counter of requests: the client left
        raise
    finally:
        requested, served = parsed.fields.model, parsed.adapter or model.served_name
        if not requested or not model.knows(requested):
            requested = model.served_name
        model.metrics.genai.ended(run, requested, served, error)
        model.metrics.tenants.ended(run, error)
        if model.plane_driver.meter.objectives.classes:
            model.metrics.classes.ended(run, error)
        describe_access(
            request_id=parsed.wire_id,
            trace_id=run.trace_id or None,
            tenant=parsed.tenant,
            model=served,
            stream=parsed.stream,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            ttft_s=None if run.ttft_s is None else round(run.ttft_s, 6),
            worker=stats.worker,
        )


@contextmanager
def _delivering(run: GatewayRun, writer: SSEWriter, metrics: Metrics) -> Iterator[None]:
    """Count the client's pauses during a reply (context)."""
    try:
        yield
    except ClientStalled as error:
        metrics.stalled.inc()
        _log.warning("request %s was cut off: %s", run.parsed.wire_id, error)
        raise
    finally:
        run.reply_bytes.close()
        writer.end_blocked()
        if run.parsed.stream:
            metrics.stages.delivered(writer.blocked_ns)
        if run.trace is not None and writer.blocked_ns:
            pauses = (("pigou.wait_s",), (writer.blocked_ns / SECOND,))
            run.trace.event("client slow", time.monotonic_ns(), pauses)


def _observe_duration(run: GatewayRun, metrics: Metrics) -> None:
    metrics.duration.observe((time.monotonic_ns() - run.parsed.arrival) / SECOND)


def _decision_headers(run: GatewayRun) -> dict[str, str]:
    """Return headers with the serving workers and the decision's URL."""
    headers, choice = dict(run.budget_headers), run.choice
    if run.lookup is not None:
        headers[CACHE_HEADER] = run.lookup.status
    if run.dropped:
        headers[CONTEXT_HEADER] = f"dropped {run.dropped}"
    if run.workload:
        headers[CLASS_HEADER] = run.workload
    if run.degraded:
        headers[DEGRADED_HEADER] = ", ".join(run.degraded)
    if run.parsed.unknown:
        headers[UNKNOWN] = header_value(run.parsed.unknown)
    if choice is None:
        return headers
    if run.overflow:
        headers[OVERFLOW_HEADER] = run.overflow
    if run.advice:
        headers[ADVICE_HEADER] = run.advice
    headers |= {"x-pigou-decision": run.parsed.id, "x-pigou-worker": choice.decode}
    if choice.prefill is not None:
        headers["x-pigou-prefill-worker"] = choice.prefill
    return headers
