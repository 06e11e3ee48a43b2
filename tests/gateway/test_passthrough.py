"""Routes that Pigou does not have reach attached servers that have them, and no others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from stub import Fleet, Stub, serving

from pigou.gateway.auth.keys import Key, Keys

KEYS = Keys([Key(name, sha256(name.encode()).digest()) for name in ("alice", "bob")])


class Server:
    """An attached server with further routes; it notes what it is asked."""

    def __init__(self, name: str, *paths: str, openapi: bool = True) -> None:
        self.seen: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.hold: asyncio.Event | None = None
        self.began = asyncio.Event()
        self.name = name
        self.paths = paths
        handlers: dict[str, Any] = dict.fromkeys(paths, self.answer)
        if openapi:
            handlers["/openapi.json"] = self.openapi
        handlers["/{rest:.*}"] = self.absent
        self.stub = Stub(name, stock=True, routes=handlers)

    async def openapi(self, _: web.Request) -> web.Response:
        methods: dict[str, Any] = {"get": {}, "post": {}, "delete": {}}
        return web.json_response({"paths": dict.fromkeys(self.paths, methods)})

    async def absent(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.path, b"", {}))
        return web.json_response({"detail": "Not Found"}, status=404)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        self.seen.append((request.method, request.path_qs, data, dict(request.headers)))
        self.began.set()
        if self.hold is not None:
            await self.hold.wait()
        if request.path.startswith("/v1/responses") and request.method == "POST":
            id = f"resp_{self.name}{len(self.seen)}"
            return web.json_response({"id": id, "object": "response", "by": self.name})
        if b'"stream": true' in data:
            out = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await out.prepare(request)
            for number in range(3):
                await out.write(b"event: x\ndata: %d\n\n" % number)
            if b'"break": true' in data:
                assert request.transport is not None
                request.transport.abort()
            return out
        if b"no such object" in data:
            error = {"error": {"message": "no such object", "code": 404}}
            return web.json_response(error, status=404)
        return web.json_response({"by": self.name, "size": len(data)})


@asynccontextmanager
async def fleet_of(*servers: Server, **limits: Any) -> AsyncIterator[tuple[Fleet, Any]]:
    stubs = [server.stub for server in servers]
    async with (
        serving(*stubs, strict=False, **limits) as fleet,
        aiohttp.ClientSession(fleet.url) as session,
    ):
        yield fleet, session
        await fleet.settle()


async def asked(session: Any, path: Any, body: Any = None, **rest: Any) -> tuple[int, Any]:
    async with session.post(path, json={"input": "a"} if body is None else body, **rest) as reply:
        return reply.status, json.loads(await reply.read())


@pytest.mark.parametrize("openapi", [True, False])
async def test_a_route_reaches_the_server_that_has_it(openapi: bool) -> None:
    a = Server("a", openapi=openapi)
    b = Server("b", "/v1/embeddings", "/v1/rerank", openapi=openapi)
    async with fleet_of(a, b) as (_, session):
        for _ in range(4):
            assert await asked(session, "/v1/embeddings") == (200, {"by": "b", "size": 14})
        assert (await asked(session, "/v1/rerank"))[0] == 200
    tried = [path for _, path, *_ in a.seen if path != "/openapi.json"]
    assert len(tried) <= (0 if openapi else 2), "a server without the route is asked once"


async def test_the_least_loaded_server_is_chosen_and_the_load_is_counted() -> None:
    a, b = Server("a", "/v1/embeddings"), Server("b", "/v1/embeddings")
    async with fleet_of(a, b) as (fleet, session):
        a.hold = b.hold = asyncio.Event()
        first = asyncio.create_task(asked(session, "/v1/embeddings"))
        done, _ = await asyncio.wait(
            [asyncio.create_task(each.began.wait()) for each in (a, b)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert done
        busy, idle = (a, b) if a.began.is_set() else (b, a)
        assert fleet.plane_driver.upstreams[busy.name].inflight == 1
        assert not fleet.idle()
        second = asyncio.create_task(asked(session, "/v1/embeddings"))
        await asyncio.wait_for(idle.began.wait(), 60)
        a.hold.set()
        assert {(await first)[1]["by"], (await second)[1]["by"]} == {"a", "b"}


@pytest.mark.parametrize(
    "path",
    [
        "embeddings",
        "audio/speech",
        "images/edits",
        "batches",
        "rerank",
    ],
)
async def test_a_route_that_nobody_has_is_refused_with_the_remedy_and_not_retried(
    path: str,
) -> None:
    async with fleet_of(Server("a", "/v1/pooling")) as (_, session):
        async with session.post(f"/v1/{path}", json={"input": "a"}) as reply:
            told = (await reply.json())["error"]["message"]
            assert (reply.status, reply.headers["x-should-retry"]) == (404, "false")
        assert all(word in told for word in ("--attach", "/v1/chat/completions", "/v1/pooling"))
        async with session.get("/metrics") as reply:
            page = await reply.text()
        assert 'status="5' not in page, "a refusal counts as an error of the server"
    async with serving(Stub("own")) as own, aiohttp.ClientSession(own.url) as session:
        assert (await asked(session, f"/v1/{path}"))[0] == 404
        assert own.stubs["own"].seen == []


async def test_a_models_card_names_the_routes_that_answer_it() -> None:
    paths = ("/v1/responses", "/v1/responses/{id}", "/v1/chat/completions", "/rerank")
    a, b = Server("a", *paths, "/v1/load_lora_adapter"), Server("b", openapi=False)
    b.stub.model = "b"
    models = {
        "a": ["/rerank", "/v1/chat/completions", "/v1/messages", "/v1/responses"],
        "b": ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"],
    }
    for server, own in ((a, models["a"]), (b, models["b"])):
        async with fleet_of(server) as (_, session), session.get("/v1/models") as reply:
            (card,) = (await reply.json())["data"]
            assert card["supported_endpoints"] == own
            for path in ("/v1/responses", "/rerank"):
                assert ((await asked(session, path))[0] == 200) is (path in own)


@pytest.mark.parametrize("path", ["/v1/nonsense", "/v1/kv/offer", "/v1/load_lora_adapter", "/v1/",
                                  "/v1/a/../kv/offer", "/v1//kv/offer", "/v1/%6bv/offer",
                                  "/v1/./kv", "/v1/unload_lora_adapter"])  # fmt: skip
async def test_what_nobody_has_or_no_client_may_is_not_found(path: str) -> None:
    from yarl import URL

    server = Server("a", "/v1/kv/offer", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    async with fleet_of(server) as (fleet, session):
        status, body = await asked(session, URL(fleet.url + path, encoded=True))
        assert status == 404, body
    assert server.seen == []


async def test_own_routes_keep_their_methods() -> None:
    async with (
        fleet_of(Server("a", "/v1/completions")) as (_, session),
        session.get("/v1/completions") as reply,
    ):
        assert (reply.status, reply.headers["allow"]) == (405, "POST")


async def test_a_tenants_salt_is_put_into_bodies_and_its_key_stays_here() -> None:
    server = Server("a", "/v1/responses")
    async with fleet_of(server, keys=KEYS) as (_, session):
        salts = []
        for key, salt in (("alice", None), ("bob", None), ("alice", "x"), ("alice", None)):
            body = {"input": "a"} | ({} if salt is None else {"cache_salt": salt})
            headers = {"authorization": f"Bearer {key}"}
            assert (await asked(session, "/v1/responses", body, headers=headers))[0] == 200
            salts.append(json.loads(server.seen[-1][2])["cache_salt"])
            assert "Authorization" not in server.seen[-1][3]
        assert salts[0] == salts[3]
        assert len(set(salts)) == 3
        assert (await asked(session, "/v1/responses"))[0] == 401
        assert (await asked(session, "/v1/responses", headers={"x-api-key": "bob"}))[0] == 200


async def test_a_kept_response_is_its_tenants_alone_and_found_on_its_server() -> None:
    paths = ("/v1/responses", "/v1/responses/{id}", "/v1/files/{id}")
    servers = [Server("a", *paths), Server("b", *paths)]
    async with fleet_of(*servers, keys=KEYS) as (_, session):
        alice, bob = ({"headers": {"authorization": f"Bearer {k}"}} for k in ("alice", "bob"))
        made = [(await asked(session, "/v1/responses", **alice))[1] for _ in range(4)]
        for each in made:
            async with session.get(f"/v1/responses/{each['id']}", **alice) as reply:
                assert (await reply.json())["by"] == each["by"]
            async with session.get(f"/v1/responses/{each['id']}", **bob) as reply:
                assert reply.status == 404
            more = {"input": "b", "previous_response_id": each["id"]}
            assert (await asked(session, "/v1/responses", more, **alice))[1]["by"] == each["by"]
            assert (await asked(session, "/v1/responses", more, **bob))[0] == 404
        async with session.get("/v1/files/f", **alice) as reply:
            assert reply.status == 403


async def test_streams_pass_event_by_event_and_a_broken_one_says_so() -> None:
    server = Server("a", "/v1/messages")
    async with fleet_of(server) as (_, session):
        for body, count in (({"stream": True}, 3), ({"stream": True, "break": True}, 4)):
            async with session.post("/v1/messages?beta=true", json=body) as reply:
                events = (await reply.read()).split(b"\n\n")
            assert events[:3] == [b"event: x\ndata: %d" % number for number in range(3)]
            assert len(events) == count + 1
        assert b"event: error" in events[3]
        assert server.seen[0][1] == "/v1/messages?beta=true"


async def test_multipart_bodies_stream_through_within_the_limit() -> None:
    server = Server("a", "/v1/audio/transcriptions")
    async with fleet_of(server, max_body=2**20) as (_, session):
        for size, status in ((500_000, 200), (2**20, 413)):
            form = aiohttp.FormData()
            form.add_field("file", b"x" * size, filename="a.wav")
            async with session.post("/v1/audio/transcriptions", data=form) as reply:
                assert reply.status == status, await reply.read()
        assert server.seen[0][3]["Content-Type"].startswith("multipart/form-data")
        assert len(server.seen[0][2]) > 500_000


async def test_an_object_that_is_not_there_is_no_route_that_is_not_there() -> None:
    server = Server("a", "/v1/embeddings")
    async with fleet_of(server) as (_, session):
        status, body = await asked(session, "/v1/embeddings", {"input": "no such object"})
        assert (status, body["error"]["message"]) == (404, "no such object")
        assert (await asked(session, "/v1/embeddings"))[0] == 200


async def test_a_client_that_leaves_ends_the_servers_work() -> None:
    server = Server("a", "/v1/embeddings")
    async with fleet_of(server) as (fleet, session):
        server.hold = asyncio.Event()
        task = asyncio.create_task(asked(session, "/v1/embeddings"))
        await asyncio.wait_for(server.began.wait(), 60)
        task.cancel()
        await fleet.settle(10.0)
        assert fleet.plane_driver.upstreams["a"].inflight == 0
