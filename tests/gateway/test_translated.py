"""Responses and Messages through the gateway: in front of any workers, for each tenant alone."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from stub import Script, Stub, serving, whole_text

from pigou.gateway.auth.keys import Key, Keys

KEYS = Keys([Key(name, sha256(name.encode()).digest()) for name in ("alice", "bob")])
MESSAGE = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


async def asked(session: Any, path: str, body: Any, **rest: Any) -> tuple[int, Any]:
    async with session.post(path, json=body, **rest) as reply:
        return reply.status, json.loads(await reply.read())


def last_events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")]


@pytest.mark.parametrize("stock", [False, True])
async def test_a_chat_worker_answers_responses_and_messages(stock: bool) -> None:
    worker = Stub("a", stock=stock)
    async with (
        serving(worker, strict=not stock) as fleet,
        aiohttp.ClientSession(fleet.url) as session,
    ):
        body = {"input": "hi", "max_output_tokens": 5}
        status, said = await asked(session, "/v1/responses", body)
        assert (status, said["output"][0]["content"][0]["text"]) == (200, whole_text(5))
        status, whole = await asked(session, "/v1/messages", MESSAGE)
        assert (status, whole["content"]) == (200, [{"type": "text", "text": whole_text(5)}])
        async with session.post("/v1/responses", json=body | {"stream": True}) as reply:
            seen = last_events(await reply.read())
        assert seen[-1]["response"]["output"][0]["content"] == said["output"][0]["content"]
        async with session.post("/v1/messages", json=MESSAGE | {"stream": True}) as reply:
            assert reply.content_type == "text/event-stream"
            seen = last_events(await reply.read())
        texts = [e["delta"]["text"] for e in seen if e["type"] == "content_block_delta"]
        assert "".join(texts) == whole_text(5)
        assert {seen.path for seen in worker.seen} == {"/v1/chat/completions"}
        status, count = await asked(session, "/v1/messages/count_tokens", MESSAGE)
        assert (status, list(count)) == (200, ["input_tokens"])
        await fleet.settle()
        assert fleet.idle()


async def test_a_stream_migrates_under_its_translation() -> None:
    workers = [Stub(name, script=Script(die_after=3, times=1)) for name in "ab"]
    async with serving(*workers) as fleet, aiohttp.ClientSession(fleet.url) as session:
        body = {"input": "hi", "max_output_tokens": 9, "stream": True}
        async with session.post("/v1/responses", json=body) as reply:
            seen = last_events(await reply.read())
        assert seen[-1]["type"] == "response.incomplete"
        assert seen[-1]["response"]["output"][0]["content"][0]["text"] == whole_text(9)


async def test_a_kept_response_is_its_tenants_alone() -> None:
    async with (
        serving(Stub("a"), keys=KEYS) as fleet,
        aiohttp.ClientSession(fleet.url) as session,
    ):
        alice, bob = ({"headers": {"authorization": f"Bearer {k}"}} for k in ("alice", "bob"))
        _, made = await asked(session, "/v1/responses", {"input": "hi"}, **alice)
        path = f"/v1/responses/{made['id']}"
        more = {"input": "more", "previous_response_id": made["id"]}
        for key, status in ((alice, 200), (bob, 404)):
            async with session.get(path, **key) as reply:
                assert reply.status == status
            assert (await asked(session, "/v1/responses", more, **key))[0] == status
        assert [m["role"] for m in fleet.stubs["a"].seen[-1].body["messages"]] == [
            "user", "assistant", "user"
        ]  # fmt: skip
        status, refusal = await asked(session, f"{path}/cancel", {}, **alice)
        assert (status, "synchronous" in refusal["error"]["message"]) == (400, True)
        async with session.delete(path, **bob) as reply:
            assert reply.status == 404
        async with session.delete(path, **alice) as reply:
            assert (await reply.json())["deleted"]
        async with session.get(path, **alice) as reply:
            assert (await reply.json())["error"]["type"] == "invalid_request_error"


async def test_errors_come_in_the_form_of_their_api() -> None:
    async with (
        serving(Stub("a"), keys=KEYS) as fleet,
        aiohttp.ClientSession(fleet.url) as session,
    ):
        key = {"headers": {"x-api-key": "alice"}}
        for body, rest, status, kind in (
            (MESSAGE, {}, 401, "authentication_error"),
            (MESSAGE | {"max_tokens": None}, key, 400, "invalid_request_error"),
            (MESSAGE | {"temperature": 9}, key, 400, "invalid_request_error"),
            (MESSAGE | {"model": "no"}, key, 404, "not_found_error"),
        ):
            told, error = await asked(session, "/v1/messages", body, **rest)
            assert (told, error["type"], error["error"]["type"]) == (status, "error", kind)
        told, error = await asked(session, "/v1/responses", {"input": []}, **key)
        assert (told, error["error"]["param"]) == (400, "input")


async def test_a_stream_that_breaks_says_so_in_its_own_words() -> None:
    async with (
        serving(Stub("a", stock=True, script=Script(error_after=2)), strict=False) as fleet,
        aiohttp.ClientSession(fleet.url) as session,
    ):
        body = MESSAGE | {"stream": True, "stop_sequences": ["x"]}  # cannot go on elsewhere
        async with session.post("/v1/messages", json=body) as reply:
            seen = last_events(await reply.read())
        assert (seen[-1]["type"], seen[-1]["error"]["type"]) == ("error", "api_error")
        async with session.post(
            "/v1/responses", json={"input": "a", "stop": "x", "stream": True}
        ) as reply:
            assert last_events(await reply.read())[-1]["type"] == "response.failed"


async def test_a_route_that_every_server_lists_is_passed_on() -> None:
    async def native(request: web.Request) -> web.Response:
        return web.json_response({"native": request.path})

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response({"paths": {"/v1/messages": {"post": {}}}})

    routes: Any = {"/v1/messages": native, "/openapi.json": openapi}
    having, lacking = Stub("a", stock=True, routes=routes), Stub("b", stock=True)
    for stubs, passed in (([having], True), ([having, lacking], False)):
        async with (
            serving(*stubs, strict=False) as fleet,
            aiohttp.ClientSession(fleet.url) as session,
        ):
            _, said = await asked(session, "/v1/messages", MESSAGE)
            assert ("native" in said) is passed


async def test_embeddings_reach_pigous_own_workers() -> None:
    async def pooled(request: web.Request) -> web.Response:
        return web.json_response({"of": (await request.json())["input"]})

    async with (
        serving(Stub("a", routes={"/v1/embeddings": pooled})) as fleet,
        aiohttp.ClientSession(fleet.url) as session,
    ):
        assert await asked(session, "/v1/embeddings", {"input": "hi"}) == (200, {"of": "hi"})
        assert (await asked(session, "/v1/audio/speech", {"input": "hi"}))[0] == 404
        await fleet.settle()
        assert fleet.idle()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
async def test_a_body_nested_too_deeply_is_refused_before_it_is_translated(path: str) -> None:
    async with serving(Stub("a")) as fleet, aiohttp.ClientSession(fleet.url) as session:
        body = b'{"model": "stub", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        headers = {"content-type": "application/json"}
        async with session.post(path, data=body, headers=headers) as reply:
            assert reply.status == 400
            assert "nested" in (await reply.json())["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_client_that_leaves_a_translated_stream_ends_the_workers_work(path: str) -> None:
    asks = MESSAGE if path.endswith("messages") else {"input": "a"}
    held = Script(held=asyncio.Event(), held_after=2)
    async with (
        serving(Stub("a", script=held)) as fleet,
        aiohttp.ClientSession(fleet.url) as session,
    ):
        async with session.post(path, json=asks | {"stream": True}) as reply:
            await reply.content.readany()
            reply.close()
        await fleet.settle()
        async with asyncio.timeout(10):
            while not fleet.stubs["a"].cancelled:  # the stub hears of it a moment later
                await asyncio.sleep(0.01)
        assert (fleet.stubs["a"].cancelled, fleet.idle()) == (1, True)
