"""Laws of what a worker may send: bounded, read in linear time, and never the client's trouble."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lib.kv_event_batch import decode_batch

from pigou.config import ControlConfig
from pigou.control.plane import ControlPlane
from pigou.gateway.app import GatewayServer
from pigou.gateway.config import GatewayConfig
from pigou.gateway.fleet_status import FleetStatus
from pigou.gateway.gateway import Gateway
from pigou.gateway.metrics import Metrics
from pigou.gateway.model_routing import GatewayModel, ModelRouting
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy import upstream as upstreams
from pigou.gateway.proxy.connection import HTTPConnection, HTTPConnectionError, parse_cost
from pigou.gateway.proxy.relay import Relay
from pigou.gateway.proxy.upstream import Engine
from pigou.gateway.proxy.writer import SSEWriter
from pigou.request import Role, Worker
from pigou.wire import bodies, kv_event_decoding, sse
from pigou.wire.bodies import ByteReservation
from pigou.wire.kv_event_decoding import EventError, event_slices

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


class Transport(asyncio.Transport):
    """Counts what is done to a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False
        self.paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def asked(connection: HTTPConnection) -> asyncio.Task[Any]:
    connection.connection_made(Transport())
    task = asyncio.create_task(connection.ask(b"x"))
    await asyncio.sleep(0)
    return task


async def whole_body(connection: HTTPConnection, task: asyncio.Task[Any]) -> bytes:
    await task
    body = b""
    while data := await connection.read():
        body += data
    return body


async def answered(pieces: list[bytes]) -> bytes:
    """Return the body that a line makes of the pieces of an answer."""
    connection = HTTPConnection()
    task = await asked(connection)
    for piece in pieces:
        connection.data_received(piece)
        await asyncio.sleep(0)
    return await whole_body(connection, task)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.booleans(),
)
def test_chunks_mean_the_same_however_they_are_cut(
    parts: list[bytes], cuts: list[int], trailers: bool
) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD
    data += b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts)
    data += b"0\r\n" + (b"x: y\r\n" if trailers else b"") + b"\r\n"
    pieces, at, turn = [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        pieces.append(data[at : at + size])
        at, turn = at + size, turn + 1
    assert asyncio.run(answered(pieces)) == b"".join(parts)


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"e8d4a51000\r\n",
        HEAD + b"-5\r\n",
        HEAD + b"0x10\r\n",
        HEAD + b"zz\r\n",
        HEAD + b"5" * 5000,
        HEAD + b"3\r\nabcdef\r\n",
        HEAD + b"0\r\n" + b"a: b\r\n" * 10_000,
        HEAD + b"0\r\n\r\nmore",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 3000,
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        JSON + b"content-length: 99999999999999999999\r\n\r\n",
        JSON + b"content-length: -1\r\n\r\n",
        JSON + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 20_000,
    ],
)
async def test_what_is_no_http_ends_the_connection(data: bytes) -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    for at in range(0, len(data), 65_536):
        connection.data_received(data[at : at + 65_536])
    with pytest.raises(HTTPConnectionError):
        await whole_body(connection, task)


async def test_a_chunk_of_any_size_is_passed_on_as_it_comes() -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    connection.data_received(HEAD + b"ffffffff\r\n")
    await task
    taken: list[int] = []
    reading = asyncio.create_task(connection.read(lambda data: taken.append(len(data)) is None))
    await asyncio.sleep(0)
    for _ in range(1000):
        connection.data_received(b"a" * 1000)
    assert sum(taken) == 1_000_000
    reading.cancel()


async def test_a_reader_that_takes_nothing_pauses_the_worker() -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    connection.data_received(HEAD + b"ffffffff\r\n" + b"a" * 1_000_000)
    await task
    transport = connection._transport
    assert isinstance(transport, Transport)
    assert transport.paused


async def test_a_last_answer_of_a_connection_is_read_on_after_a_pause() -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    head = JSON + b"connection: close\r\ncontent-length: 1000000\r\n\r\n"
    connection.data_received(head + b"a" * 500_000)
    await task
    transport = connection._transport
    assert isinstance(transport, Transport)
    assert transport.paused
    assert len(await connection.read() or b"") == 500_000
    reading = asyncio.create_task(connection.read())
    await asyncio.sleep(0)
    assert not transport.paused
    reading.cancel()


async def test_a_flood_is_read_in_slices_between_which_others_run() -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    connection.data_received(HEAD)
    await task
    taken: list[int] = []
    reading = asyncio.create_task(connection.read(lambda data: taken.append(len(data)) is None))
    await asyncio.sleep(0)
    connection.data_received(b"40000\r\n" + b"a" * 0x40000 + b"\r\n")
    transport = connection._transport
    assert isinstance(transport, Transport)
    assert transport.paused
    assert sum(taken) < 80_000
    turns = 0
    while sum(taken) < 0x40000:
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 3
    assert not transport.paused
    reading.cancel()


@pytest.mark.parametrize("size", [1500, 16_000, 120_000])
async def test_of_chunks_of_one_byte_few_are_read_in_one_turn(size: int) -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    connection.data_received(HEAD)
    await task
    taken: list[int] = []
    reading = asyncio.create_task(connection.read(lambda data: taken.append(len(data)) is None))
    await asyncio.sleep(0)
    count = size // 6
    connection.data_received(b"1\r\na\r\n" * count)
    while sum(taken) < count:
        await asyncio.sleep(0)
    assert max(taken) <= 256
    assert parse_cost(b"1\r\na\r\n" * 100) == 12_800, "and what they take of the rate is more"
    reading.cancel()


async def test_a_flood_beyond_its_burst_waits() -> None:
    connection, loop = HTTPConnection(), asyncio.get_running_loop()
    await asked(connection)
    assert [connection._delay_s(2**14, loop.time()) for _ in range(2)] == [0.0, 0.0]
    assert connection._delay_s(2**23, 1.0 + loop.time()) == 1.0
    assert connection._delay_s(2**14, 60.0 + loop.time()) == 0.0


async def test_a_slice_that_waits_is_read_before_the_end_of_its_connection() -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    connection.data_received(HEAD)
    await task
    taken: list[int] = []
    reading = asyncio.create_task(connection.read(lambda data: taken.append(len(data)) is None))
    await asyncio.sleep(0)
    connection.data_received(b"20000\r\n" + b"a" * 0x20000 + b"\r\n0\r\n\r\n")
    connection.connection_lost(None)
    assert await reading == b""
    assert sum(taken) == 0x20000


async def test_a_line_with_bytes_after_its_answer_takes_no_other_request() -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    connection.data_received(HEAD)
    await task
    reading = asyncio.create_task(connection.read(lambda _: True))
    await asyncio.sleep(0)
    connection.data_received(b"1\r\na\r\n0\r\n\r\n" + b"b" * 40_000)
    await asyncio.wait([reading])
    assert not connection.idle
    with pytest.raises(HTTPConnectionError):
        await connection.ask(b"z")


async def test_a_line_that_was_paused_at_its_answer_s_end_reads_the_next() -> None:
    connection = HTTPConnection()
    task = await asked(connection)
    connection.data_received(JSON + b"content-length: 1000000\r\n\r\n" + b"a" * 1_000_000)
    assert len(await whole_body(connection, task)) == 1_000_000
    transport = connection._transport
    assert isinstance(transport, Transport)
    assert connection.idle
    again = asyncio.create_task(connection.ask(b"y"))
    await asyncio.sleep(0)
    assert not transport.paused
    connection.data_received(JSON + b"content-length: 0\r\n\r\n")
    await again


@given(st.binary(max_size=200).map(lambda data: data.replace(b"\xef", b"x")),
       st.lists(st.integers(1, 9), min_size=1, max_size=4))  # fmt: skip
def test_events_mean_the_same_however_they_are_cut(noise: bytes, cuts: list[int]) -> None:
    data = b"data: a\r\n\r\n: c\n\ndata: b\ndata:c\n\n" + noise + b"\r\rdata: d\n\n"
    whole = sse.Reader().feed(data)
    reader, found, at, turn = sse.Reader(), [], 0, 0
    while at < len(data):
        found += reader.feed(data[at : at + cuts[turn % len(cuts)]])
        at, turn = at + cuts[turn % len(cuts)], turn + 1
    assert found == whole


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT", 100_000)
    reader = sse.Reader()
    for _ in range(99):
        assert reader.feed(b"data: " + b"a" * 1000) == []
    with pytest.raises(sse.EventTooLong):
        reader.feed(b"data: " + b"a" * 1000)


def test_the_pieces_of_an_event_are_joined_once() -> None:
    reader = sse.Reader()
    reader.feed(b"data: ")
    for _ in range(50_000):
        reader.feed(b"aaaaaaaaaa")
    assert len(reader._parts) <= 16_385
    assert [len(each) for each in reader.feed(b"\n\n")] == [500_000]


DEEP = b"[" * 200_000 + b"]" * 200_000


@asynccontextmanager
async def front(answer: Callable[[int], list[Any]]) -> AsyncIterator[tuple[str, Metrics]]:
    """Run a gateway over a worker that sends these bytes, by the number of the request."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(
                    connection.split(b": ", 1) for connection in head.split(b"\r\n")[1:-2]
                )
                await reader.readexactly(int(fields.get(b"content-length", b"0")))
                pieces = answer(count)
                count += 1
                for piece in pieces:
                    if isinstance(piece, asyncio.Event):
                        await piece.wait()
                        continue
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    plane_driver, metrics = PlaneDriver(ControlPlane(ControlConfig())), Metrics()
    model = GatewayModel(plane_driver, metrics, FleetStatus(plane_driver, list))
    gateway = Gateway(GatewayConfig(port=0), ModelRouting([model]), metrics, None, 1)
    try:
        async with GatewayServer(gateway, shutdown_s=0.2) as running:
            await plane_driver.up(
                Worker("w", f"http://127.0.0.1:{port}", Role.BOTH), Engine(True, "stub", 2048)
            )
            yield f"http://127.0.0.1:{running.port}", metrics
    finally:
        server.close()


def chunk(payload: bytes) -> bytes:
    data = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = json.dumps(
    {"id": "a", "created": 1, "model": "m", "choices": [{"index": 0, "text": "t"}]}
).encode()


async def ask(url: str, *, stream: bool, max_tokens: int = 4) -> tuple[int, bytes]:
    body = {"prompt": "a", "max_tokens": max_tokens, "stream": stream}
    timeout = aiohttp.ClientTimeout(total=20)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url + "/v1/completions", json=body) as response,
    ):
        return response.status, await response.read()


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices":[],"x":' + DEEP + b"}",
        DEEP,
        b'{"choices":[{"index":0,"text":"t","logprobs":' + DEEP + b"}]}",
        b'{"error":' + DEEP + b"}",
        b'{"choices":[{"index":0,"text":"a' + b"\xff" + b'"}]}',
    ],
    ids=["skipped", "outermost", "within", "error", "no-utf8"],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_what_no_client_could_read_ends_in_an_error(payload: bytes, begun: bool) -> None:
    pieces = [HEAD, *([chunk(TOKEN)] if begun else []), chunk(payload)]
    async with front(lambda _: pieces) as (url, _):
        status, body = await ask(url, stream=True)
        assert DEEP[:1000] not in body
        if begun:
            assert status == 200
            assert b'"error"' in body
            assert body.endswith(b"data: [DONE]\n\n")
        else:
            assert status == 502


async def test_a_reply_that_is_nested_too_deeply_reaches_no_client() -> None:
    body = b'{"choices":[],"x":' + DEEP + b"}"
    pieces = [JSON + b"content-length: %d\r\n\r\n" % len(body), body]
    async with front(lambda _: pieces) as (url, _):
        status, answer = await ask(url, stream=False)
        assert (status, DEEP[:1000] in answer) == (502, False)


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"500 No"])
async def test_a_reply_without_end_is_given_up(
    status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstreams, "MAX_REPLY_BYTES", 2**20)
    head = b"HTTP/1.1 " + status + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [head, *[b"10000\r\n" + b" " * 65_536 + b"\r\n"] * 64]
    async with front(lambda _: pieces) as (url, _):
        found, _ = await ask(url, stream=False)
        assert found == 502


@pytest.mark.parametrize("length", [2**30, 2**27 + 1])
async def test_a_reply_too_long_by_its_head_is_refused_before_its_body(length: int) -> None:
    never = asyncio.Event()
    async with front(lambda _: [JSON + b"content-length: %d\r\n\r\n" % length, never]) as (url, _):
        assert (await ask(url, stream=False))[0] == 502
        never.set()


async def test_what_replies_hold_is_bounded_in_sum_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies.REPLIES, "limit", 2**22)
    gc.collect()
    before = bodies.REPLIES.used
    peaks: list[int] = []
    grow = ByteReservation.grow

    def measured(self: ByteReservation, size: int) -> None:
        grow(self, size)
        peaks.append(bodies.REPLIES.used)

    monkeypatch.setattr(ByteReservation, "grow", measured)
    block = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    head = JSON + b"transfer-encoding: chunked\r\n\r\n"
    async with front(lambda _: [head, *[block] * 64]) as (url, _):
        answers = await asyncio.gather(*(ask(url, stream=False) for _ in range(8)))
        assert {status for status, _ in answers} == {502}
        assert 2**21 < max(peaks) <= 2**22
        gc.collect()
        assert bodies.REPLIES.used == before


async def test_nothing_of_a_failed_reply_lives_on_in_its_errors() -> None:
    body = b'{"choices":"' + b"a" * 2**20 + b'"}'
    pieces = [JSON + b"content-length: %d\r\n\r\n" % len(body), body]
    gc.collect()
    gc.disable()
    try:
        async with front(lambda _: pieces) as (url, _):
            assert (await ask(url, stream=False))[0] == 502
            del body, pieces[:]
            frames = [each for each in gc.get_objects() if isinstance(each, FrameType)]
            kept = [(frame.f_code.co_qualname, name) for frame in frames
                    for name, value in frame.f_locals.items()
                    if isinstance(value, bytes | bytearray) and len(value) > 2**18]  # fmt: skip
            assert kept == []
    finally:
        gc.enable()


def tokens(count: int, start: int = 0) -> bytes:
    ids = list(range(1000 + start, 1000 + start + count))
    choice = {"index": 0, "text": "t" * count, "token_ids": ids, "finish_reason": None}
    body = {"id": "a", "created": 1, "model": "m", "choices": [choice]}
    return chunk(json.dumps(body, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("pieces", "shown", "end"),
    [
        ([tokens(1, i) for i in range(400)], 4, b'"finish_reason":"length"'),
        ([tokens(3), tokens(397, 3)], 1, b'"error"'),
        ([chunk(TOKEN)] * 400, 6, b'"error"'),
    ],
    ids=["one-by-one", "in-two", "without-ids"],
)
async def test_tokens_beyond_those_asked_for_reach_no_client(
    pieces: list[bytes], shown: int, end: bytes
) -> None:
    async with front(lambda _: [HEAD, *pieces]) as (url, _):
        status, body = await ask(url, stream=True)
        events = [line for line in body.split(b"\n") if b'"text"' in line]
        texts = [event for event in events if b'"text":""' not in event]
        assert (status, len(texts)) == (200, shown), body[-500:]
        assert end in body
        assert body.endswith(b"data: [DONE]\n\n")


async def test_a_whole_reply_of_more_tokens_than_asked_for_is_refused() -> None:
    body = b'{"choices":[{"text":"t"}],"usage":{"prompt_tokens":1,"completion_tokens":400}}'
    pieces = [JSON + b"content-length: %d\r\n\r\n" % len(body), body]
    async with front(lambda _: pieces) as (url, _):
        assert (await ask(url, stream=False, max_tokens=8))[0] == 502
        assert (await ask(url, stream=False, max_tokens=400))[0] == 200


@pytest.mark.parametrize("break_", [b"\ndata: ", b"\rdata:", b"\r\ndata: "])
async def test_a_line_break_within_an_event_s_data_reaches_no_client(break_: bytes) -> None:
    payload = TOKEN.replace(b'"choices"', break_ + b'"choices"')
    async with front(lambda _: [HEAD, chunk(TOKEN), chunk(payload)]) as (url, _):
        status, body = await ask(url, stream=True)
        assert status == 200
        assert b"line break" in body
        assert all(line.startswith(b"data: ") for line in body.split(b"\n") if line)


@pytest.mark.parametrize("begun", [False, True])
async def test_an_event_without_end_ends_in_an_error(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT", 2**20)
    endless = [b"10000\r\n" + b"a" * 65_536 + b"\r\n"] * 64
    pieces = [HEAD, *([chunk(TOKEN)] if begun else []), *endless]
    async with front(lambda _: pieces) as (url, _):
        status, body = await ask(url, stream=True)
        assert status == (200 if begun else 502)
        assert body.endswith(b"data: [DONE]\n\n") is begun


@pytest.mark.parametrize("event", [b": ping\n\n", b"data:\n\n", b'data: {"choices":[]}\n\n'])
@pytest.mark.parametrize("begun", [False, True])
async def test_events_without_a_token_for_ever_end_in_an_error(event: bytes, begun: bool) -> None:
    block = event * 100
    idle = [b"%x\r\n%b\r\n" % (len(block), block)] * 200
    async with front(lambda _: [HEAD, *([chunk(TOKEN)] if begun else []), *idle]) as (url, _):
        status, body = await ask(url, stream=True)
        assert status == (200 if begun else 502)
        assert b"events without a token" in body


async def test_an_event_without_a_token_before_each_token_is_no_fault() -> None:
    done = b"data: [DONE]\n\n"
    one = b"8\r\n: ping\n\n\r\n" + chunk(TOKEN)
    pieces = [HEAD, *[one * 100] * 50, b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done)]
    async with front(lambda _: pieces) as (url, _):
        status, body = await ask(url, stream=True, max_tokens=5000)
        assert status == 200
        assert body.count(b'"text"') == 5000
        assert body.endswith(done)


async def test_an_unforeseen_failure_of_a_stream_is_told_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = Relay.feed

    def broken(self: Relay, data: bytes) -> bytes:
        if b"second" in data:
            raise ZeroDivisionError("nobody thought of this")
        return feed(self, data)

    write, written = SSEWriter.write, asyncio.Event()

    async def told(self: SSEWriter, data: bytes) -> None:
        await write(self, data)
        written.set()

    monkeypatch.setattr(Relay, "feed", broken)
    monkeypatch.setattr(SSEWriter, "write", told)
    pieces = [HEAD, chunk(TOKEN), written, chunk(b'"second"')]
    async with front(lambda _: pieces) as (url, _):
        status, body = await ask(url, stream=True)
        assert status == 200
        assert b"ZeroDivisionError" in body
        assert body.endswith(b"data: [DONE]\n\n")


async def test_a_stream_byte_by_byte_is_a_stream() -> None:
    done = b"data: [DONE]\n\n"
    whole = chunk(TOKEN) * 3 + b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done)
    pieces = [HEAD, *(b"1\r\n%b\r\n" % bytes([byte]) for byte in b"data: " + TOKEN + b"\n\n")]
    async with front(lambda _: [*pieces, whole]) as (url, _):
        status, body = await ask(url, stream=True)
        assert status == 200
        assert body.count(b'"text"') == 4
        assert body.endswith(done)


# --- KV events ---------------------------------------------------------------------------------


def stored(blocks: int, first: int = 0) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + blocks)),
        "parent_block_hash": None,
        "token_ids": list(range(4 * blocks)),
        "block_size": 4,
        "extra_keys": [["salt"]],
    }


def test_a_large_batch_is_applied_in_slices_that_mean_the_same() -> None:
    events = [stored(2000), {"type": "BlockRemoved", "block_hashes": list(range(1500))},
              *[{"type": "AllBlocksCleared"}] * 600]  # fmt: skip
    slices = list(event_slices(kv_event_decoding.encode_batch(1.0, events)))
    flat = [event for each in slices for event in each]
    assert all(len(each) <= kv_event_decoding.SLICE // 4 for each in slices)
    parts = [event for event in flat if isinstance(event, kv_event_decoding.Stored)]
    assert all(len(part.hashes) <= kv_event_decoding.SLICE for part in parts)
    [whole] = decode_batch(kv_event_decoding.encode_batch(1.0, events[:1])).events
    assert isinstance(whole, kv_event_decoding.Stored)
    assert [h for part in parts for h in part.hashes] == list(whole.hashes)
    assert [t for part in parts for t in part.token_ids] == list(whole.token_ids)
    assert [part.parent for part in parts[1:]] == [part.hashes[-1] for part in parts[:-1]]
    assert [part.salt for part in parts] == ["salt"] + [None] * (len(parts) - 1)
    removed = [event for event in flat if isinstance(event, kv_event_decoding.Removed)]
    assert [h for part in removed for h in part.hashes] == list(range(1500))
    assert sum(isinstance(event, kv_event_decoding.Cleared) for event in flat) == 600


def test_small_batches_stay_whole() -> None:
    events = [stored(3), {"type": "BlockRemoved", "block_hashes": [1]}]
    payload = kv_event_decoding.encode_batch(1.0, events)
    assert list(event_slices(payload)) == [decode_batch(payload).events]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["x", []]),
        msgspec.msgpack.encode([1.0, {}]),
        msgspec.msgpack.encode([1.0, [7]]),
        b"\x92\xcb" + b"\x00" * 8 + b"\x91" * 200_000 + b"\xc0",
        b"\x92\xcb" + b"\x00" * 8 + b"\xdd\xff\xff\xff\xff",
        b"\x92\xcb" + b"\x00" * (kv_event_decoding.MAX_BATCH + 8),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventError):
        list(event_slices(payload))
