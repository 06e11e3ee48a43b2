"""Requests of odd forms: upgrades, absolute URIs, bytes after the last one, HEAD, connections above
the cap. Each is answered as HTTP says, or refused; none does anything that it should not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.gateway.stub import Fleet, Script, Stub, serving
from tests.gateway.test_connections import (
    STREAM,
    WHOLE,
    connect,
    exchange,
    request,
    status,
    to_end,
)
from tests.gateway.test_front import eventually

from pigou.gateway.auth.keys import Key, Keys, make_key

UPGRADE = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13",
           "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip
PATHS = ("/v1/completions", "/v1/realtime", "/v1/models", "/metrics", "/", "/nowhere")


def keyed() -> tuple[str, Keys]:
    secret, line = make_key("t")
    tenant, _, digest = line.rpartition(":")
    return secret, Keys([Key(tenant, bytes.fromhex(digest))])


async def answers(fleet: Fleet, data: bytes) -> bytes:
    """Send bytes, and that no more will come; return all that is answered."""
    reader, writer = await connect(fleet)
    writer.write(data)
    writer.write_eof()
    try:
        return await to_end(reader)
    finally:
        writer.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("protocol", ["websocket", "h2c", "tls/1.2"])
async def test_no_connection_becomes_another_protocol(path: str, protocol: str) -> None:
    headers = [h.replace("websocket", protocol) if h[:3] == "upg" else h for h in UPGRADE]
    async with serving(Stub("a")) as fleet:
        data = request(None, *headers, "connection: close", method="GET", path=path)
        answer = await exchange(fleet, data)
        assert answer.startswith(b"HTTP/1.1 ")
        assert b" 101 " not in answer.partition(b"\r\n")[0]
        assert not fleet.stubs["a"].seen
        assert await status(fleet, request(WHOLE)) == 200


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_what_follows_a_refused_upgrade_is_no_frame_but_a_request(protocol: str) -> None:
    headers = [h.replace("websocket", protocol) if h[:3] == "upg" else h for h in UPGRADE]
    async with serving(Stub("a")) as fleet:
        first = request(None, *headers, method="GET", path="/version")
        answer = await answers(fleet, first + b"\x81\x85\x00\x00\x00\x00hello")
        assert answer.count(b"HTTP/1.1 200") == 1
        assert b" 101 " not in answer
        assert not fleet.stubs["a"].seen


@pytest.mark.parametrize("rest", [b"\x00\x01\x02", b"GARBAGE\r\n\r\n", b"}" * 5000, b"POST /"])
async def test_bytes_after_the_last_request_change_nothing_of_its_answer(rest: bytes) -> None:
    stub = Stub("a", script=Script(held=asyncio.Event()))
    async with serving(stub, head_timeout=0.5) as fleet:
        reader, writer = await connect(fleet)
        writer.write(request(WHOLE))
        await eventually(lambda: stub.active == 1)
        writer.write(rest)
        writer.write_eof()
        assert stub.script.held is not None
        stub.script.held.set()
        answer = await to_end(reader)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason"' in answer
        assert len(stub.seen) == 1
        await fleet.settle()


@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_a_request_that_comes_with_garbage_is_served_whole_or_not_at_all(
    body: dict[str, Any],
) -> None:
    async with serving(Stub("a"), head_timeout=0.5) as fleet:
        answer = await answers(fleet, request(body) + b"GARBAGE\r\n\r\n")
        served = b" 200 " in answer.partition(b"\r\n")[0]
        assert served or b" 400 " in answer.partition(b"\r\n")[0]
        assert len(fleet.stubs["a"].seen) == served
        assert await status(fleet, request(WHOLE)) == 200


async def test_line_breaks_between_requests_are_skipped() -> None:
    async with serving(Stub("a")) as fleet:
        answer = await answers(fleet, request(WHOLE) + b"\r\n" + request(WHOLE))
        assert answer.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("target", ["http://localhost", "http://localhost:8000", "http://[::1]:80"])
async def test_an_absolute_uri_of_this_server_is_served(target: str) -> None:
    async with serving(Stub("a")) as fleet:
        assert await status(fleet, request(WHOLE, path=target + "/v1/completions")) == 200
        data = request(None, method="GET", path=target + "/v1/models")
        assert await status(fleet, data) == 200


@pytest.mark.parametrize(
    "target",
    ["http://evil.example", "http://user@evil.example", "//evil.example", "https://10.0.0.1:1",
     "ftp://localhost", "http://localhost@evil.example", "http://localhost.evil.example"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions"])
async def test_the_gateway_is_no_proxy_and_no_name_of_another_site(target: str, path: str) -> None:
    async with serving(Stub("a")) as fleet:
        for data in (
            request(None, "connection: close", method="GET", path=target + path),
            request(WHOLE, "connection: close", path=target + path),
        ):
            assert 400 <= await status(fleet, data) < 500
        assert not fleet.stubs["a"].seen


@pytest.mark.parametrize("target", ["evil.example:443", "localhost:8000", "*", "/v1/models"])
@pytest.mark.parametrize("method", ["CONNECT", "OPTIONS", "TRACE"])
async def test_other_methods_open_nothing(method: str, target: str) -> None:
    async with serving(Stub("a")) as fleet:
        data = request(None, "connection: close", method=method, path=target)
        assert 400 <= await status(fleet, data) < 500
        assert not fleet.stubs["a"].seen


async def test_an_absolute_uri_needs_a_key_as_others_do() -> None:
    secret, keys = keyed()
    path = "http://localhost/v1/models"
    async with serving(Stub("a"), keys=keys) as fleet:
        assert await status(fleet, request(None, method="GET", path=path)) == 401
        bearer = f"authorization: Bearer {secret}"
        assert await status(fleet, request(None, bearer, method="GET", path=path)) == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/", "/v1/models", "/x"])
@pytest.mark.parametrize("body", [b"", b"a body that a HEAD has no use for"])
async def test_an_answer_to_head_has_no_body_and_the_next_request_is_read_right(
    path: str, body: bytes
) -> None:
    async with serving(Stub("a")) as fleet:
        first = request(body or None, method="HEAD", path=path)
        answer = await answers(fleet, first + request(None, method="GET", path="/version"))
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 ")
        assert rest.startswith(b"HTTP/1.1 200"), answer
        assert rest.endswith(b"}")


async def test_a_request_in_the_body_of_a_get_is_never_served() -> None:
    """Its length is said, so that it is a body, whatever the method does with one."""
    hidden = request(WHOLE)
    async with serving(Stub("a")) as fleet:
        for method in ("GET", "HEAD", "DELETE"):
            answer = await answers(fleet, request(hidden, method=method, path="/version"))
            assert answer.count(b"HTTP/1.1 ") == 1
        assert not fleet.stubs["a"].seen


async def test_connections_above_the_cap_are_for_keys_and_probes_and_end_with_their_answer() -> (
    None
):
    secret, keys = keyed()
    bearer = f"authorization: Bearer {secret}"
    stub = Stub("a", script=Script(held=asyncio.Event()))
    async with serving(stub, keys=keys, max_connections=16) as fleet:
        busy = [await connect(fleet) for _ in range(16)]
        for _, writer in busy:
            writer.write(request(STREAM, "connection: close", bearer))
        await eventually(lambda: stub.active == 16)
        assert await status(fleet, request(WHOLE)) == 401
        assert await status(fleet, request(WHOLE, "authorization: Bearer wrong")) == 401
        assert await status(fleet, request(None, method="GET", path="/version")) == 503
        # The connection is not kept, so that the reserve is free for the next.
        for _ in range(12):
            listed = request(None, bearer, method="GET", path="/v1/models")
            assert (await exchange(fleet, listed)).startswith(b"HTTP/1.1 200")
        keyed_one = asyncio.create_task(exchange(fleet, request(WHOLE, bearer)))
        await eventually(lambda: stub.active == 17)
        assert stub.script.held is not None
        stub.script.held.set()
        assert (await keyed_one).startswith(b"HTTP/1.1 200")
        for reader, writer in busy:
            assert b"data: [DONE]" in await to_end(reader)
            writer.close()


async def test_silent_connections_do_not_fill_the_reserve() -> None:
    secret, keys = keyed()
    bearer = f"authorization: Bearer {secret}"
    stub = Stub("a", script=Script(held=asyncio.Event()))
    async with serving(stub, keys=keys, max_connections=16) as fleet:
        busy = [await connect(fleet) for _ in range(16)]
        for _, writer in busy:
            writer.write(request(STREAM, "connection: close", bearer))
        await eventually(lambda: stub.active == 16)
        silent = [await connect(fleet) for _ in range(40)]
        await asyncio.sleep(0.1)
        assert await status(fleet, request(None, bearer, method="GET", path="/v1/models")) == 200
        assert await status(fleet, request(None, method="GET", path="/health")) == 200
        assert stub.script.held is not None
        stub.script.held.set()
        for _, writer in (*busy, *silent):
            writer.close()
