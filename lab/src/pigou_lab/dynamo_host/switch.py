"""Switch: frontends with different settings; each request goes to the regime's frontend.

Georgiou 2026, section 6.4, for a Dynamo that ignores per-request parameters: frontends over the
same workers differ in temperature and prefill load scale. A request stays with its frontend, and is
retried elsewhere if that fails before the reply begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp import web

from pigou.config import ConfigError, key_values
from pigou.control.routing_controller import Parameters, RoutingSetting
from pigou.request import SECOND
from pigou_lab.dynamo_host.meters import Meters
from pigou_lab.dynamo_host.steering import SteeredRequest, Steering, distance, shown

_log = logging.getLogger("pigou_lab.dynamo_host")
_CONNECT_S = 5.0
#: A frontend that failed is tried last for so long.
_AVOIDED = 2 * SECOND
_MAX_BODY = 64 * 2**20
#: Headers of one hop, which are not passed on (RFC 9110, 7.6.1), and those made anew.
_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "expect"}  # fmt: skip
_GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True, slots=True)
class Frontend:
    """A Dynamo frontend and its settings."""

    url: str
    parameters: Parameters

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `URL,temperature=T[,overlap-weight=W]`; raises ConfigError."""
        url, *options = text.split(",")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"frontend: {url!r} is no URL; write for example http://HOST:8000")
        values: dict[str, float] = {}
        form = "after the URL temperature= and overlap-weight=, as the frontend was started"
        for name, value in key_values("frontend", options, form).items():
            if name not in ("temperature", "overlap-weight"):
                raise ConfigError(f"frontend: {name!r} is not understood; write {form}")
            try:
                values[name.replace("-", "_")] = float(value)
            except ValueError:
                raise ConfigError(f"frontend: {name} is {value!r}; give a number") from None
        if "temperature" not in values:
            raise ConfigError(f"frontend: {text!r} has no temperature=; say how it was started")
        try:
            return cls(url.rstrip("/"), Parameters.of(RoutingSetting(**values)))
        except ConfigError as error:
            raise ConfigError(f"frontend {url}: {error}") from error


@dataclass(slots=True)
class _FrontendState:
    frontend: Frontend
    sent: int = 0
    inflight: int = 0
    failed: int = 0
    avoid_until: int = 0


class _Unanswered(Exception):
    """A frontend failed before it answered anything."""


class Switch:
    """Proxies requests to the frontend whose setting is nearest to the controller's."""

    def __init__(
        self,
        frontends: Sequence[Frontend],
        steering: Steering,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises ConfigError for fewer than two frontends, or two with one setting."""
        if len(frontends) < 2:
            raise ConfigError(f"there are {len(frontends)} frontends; a switch needs two or more")
        settings = [frontend.parameters for frontend in frontends]
        if len(set(settings)) < len(settings):
            raise ConfigError(f"two frontends have the same setting: {settings}; make them differ")
        self.meters = Meters()
        self._states = [_FrontendState(frontend) for frontend in frontends]
        self._steering = steering
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """Return the web application; its server should cancel handlers of lost clients."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get("/switch", self._state)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._pass)
        app.cleanup_ctx.append(self._connected)
        return app

    def order(self, now: int) -> list[Frontend]:
        """Return the frontends in a request's order of tries."""
        return [state.frontend for state in self._order(now)]

    def status(self) -> dict[str, Any]:
        """Return regime, wanted parameters and the frontends, ready for JSON."""
        now = self._clock()
        wanted, signal = self._steering.parameters(now), self._steering.signal
        return {
            "regime": self._steering.regime.value,
            "signal": None if math.isnan(signal) else signal,
            "wanted": shown(wanted),
            "active": self._order(now)[0].frontend.url,
            "frontends": [
                {
                    "url": state.frontend.url, **shown(state.frontend.parameters),
                    "sent": state.sent, "inflight": state.inflight, "failed": state.failed,
                }
                for state in self._states
            ],
        }  # fmt: skip

    def _order(self, now: int) -> list[_FrontendState]:
        wanted = self._steering.parameters(now)
        return sorted(
            self._states,
            key=lambda state: (
                state.avoid_until > now, distance(state.frontend.parameters, wanted)
            ),
        )  # fmt: skip

    async def _connected(self, _: web.Application) -> Any:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        yield
        await self._session.close()

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(
            self.status(), dumps=lambda value: msgspec.json.encode(value).decode()
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.meters.exposition(), content_type="text/plain")

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if "upgrade" in request.headers:
            return _error(404, "Not Found", "The switch passes no WebSockets")
        body = await request.read()
        now = self._clock()
        run = None
        if request.method == "POST" and request.path in _GENERATES:
            run = self._steering.arrive(now)
        last = ""
        try:
            for number, state in enumerate(self._order(now)):
                if number:
                    self.meters.retried()
                    _log.warning("%s; the request goes to %s", last, state.frontend.url)
                if run is not None:
                    regime = self._steering.regime
                    self.meters.routed(regime, state.frontend.parameters, state.frontend.url)
                    state.sent += 1
                state.inflight += 1
                try:
                    return await self._ask(state.frontend, request, body, run)
                except _Unanswered as error:
                    state.failed += 1
                    state.avoid_until = self._clock() + _AVOIDED
                    last = f"{state.frontend.url} failed: {error}"
                finally:
                    state.inflight -= 1
        finally:
            if run is not None:
                run.end(self._clock())
        return _error(502, "Bad Gateway", f"No frontend answers; {last}")

    async def _ask(
        self, frontend: Frontend, request: web.Request, body: bytes, run: SteeredRequest | None
    ) -> web.StreamResponse:
        """Relay a request to a frontend; raises _Unanswered on failure before the reply."""
        assert self._session is not None
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _HOP]
        try:
            answer = await self._session.request(
                request.method, frontend.url + request.raw_path, data=body or None,
                headers=headers, allow_redirects=False,
            )  # fmt: skip
        except (aiohttp.ClientError, OSError) as error:
            raise _Unanswered(str(error) or type(error).__name__) from error
        async with contextlib.aclosing(_Closing(answer)):
            passed = [(k, v) for k, v in answer.headers.items() if k.lower() not in _HOP]
            reply = web.StreamResponse(status=answer.status, headers=passed)
            streams = answer.content_type == "text/event-stream" and answer.status == 200
            await reply.prepare(request)
            async for chunk, _ in answer.content.iter_chunks():
                if run is not None and streams and b"data:" in chunk:
                    run.first_token(self._clock())
                await reply.write(chunk)
            await reply.write_eof()
            return reply


class _Closing:
    """Closes an unfinished answer, so that the frontend stops computing."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def aclose(self) -> None:
        self._answer.close()


def _error(status: int, kind: str, message: str) -> web.Response:
    body = {"message": message, "type": kind, "code": status}
    return web.json_response(body, status=status)


async def serve(switch: Switch, host: str, port: int) -> web.AppRunner:
    """Serve a switch; the caller cleans the runner up. Raises OSError: the address is taken."""
    runner = web.AppRunner(switch.app(), handler_cancellation=True, shutdown_timeout=5.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


async def ticking(steering: Steering, clock: Callable[[], int] = time.monotonic_ns) -> None:
    """Let time pass for the detector, until cancelled: idle fleets come back to rest."""
    while True:
        await asyncio.sleep(0.5)
        steering.parameters(clock())
