"""The gateway's HTTP server: limits on what comes before a body, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

from aiohttp import web

from pigou.gateway.app import Gateway, build
from pigou.wire.connections import ConnectionLimits, Factory

_log = logging.getLogger("pigou.gateway")

_BACKLOG = 4096
#: Seconds in which those that are cut off must take what they are told.
_TELL_S = 0.5


class GatewayServer:
    """Listens from `start` to `stop`; an async context manager.

    Example:
        async with GatewayServer(gateway) as server:
            print(f"http://127.0.0.1:{server.port}")
    """

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
        factory = Factory(
            server,
            ConnectionLimits(
                max_connections=config.max_connections,
                max_peer_connections=config.max_peer_connections,
                head_timeout_s=config.head_timeout,
                keepalive_s=config.keepalive,
                max_line=config.max_line,
                max_header=config.max_header,
                max_headers=config.max_headers,
            ),
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
        shutdown = self._gateway.shutdown
        shutdown.begun = True
        await shutdown.idle(self._shutdown_s)
        if cut := shutdown.cut():
            _log.warning(
                "the drain of %g s is over: %d requests were cut off, and told so",
                self._shutdown_s,
                cut,
            )
            await shutdown.idle(_TELL_S)

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
