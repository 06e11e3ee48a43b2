"""An endpoint that answers without end, or with garbage, ends no run and fills no memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from pigou.workload import endpoint as bounded
from pigou.workload.bench_config import ProfileConfig
from pigou.workload.endpoint import (
    ApiFlavour,
    EndpointClient,
    EndpointError,
    find_model,
    open_session,
    tokenize,
)
from pigou.workload.profiling.measure import find_target
from pigou.workload.prompts import PromptJob
from pigou.workload.token_counter import Failure

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEEP = b"[" * 100_000


def endless(part: bytes, *, kind: str = "text/event-stream", status: int = 200) -> Handler:
    """Answer with a part again and again, until the client leaves."""

    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(status=status, headers={"content-type": kind})
        await reply.prepare(request)
        for _ in range(100_000):
            await reply.write(part)
        raise AssertionError("the client read it all")

    return answer


def whole(body: bytes) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return answer


@asynccontextmanager
async def served(routes: dict[str, Handler]) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with open_session() as session:
            yield session, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def failure(handler: Handler, output: int = 4) -> Failure:
    async with served({"/v1/completions": handler}) as (session, url):
        asked = EndpointClient(session, url, "m", ApiFlavour(), timeout=100)
        result = (await asked.send(PromptJob("a", output), 0)).result
    assert isinstance(result, Failure)
    return result


EMPTY = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": null}]}\n\n'
TOKEN = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n'


@pytest.mark.parametrize("part", [EMPTY * 800, TOKEN * 800, b": wait\n\n" * 8000, b"\n" * 60_000])
async def test_a_stream_without_end_is_a_failure(part: bytes) -> None:
    assert (await failure(endless(part))).reason == "endless stream"


async def test_an_event_without_end_is_a_failure() -> None:
    got = await failure(endless(b"x" * 2**20), output=10_000)
    assert got.reason == "endless stream"
    assert "event" in got.detail


async def test_of_an_error_without_end_the_start_is_told() -> None:
    got = await failure(endless(b"oops " * 10_000, kind="text/plain", status=500))
    assert got.reason == "HTTP 500"
    assert got.detail.startswith("oops oops")


@pytest.mark.parametrize("chunk", [b'data: {"x": ' + DEEP + b"\n\n", b'data: "\xff"\n\n'])
async def test_a_chunk_that_cannot_be_decoded_is_a_failure(chunk: bytes) -> None:
    assert (await failure(endless(chunk))).reason == "malformed chunk"


async def test_models_and_tokens_without_end_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_ANSWER", 2**20)
    part = endless(b" " * 65_536, kind="application/json")
    async with served({"/v1/models": part, "/tokenize": part}) as (session, url):
        for ask in (find_model(session, url, ""), tokenize(session, url, "m", "text")):
            with pytest.raises(EndpointError, match="over 1048576 bytes"):
                await asyncio.wait_for(ask, 100)


@pytest.mark.parametrize("body", [b'{"data": ' + DEEP, b'{"data": [{"id": "\xff"}]}', b"[]"])
async def test_models_that_cannot_be_decoded_are_none(body: bytes) -> None:
    async with served({"/v1/models": whole(body), "/tokenize": whole(body)}) as (session, url):
        with pytest.raises(EndpointError, match="lists no model"):
            await find_model(session, url, "")
        assert await tokenize(session, url, "m", "text") is None


async def test_without_a_name_the_first_model_that_is_no_adapter_is_meant() -> None:
    body = b'{"data": [{"id": "sql", "parent": "m"}, {"id": "m", "parent": null}]}'
    async with served({"/v1/models": whole(body)}) as (session, url):
        assert (await find_model(session, url, "")).id == "m"
        assert (await find_model(session, url, "sql")).id == "sql"


async def stream(_: web.Request) -> web.StreamResponse:
    data = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}\n\n'
    return web.Response(body=data + b"data: [DONE]\n\n", content_type="text/event-stream")


@pytest.mark.parametrize(
    ("about", "page"),
    [
        (b"{" + DEEP, b"vllm:num_requests_running nan\n"),
        (b'{"block_size": "x", "blocks": -1, "repeat": []}', b"vllm:num_requests_waiting a\n"),
        (b'{"max_seqs": 1e999}', b"vllm:num_requests_running inf\n\xff\xfe"),
        (b"{not json", b"vllm:cache_config_info{"),
    ],
)
async def test_what_a_worker_says_of_itself_may_be_anything(about: bytes, page: bytes) -> None:
    routes = {
        "/v1/models": whole(b'{"data": [{"id": "m", "max_model_len": 512}]}'),
        "/tokenize": whole(b'{"tokens": [1, 2, 3, 4, 5, 6, 7, 8]}'),
        "/v1/completions": stream,
        "/server_info": whole(about),
        "/metrics": whole(page),
    }
    async with served(routes) as (session, url):
        target = await find_target(ProfileConfig(url=url), session)
    assert target.limits.block == 16
    assert target.limits.repeat == 1
