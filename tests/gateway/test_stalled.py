"""Laws of clients that stop reading: they are cut after a limit of their own, workers go on."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest
from tests.gateway.stub import Fleet, Script, Stub, serving

#: Text of one chunk is larger than what kernels buffer of a connection, in a few chunks.
WIDE = Script(per_chunk=2_000)


async def paused(fleet: Fleet, tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream by a socket with little room, and read its head alone."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    port = int(fleet.url.rpartition(":")[2])
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert b"200" in await reader.readline()
    return reader, writer


async def test_a_client_that_takes_nothing_is_cut_and_its_worker_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub = Stub("a", script=WIDE)
    async with serving(stub, client_timeout=0.5) as fleet:
        _, writer = await paused(fleet, 5_000_000)
        await fleet.settle(30.0)
        for _ in range(3000):
            if not stub.active:
                break
            await asyncio.sleep(0.02)
        assert stub.active == 0
        assert list(fleet.plane_driver.upstreams) == ["a"]
        writer.close()
        async with aiohttp.ClientSession() as session:
            body = {"prompt": "x", "max_tokens": 3}
            async with session.post(fleet.url + "/v1/completions", json=body) as response:
                assert response.status == 200
            async with session.get(fleet.url + "/metrics") as response:
                page = await response.text()
    stalled = [line for line in page.splitlines() if line.startswith("pigou_clients_stalled_total")]
    assert [line.rpartition(" ")[2] for line in stalled] == ["1.0"]
    assert "took nothing" in caplog.text


async def test_while_a_client_takes_nothing_its_worker_owes_nothing() -> None:
    stub = Stub("a", script=WIDE)
    async with serving(stub, client_timeout=60) as fleet:
        _, writer = await paused(fleet, 5_000_000)
        (upstream,) = fleet.plane_driver.upstreams.values()
        for _ in range(1500):
            if upstream.paused:
                break
            await asyncio.sleep(0.02)
        assert (upstream.inflight, upstream.owed) == (1, 0)
        writer.transport.abort()
        await fleet.settle(10.0)


async def test_a_client_that_is_slow_is_not_cut() -> None:
    stub = Stub("a", script=WIDE)
    async with serving(stub, client_timeout=0.5) as fleet:
        reader, writer = await paused(fleet, 600_000)
        taken = 0
        while data := await reader.read(40_000):
            taken += len(data)
            if data.endswith(b"0\r\n\r\n"):
                break
            if taken % 400_000 < 40_000:
                await asyncio.sleep(0.05)
        assert taken > 3_000_000
        writer.close()
