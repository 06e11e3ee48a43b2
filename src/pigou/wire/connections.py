"""Client connections of an HTTP server: how many, for how long, and how each may end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from pigou.wire.errors import APIError, bad_request, error_body
from pigou.wire.request_validation import REQUEST_ID_HEADER, new_request_id, reply_id

_log = logging.getLogger("pigou.http")

#: File descriptors reserved for files, workers and event sockets.
_OTHER_DESCRIPTORS = 128
#: Warn below this cap.
_FEW_DESCRIPTORS = 4096
#: Connections above the cap for health probes and keyed requests, as a share of the cap.
_RESERVE_SHARE = 16
#: Seconds until a half-closed client is probed for reading.
_PROBES_S = (0.5, 5.0, 20.0)
_LOOK_S = 0.25
#: `TCP_INFO` state of a connection that was reset.
_TCP_CLOSE = 7
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"
_REPLY_ID = web.RequestKey("reply_id", str)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server's connections; times in seconds."""

    max_connections: int = 0  # concurrent connections; 0: as the file descriptors allow
    max_peer_connections: int = 0  # concurrent connections per address; 0 for no limit
    # from a connection, or a request's first byte, to the end of its head.
    head_timeout_s: float = 15.0
    keepalive_s: float = 120.0  # how long an idle connection is kept
    max_line: int = 8190  # bytes of the request line
    max_header: int = 8190  # bytes of one header
    max_headers: int = 100
    read_buffer: int = 256 * 1024  # bytes buffered before the handler reads them


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; return the limit, 0 where unknown."""
    try:
        import resource
    except ImportError:  # not on this platform
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1_048_576 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass
    return wanted if soft == resource.RLIM_INFINITY else soft


def connection_cap(limits: ConnectionLimits, descriptors: int) -> int:
    """Return the most connections: each may need a second descriptor, to a worker."""
    fitting = max(16, (descriptors - _OTHER_DESCRIPTORS) // 2) if descriptors else 16_384
    return min(limits.max_connections or 16_384, fitting)


class Connections:
    """The connections of one server, capped; at the cap, idle ones are closed for new ones.

    First go those without a whole request so far, of the address with most of them, the oldest. If
    all are busy, `reserved` more are accepted, half of them for probes; the rest is answered 503.
    """

    def __init__(self, cap: int, max_peer: int = 0) -> None:
        self._cap = cap
        self._reserve = max(4, cap // _RESERVE_SHARE)
        self._max_peer = max_peer
        self._open: dict[LimitedHandler, None] = {}
        self._peers: Counter[str] = Counter()
        self.evicted = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: LimitedHandler) -> bool:
        """Count a new connection; return whether it may stay."""
        if self._max_peer and self._peers[connection.peer] >= self._max_peer:
            self.refused += 1
            return False
        if len(self._open) >= self._cap and not self._evict():
            if len(self._open) >= self._cap + self._reserve:
                self.refused += 1
                return False
            connection.reserved = True
            connection.for_probes = not self._may_work(connection.peer)
        self._open[connection] = None
        self._peers[connection.peer] += 1
        return True

    def remove(self, connection: LimitedHandler) -> None:
        """Remove an ended connection."""
        if connection in self._open:
            del self._open[connection]
            self._peers[connection.peer] -= 1
            if self._peers[connection.peer] <= 0:
                del self._peers[connection.peer]

    def _may_work(self, peer: str) -> bool:
        """Whether one more of an address may take a reserved place that is not for probes alone."""
        working = [one for one in self._open if one.reserved and not one.for_probes]
        own = sum(connection.peer == peer for connection in working)
        left = self._reserve - self._reserve // 2 - len(working)
        return left > 0 and 2 * (own + 1) <= left + own + 1

    def _evict(self) -> bool:
        waiting = [connection for connection in self._open if connection.is_idle]
        if not waiting:
            return False
        strangers = [connection for connection in waiting if not connection.served]
        peers = Counter(connection.peer for connection in strangers)
        victim = max(strangers, key=lambda connection: peers[connection.peer], default=waiting[0])
        self.evicted += 1
        self.remove(victim)
        victim.force_close()
        return True


class LimitedHandler(RequestHandler):
    """One connection, with timeouts and uniform error bodies."""

    __slots__ = ("_answered", "_connections", "_content", "_half_open", "_head_s", "_head_timer",
                 "_probe_timer", "for_probes", "peer", "reserved", "served",
                 "streams_events")  # fmt: skip

    def __init__(
        self, server: web.Server, connections: Connections, limits: ConnectionLimits
    ) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=limits.keepalive_s, max_line_size=limits.max_line,
            max_field_size=limits.max_header, max_headers=limits.max_headers,
            read_bufsize=limits.read_buffer, lingering_time=2.0, auto_decompress=False,
        )  # fmt: skip
        self._connections = connections
        self._head_s = limits.head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._half_open = False
        self._content: StreamReader | None = None
        self.peer = ""  # the client's address
        self.served = False  # a request was answered below 400
        self.reserved = self.for_probes = False  # let in above the cap; for health probes alone
        self._answered = False
        self.streams_events = False  # the response under way may hold comments

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way: its head has not come, or the last was answered."""
        if self._answered:
            return True  # the rest of its body is discarded
        if self._messages:
            return False
        waiter = self._waiter
        return self._request_count == 0 or (waiter is not None and not waiter.done())

    # --- the event loop's side --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a slot, or answer 503."""
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) and name else ""
        if not self._connections.admit(self):
            self._manager = None  # it never joins the server's connections
            cast(asyncio.Transport, transport).write(_raw(too_many_connections()))
            transport.close()
            return
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the place back."""
        self._connections.remove(self)
        self._end_head()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; a head must end in time."""
        if self._manager is None:
            return
        if self._head_timer is None and self.is_idle and data:
            self._await_head()
        super().data_received(data)
        if self._messages:
            self._content = self._messages[-1][1]
        if not self.is_idle:
            self._end_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed client's answer."""
        if self.is_idle or self._content is None or not self._content.is_eof():
            return False
        self._half_open = True
        self._look_after(0, 0.0)
        return True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Finish a response, and update the connection's state."""
        self.streams_events = False
        if resp.status < 400:
            self.served = True
        if self.reserved or (self._half_open and not self._messages):
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        self._answered = self.reserved
        return finished

    # --- time -------------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._head_s, self._head_late)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self.is_idle and self.transport is not None:
            self.transport.write(_raw(APIError(408, "The request's head did not end in time.")))
            self.force_close()

    def _look_after(self, probes: int, wait_s: float) -> None:
        """See whether a half-closed client is still there, until its answer is sent."""
        # One that has closed both sides looks the same, until something is sent: then it is reset.
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self.is_idle:  # the client left while the end of its answer was on its way
            self.force_close()
            return
        if _was_reset(transport):
            self._half_open = False
            transport.abort()
            return
        if probes < len(_PROBES_S) and wait_s >= _PROBES_S[probes]:
            self._probe(transport)
            probes += 1
        self._probe_timer = self._loop.call_later(
            _LOOK_S, self._look_after, probes, wait_s + _LOOK_S
        )

    def _probe(self, transport: asyncio.Transport) -> None:
        request = self._current_request
        if request is None or request.version < HttpVersion11:
            return
        if request.writer.output_size == 0:
            transport.write(_CONTINUE)
        elif self.streams_events:
            transport.write(_COMMENT)

    # --- errors -----------------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer an unreadable request with an error of the usual shape."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of a response was already sent")
        if isinstance(exc, LineTooLong) or (message or "").startswith("Too many headers"):
            error = APIError(431, "The headers are too large or too many.")
        elif status == 400:
            error = bad_request(f"The request is not valid HTTP: {message}.")
        else:
            self.log_exception("Error handling request from %s", request.remote, exc_info=exc)
            error = APIError(status, "The server failed; its log says why.")
        response = web.Response(
            status=error.status, body=error.body(), content_type="application/json",
            headers={REQUEST_ID_HEADER: reply_id(request.headers.get(REQUEST_ID_HEADER))},
        )  # fmt: skip
        response.force_close()
        return response


class Factory:
    """Makes a `LimitedHandler` for each connection of a server."""

    def __init__(self, server: web.Server, limits: ConnectionLimits) -> None:
        self._server = server
        self._limits = limits
        descriptors = raise_descriptor_limit()
        cap = connection_cap(limits, descriptors)
        if 0 < descriptors < _FEW_DESCRIPTORS:
            _log.warning("at most %d files may be open (RLIMIT_NOFILE), so that %d connections "
                         "fit; raise it with `ulimit -Hn` or LimitNOFILE=", descriptors,
                         cap)  # fmt: skip
        self.connections = Connections(cap, limits.max_peer_connections)

    def __call__(self) -> LimitedHandler:
        """Return the handler of a new connection."""
        return LimitedHandler(self._server, self.connections, self._limits)


async def close_old_streams(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """End a stream to an HTTP/1.0 client with its connection; for `on_response_prepare`."""
    if request.version < HttpVersion11 and not isinstance(response, web.Response):
        response.force_close()


def note_reply_id(request: web.BaseRequest, id: str) -> None:
    """Set a reply's request id, in place of the client's."""
    request[_REPLY_ID] = id


async def tell_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add the request id to each reply (`on_response_prepare`)."""
    if REQUEST_ID_HEADER not in response.headers:
        id = request.get(_REPLY_ID) or reply_id(request.headers.get(REQUEST_ID_HEADER))
        response.headers[REQUEST_ID_HEADER] = id


def mark_event_stream(request: web.BaseRequest) -> None:
    """Mark a reply as an event stream."""
    if (handler := _handler(request)) is not None:
        handler.streams_events = True


def is_reserved(request: web.BaseRequest) -> bool:
    """Whether a request came over a connection above the cap."""
    handler = _handler(request)
    return handler is not None and handler.reserved


def serves_probes_alone(request: web.BaseRequest) -> bool:
    """True on a connection reserved for health probes."""
    handler = _handler(request)
    return handler is not None and handler.for_probes


def _handler(request: web.BaseRequest) -> LimitedHandler | None:
    protocol: Any = request.protocol
    return protocol if isinstance(protocol, LimitedHandler) else None


def too_many_connections() -> APIError:
    """Return the error for a connection above the cap."""
    return APIError(503, "The server has too many connections. Try again later.", retry_after=1)


def _raw(error: APIError) -> bytes:
    body = error_body(error.message, error.type, None, error.code)
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"x-request-id: %b\r\nretry-after: 1\r\nconnection: close\r\n\r\n%b"
    ) % (error.status, error.type.encode(), len(body), new_request_id().encode(), body)


def _was_reset(transport: asyncio.Transport) -> bool:
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        state: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return False
    return state[0] == _TCP_CLOSE
