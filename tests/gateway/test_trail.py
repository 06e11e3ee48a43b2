"""The way of a chat to its worker is short: at most five calls deep, at most 21 stays."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import aiohttp
from aiohttp import web
from tests.gateway.stub import Stub, serving

from pigou.gateway.proxy.connection import HTTPConnection
from pigou.gateway.proxy.driver import RequestDriver
from pigou.gateway.request import CHAT, GatewayRun, ParsedRequest
from pigou.request import Request

CARRIERS = (web.Request, ParsedRequest, GatewayRun, Request, RequestDriver)
MAX_DEPTH, MAX_STAYS = 5, 21


class Trail:
    """Stays of one chat: functions of the gateway and of ControlPlane that take the request.

    Its own accessors, and constructors, are none.
    """

    def __init__(self) -> None:
        self.stays: dict[CodeType, str] = {}
        self.depth = 0

    def on_call(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or self.depth or not _is_own(code):
            return
        if code.co_name == "generate" or self.stays:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            carries = any(isinstance(frame.f_locals.get(name), CARRIERS) for name in names)
            is_own = code.co_filename.endswith("gateway/request.py") or code.co_name == "__init__"
            if carries and not is_own:
                self.stays[code] = code.co_qualname
        if code is HTTPConnection.ask.__code__:  # it writes the request's bytes
            while frame.f_code.co_name != "generate":
                self.depth += _is_own(frame.f_code)
                assert frame.f_back is not None
                frame = frame.f_back


def _is_own(code: CodeType) -> bool:
    return "/pigou/gateway/" in code.co_filename or code.co_filename.endswith("control/plane.py")


async def test_a_chat_reaches_its_worker_in_few_stays() -> None:
    trail = Trail()
    async with serving(Stub("a")) as fleet, aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3}
        await (await session.post(fleet.url + CHAT, json=body)).read()  # caches are warm
        sys.setprofile(trail.on_call)
        try:
            async with session.post(fleet.url + CHAT, json=body) as response:
                assert response.status == 200
                await response.read()
        finally:
            sys.setprofile(None)
    names = list(trail.stays.values())
    assert names[0] == "GenerationAPI.generate"
    assert {"ControlPlane.submit", "StreamDriver._decode"} <= set(names)
    assert 0 < trail.depth <= MAX_DEPTH
    assert len(names) <= MAX_STAYS, names
