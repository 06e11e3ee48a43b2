"""Laws of client connections: how they begin, how long they stay, and how they end."""

from __future__ import annotations

import asyncio
import gzip
import json
import select
import zlib
from typing import Any

import pytest
from tests.gateway.stub import Fleet, Script, Stub, serving, whole_text
from tests.gateway.test_front import eventually

from pigou.config import ConfigError
from pigou.gateway.auth.guard import host_name
from pigou.gateway.auth.keys import Key, Keys, make_key
from pigou.gateway.config import GatewayConfig
from pigou.wire.connections import ConnectionLimits, connection_cap

PATH = "/v1/completions"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(fleet: Fleet) -> Streams:
    return await asyncio.open_connection("127.0.0.1", int(fleet.url.rpartition(":")[2]))


def request(
    body: Any = None, *headers: str, method: str = "POST", path: str = PATH, version: str = "1.1"
) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "host: localhost", *headers]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def to_end(reader: asyncio.StreamReader) -> bytes:
    """Read until the server closes the connection."""
    return await asyncio.wait_for(reader.read(), 60)


async def exchange(fleet: Fleet, data: bytes) -> bytes:
    """Send a request whose connection ends with its answer; return that."""
    reader, writer = await connect(fleet)
    writer.write(data)
    try:
        return await to_end(reader)
    finally:
        writer.close()


async def status(fleet: Fleet, data: bytes) -> int:
    reader, writer = await connect(fleet)
    writer.write(data)
    line = await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    return int(line.split()[1]) if line else 0


STREAM = {"prompt": "a b c", "max_tokens": 5, "stream": True}
WHOLE = {"prompt": "a b c", "max_tokens": 5}


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "nonsense", "gzip, identity"])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_compressed_bodies_are_refused_and_never_inflated(coding: str, path: str) -> None:
    packed = {"deflate": zlib.compress(b"{}"), "gzip": gzip.compress(b"{}")}.get(coding, b"{}")
    async with serving(Stub("a")) as fleet:
        data = request(packed, f"content-encoding: {coding}", path=path)
        assert await status(fleet, data) == 415
        assert not fleet.stubs["a"].seen


async def test_compression_within_chunks_is_refused() -> None:
    async with serving(Stub("a")) as fleet:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-type: application/json\r\n"
        packed = gzip.compress(json.dumps(WHOLE).encode())
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
        chunked = b"transfer-encoding: chunked\r\n\r\n"
        for extra in (b"content-encoding: gzip\r\n" + chunked,
                      b"transfer-encoding: gzip, chunked\r\n\r\n"):  # fmt: skip
            assert await status(fleet, head + extra + body) in (400, 415)


async def test_a_wrong_key_is_refused_before_the_body_is_asked_for() -> None:
    secret, line = make_key("t")
    tenant, _, digest = line.rpartition(":")
    keys = Keys([Key(tenant, bytes.fromhex(digest))])
    async with serving(Stub("a"), keys=keys) as fleet:
        expects = ("expect: 100-continue", "content-type: application/json")
        head = request(None, "authorization: Bearer wrong", "content-length: 9", *expects)
        assert await status(fleet, head) == 401
        head = request(None, f"authorization: Bearer {secret}", "content-length: 9", *expects)
        assert await status(fleet, head) == 100


async def test_a_body_that_is_too_large_is_refused_by_its_length_alone() -> None:
    async with serving(Stub("a"), max_body=1000) as fleet:
        head = request(None, "content-type: application/json", "content-length: 1000000000000")
        assert await status(fleet, head) == 413
        expects = request(
            None, "content-type: application/json", "content-length: 9", "expect: magic"
        )
        assert await status(fleet, expects) == 417


async def test_an_unfinished_head_is_ended_in_time() -> None:
    async with serving(Stub("a"), head_timeout=0.2) as fleet:
        assert b" 408 " in await exchange(fleet, b"POST /v1/completions HTTP/1.1\r\nhost: a")
        assert b" 408 " in await exchange(fleet, b"")


async def test_a_head_that_comes_byte_by_byte_is_ended_in_time() -> None:
    async with serving(Stub("a"), head_timeout=0.3) as fleet:
        reader, writer = await connect(fleet)
        writer.write(request(None, method="GET", path="/health"))
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        ended = asyncio.create_task(to_end(reader))
        for byte in b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 2000:
            writer.write(bytes([byte]))
            await asyncio.wait([ended], timeout=0.01)
            # A byte sent after the answer would reset the connection, and the answer be lost.
            if ended.done() or select.select([writer.get_extra_info("socket")], [], [], 0)[0]:
                break
        assert b" 408 " in await ended
        writer.close()


async def test_a_body_that_comes_too_slowly_is_answered_408(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pigou.wire.bodies._GRACE_S", 0.3)
    async with serving(Stub("a")) as fleet:
        head = request(None, "content-type: application/json", "content-length: 100")
        assert b" 408 " in await exchange(fleet, head + b"{")


async def test_an_idle_connection_is_ended() -> None:
    async with serving(Stub("a"), keepalive=0.2) as fleet:
        answer = await exchange(fleet, request(None, method="GET", path="/version"))
        assert answer.startswith(b"HTTP/1.1 200")


async def test_silent_connections_give_way_to_requests() -> None:
    async with serving(Stub("a"), max_connections=16) as fleet:
        silent = [await connect(fleet) for _ in range(50)]
        slow = [await connect(fleet) for _ in range(50)]
        for _, writer in slow:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: loc")
        for _ in range(20):
            assert await status(fleet, request(WHOLE)) == 200
        for _, writer in (*silent, *slow):
            writer.close()


async def test_a_stream_does_not_give_way_and_probes_have_a_reserve() -> None:
    held = asyncio.Event()
    async with serving(Stub("a", script=Script(held=held)), max_connections=16) as fleet:
        busy = [await connect(fleet) for _ in range(16)]
        for _, writer in busy:
            writer.write(request(STREAM, "connection: close"))
        await eventually(lambda: fleet.stubs["a"].active == 16)
        assert await status(fleet, request(None, method="GET", path="/health")) == 200
        assert await status(fleet, request(WHOLE)) == 503
        held.set()
        for reader, writer in busy:
            assert b"data: [DONE]" in await to_end(reader)
            writer.close()
        assert await status(fleet, request(WHOLE)) == 200


async def test_health_stays_while_one_address_holds_the_reserve() -> None:
    held = asyncio.Event()
    secret, line = make_key("t")
    tenant, _, digest = line.rpartition(":")
    keys = Keys([Key(tenant, bytes.fromhex(digest))])
    script = Script(held=held)
    async with serving(Stub("a", script=script), max_connections=16, keys=keys) as fleet:
        busy = []
        for _ in range(24):
            busy.append(await connect(fleet))
            busy[-1][1].write(request(STREAM, f"authorization: Bearer {secret}"))
            await asyncio.sleep(0.02)  # an idle connection would give way
        waiting = [asyncio.create_task(reader.readline()) for reader, _ in busy]
        refused, served = await asyncio.wait(waiting, timeout=0.5)
        assert len(served) == 17, "16, and one of the reserve"
        assert {task.result().split()[1] for task in refused} == {b"503"}
        unfinished = [await connect(fleet) for _ in range(8)]
        for _, writer in unfinished:
            writer.write(request(None, f"authorization: Bearer {secret}", "content-length: 99",
                                 "content-type: application/json"))  # fmt: skip
        health = request(None, method="GET", path="/health")
        assert [await status(fleet, health) for _ in range(50)] == [200] * 50
        held.set()
        await asyncio.wait(served)
        for _, writer in (*busy, *unfinished):
            writer.close()


async def test_one_address_has_its_share_of_connections() -> None:
    async with serving(Stub("a"), max_peer_connections=3) as fleet:
        kept = [await connect(fleet) for _ in range(3)]
        assert await status(fleet, request(WHOLE)) == 503
        for _, writer in kept:
            writer.close()
        await asyncio.sleep(0.1)
        assert await status(fleet, request(WHOLE)) == 200


def test_the_cap_leaves_descriptors_for_workers_and_files() -> None:
    assert connection_cap(ConnectionLimits(), 1024) == 448
    assert connection_cap(ConnectionLimits(max_connections=100), 1024) == 100
    assert connection_cap(ConnectionLimits(max_connections=10**6), 1024) == 448
    assert connection_cap(ConnectionLimits(), 64) == 16


@pytest.mark.parametrize("headers", [(), ("connection: keep-alive",)])
@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_an_http_1_0_client_sees_the_end_of_its_answer(
    body: dict[str, Any], headers: tuple[str, ...]
) -> None:
    async with serving(Stub("a"), keepalive=0.3) as fleet:
        answer = await exchange(fleet, request(body, *headers, version="1.0"))
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head
        assert b"chunked" not in head.lower()
        if "stream" in body:
            assert rest.endswith(b"data: [DONE]\n\n")
            assert b"keep-alive" not in head.lower()
        else:
            assert json.loads(rest)["choices"][0]["text"] == whole_text(5)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("delay_s", [0.0, 0.2])
@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_a_half_closed_client_gets_its_answer(
    body: dict[str, Any], delay_s: float, version: str
) -> None:
    async with serving(Stub("a", script=Script(delay_s=delay_s))) as fleet:
        reader, writer = await connect(fleet)
        writer.write(request(body, version=version))
        writer.write_eof()
        answer = await to_end(reader)
        assert b" 200 " in answer
        assert b"[DONE]" in answer or b'"finish_reason"' in answer
        writer.close()
        await fleet.settle()


async def test_a_half_closed_client_that_then_leaves_frees_its_worker() -> None:
    stub = Stub("a", script=Script(held=asyncio.Event()))
    async with serving(stub) as fleet:
        _, writer = await connect(fleet)
        writer.write(request(WHOLE))
        writer.write_eof()
        await eventually(lambda: stub.active == 1)
        writer.close()
        await eventually(lambda: stub.active == 0, 10)


async def test_pipelined_requests_of_a_half_closed_client_are_all_answered() -> None:
    async with serving(Stub("a")) as fleet:
        reader, writer = await connect(fleet)
        writer.write(request(WHOLE) * 5)
        writer.write_eof()
        assert (await to_end(reader)).count(b"HTTP/1.1 200") == 5
        writer.close()


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8000", "[::1]:80", "x.localhost", "gateway:8000"]
)
async def test_local_names_are_let_in(host: str) -> None:
    async with serving(Stub("a")) as fleet:
        data = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
        assert await status(fleet, data) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "10.0.0.1"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/metrics", "/workers"])
async def test_a_name_that_was_rebound_to_loopback_is_refused(host: str, path: str) -> None:
    async with serving(Stub("a")) as fleet:
        data = f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
        assert await status(fleet, data) == 403
    async with serving(Stub("a"), allowed_hosts=(host_name(host),)) as fleet:
        assert await status(fleet, data) == 200


async def test_hosts_that_contradict_each_other_are_refused() -> None:
    async with serving(Stub("a")) as fleet:
        data = b"GET /version HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n"
        assert await status(fleet, data) == 400


async def test_pages_of_an_allowed_origin_may_call_and_no_others() -> None:
    preflight = ("access-control-request-method: POST",
                 "access-control-request-headers: authorization, content-type")  # fmt: skip
    good, bad = "origin: https://app.example", "origin: https://evil.example"
    ask = {"method": "OPTIONS", "path": PATH}
    async with serving(Stub("a"), cors_origins=("https://app.example",)) as fleet:
        answer = await exchange(fleet, request(None, good, *preflight, "connection: close", **ask))
        assert answer.startswith(b"HTTP/1.1 204")
        assert b"access-control-allow-origin: https://app.example" in answer.lower()
        assert b"access-control-allow-headers: authorization, content-type" in answer.lower()
        assert await status(fleet, request(None, bad, *preflight, **ask)) == 403
        for body in (WHOLE, STREAM, {"prompt": 7}):
            answer = await exchange(fleet, request(body, good, "connection: close"))
            assert b"access-control-allow-origin: https://app.example" in answer.lower()
            answer = await exchange(fleet, request(body, bad, "connection: close"))
            assert b"access-control-allow-origin" not in answer.lower()
    async with serving(Stub("a")) as fleet:
        assert await status(fleet, request(None, good, *preflight, **ask)) == 403
        answer = await exchange(fleet, request(WHOLE, good, "connection: close"))
        assert b"access-control" not in answer.lower()


def test_an_origin_with_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        GatewayConfig(cors_origins=("https://app.example/",))
