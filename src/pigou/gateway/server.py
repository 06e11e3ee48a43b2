"""The gateway's HTTP server: limits on what comes before a body, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from pigou.gateway.app import Gateway, build
from pigou.gateway.guard import error_response
from pigou.wire.errors import APIError, bad_request

_log = logging.getLogger("pigou.gateway")

_BACKLOG = 4096
_READ_BUFFER = 256 * 1024
#: Seconds in which those that are cut off must take what they are told.
_TELL_S = 0.5


class _Protocol(RequestHandler):
    """Tells of unreadable requests in the shape that all errors have."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("part of a response was already sent")
        if isinstance(exc, LineTooLong) or (message or "").startswith("Too many headers"):
            response = error_response(APIError(431, "The headers are too large or too many."))
        elif status == 400:
            response = error_response(bad_request(f"The request is not valid HTTP: {message}."))
        else:
            self.log_exception("Error handling request from %s", request.remote, exc_info=exc)
            response = error_response(APIError(status, "The gateway failed; its log says why."))
        response.force_close()
        return response


class _Factory:
    """Makes a `_Protocol` a connection, where aiohttp would make its own."""

    def __init__(self, server: web.Server, arguments: dict[str, Any]) -> None:
        self._server = server
        self._arguments = arguments

    def __call__(self) -> _Protocol:
        loop = asyncio.get_running_loop()
        return _Protocol(self._server, loop=loop, **self._arguments)


class GatewayServer:
    """Listens from `start` to `stop`; an async context manager."""

    def __init__(self, gateway: Gateway, shutdown_s: float = 5.0) -> None:
        """Prepare; on `stop`, requests under way have `shutdown_s` seconds to finish."""
        self._gateway = gateway
        self._shutdown_s = shutdown_s
        self._runner = web.AppRunner(build(gateway), handler_cancellation=True, access_log=None)
        self._listener: asyncio.Server | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The TCP port, known after `start`."""
        return self._port

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken.
        """
        config = self._gateway.config
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        factory = _Factory(
            server,
            {
                "access_log": None,
                "max_line_size": config.max_line,
                "max_field_size": config.max_header,
                "max_headers": config.max_headers,
                "read_bufsize": _READ_BUFFER,
            },
        )
        self._listener = await asyncio.get_running_loop().create_server(
            factory, config.host, config.port, backlog=_BACKLOG
        )
        self._port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Take no more requests, let those under way finish for a while, then cut them.

        Those that are cut get an error, within their stream where that has begun. Until then the
        port stays open: probes are answered, further requests get 503.
        """
        server = self._runner.server
        if server is not None:
            await self._drain()
        if self._listener is not None:
            self._listener.close()
        if server is not None:
            await server.shutdown(timeout=0.1)
        await self._runner.cleanup()

    async def _drain(self) -> None:
        closing = self._gateway.closing
        closing.begun = True
        await closing.idle(self._shutdown_s)
        if cut := closing.cut():
            _log.warning(
                "the drain of %g s is over: %d requests were cut off, and told so",
                self._shutdown_s,
                cut,
            )
            await closing.idle(_TELL_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
