"""HTTP application, its server, and the event loop watch."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import TracebackType
from typing import Self

from aiohttp import web

from pigou.gateway import api
from pigou.gateway.api.page import APIPages
from pigou.gateway.auth.guard import PageRules, add_cors, check_browser, guard
from pigou.gateway.gateway import Gateway
from pigou.metric_rows import MetricSet
from pigou.wire.connections import ConnectionLimits, Factory, close_old_streams, tell_request_id

_log = logging.getLogger("pigou.gateway")

#: Seconds between two looks, and from which on a lag is logged, once a minute.
LOOK_S, _LONG_S, _WARN_EVERY_S = 0.1, 1.0, 60.0
#: Seconds between two collections of the oldest generation, and times what one takes.
COLLECT_EVERY_S, _COLLECT_RATIO = 30.0, 100.0
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_BACKLOG = 4096
#: Seconds in which cut-off clients must read their error.
_TELL_S = 0.5


class LoopWatch:
    """Measures event loop lag, and collects the oldest garbage generation on a timer.

    CPython may collect it once in hours, which would keep errors' frames alive until then.
    """

    def __init__(self, metrics: MetricSet, collect_every_s: float = COLLECT_EVERY_S) -> None:
        self._lag = metrics.histogram(
            "pigou_event_loop_lag_seconds",
            "How late the gateway's event loop came to a timer, by ten looks a second.", _SECONDS,
        )  # fmt: skip
        self._collect_every_s = collect_every_s
        self._warned_s = -_WARN_EVERY_S

    async def run(self) -> None:
        """Measure until cancelled."""
        before_s = time.monotonic()
        next_s = before_s + self._collect_every_s
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            self._observe(max(0.0, now_s - before_s - LOOK_S), now_s)
            before_s = now_s
            if now_s >= next_s:
                gc.collect()
                took_s = time.monotonic() - now_s
                next_s = now_s + max(self._collect_every_s, _COLLECT_RATIO * took_s)

    def _observe(self, lag_s: float, now_s: float) -> None:
        self._lag.observe(lag_s)
        if lag_s > _LONG_S and now_s - self._warned_s > _WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning(
                "the event loop was %.1f s late: the machine gives the gateway too little time, or "
                "something here takes long (pigou_event_loop_lag_seconds)",
                lag_s,
            )


def all_pages(gateway: Gateway) -> Iterator[APIPages]:
    """Yield the pages of each module in `pigou.gateway.api`."""
    for info in iter_modules(api.__path__):
        make = getattr(import_module(f"{api.__name__}.{info.name}"), "pages", None)
        if make is not None:
            yield make(gateway)


def build(gateway: Gateway) -> web.Application:
    """Build the application, which starts and stops the plane drivers."""
    added = list(all_pages(gateway))
    # A route for all methods comes after those that it would hide.
    pages = sorted(
        (page for part in added for page in part.pages), key=lambda page: page.method == "*"
    )
    app = web.Application(
        client_max_size=gateway.config.max_body,
        middlewares=[
            check_browser(gateway.config),
            guard(gateway.keys, gateway.metrics, gateway.shutdown, PageRules(pages)),
        ],
    )
    for page in pages:
        page.add_to(app.router)
    loop_watch, tasks = LoopWatch(gateway.metrics), list[asyncio.Task[None]]()

    async def start(_: web.Application) -> None:
        gateway.start()
        run = gateway.plane_driver.background.start
        tasks.append(run("event loop", loop_watch.run))
        for part in added:
            tasks.extend(run(name, work) for name, work in part.background.items())

    async def stop(_: web.Application) -> None:
        for task in tasks:
            task.cancel()
        for part in added:
            if part.close is not None:
                await part.close()
        await gateway.close()

    app.on_response_prepare.append(close_old_streams)
    app.on_response_prepare.append(tell_request_id)
    app.on_response_prepare.append(add_cors(gateway.config))
    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    return app


class GatewayServer:
    """Listens from `start` to `stop`; an async context manager.

    Example:
        async with GatewayServer(gateway) as server:
            print(f"http://127.0.0.1:{server.port}")
    """

    def __init__(self, gateway: Gateway, shutdown_s: float = 5.0) -> None:
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
        """Listen; raise `OSError` if the address is taken."""
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
        """Reject new requests, let running ones finish for a while, then cut them with an error.

        The port stays open meanwhile: probes are answered, other requests get 503.
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
