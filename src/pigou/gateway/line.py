"""A line: one HTTP/1.1 connection to a worker.

What arrives is handed on within the call that receives it, without waking a task: a lone chunk
costs half of what it costs through a general HTTP client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import cast

_MOST_HEAD = 64 * 1024
_HIGH_WATER = 256 * 1024


class LineError(ConnectionError):
    """The connection ended, or what came is not HTTP.

    Attributes:
        fresh: nothing of an answer had come.
    """

    def __init__(self, message: str, fresh: bool) -> None:
        super().__init__(message)
        self.fresh = fresh


class _Phase(Enum):
    IDLE = 0
    HEAD = 1
    CHUNKS = 2
    SIZED = 3
    UNTIL_CLOSE = 4


# Looked up once: members of an Enum are slow to find.
_IDLE, _CHUNKS = _Phase.IDLE, _Phase.CHUNKS


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers (names in lower case) of a response."""

    status: int
    headers: dict[bytes, bytes]


#: Takes body bytes; returns whether it goes on taking them.
Take = Callable[[bytes], bool]


class Line(asyncio.Protocol):
    """One request at a time; `ask`, then `read` until it returns empty bytes.

    Attributes:
        idle_since: when the last response ended, by the event loop's clock.
        closed: no further request can be sent.
    """

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._phase = _Phase.IDLE
        self._rest = b""
        self._left = 0
        self._head: Head | None = None
        self._body = bytearray()
        self._take: Take | None = None
        self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def ask(self, request: bytes) -> Head:
        """Send a request, its head and body; return the head of the answer.

        Raises:
            LineError: the connection ended first.
        """
        if self._transport is None or self.closed or not self._over():
            raise LineError("the connection is closed", fresh=True)
        self._phase = _Phase.HEAD
        self._head = None
        self._transport.write(request)
        while (head := self._answer()) is None:
            await self._wait()
        return head

    async def read(self, take: Take | None = None) -> bytes | None:
        """Return the next bytes of the body, empty at its end.

        With `take`, bytes go there as they arrive; None is returned once it has declined.

        Raises:
            LineError: the connection ended within the body. Whatever `take` raises.
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
        """Cut the connection, at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def idle(self) -> bool:
        """Whether the line can take another request."""
        return self._over() and not self.closed and not self._body

    def _answer(self) -> Head | None:
        return self._head

    def _over(self) -> bool:
        """Whether no answer is under way."""
        return self._phase is _Phase.IDLE

    # --- the event loop's side ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell whoever waits."""
        self.closed = True
        if self._phase is _Phase.UNTIL_CLOSE and error is None:
            self._phase = _Phase.IDLE
        elif self._phase is not _Phase.IDLE:
            fresh = self._phase is _Phase.HEAD and not self._rest
            words = str(error) if error else "the connection was closed"
            self._error = LineError(words, fresh)
        self._wake()

    def data_received(self, data: bytes) -> None:
        """Take bytes in."""
        if self._take is not None and self._phase is _CHUNKS and not self._rest:
            # Mostly this is one whole chunk.
            size, _, rest = data.partition(b"\r\n")
            try:
                lone = int(size, 16) == len(rest) - 2 > 0
            except ValueError:
                lone = False
            if lone:
                self._hand(self._take, rest[:-2])
                return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        try:
            if self._phase is _Phase.HEAD:
                data = self._take_head(data)
            if data or self._phase is _Phase.SIZED:
                self._deliver(self._take_body(data))
        except (ValueError, IndexError) as error:
            self._error = LineError(f"not HTTP: {error}", fresh=False)
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
        """Let the reader take bytes; wake it when it wants no more, or there is no more."""
        try:
            goes_on = take(body)
        except Exception as error:
            self._error, goes_on = error, False
        if not goes_on or self._phase is _IDLE:
            self._take = None
            self._wake()

    def _take_head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MOST_HEAD:
                raise ValueError("the head is too long")
            self._rest = data
            return b""
        first, *lines = data[:end].split(b"\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        status = int(first.split(b" ", 2)[1])
        if 100 <= status < 200:
            return self._take_head(data[end + 4 :])
        self._head = Head(status, headers)
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._phase = _Phase.CHUNKS
        elif b"content-length" in headers:
            self._phase, self._left = _Phase.SIZED, int(headers[b"content-length"])
        else:
            self._phase = _Phase.UNTIL_CLOSE
        if headers.get(b"connection", b"").lower() == b"close":
            self.closed = True
        self._wake()
        return data[end + 4 :]

    def _take_body(self, data: bytes) -> bytes:
        """Return what `data` holds of the body; note its end."""
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
        parts = []
        at, size = 0, len(data)
        while at < size:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            count = int(data[at:line].split(b";", 1)[0], 16)
            if count < 0:
                raise ValueError(f"a chunk of {count} bytes")
            start, end = line + 2, line + 2 + count
            if count == 0:
                if (last := data.find(b"\r\n\r\n", line)) >= 0:
                    self._phase, at = _Phase.IDLE, last + 4
                break
            if end + 2 > size:
                break
            parts.append(data[start:end])
            at = end + 2
        if self._phase is _Phase.IDLE and at < size:
            raise ValueError("bytes follow the last chunk")
        self._rest = data[at:]
        return parts[0] if len(parts) == 1 else b"".join(parts)

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
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()
