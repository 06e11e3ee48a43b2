"""Laws of a line: a body arrives as it was sent, however it is cut, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pigou.gateway.failure import WorkerFailed
from pigou.gateway.proxy.connection import HTTPConnection, HTTPConnectionError, Take
from pigou.gateway.proxy.upstream import Engine, Upstream
from pigou.request import Role, Worker

BODY = [b"one", b"two" * 1000, b"", b"x"]
WHOLE = b"".join(BODY)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x;note=1\r\n%b\r\n" % (len(part), part) for part in BODY if part)
    + b"0\r\nx-trailer: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(WHOLE), WHOLE)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED
CLOSED = b"HTTP/1.1 200 OK\r\n\r\n" + WHOLE

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@asynccontextmanager
async def lines(serve: Serve) -> AsyncIterator[Upstream]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)  # type: ignore[arg-type]
    port = server.sockets[0].getsockname()[1]
    pool = Upstream(Worker("w", f"http://127.0.0.1:{port}", Role.BOTH), Engine(), "k")
    try:
        yield pool
    finally:
        await pool.close()
        server.close()


def answering(answer: bytes, cut: int, close: bool = False) -> tuple[Serve, list[bytes]]:
    """A server that sends this answer to every request, `cut` bytes at a time."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                asked.append(head + await reader.readexactly(2))
                for start in range(0, len(answer), cut):
                    writer.write(answer[start : start + cut])
                    await writer.drain()
                    if cut < 1000:
                        await asyncio.sleep(0)
                if close:
                    writer.close()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return serve, asked


async def whole(connection: HTTPConnection, take: Take | None = None) -> bytes:
    found = b""
    while (data := await connection.read(take)) != b"":
        found += data or b""
    return found


async def ask_whole(pool: Upstream) -> bytes:
    connection = await pool.ask("/", {}, "i")
    return await whole(connection)


@pytest.mark.parametrize("cut", [7, 100, 1_000_000])
@pytest.mark.parametrize("answer", [CHUNKED, SIZED, CONTINUED])
async def test_a_body_arrives_whole_and_the_line_is_kept(answer: bytes, cut: int) -> None:
    serve, asked = answering(answer, cut)
    async with lines(serve) as pool:
        first = None
        for _ in range(3):
            connection = await pool.ask("/v1/x", {}, "id-1")
            assert await whole(connection) == WHOLE
            pool.give_back(connection)
            assert connection is (first := first or connection)
    assert len(asked) == 3
    assert asked[0].startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"Bearer k\r\nx-request-id: id-1\r\ncontent-length: 2\r\n\r\n{}" in asked[0]


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    serve, _ = answering(CLOSED, 10, close=True)
    async with lines(serve) as pool:
        connection = await pool.ask("/", {}, "i")
        assert await whole(connection) == WHOLE
        assert not connection.idle


@pytest.mark.parametrize("cut", [7, 1_000_000])
async def test_what_a_taker_declines_is_not_lost(cut: int) -> None:
    serve, _ = answering(CHUNKED, cut)
    async with lines(serve) as pool:
        connection = await pool.ask("/", {}, "i")
        taken: list[bytes] = []

        def take(data: bytes) -> bool:
            taken.append(data)
            return len(taken) % 3 != 0

        while (data := await connection.read(take)) != b"":
            taken += [data] if data else []
        assert b"".join(taken) == WHOLE
        assert connection.idle


async def test_an_error_of_a_taker_reaches_the_reader() -> None:
    serve, _ = answering(CHUNKED, 50)
    async with lines(serve) as pool:
        connection = await pool.ask("/", {}, "i")

        def take(_: bytes) -> bool:
            raise KeyError("mine")

        with pytest.raises(KeyError):
            await whole(connection, take)


@pytest.mark.parametrize("end", [0, 10, 60, 200, len(CHUNKED) - 1])
async def test_a_body_that_breaks_off_is_an_error(end: int) -> None:
    serve, _ = answering(CHUNKED[:end], 1_000_000, close=True)
    async with lines(serve) as pool:
        with pytest.raises((HTTPConnectionError, WorkerFailed)):
            await ask_whole(pool)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nabcdefgh",
     b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
     b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabc", b"x" * 100_000],
)  # fmt: skip
async def test_what_is_not_http_is_an_error(answer: bytes) -> None:
    serve, _ = answering(answer, 1_000_000)
    async with lines(serve) as pool:
        with pytest.raises((HTTPConnectionError, WorkerFailed)):
            await ask_whole(pool)


async def test_a_kept_line_that_was_closed_is_replaced() -> None:
    serve, asked = answering(SIZED, 1_000_000, close=True)
    async with lines(serve) as pool:
        for _ in range(3):
            connection = await pool.ask("/", {}, "i")
            assert await whole(connection) == WHOLE
            pool.give_back(connection)
    assert len(asked) == 3


async def test_a_closed_pool_cuts_lines_in_use_and_opens_none() -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    async with lines(silent) as pool:
        waiting = asyncio.create_task(pool.ask("/", {}, "i"))
        await asked.wait()
        await pool.close()
        with pytest.raises(WorkerFailed):
            await waiting
        with pytest.raises(WorkerFailed):
            await pool.ask("/", {}, "i")
