"""Laws of a gateway's end: whoever is still under way is told, and nobody is cut off in silence."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import aiohttp
import pytest
from tests.gateway.stub import Script, Stub, serving, whole_text

PATH = "/v1/completions"


def body(*, stream: bool, tokens: int = 100_000) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": tokens, "stream": stream}


async def fetch(session: aiohttp.ClientSession, url: str, **wanted: Any) -> tuple[int, str]:
    """Return status and text of a whole reply; raises where the connection breaks off."""
    async with session.post(url + PATH, json=body(**wanted)) as response:
        return response.status, (await response.read()).decode()


async def under_way(stub: Stub, count: int) -> None:
    while stub.active < count:
        await asyncio.sleep(0.01)


async def test_a_stream_that_outlasts_the_drain_ends_in_an_error_event_and_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub = Stub("a", script=Script(delay_s=0.01))
    async with aiohttp.ClientSession() as session:
        with caplog.at_level(logging.WARNING, "pigou.gateway"):
            async with serving(stub) as fleet:
                going = [
                    asyncio.create_task(fetch(session, fleet.url, stream=True)) for _ in range(3)
                ]
                await under_way(stub, 3)
                await asyncio.sleep(0.1)
                before = time.monotonic()
            assert time.monotonic() - before < 20.0
        for status, text in await asyncio.gather(*going):
            *chunks, last, done, rest = text.split("\n\n")
            assert (status, done, rest) == (200, "data: [DONE]", "")
            assert json.loads(chunks[0].removeprefix("data: "))["choices"]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
            assert "shutting down" in error["message"]
    assert "3 requests were cut off" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_no_first_byte_when_the_drain_is_over_gets_a_503(stream: bool) -> None:
    stub = Stub("a", script=Script(held=asyncio.Event()))
    async with aiohttp.ClientSession() as session:
        async with serving(stub) as fleet:
            going = asyncio.create_task(fetch(session, fleet.url, stream=stream))
            await under_way(stub, 1)
        status, text = await going
    assert (status, json.loads(text)["error"]["type"]) == (503, "ServiceUnavailableError")


async def test_what_ends_within_the_drain_is_whole_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub = Stub("a", script=Script(delay_s=0.05))
    async with aiohttp.ClientSession() as session:
        async with serving(stub, drain_s=60.0) as fleet:
            going = asyncio.create_task(fetch(session, fleet.url, stream=False, tokens=5))
            await under_way(stub, 1)
        status, text = await going
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, whole_text(5))
    assert "cut off" not in caplog.text


async def test_a_gateway_that_drains_takes_no_more_requests_on_an_open_connection() -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    async with aiohttp.ClientSession() as session, serving(stub, drain_s=60.0) as fleet:
        async with session.get(fleet.url + "/version") as response:
            await response.read()
        async with aiohttp.ClientSession() as other:
            going = asyncio.create_task(fetch(other, fleet.url, stream=False))
            await under_way(stub, 1)
            stopping = asyncio.create_task(fleet.stop())
            await asyncio.sleep(0.05)
            status, text = await fetch(session, fleet.url, stream=False)
            held.set()
            await asyncio.gather(going, stopping)
    assert (status, len(stub.seen)) == (503, 1)
    assert "shutting down" in json.loads(text)["error"]["message"]


async def test_a_gateway_that_drains_is_alive_and_not_ready() -> None:
    stub = Stub("a", script=Script(held=asyncio.Event()))
    async with aiohttp.ClientSession() as session, serving(stub) as fleet:
        seen = {}
        going = asyncio.create_task(fetch(session, fleet.url, stream=False))
        await under_way(stub, 1)
        stopping = asyncio.create_task(fleet.stop())
        await asyncio.sleep(0.05)
        for path in ("/health", "/health/ready", "/health/live"):
            async with aiohttp.ClientSession() as other, other.get(fleet.url + path) as response:
                seen[path] = (response.status, (await response.json())["status"])
        await asyncio.gather(going, stopping)
    assert seen == {
        "/health": (503, "closing"),
        "/health/ready": (503, "closing"),
        "/health/live": (200, "ok"),
    }
