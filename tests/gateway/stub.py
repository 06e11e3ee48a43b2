"""Scripted workers, in process: they answer as Pigou's own or a stock vLLM would, or misbehave.

Token i of a reply has the id 1000 + i. Every fifth and the one before it make up one character
between them, so that text depends on what came before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pigou.config import ControlConfig
from pigou.control.plane import ControlPlane
from pigou.gateway.app import GatewayServer
from pigou.gateway.auth.keys import Keys
from pigou.gateway.config import GatewayConfig
from pigou.gateway.fleet_status import FleetStatus
from pigou.gateway.gateway import Gateway
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import GatewayModel, ModelRouting
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import Engine
from pigou.objectives import Objectives
from pigou.request import Role, Worker
from pigou.tracing.tracer import Tracer

BASE = 1000


def text_of(index: int) -> str:
    """What token `index` adds to the text."""
    return {3: "", 4: "é"}.get(index % 5, f" t{index}")


def whole_text(count: int) -> str:
    return "".join(text_of(i) for i in range(count))


@dataclass
class Script:
    """How a worker misbehaves; everything off is a good worker.

    `*_after` count content chunks that are sent before; `times` bounds how often it happens.
    `held`: nothing is answered before it is set, or nothing past `held_after`. `odd` is sent
    before each content chunk, `opening` before the whole stream, `done` at its end; `cached` are
    the tokens that a whole reply says were cached.
    """

    die_after: int | None = None
    hang_after: int | None = None
    garbage_after: int | None = None
    error_after: int | None = None
    abort_after: int | None = None
    end_after: int | None = None
    status: int = 200
    delay_s: float = 0.0
    per_chunk: int = 1
    cut: int = 0
    no_ticket: bool = False
    times: int = 1_000_000
    held: asyncio.Event | None = None
    held_after: int = 0
    odd: bytes = b""
    opening: bytes = b""
    done: bytes = b"data: [DONE]\n\n"
    cached: int | None = None


@dataclass
class Seen:
    path: str
    body: dict[str, Any]
    request_id: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Stub:
    """One scripted worker; `listed` are further cards of its list of models, as vLLM's has."""

    name: str
    role: Role = Role.BOTH
    stock: bool = False
    script: Script = field(default_factory=Script)
    seen: list[Seen] = field(default_factory=list)
    cancelled: int = 0
    active: int = 0
    port: int = 0
    health: int = 200
    model: str = "stub"
    listed: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    routes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(
        default_factory=dict
    )

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_post("/tokenize", self._tokenize)
        for path in ("/v1/models", "/version", "/metrics", "/health", "/kv_event_sources",
                     "/server_info"):  # fmt: skip
            app.router.add_get(path, self._tell)
        for path, handler in self.routes.items():
            app.router.add_route("*", path, handler)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _tell(self, request: web.Request) -> web.Response:
        """What a worker says of itself."""
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/metrics":
            labels = 'model_name="stub",engine="0"'
            return web.Response(
                text=f"# HELP x y\nvllm:num_requests_running{{{labels}}} {self.active}.0\n"
                f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
                f"vllm:kv_cache_usage_perc{{{labels}}} 0.25\n"
                'vllm:cache_config_info{block_size="32",num_gpu_blocks="77"} 1.0\n'
            )
        card = {
            "id": self.model,
            "owned_by": "vllm" if self.stock else "pigou",
            "max_model_len": 2048,
        }
        cards = [{"root": self.model} | card, *self.listed] if self.listed else [card]
        pages = {"/v1/models": {"data": cards}, "/version": {"version": "1.2"},
                 "/server_info": self.about}  # fmt: skip
        return web.json_response(pages.get(request.path, {}))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"count": len(body.get("prompt", "")), "tokens": [1]})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.active += 1
        try:
            return await self._reply(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.path, body, headers.get("x-request-id", ""), headers))
        chat = request.path.endswith("chat/completions")
        names = {card["id"] for card in self.listed} | {self.model}
        if self.listed and body["model"] not in names:
            message = {"error": {"message": f"no model {body['model']}", "type": "NotFoundError",
                                 "param": "model", "code": 404}}  # fmt: skip
            return web.json_response(message, status=404)
        if self.script.status != 200 and self._strike():
            message = {"error": {"message": "scripted", "type": "X", "param": None,
                                 "code": self.script.status}}  # fmt: skip
            return web.json_response(message, status=self.script.status)
        await self._hold(0)
        await asyncio.sleep(self.script.delay_s)
        ids, first = self._prompt(body, chat)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 5
        last = (first if self.stock else 0) + most
        if not body.get("stream"):
            if self.script.die_after is not None and self._strike():
                request.transport.abort()
            return web.json_response(self._whole(body, chat, ids, last))
        return await self._stream(request, body, chat, ids, (first, last))

    async def _hold(self, sent: int) -> None:
        if self.script.held is not None and self.script.held_after == sent:
            await self.script.held.wait()

    def _strike(self) -> bool:
        if self.script.times == 0:
            return False
        self.script.times -= 1
        return True

    def _prompt(self, body: dict[str, Any], chat: bool) -> tuple[list[int], int]:
        """Return the original prompt's ids, and how many tokens of the reply were there."""
        if chat:
            ids = body.get("prompt_token_ids") or list(json.dumps(body["messages"]).encode())
        else:
            prompt = body["prompt"]
            ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        done = sum(each >= BASE for each in ids)
        if not self.stock:
            assert done == (0 if body.get("max_tokens") == 1 else body.get("resume_tokens", 0))
        return ids[: len(ids) - done], done

    def _whole(self, body: dict[str, Any], chat: bool, ids: list[int], last: int) -> dict[str, Any]:
        text = whole_text(last)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "stop_reason": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        ticket = None
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            ticket = {"do_remote_prefill": True, "from": self.name, "nested": [[1, 2]]}
        return {
            "id": "whole",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": self.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(ids),
                "total_tokens": len(ids) + last,
                "completion_tokens": last,
                "prompt_tokens_details": {"cached_tokens": self.script.cached},
            },
            "kv_transfer_params": None if self.script.no_ticket else ticket,
        }

    async def _stream(
        self, request: web.Request, body: dict[str, Any], chat: bool, ids: list[int],
        span: tuple[int, int],
    ) -> web.StreamResponse:  # fmt: skip
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        wants = body.get("return_token_ids")
        prefix = "chatcmpl" if chat else "cmpl"
        if self.script.opening:
            await response.write(self.script.opening)
        head = {
            "id": f"{prefix}-{request.headers['x-request-id']}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1 + len(self.seen),
            "model": self.model,
        }
        prompt = ids if wants else None
        if chat:
            delta = {"role": "assistant", "content": ""}
            choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None,
                                      "finish_reason": None}  # fmt: skip
            await self._send(response, {**head, "choices": [choice], "prompt_token_ids": prompt})
        first, last = span
        sent = 0
        for start in range(first, last, self.script.per_chunk):
            if await self._misbehave(request, response, head, sent):
                return response
            group = range(start, min(last, start + self.script.per_chunk))
            text = "".join(text_of(i) for i in group)
            over = group[-1] == last - 1
            choice = {"index": 0}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            choice |= {"logprobs": None, "finish_reason": "length" if over else None}
            choice["token_ids"] = [BASE + i for i in group] if wants else None
            if not chat:
                choice["prompt_token_ids"] = prompt if sent == 0 else None
            if over:
                choice["stop_reason"] = None
            if self.script.odd:
                await response.write(self.script.odd)
            await self._send(response, {**head, "choices": [choice]})
            sent += 1
            await self._hold(sent)
            await asyncio.sleep(self.script.delay_s)
        if await self._misbehave(request, response, head, sent):
            return response
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + last,
                     "completion_tokens": last,
                     "prompt_tokens_details": {"cached_tokens": len(ids) + first}}  # fmt: skip
            await self._send(response, {**head, "choices": [], "usage": usage})
        await response.write(self.script.done)
        return response

    async def _misbehave(
        self, request: web.Request, response: web.StreamResponse, head: dict[str, Any], sent: int
    ) -> bool:
        script = self.script
        if script.die_after == sent and self._strike():
            request.transport.abort()
            return True
        if script.hang_after == sent and self._strike():
            await asyncio.sleep(3600)
        if script.garbage_after == sent and self._strike():
            await response.write(b"data: {not json\n\n")
            return True
        if script.end_after == sent and self._strike():
            return True
        if script.error_after == sent and self._strike():
            error = {"message": "scripted", "type": "InternalServerError", "code": 500}
            await self._send(response, {"error": error})
            await response.write(b"data: [DONE]\n\n")
            return True
        if script.abort_after == sent and self._strike():
            choice = {"index": 0, "text": "", "delta": {}, "finish_reason": "abort"}
            await self._send(response, {**head, "choices": [choice]})
            await response.write(b"data: [DONE]\n\n")
            return True
        return False

    async def _send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
        cut = self.script.cut or len(data)
        for start in range(0, len(data), cut):
            await response.write(data[start : start + cut])
            if cut < len(data):
                await asyncio.sleep(0)


@dataclass
class Fleet:
    """A gateway in front of stubs."""

    url: str
    stubs: dict[str, Stub]
    plane_driver: PlaneDriver
    metrics: Metrics
    stop: Callable[[], Awaitable[None]]

    def idle(self) -> bool:
        """Whether nothing weighs on anybody."""
        columns = self.plane_driver.plane.state.columns
        counts = (columns.prefill_tokens, columns.decode_tokens, columns.decode_requests)
        ups = self.plane_driver.upstreams.values()
        return (
            all((c == 0).all() for c in counts)
            and not self.plane_driver.plane.state.requests
            and self.plane_driver.queued == 0
            and all(up.inflight == 0 for up in ups)
        )

    async def settle(self, timeout_s: float = 3.0) -> None:
        """Wait until nothing weighs on anybody."""
        for _ in range(int(timeout_s / 0.02)):
            if self.idle():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("load was left behind")


@asynccontextmanager
async def serving(
    *stubs: Stub,
    control: ControlConfig | None = None,
    keys: Keys | None = None,
    drain_s: float = 0.2,
    objectives: Objectives | None = None,
    tracer: Tracer | None = None,
    **limits: Any,
) -> AsyncIterator[Fleet]:
    """Run a gateway over these stubs, all of them up; its end waits `drain_s` for requests."""
    runners = [await stub.start() for stub in stubs]
    control = control or ControlConfig(policy="least-loaded")  # which splits every prompt
    plane_driver = PlaneDriver(ControlPlane(control), objectives=objectives)
    metrics = Metrics()
    config = GatewayConfig(port=0, **limits)
    model = GatewayModel(plane_driver, metrics, FleetStatus(plane_driver, list))
    server = GatewayServer(
        Gateway(config, ModelRouting([model]), metrics, keys, 1, tracer=tracer),
        shutdown_s=drain_s,
    )
    try:
        async with server:
            for stub in stubs:
                worker = Worker(stub.name, stub.url, stub.role)
                await plane_driver.up(worker, Engine(stub.stock, "stub", 2048))
            url = f"http://127.0.0.1:{server.port}"
            yield Fleet(
                url, {stub.name: stub for stub in stubs}, plane_driver, metrics, server.stop
            )
    finally:
        for runner in runners:
            await runner.cleanup()
