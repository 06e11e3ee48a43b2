"""Routes of a worker's HTTP API."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from pigou import __version__
from pigou.background import Background
from pigou.config import ConfigError
from pigou.kv.quotas import check_quotas
from pigou.kv.tenure import salt_expiry
from pigou.logs import accessed, describe_access, note_request, traced
from pigou.request import NEVER, SECOND, EndedTenures, EngineLimits
from pigou.tracing.request_trace import RequestTrace
from pigou.tracing.tracer import Tracer
from pigou.tracing.waterfall import spans_view
from pigou.wire import openai_replies, request_validation
from pigou.wire.bodies import no_interim_answer, read_json
from pigou.wire.chat_translation import ChatTranslation, renaming
from pigou.wire.connections import (
    close_old_streams,
    is_reserved,
    mark_event_stream,
    note_reply_id,
    tell_request_id,
    too_many_connections,
)
from pigou.wire.errors import APIError, bad_request, decoded, http_error, too_large
from pigou.wire.fair_turns import FairThreadPool
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.json_limits import SMALL, read_fields
from pigou.wire.messages import PATH as MESSAGES
from pigou.wire.messages import Messages, error_body
from pigou.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    UnknownFields,
    decode,
    decode_generation,
    known,
    without_bom,
)
from pigou.wire.request_validation import REQUEST_ID_HEADER, request_id
from pigou.wire.responses import Responses, ResponseStore, answer_stored
from pigou.wire.sse import DONE, frame
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.engine_client import EngineClient
from pigou.worker.engine_thread.heartbeat import Heartbeat
from pigou.worker.engine_thread.kv_event_publisher import EventPublisher
from pigou.worker.engine_thread.kv_offload import OffloadConnector
from pigou.worker.http.fleet_auth import fleet_guard, fleet_tenant
from pigou.worker.http.input_processor import InputProcessor
from pigou.worker.http.pooling import pooling_reply, pooling_request, prompt_field
from pigou.worker.http.reply import Reply, ReplyTrace
from pigou.worker.http.served_model import ServedModel
from pigou.worker.metrics import CONTENT_TYPE, health_of

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_R = TypeVar("_R", CompletionRequest, ChatRequest)
_ENDED = msgspec.json.Decoder(EndedTenures)
_LIMITS = msgspec.json.Decoder(EngineLimits)
#: Routes answered even above the connection cap.
_PROBES = ("/health", "/ping", "/metrics")
_B = TypeVar("_B")
_POOLED: dict[str, type[EmbeddingsRequest | ScoreRequest | RerankRequest]] = {
    "/v1/embeddings": EmbeddingsRequest,
    **dict.fromkeys(("/v1/score", "/score"), ScoreRequest),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), RerankRequest),
}
#: Max queued large bodies per tenant.
_MAX_WAITING = 1024


class Routes:
    """All routes of a worker."""

    def __init__(
        self, model: ServedModel, intake: InputProcessor, service: EngineClient,
        config: WorkerConfig, *, events: EventPublisher | None, about: dict[str, Any],
        heartbeat: Heartbeat, background: Background, tiers: OffloadConnector | None = None,
        secret: FleetSecret | None = None, tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self._unknown = UnknownFields(config.unknown_fields, log.warning)
        self._secret, self._tracer, self._tiers = secret, tracer, tiers
        self._heartbeat, self._background = heartbeat, background
        self._model, self._intake, self._service = model, intake, service
        self._events, self._about = events, about
        self._max_body, self._evicts_tokens = config.max_body, bool(config.eviction.policy)
        self._bodies = Bodies(config.max_body, model.limits.max_model_len)
        self._responses = ResponseStore(time.monotonic)

    def application(self) -> web.Application:
        """Build the application with all routes."""
        app = web.Application(
            client_max_size=self._max_body, middlewares=[errors, fleet_guard(self._secret)]
        )
        app.on_response_prepare.append(close_old_streams)
        app.on_response_prepare.append(tell_request_id)
        app.on_cleanup.append(self._intake.prefillers.close)
        post = partial(web.post, expect_handler=no_interim_answer)
        app.add_routes(
            [
                post("/v1/completions", self.completions),
                post("/v1/chat/completions", self.chat),
                post("/v1/responses", self.translated),
                web.get("/v1/responses/{id}", self.stored_response, allow_head=False),
                web.delete("/v1/responses/{id}", self.stored_response),
                web.post("/v1/responses/{id}/cancel", self.stored_response),
                post(MESSAGES, self.translated),
                post(f"{MESSAGES}/count_tokens", self.count_tokens),
                post("/v1/kv/offer", self.offer),
                post("/v1/kv/end", self.end_tenures),
                *(post(path, self.pooled) for path in _POOLED),
                web.get("/v1/models", self.models, allow_head=False),
                web.get("/v1/models/{model:.+}", self.model_card, allow_head=False),
                web.get("/health", self.health),
                web.get("/health/ready", self.health),
                web.get("/health/live", self.live),
                web.get("/ping", self.health),
                web.post("/ping", self.health),
                web.get("/metrics", self.metrics_page),
                web.get("/version", self.version),
                web.get("/load", self.load),
                web.get("/traces/{id}", self.trace),
                web.get("/server_info", self.server_info),
                web.get("/kv_event_sources", self.event_sources),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                post("/limits", self.set_limits),
                post("/tokenize", self.tokenize),
                post("/detokenize", self.detokenize),
            ]
        )
        if self._model.adapters is not None:
            app.add_routes(self._model.adapters.routes(self._bodies.read))
        return app

    def close(self) -> None:
        """Stop the threads."""
        self._bodies.close()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete prompts."""
        return await self._parse_and_reply(request, CompletionRequest, self._intake.completion)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat."""
        return await self._parse_and_reply(request, ChatRequest, self._intake.chat)

    async def translated(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a response or a message by a chat."""
        id, tenant = secrets.token_hex(16), fleet_tenant()

        def translate(data: bytes) -> ChatTranslation:
            if request.path == MESSAGES:
                return Messages(data, id)
            return Responses(data, id, tenant, self._responses)

        made = await self._bodies.read(request, translate)
        with renaming(made.field):
            return await self._parse_and_reply(request, ChatRequest, self._intake.chat, made)

    async def pooled(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for embeddings, scores, or a ranking."""
        kind = _POOLED[request.path]
        parsed = await self._bodies.read(request, partial(known, kind))
        headers, wanted = self._unknown.judge(parsed.unknown), parsed.request
        prompts, id = pooling_request(wanted, self._model), _id(request, wanted.request_id)

        def field(path: str) -> str:
            return re.sub(r"^prompt\b", lambda _: prompt_field(wanted), path)

        with ReplyTrace(self._tracer, request.headers) as spans, renaming(field):
            reply = await self._intake.completion(prompts, id, fleet_tenant(), spans.trace)
            spans.take(reply)
            render = partial(pooling_reply, wanted)
            return await self._send(request, reply, headers, spans.trace_id, render)

    async def stored_response(self, request: web.Request) -> web.Response:
        """Answer for a stored response."""
        id = request.match_info["id"]
        return _json(answer_stored(self._responses, fleet_tenant(), request.method, id))

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Return the number of a message's tokens."""
        message = await self._bodies.read(request, lambda data: Messages(data, "", counts=True))
        with renaming(message.field):
            body = decode(TokenizeRequest, message.tokenize_body())
            return _json({"input_tokens": len(await self._tokens_of(body))})

    async def _parse_and_reply(
        self,
        request: web.Request,
        kind: type[_R],
        begin: Callable[[_R, str, str, RequestTrace | None], Awaitable[Reply]],
        translation: ChatTranslation | None = None,
    ) -> web.StreamResponse:
        with ReplyTrace(self._tracer, request.headers) as spans:
            if translation is None:
                parsed = await self._bodies.read(request, partial(known, kind))
            else:
                parsed = known(kind, translation.body)
                parsed.unknown[:] = map(translation.field, parsed.unknown)
            headers = self._unknown.judge(parsed.unknown)
            id, wanted = _id(request, parsed.request.request_id), parsed.request
            spans.phase("receive")
            ticket, shown = await self._intake.prefillers.ticket(
                request, id, parsed.body, chat=isinstance(wanted, ChatRequest)
            )
            if ticket is not None:
                wanted = msgspec.structs.replace(wanted, kv_transfer_params=ticket)
            reply = await begin(wanted, id, fleet_tenant(), spans.trace)
            headers |= shown
            spans.take(reply)
            if translation is None:
                return await self._send(request, reply, headers, spans.trace_id, Reply.body)
            return await self._send(
                request, reply, headers, spans.trace_id,
                lambda reply: translation.whole(reply.body()), translation.feed,
            )  # fmt: skip

    async def _send(
        self, request: web.Request, reply: Reply, headers: dict[str, str], trace_id: str,
        render: Callable[[Reply], bytes], feed: Callable[[bytes], bytes] = bytes,
    ) -> web.StreamResponse:  # fmt: skip
        """Send a reply: its events by `feed` if it streams, else the whole of it by `render`."""
        note_request(reply.id, trace_id)
        try:
            with traced(reply.id, trace_id):
                if reply.options.stream:
                    return await self._stream(request, reply, headers, feed)
                await reply.complete()
            return _json(render(reply), headers=headers)
        finally:
            # Also on disconnect: stop computing its requests.
            self._service.cancel(reply)
            _describe(reply, trace_id)

    async def _stream(
        self, request: web.Request, reply: Reply, headers: dict[str, str],
        feed: Callable[[bytes], bytes],
    ) -> web.StreamResponse:  # fmt: skip
        await reply.wait()
        if (failure := reply.error) is not None:
            raise failure  # before the first byte, the status can still be set
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        mark_event_stream(request)
        await response.prepare(request)
        data = reply.opening()
        while True:
            ended, error = reply.done, reply.error
            data += reply.take_frames()
            if error is not None:
                await response.write(feed(data + frame(error.body()) + DONE))
                break
            if ended:
                await response.write(feed(data + reply.closing()))
                break
            if data:
                await response.write(feed(data))
            data = b""
            await reply.wait()
        await response.write_eof()
        return response

    async def models(self, _: web.Request) -> web.Response:
        """List the model and its adapters."""
        return _json({"object": "list", "data": [self._card(), *self._adapter_cards().values()]})

    async def model_card(self, request: web.Request) -> web.Response:
        """Describe the model."""
        self._intake.check_model(name := request.match_info["model"])
        return _json(self._adapter_cards().get(name) or self._card())

    def _card(self) -> dict[str, Any]:
        model = self._model
        return openai_replies.model_card(
            model.name, model.root, model.created, model.limits.max_model_len
        )

    def _adapter_cards(self) -> dict[str, dict[str, Any]]:
        if self._model.adapters is None:
            return {}
        base, served = self._card(), self._model.adapters.served
        return {
            name: {**base, "id": name, "root": a.path, "created": a.created, "parent": base["id"]}
            for name, a in served.items()
        }

    async def health(self, _: web.Request) -> web.Response:
        """Answer 200 while requests are accepted, else 503; a tier that is down is not fatal."""
        ready = not (self._service.dead or self._service.draining)
        whole = True
        body: dict[str, Any] = {
            "status": "ok",
            "engine": self._heartbeat.view(),
            "background": self._background.health(),
        }
        if self._tiers is not None:
            body["tiers"] = tiers = health_of(self._tiers)
            whole = all(tier["up"] for tier in tiers.values())
        if self._service.dead:
            body["status"] = "dead"
        elif not ready:
            body["status"] = "closing"
        elif not whole or self._background.failing:
            body["status"] = "degraded"
        return _json(body, 200 if ready else 503)

    async def live(self, _: web.Request) -> web.Response:
        """Answer 200 until the engine dies, also while draining."""
        dead = self._service.dead
        return _json({"status": "dead" if dead else "ok"}, 503 if dead else 200)

    async def metrics_page(self, _: web.Request) -> web.Response:
        """Return the Prometheus metrics."""
        return web.Response(
            body=self._service.metrics_page(), headers={"Content-Type": CONTENT_TYPE}
        )

    async def version(self, _: web.Request) -> web.Response:
        """Return the version."""
        return _json({"version": __version__})

    async def load(self, _: web.Request) -> web.Response:
        """Return the sequences in flight."""
        return _json({"server_load": self._service.in_flight})

    async def trace(self, request: web.Request) -> web.Response:
        """Return the spans of a trace that this worker remembers."""
        if self._tracer is None:
            raise APIError(404, "This worker traces nothing: give --otlp-traces-endpoint.")
        traces = self._tracer.memory.find(request.match_info["id"])
        return _json({"spans": spans_view(traces, self._tracer.service)})

    async def server_info(self, _: web.Request) -> web.Response:
        """Return role, block size and limits."""
        return _json(self._about)

    async def event_sources(self, _: web.Request) -> web.Response:
        """Return where KV events are published."""
        return _json({} if self._events is None else {"0": self._events.describe()})

    async def offer(self, request: web.Request) -> web.Response:
        """Offer a prompt's cached blocks to another worker (gateway only); null ticket if none."""
        body = await self._bodies.read(request, decode_generation)
        ticket = await self._service.lease_cached(await self._intake.cached(body))
        return _json({"kv_transfer_params": ticket})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Clear the prefix cache."""
        self._service.check_open()
        self._service.clear_cache()
        return _json({"success": True})

    async def end_tenures(self, request: web.Request) -> web.Response:
        """Free what tenures have cached (gateway only)."""
        salts = (await self._bodies.read(request, partial(decoded, _ENDED))).salts
        self._service.check_open()
        try:
            expire = all(salt_expiry(salt) < NEVER for salt in salts)
        except ValueError:
            expire = False
        if not expire:
            raise bad_request("salts must all be tenure1:DIGEST:EXPIRY.", "salts")
        self._service.clear_cache(salts)
        return _json({"success": True})

    async def set_limits(self, request: web.Request) -> web.Response:
        """Limit the engine, up to what it was started with; return the limits in force."""
        wanted = await self._bodies.read(request, partial(decoded, _LIMITS))
        self._service.check_open()
        if (quotas := wanted.kv_quotas) and self._evicts_tokens:
            raise APIError(409, "The worker evicts tokens, which knows no quotas.", "kv_quotas")
        try:
            check_quotas(quotas or {})
        except ConfigError as error:
            raise bad_request(str(error), "kv_quotas") from None
        limits = {
            name: min(getattr(wanted, name) or self._about[name], self._about[name])
            for name in ("max_seqs", "max_batched_tokens")
        }
        self._service.set_limits(**limits, kv_quotas=quotas)
        self._about["limits"] = limits
        return _json({**limits, "kv_quotas": quotas and msgspec.to_builtins(quotas)})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the tokens of a text or rendered messages."""
        body = await self._bodies.read(request, partial(decode, TokenizeRequest))
        self._intake.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Give prompt or messages, and only one of them.", "prompt")
        tokens = await self._tokens_of(body)
        names = [self._model.tokenizer.name(token) for token in tokens]
        return _json(
            {
                "count": len(tokens),
                "max_model_len": self._model.limits.max_model_len,
                "tokens": tokens,
                "token_strs": names if body.return_token_strs else None,
            }
        )

    async def _tokens_of(self, body: TokenizeRequest) -> list[int]:
        prompts = self._intake.prompts
        if body.messages is None:
            return await prompts.encode(body.prompt or "", body.add_special_tokens is not False)
        request_validation.check_messages(body.messages)
        return await prompts.encode(prompts.render(body), bool(body.add_special_tokens))

    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the text of tokens."""
        body = await self._bodies.read(request, partial(decode, DetokenizeRequest))
        self._intake.check_model(body.model)
        return _json({"prompt": await self._intake.prompts.decode(body.tokens)})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _describe(reply: Reply, trace_id: str) -> None:
    sequences = reply.sequences
    leaders = sequences[:: reply.options.per_prompt]
    first = min((sequence.first for sequence in sequences if sequence.first), default=0)
    began = min((sequence.arrival for sequence in sequences), default=0)
    describe_access(
        request_id=reply.id,
        trace_id=trace_id or None,
        model=reply.model,
        stream=reply.options.stream,
        prompt_tokens=sum(len(sequence.prompt) for sequence in leaders),
        completion_tokens=sum(len(sequence.choice.tokens) for sequence in sequences),
        ttft_s=round((first - began) / SECOND, 6) if first else None,
    )


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: convert failures to error bodies, and log access."""
    note_request()  # the task may have served another request before
    with accessed(request.method, request.path) as fields:
        response = await _answered(request, handler)
        fields["status"] = response.status
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if is_reserved(request) and request.path not in _PROBES:
            raise too_many_connections()
        response = await handler(request)
    except APIError as error:
        response = _error(error, request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = _error(_explain(error, request), request)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client went away
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        failure = APIError(500, "The server failed on this request; its log says how.")
        response = _error(failure, request)
    return response


def _explain(error: web.HTTPException, request: web.Request) -> APIError:
    if error.status == 413:
        return too_large(request.client_max_size)
    return http_error(error.status, request.method, request.path, error.reason)


def _error(error: APIError, request: web.Request) -> web.Response:
    body = error_body(error) if request.path.startswith(MESSAGES) else error.body()
    return _json(body, error.status, error.headers)


def _id(request: web.Request, body: str | None) -> str:
    id = request_id(request.headers.get(REQUEST_ID_HEADER), body)
    note_reply_id(request, id)
    return id


class Bodies:
    """Reads and decodes request bodies within bounds."""

    def __init__(self, max_bytes: int, context: int) -> None:
        self._max_bytes = max_bytes
        self._context = context
        self._large = FairThreadPool(max_waiting=_MAX_WAITING)

    async def read(self, request: web.Request, decode: Callable[[bytes], _B]) -> _B:
        """Decode a JSON body with `decode`; raises APIError as `wire.bodies.read_json`."""
        data = await read_json(request, self._max_bytes)
        if len(data) <= SMALL:
            return self._decode(data, decode)
        return await self._large.run(fleet_tenant(), lambda: self._decode(data, decode))

    def close(self) -> None:
        """Stop the threads."""
        self._large.close()

    def _decode(self, data: bytes, decode: Callable[[bytes], _B]) -> _B:
        data = without_bom(data)
        read_fields(data, self._context)
        return decode(data)
