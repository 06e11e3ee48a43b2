"""The small routes: models, health, metrics, tokens, version, load, events."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from pigou import __version__
from pigou.background import Background
from pigou.tracing.tracer import Tracer
from pigou.tracing.waterfall import spans_view
from pigou.wire import openai_replies, request_validation
from pigou.wire.bodies import no_interim_answer
from pigou.wire.connections import close_old_streams, tell_request_id
from pigou.wire.errors import APIError, bad_request
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.openai_requests import (
    UnknownFields,
    decode_cached,
    decode_detokenize,
    decode_tokenize,
)
from pigou.worker.engine_client import EngineClient
from pigou.worker.fleet_auth import fleet_guard
from pigou.worker.generation import Bodies, Generation, errors
from pigou.worker.heartbeat import Heartbeat
from pigou.worker.input_processor import InputProcessor
from pigou.worker.kv_event_publisher import EventPublisher
from pigou.worker.kv_offload import OffloadConnector
from pigou.worker.metrics import CONTENT_TYPE, health_of
from pigou.worker.served_model import ServedModel

_log = logging.getLogger(__name__)


class Routes:
    """Everything that is answered without the engine."""

    def __init__(
        self,
        model: ServedModel,
        intake: InputProcessor,
        service: EngineClient,
        *,
        events: EventPublisher | None,
        about: dict[str, Any],
        heartbeat: Heartbeat,
        background: Background,
        tiers: OffloadConnector | None = None,
        unknown_fields: str = "warn",
        secret: FleetSecret | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._unknown = UnknownFields(unknown_fields, _log.warning)
        self._secret = secret
        self._tracer = tracer
        self._tiers = tiers
        self._heartbeat = heartbeat
        self._background = background
        self._model = model
        self._intake = intake
        self._service = service
        self._events = events
        self._about = about

    def application(self, max_body: int) -> web.Application:
        """Return the application with all routes; bodies have at most `max_body` bytes."""
        app = web.Application(
            client_max_size=max_body, middlewares=[errors, fleet_guard(self._secret)]
        )
        app.on_response_prepare.append(close_old_streams)
        app.on_response_prepare.append(tell_request_id)
        bodies = self._bodies = Bodies(max_body, self._model.limits.max_model_len)
        post = partial(web.post, expect_handler=no_interim_answer)
        generation = Generation(self._intake, self._service, bodies, self._unknown, self._tracer)
        app.add_routes(
            [
                post("/v1/completions", generation.completions),
                post("/v1/chat/completions", generation.chat),
                post("/v1/kv/offer", self.offer),
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
                post("/tokenize", self.tokenize),
                post("/detokenize", self.detokenize),
            ]
        )
        return app

    def close(self) -> None:
        """End the threads."""
        self._bodies.close()

    async def models(self, _: web.Request) -> web.Response:
        """List the one model."""
        model = self._model
        body = openai_replies.models(
            model.name, model.root, model.created, model.limits.max_model_len
        )
        return _json(body)

    async def model_card(self, request: web.Request) -> web.Response:
        """Describe the one model."""
        self._intake.check_model(request.match_info["model"])
        model = self._model
        card = openai_replies.model_card(
            model.name, model.root, model.created, model.limits.max_model_len
        )
        return _json(card)

    async def health(self, _: web.Request) -> web.Response:
        """Answer 200 while requests are taken; else 503.

        The body tells of the engine's heartbeat, of background tasks, and of tiers. A tier whose
        store is down is not fatal: what it had is computed.
        """
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
        """Answer 200 until the engine dies, also while the worker drains."""
        dead = self._service.dead
        return _json({"status": "dead" if dead else "ok"}, 503 if dead else 200)

    async def metrics_page(self, _: web.Request) -> web.Response:
        """Return the metrics in the text format of Prometheus."""
        return web.Response(
            body=self._service.metrics_page(), headers={"Content-Type": CONTENT_TYPE}
        )

    async def version(self, _: web.Request) -> web.Response:
        """Say which version this is."""
        return _json({"version": __version__})

    async def load(self, _: web.Request) -> web.Response:
        """Say how many sequences are in flight."""
        return _json({"server_load": self._service.in_flight})

    async def trace(self, request: web.Request) -> web.Response:
        """Say which spans of a trace this worker remembers."""
        if self._tracer is None:
            raise APIError(404, "This worker traces nothing: give --otlp-traces-endpoint.")
        traces = self._tracer.memory.find(request.match_info["id"])
        return _json({"spans": spans_view(traces, self._tracer.service)})

    async def server_info(self, _: web.Request) -> web.Response:
        """Say what this worker is: role, block size, limits."""
        return _json(self._about)

    async def event_sources(self, _: web.Request) -> web.Response:
        """Say where KV events are published."""
        return _json({} if self._events is None else {"0": self._events.describe()})

    async def offer(self, request: web.Request) -> web.Response:
        """Offer what is cached of a prompt to another worker; for the gateway alone.

        The body is one of a completion or of a chat (it has `messages`), as it would be sent to
        be computed here. The ticket is null where nothing of it is cached.
        """
        body = await self._bodies.read(request, decode_cached)
        ticket = await self._service.lease_cached(await self._intake.cached(body))
        return _json({"kv_transfer_params": ticket})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Forget all cached prefixes."""
        self._service.check_open()
        self._service.clear_cache()
        return _json({"success": True})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the tokens of a text, or of rendered messages."""
        body = await self._bodies.read(request, decode_tokenize)
        self._intake.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Give prompt or messages, and only one of them.", "prompt")
        if body.messages is not None:
            request_validation.check_messages(body.messages)
            tokens = await self._intake.prompts.encode(
                self._intake.prompts.render(body), bool(body.add_special_tokens)
            )
        else:
            text = body.prompt or ""
            tokens = await self._intake.prompts.encode(text, body.add_special_tokens is not False)
        names = [self._model.tokenizer.name(token) for token in tokens]
        return _json(
            {
                "count": len(tokens),
                "max_model_len": self._model.limits.max_model_len,
                "tokens": tokens,
                "token_strs": names if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the text of tokens."""
        body = await self._bodies.read(request, decode_detokenize)
        self._intake.check_model(body.model)
        return _json({"prompt": await self._intake.prompts.decode(body.tokens)})


def _json(value: Any, status: int = 200) -> web.Response:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")
