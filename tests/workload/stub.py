"""An OpenAI endpoint with known timing and chosen faults, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "stub"
LIMIT = 4096


@dataclass
class Behaviour:
    """What the stub does; `fault(n)` names what befalls request n (0 is the first, no probe)."""

    first: float = 0.0
    gap: float = 0.0
    per_chunk: int = 1
    usage: str = "continuous"  # or "final", "none"
    ids: bool = False
    refuse: tuple[str, ...] = ()
    tokenizer: bool = True
    short: int | None = None
    barrier: int = 0
    fault: Callable[[int], str] = field(default=lambda _: "")


class Stub:
    """The server; keeps what came (`bodies`, `headers`, `paths`) and the `peak` in flight."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.how = behaviour
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.inflight = self.peak = 0
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Stub:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop.set)
        self._thread.join(10)

    def _serve(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self.stop, self._full = asyncio.Event(), asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        if self.how.tokenizer:
            app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._ready.set()
        await self.stop.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "max_model_len": LIMIT}]}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": [sum(word.encode()) for word in words]})

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """Bodies of what was measured or warmed up, without the probes."""
        return [body for body in self.bodies if not is_probe(body)]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        flat = {**body, **(body.get("stream_options") or {})}
        for name in self.how.refuse:
            if name in flat:
                return web.json_response({"error": {"message": f"no {name} here"}}, status=400)
        number = len(self.jobs)
        self.bodies.append(body)
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        self.paths.append(request.path)
        fault = "" if is_probe(body) else self.how.fault(number)
        if fault == "die":
            self.stop.set()
            await asyncio.Event().wait()  # ended with the server: nothing is answered before
        if fault.isdigit():
            return web.json_response({"error": {"message": "told to"}}, status=int(fault))
        self.inflight += 1
        self.peak = max(self.peak, self.inflight)
        try:
            if not is_probe(body):
                await self._wait()
            return await self._stream(request, body, fault)
        finally:
            self.inflight -= 1

    async def _wait(self) -> None:
        if self.how.barrier:
            if self.inflight == self.how.barrier:
                self._full.set()
            await asyncio.wait_for(self._full.wait(), 60)
        await asyncio.sleep(self.how.first)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: str
    ) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        if fault == "cut at once":
            request.transport.close()
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        asked = body.get("max_tokens") or body["max_completion_tokens"]
        total = min(asked, self.how.short or asked)
        if chat:
            await reply.write(self._chunk(body, chat, 0, 0, None, {"role": "assistant"}))
        sent = 0
        while sent < total:
            if sent:
                await asyncio.sleep(self.how.gap)
            new = min(self.how.per_chunk, total - sent)
            sent += new
            finish = "length" if sent == total and fault != "abort" else None
            await reply.write(self._chunk(body, chat, sent, new, finish))
            if fault == "cut" and sent >= total // 2:
                request.transport.close()
                return reply
            if fault == "hang":
                await asyncio.sleep(60)
            if fault == "error":
                await reply.write(b'data: {"error": {"message": "boom"}}\n\ndata: [DONE]\n\n')
                return reply
        if fault == "abort":
            await reply.write(self._chunk(body, chat, sent, 0, "abort"))
        if (body.get("stream_options") or {}).get("include_usage") and self.how.usage != "none":
            tail = {"choices": [], "usage": _usage(total)}
            await reply.write(b"data: " + json.dumps(tail).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    def _chunk(
        self, body: dict[str, Any], chat: bool, sent: int, new: int, finish: str | None,
        delta: dict[str, str] | None = None,
    ) -> bytes:  # fmt: skip
        text = " x" * new
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": delta or {"content": text}} if chat else {"text": text}
        if self.how.ids:
            choice["token_ids"] = [7] * new
        chunk: dict[str, Any] = {"choices": [choice]}
        options = body.get("stream_options") or {}
        if self.how.usage == "continuous" and options.get("continuous_usage_stats"):
            chunk["usage"] = _usage(sent)
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}


def is_probe(body: dict[str, Any]) -> bool:
    """Whether it is the small request that finds out which fields the endpoint takes."""
    hello = body.get("prompt") or body["messages"][0]["content"]
    return isinstance(hello, str) and hello.startswith("Hello")
