"""Laws of requests that wait inside a worker: they time out, and go where there is room."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from stub import Script, Stub, serving

from pigou.config import ControlConfig
from pigou.control.messages import LoadReport
from pigou.gateway.proxy.upstream import Engine
from pigou.request import SECOND, Worker

TEXT = "/v1/completions"


async def post(fleet: Any, body: Any) -> tuple[int, str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + TEXT, json=body) as response,
    ):
        return response.status, await response.text(), response.headers


async def eventually(check: Any) -> None:
    for _ in range(6000):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stock", [False, True])
async def test_a_request_that_waits_too_long_inside_a_worker_is_answered_503(
    stream: bool, stock: bool
) -> None:
    stub = Stub("a", stock=stock, script=Script(held=asyncio.Event()))
    async with serving(stub, control=ControlConfig(queue_timeout=SECOND // 5)) as fleet:
        going = asyncio.create_task(post(fleet, {"prompt": "x", "stream": stream}))
        await eventually(lambda: stub.active == 1)
        await asyncio.sleep(0.5)
        assert not going.done(), "nobody said that it waits: it may be at its prompt"
        fleet.plane_driver.observe(LoadReport("a", 0, 1, 0.5))
        status, text, headers = await going
        assert status == 503
        assert "inside a" in text
        assert int(headers["retry-after"]) >= 1
        await eventually(lambda: stub.cancelled == 1)
        await eventually(fleet.idle)
        assert fleet.plane_driver.shed == 1
        assert len(stub.seen) == 1


async def test_a_stream_that_has_begun_is_never_timed_out() -> None:
    stub = Stub("a", script=Script(delay_s=0.15))
    async with serving(stub, control=ControlConfig(queue_timeout=SECOND // 5)) as fleet:
        going = asyncio.create_task(
            post(fleet, {"prompt": "x", "stream": True, "max_tokens": 8, "priority": 0})
        )
        await eventually(
            lambda: any(
                load.first_token_at for load in fleet.plane_driver.plane.state.requests.values()
            )
        )
        fleet.plane_driver.observe(LoadReport("a", 0, 1, 0.5))
        status, text, _ = await going
        assert status == 200
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_waits_at_a_worker_goes_to_one_that_comes_up(stream: bool) -> None:
    first, second = Stub("a", script=Script(held=asyncio.Event())), Stub("b")
    async with serving(first) as fleet:
        body = {"prompt": "x", "stream": stream, "max_tokens": 4}
        going = [asyncio.create_task(post(fleet, body)) for _ in range(6)]
        await eventually(lambda: first.active == 6)
        fleet.plane_driver.observe(LoadReport("a", 1, 5, 0.5))
        runner = await second.start()
        try:
            await fleet.plane_driver.up(Worker("b", second.url), Engine(False, "stub", 2048))
            await eventually(lambda: len(second.seen) == 3)
            assert first.script.held is not None
            await eventually(lambda: first.cancelled == 3)
            first.script.held.set()
            for each in going:
                status, text, _ = await each
                assert status == 200
                done = "[DONE]" if stream else '"completion_tokens":4'
                assert done in text.replace(" ", "")
            assert len(second.seen) == 3
            await eventually(fleet.idle)
        finally:
            await runner.cleanup()
