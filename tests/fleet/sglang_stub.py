"""Scripted SGLang servers, by the routes and fields of SGLang 0.5.23.

`tests/integrations/test_sglang_contract.py` compares them with the wheel's sources.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tests.gateway.stub import Stub

#: Names of `/metrics` that the gateway reads.
RUNNING, WAITING, USAGE = (
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage",
)  # fmt: skip
#: Fields of the prefill and decode legs.
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
BOOTSTRAP_PORT = 8998


@dataclass
class Room:
    """Where the legs of one request meet."""

    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    joined: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class SglangStub(Stub):
    """One server; `rooms` is shared by a pair, whose legs wait for one another."""

    stock: bool = True
    mode: str = "null"
    rooms: dict[int, Room] = field(default_factory=dict)
    meeting_s: float = 2.0
    events: dict[str, Any] | None = None
    adapters: tuple[str, ...] = ()

    async def _tell(self, request: web.Request) -> web.Response:
        if request.path == "/server_info":
            return web.json_response({
                "model_path": "org/model", "version": "0.5.23", "page_size": 64,
                "max_running_requests": 48, "max_total_num_tokens": 64_000,
                "disaggregation_mode": self.mode, "disaggregation_bootstrap_port": BOOTSTRAP_PORT,
                "kv_events": self.events, "internal_states": [{}],
            })  # fmt: skip
        if request.path == "/v1/models":
            card = {"id": self.model, "object": "model", "owned_by": "sglang", "root": self.model,
                    "parent": None, "max_model_len": 2048}  # fmt: skip
            adapters = [card | {"id": name, "root": f"/{name}", "parent": self.model}
                        for name in self.adapters]  # fmt: skip
            return web.json_response({"object": "list", "data": [card, *adapters]})
        if request.path == "/metrics":
            labels = '{engine_type="unified",model_name="stub",tp_rank="0"}'
            return web.Response(
                text=f"{RUNNING}{labels} {self.active}.0\n{WAITING}{labels} 2.0\n"
                f"{USAGE}{labels} 0.5\n"
            )
        if request.path in ("/version", "/kv_event_sources"):
            return web.Response(status=404)
        return await super()._tell(request)

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chat = request.path.endswith("chat/completions")
        if chat and body.get("stream") and body.get("return_token_ids"):
            return refused("return_token_ids is not supported with streaming on chat")
        if self.mode != "null":
            told = [body.get(name) for name in BOOTSTRAP]
            if told[:2] != ["127.0.0.1", BOOTSTRAP_PORT] or not isinstance(told[2], int):
                return refused(f"no bootstrap: {told}")
            room = self.rooms.setdefault(told[2], Room())
            if self.mode == "prefill" and self.script.die_after is not None and self._strike():
                async with asyncio.timeout(self.meeting_s):
                    await room.joined.wait()  # it dies while the decode leg waits for it
                request.transport.abort()
                return web.Response()
            await self._meet(room)
        return await super()._reply(request)

    async def _meet(self, room: Room) -> None:
        """Wait for the other leg, as the transfer of KV does."""
        mine, other = room.prefilled, room.joined
        if self.mode == "decode":
            mine, other = other, mine
        mine.set()
        async with asyncio.timeout(self.meeting_s):
            await other.wait()


def refused(message: str) -> web.Response:
    error = {"object": "error", "message": message, "type": "BadRequestError", "param": None,
             "code": 400}  # fmt: skip
    return web.json_response(error, status=400)
