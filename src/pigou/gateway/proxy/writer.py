"""SSE writer: the client's end of a stream."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
from aiohttp import web

from pigou.gateway.failure import Rejected
from pigou.wire.chat_translation import ChatTranslation
from pigou.wire.connections import mark_event_stream
from pigou.wire.errors import TYPES, APIError, error_body
from pigou.wire.sse import DONE, frame

#: Bytes that may wait for a slow client before its worker is not read any further.
HIGH_WATER = 256 * 1024
_LOOK_S = 0.01
#: Bytes of a stream that this kernel takes beyond what the client's takes.
_MAX_UNSENT_BYTES = 16 * 1024
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class ClientStalled(ConnectionResetError):
    """A client read nothing for too long and was disconnected."""


class SSEWriter:
    """A streamed response; until its first bytes a plain error can still be sent."""

    def __init__(
        self,
        request: web.Request,
        headers: Callable[[], Mapping[str, str]] = dict,
        client_timeout_s: float = 0.0,
        on_blocked: Callable[[int], None] | None = None,
        translation: ChatTranslation | None = None,
        record: Callable[[bytes], None] | None = None,
    ) -> None:
        """Answer a request; `on_blocked` gets the nanoseconds of each pause of the client.

        `translation` renders frames of the chat that another API's request became; `record`
        takes the frames before it.
        """
        self._translation, self._record = translation, record
        # nanoseconds in which bytes waited for the client, as looks at the connection's buffer
        # tell. What the client's kernel took and it did not read is not seen
        self.blocked_ns = 0
        self._on_blocked = on_blocked
        self._blocked_from_ns = self._blocked_to_ns = 0
        self._client_timeout_s = client_timeout_s
        self._request = request
        self._headers = headers
        self._response: web.StreamResponse | None = None
        self._transport = request.transport

    @property
    def open(self) -> bool:
        """True if the client received anything."""
        return self._response is not None

    async def write(self, data: bytes) -> None:
        """Send whole SSE frames, at the client's pace; raise `ConnectionResetError`."""
        if self._record is not None:
            self._record(data)
        if self._translation is not None:
            data = self._translation.feed(data)
        response = self._response
        if response is None:
            response = self._response = web.StreamResponse(headers={**_HEADERS, **self._headers()})
            mark_event_stream(self._request)
            _limit_unsent(self._transport)
            await response.prepare(self._request)
        with suppress(TimeoutError):  # the transport has the data, and goes on
            async with asyncio.timeout(self._client_timeout_s or None):
                await response.write(data)
        await self.drain()  # `response` counts what it wrote, and not what `push` did

    @property
    def fast(self) -> bool:
        """True if `push` works: head sent, and body chunked (HTTP/1.1)."""
        response = self._response
        return response is not None and response.headers.get("transfer-encoding") == "chunked"

    def push(self, data: bytes) -> bool:
        """Send whole SSE frames without waiting; True if there is room for more."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if self._record is not None:
            self._record(data)
        if self._translation is not None and not (data := self._translation.feed(data)):
            return True
        if self._blocked_from_ns and not transport.get_write_buffer_size():
            self._end_blocked()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        size = transport.get_write_buffer_size()
        if size:
            self._note_blocked()
        return bool(size < HIGH_WATER)

    def _note_blocked(self) -> None:
        """Record whether bytes wait for the client."""
        now_ns = time.monotonic_ns()
        if self._blocked_from_ns:
            self.blocked_ns += now_ns - self._blocked_to_ns
        else:
            self._blocked_from_ns = now_ns
        self._blocked_to_ns = now_ns

    def _end_blocked(self) -> None:
        if self._blocked_from_ns and self._on_blocked is not None:
            self._on_blocked(self._blocked_to_ns - self._blocked_from_ns)
        self._blocked_from_ns = 0

    async def drain(self, max_waiting_bytes: int = HIGH_WATER) -> None:
        """Wait until the write buffer drains; raise `ConnectionResetError`."""
        min_waiting_bytes, since = None, time.monotonic()
        while True:
            transport = self._transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client left")
            size = transport.get_write_buffer_size()
            if size:
                self._note_blocked()
            else:
                self._end_blocked()
            if size < max_waiting_bytes:
                return
            now = time.monotonic()
            if min_waiting_bytes is None or size < min_waiting_bytes:
                min_waiting_bytes, since = size, now
            elif self._client_timeout_s and now - since > self._client_timeout_s:
                transport.abort()
                raise ClientStalled(f"the client took nothing for {now - since:.0f} s")
            await asyncio.sleep(_LOOK_S)

    def end_blocked(self) -> None:
        """Report a pause that lasts at the stream's end."""
        if self._blocked_from_ns and self._transport is not None:
            if not self._transport.is_closing() and self._transport.get_write_buffer_size():
                self._note_blocked()
            self._end_blocked()

    async def fail(self, error: APIError) -> None:
        """End the stream with an error event."""
        if isinstance(error, Rejected):
            await self.write(frame(_compact(error.answer)) + DONE)
        else:
            kind = TYPES.get(error.status, error.type)
            body = error_body(error.message, kind, None, error.status)
            await self.write(frame(body) + DONE)

    async def send(self, response: web.Response) -> web.StreamResponse:
        """Send a whole reply; raise as `write`."""
        response.headers.update(self._headers())
        self._response = response
        await response.prepare(self._request)
        return await self.close()

    async def close(self) -> web.StreamResponse:
        """End the response and return it."""
        if self._response is None:
            await self.write(b"")
        assert self._response is not None
        try:
            async with asyncio.timeout(self._client_timeout_s or None):
                await self._response.write_eof()
        except TimeoutError:
            await self.drain(1)
        if self._blocked_from_ns:
            self._note_blocked()  # the end was written once the client had read enough
        return self._response


def _limit_unsent(transport: asyncio.Transport | None) -> None:
    """Limit the kernel's send buffer, so that unsent bytes wait here."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with suppress(OSError):  # a Unix socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)


def _compact(body: bytes) -> bytes:
    try:
        return msgspec.json.format(body, indent=-1)
    except msgspec.DecodeError:
        return msgspec.json.encode({"error": {"message": body.decode("utf-8", "replace")}})
