"""HTTP/1.1 connections to a worker: parsing, one connection, and a pool.

Data is passed on in the receiving call, without a task switch: half the cost of a general client.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 * 1024
#: Interim responses (1xx) before the real one.
MAX_INTERIM = 16
#: Bytes of a chunk's size line, and of all trailers.
MAX_SIZE_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 16 * 1024
_HEX = re.compile(rb"[0-9a-fA-F]+")
#: Hexadecimal digits of a chunk's size: up to 2^32 bytes.
_MAX_SIZE_DIGITS = 8
#: Cost of a line feed: a chunk has a cost, however short it is. Bytes of long lines cost a quarter.
_FEED_COST, _CHEAP_BYTES = 64, 4
_HIGH_WATER = 256 * 1024
#: Cost of what is read of a stream in one turn of the event loop, bytes that may come at once, and
#: bytes per second beyond: a server that floods its stream does not keep the others waiting.
_SLICE, _BURST, _RATE = 16 * 1024, 2**20, 8 * 2**20
#: Bytes that are read at once, however short their chunks are.
_LITTLE = 1024
#: End of an event and its chunk: where one is parsed in parts, it costs more.
_EVENT_CHUNK_END = b"\n\n\r\n"
#: Takes body bytes; returns False to take no more.
Take = Callable[[bytes], bool]
#: Below the 5 seconds after which vLLM's server closes idle connections: a request that is sent
#: on a connection at the moment it closes is lost.
KEEPALIVE_S = 4.0
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers (names in lower case) of a response."""

    status: int
    headers: dict[bytes, bytes]


def parse_cost(data: bytes) -> int:
    """Return the cost of parsing these bytes, in bytes of short lines."""
    return max(len(data) // _CHEAP_BYTES, _FEED_COST * data.count(b"\n"))


def parse_head(data: bytes) -> ResponseHead:
    """Parse status and headers, `data` ending before the blank line; raise `ValueError`."""
    first, *lines = data.split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    version, code, *_ = first.split(b" ", 2)
    if not version.startswith(b"HTTP/1.") or not code.isdigit() or len(code) != 3:
        raise ValueError(f"a status line {first[:60]!r}")
    return ResponseHead(int(code), headers)


def parse_chunk_size(line: bytes) -> int:
    """Parse a chunk's size line; raise `ValueError`."""
    digits = line.partition(b";")[0].strip()
    if len(digits.lstrip(b"0")) > _MAX_SIZE_DIGITS or not _HEX.fullmatch(digits):
        raise ValueError(f"a chunk of {line[:40]!r} bytes")
    return int(digits, 16)


#: Most chunks of a stream have one of a few sizes.
_chunk_size = lru_cache(1024)(parse_chunk_size)


class HTTPConnectionError(ConnectionError):
    """The connection ended, or its bytes are not HTTP."""

    def __init__(self, message: str, fresh: bool) -> None:
        super().__init__(message)
        self.fresh = fresh  # nothing of an answer had come


class _Phase(Enum):
    IDLE = 0
    HEAD = 1
    CHUNKS = 2
    SIZED = 3
    UNTIL_CLOSE = 4


class _ChunkPart(Enum):
    """The next part of a chunked body: `DATA` includes the line break after it."""

    SIZE = 0
    DATA = 1
    TRAILERS = 2


# Looked up once: members of an Enum are slow to find.
_IDLE, _CHUNKS, _SIZE = _Phase.IDLE, _Phase.CHUNKS, _ChunkPart.SIZE


class HTTPConnection(asyncio.Protocol):
    """A connection for one request at a time: `ask`, then `read` until empty."""

    def __init__(self) -> None:
        self.idle_since = 0.0  # when the last response ended, by the event loop's clock
        self.closed = False  # no further request can be sent
        self._gone = False  # cut or lost; `closed` may mean that the answer is the last one
        self._transport: asyncio.Transport | None = None
        self._phase = _Phase.IDLE
        self._rest = b""
        self._left = 0
        self._chunk = _ChunkPart.SIZE
        self._interim = 0
        self._head: ResponseHead | None = None
        self.declared = 0  # `content-length` of the answer under way; 0 where its head did not say
        self._body = bytearray()
        self._backlog = bytearray()  # bytes of a stream to be parsed; reading is paused
        self._next: asyncio.Handle | None = None
        self._loss: tuple[Exception | None] | None = None  # a loss that waits for the backlog
        self._is_stream = False
        self._level, self._leaked_at = 0.0, 0.0  # leaky bucket of bytes, and its clock
        self._take: Take | None = None
        self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def ask(self, request: bytes) -> ResponseHead:
        """Send a request; return the response head; raise `HTTPConnectionError`."""
        if self._transport is None or self.closed or not self._over() or self._backlog:
            raise HTTPConnectionError("the connection is closed", fresh=True)
        self._phase = _Phase.HEAD
        self._chunk, self._left, self._interim = _ChunkPart.SIZE, 0, 0
        self._head = None
        self._resume()  # the last answer may have ended while reading was paused
        self._transport.write(request)
        while (head := self._answer()) is None:
            await self._wait()
        return head

    async def read(self, take: Take | None = None) -> bytes | None:
        """Return the next bytes of the body, empty at its end; raises HTTPConnectionError if cut.

        With `take`, bytes go there as they arrive; returns None once it declines. Its errors
        propagate.
        """
        while not self._body:
            if self._over():
                return b""
            self._resume()
            self._take = take
            await self._wait()
            if take is not None and self._take is None and not self._body:
                return b"" if self._over() else None
            self._take = None
        data = bytes(self._body)
        self._body.clear()
        return data

    def abort(self) -> None:
        """Cut the connection at once."""
        self.closed = self._gone = True
        self._drop_backlog()
        if self._transport is not None:
            self._transport.abort()

    @property
    def idle(self) -> bool:
        """True if the connection can take another request."""
        return self._over() and not self.closed and not self._body and not self._backlog

    def _answer(self) -> ResponseHead | None:
        return self._head

    def _over(self) -> bool:
        return self._phase is _Phase.IDLE

    # --- the event loop's side ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Wake the reader with the loss."""
        self.closed = self._gone = True
        if self._backlog:
            self._loss = (error,)  # told after what came before it
            return
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if self._phase is _Phase.UNTIL_CLOSE and error is None:
            self._phase = _Phase.IDLE
        elif self._phase is not _Phase.IDLE:
            fresh = self._phase is _Phase.HEAD and not self._rest
            words = str(error) if error else "the connection was closed"
            self._error = HTTPConnectionError(words, fresh)
        self._wake()

    def data_received(self, data: bytes) -> None:
        """Take bytes in."""
        if self._backlog or (len(data) > _LITTLE and self._is_flood(data)):
            self._put_off(data)
            return
        take = self._take
        if take is not None and self._phase is _CHUNKS and self._chunk is _SIZE and not self._rest:
            # Mostly this is one whole chunk.
            size, _, rest = data.partition(b"\r\n")
            try:
                lone = int(size, 16) == len(rest) - 2 > 0 and rest.endswith(b"\r\n")
            except ValueError:
                lone = False
            if lone:
                self._hand(take, rest[:-2])
                return
        self._parse(data)

    def _is_flood(self, data: bytes) -> bool:
        """True if these bytes are too many for one turn of the event loop."""
        return self._phase is _CHUNKS and self._is_stream and parse_cost(data) > _SLICE

    def _put_off(self, data: bytes) -> None:
        """Add to the backlog, and parse a slice unless one is scheduled."""
        self._backlog += data
        if self._next is None:
            self._read_slice()

    def _read_slice(self) -> None:
        """Parse a slice of the backlog, and schedule the rest with reading paused."""
        self._next = None
        data, cost = self._cut()
        if self._backlog:
            if self._transport is not None and not self._gone:
                self._transport.pause_reading()
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(self._delay_s(cost, loop.time()), self._read_slice)
        elif self._transport is not None and not self._paused and not self._gone:
            self._transport.resume_reading()
        self._parse(data)
        if self._loss is not None and not self._backlog:
            self._lose(self._loss[0])

    def _delay_s(self, size: int, now_s: float) -> float:
        leaked = _RATE * (now_s - self._leaked_at)
        self._level, self._leaked_at = max(0.0, self._level - leaked) + size, now_s
        return 0.0 if self._level <= _BURST else size / _RATE

    def _cut(self) -> tuple[bytes, int]:
        """Take a slice off the backlog; return it, and about its cost or size."""
        data = bytes(self._backlog[: _CHEAP_BYTES * _SLICE])
        cost, size = parse_cost(data), len(data)
        if cost > _SLICE:
            data = data[: max(_LITTLE, size * _SLICE // cost)]
        if (end := data.rfind(_EVENT_CHUNK_END) + len(_EVENT_CHUNK_END)) > _LITTLE:
            data = data[:end]
        del self._backlog[: len(data)]
        return data, max(cost * len(data) // size, len(data))

    def _drop_backlog(self) -> None:
        self._backlog.clear()
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _parse(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        try:
            if self._phase is _Phase.HEAD:
                data = self._take_head(data)
                if self._is_flood(data):
                    self._put_off(data)
                    return
            if data or self._phase is _Phase.SIZED:
                self._deliver(self._take_body(data))
        except (ValueError, IndexError) as error:
            self._error = HTTPConnectionError(f"not HTTP: {error}", fresh=False)
            self.abort()
            self._wake()

    def _deliver(self, body: bytes) -> None:
        take = self._take
        if body and take is not None and not self._body:
            self._hand(take, body)
            return
        self._body += body
        if len(self._body) > _HIGH_WATER and not self._paused and self._transport:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _hand(self, take: Take, body: bytes) -> None:
        """Give bytes to the reader, and wake it at the end or when it declines."""
        try:
            goes_on = take(body)
        except Exception as error:
            self._error, goes_on = error, False
        if not goes_on or self._phase is _IDLE:
            self._take = None
            self._wake()

    def _take_head(self, data: bytes) -> bytes:
        while True:
            end = data.find(b"\r\n\r\n")
            if end > MAX_HEAD_BYTES or (end < 0 and len(data) > MAX_HEAD_BYTES):
                raise ValueError("the head is too long")
            if end < 0:
                self._rest = data
                return b""
            head = parse_head(data[:end])
            data = data[end + 4 :]
            if not 100 <= head.status < 200:
                break
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise ValueError(f"more than {MAX_INTERIM} interim responses")
        self._begin(head)
        self._wake()
        return data

    def _begin(self, head: ResponseHead) -> None:
        headers = head.headers
        length = headers.get(b"content-length")
        self.declared = 0
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            if length is not None:
                raise ValueError("a length and chunks")
            self._phase = _Phase.CHUNKS
        elif length is not None:
            if not length.isdigit() or len(length) > 18:
                raise ValueError(f"a body of {length[:40]!r} bytes")
            self._phase, self._left = _Phase.SIZED, int(length)
            self.declared = self._left
        else:
            self._phase = _Phase.UNTIL_CLOSE
        if headers.get(b"connection", b"").lower() == b"close":
            self.closed = True
        self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._head = head

    def _take_body(self, data: bytes) -> bytes:
        """Return the body bytes in `data`; detect the end."""
        if self._phase is _Phase.SIZED:
            self._left -= len(data)
            if self._left < 0:
                raise ValueError("the body is longer than its head said")
            if self._left == 0:
                self._phase = _Phase.IDLE
            return data
        if self._phase is _Phase.UNTIL_CLOSE:
            return data
        if self._phase is _Phase.IDLE:
            raise ValueError("bytes came that nobody asked for")
        return self._take_chunks(data)

    def _take_chunks(self, data: bytes) -> bytes:
        """Return the chunk contents in `data`, partial ones included."""
        parts: list[bytes] = []
        at, size = 0, len(data)
        while at < size and self._phase is _CHUNKS:
            if self._chunk is _SIZE:
                at = self._take_whole_chunks(data, at, parts)
            if self._chunk is _ChunkPart.DATA:
                at = self._take_chunk(data, at, parts)
            elif (end := data.find(b"\r\n", at)) < 0:
                break
            elif self._chunk is _ChunkPart.SIZE:
                self._left = parse_chunk_size(data[at:end])
                self._chunk = _ChunkPart.DATA if self._left else _ChunkPart.TRAILERS
                self._left += 2 if self._left else 0
                at = end + 2
            else:
                self._left += end + 2 - at
                if end == at:
                    self._phase = _Phase.IDLE
                at = end + 2
            if self._chunk is _ChunkPart.TRAILERS and self._left > MAX_TRAILER_BYTES:
                raise ValueError("the trailers are too long")
        if self._phase is _IDLE and at < size:
            raise ValueError("bytes follow the last chunk")
        self._rest = data[at:]
        if len(self._rest) > MAX_SIZE_LINE_BYTES:
            raise ValueError("a line between chunks is too long")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take_whole_chunks(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Add the contents of the whole chunks that come next; return the new position."""
        while (end := data.find(b"\r\n", at)) >= 0:
            begin = end + 2
            stop = begin + _chunk_size(data[at:end])
            if stop == begin or data[stop : stop + 2] != b"\r\n":
                break
            parts.append(data[begin:stop])
            at = stop + 2
        return at

    def _take_chunk(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Consume part of a chunk and its line break; return the new position."""
        content = self._left - 2
        if content > 0:
            part = data[at : at + content]
            parts.append(part)
            self._left -= len(part)
            at += len(part)
        if self._left <= 2:
            breaks = data[at : at + self._left]
            if breaks != b"\r\n"[2 - self._left : 2 - self._left + len(breaks)]:
                raise ValueError("a chunk is longer than its size")
            self._left -= len(breaks)
            at += len(breaks)
            if self._left == 0:
                self._chunk = _ChunkPart.SIZE
        return at

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume(self) -> None:
        if self._paused and self._transport is not None and not self._gone:
            self._paused = False
            if not self._backlog:
                self._transport.resume_reading()


class HTTPConnectionPool:
    """Keep-alive connections to one server, opened on demand without a limit."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.encode()
        fixed = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._fixed = f"host: {parts.netloc}\r\n{fixed}".encode()
        self._idle: list[HTTPConnection] = []
        self._used: set[HTTPConnection] = set()
        self._closed = False

    def post(self, path: str, body: bytes, headers: str) -> bytes:
        """Return a request; `headers` are further lines, each with its line break."""
        own = f"{headers}content-length: {len(body)}\r\n"
        return b"POST %b%b HTTP/1.1\r\n%b%b\r\n%b" % (
            self._prefix, path.encode(), self._fixed, own.encode(), body,
        )  # fmt: skip

    def take_idle(self) -> HTTPConnection | None:
        """Return an open idle connection; None for none."""
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle and connection.idle_since > oldest:
                self._used.add(connection)
                return connection
            connection.abort()
        return None

    async def open(self) -> HTTPConnection:
        """Open a connection; raise `OSError` or `TimeoutError`."""
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                HTTPConnection, self._host, self._port, ssl=self._tls
            )
        if self._closed:
            connection.abort()
            raise HTTPConnectionError("the worker was left", fresh=False)
        self._used.add(connection)
        return connection

    def give_back(self, connection: HTTPConnection) -> None:
        """Return a connection to the pool; cut it if its answer was not read to the end."""
        self._used.discard(connection)
        if connection.idle and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        """Cut all connections; readers get an error."""
        self._closed = True
        for connection in [*self._idle, *self._used]:
            connection.abort()
        self._idle.clear()
