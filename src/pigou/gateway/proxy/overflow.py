"""Overflow: sends requests of a full model to another model or fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import msgspec
from aiohttp import web

from pigou.control.messages import Choice
from pigou.gateway.config import Overflow
from pigou.gateway.request import GatewayRun
from pigou.wire.errors import APIError
from pigou.wire.json_limits import read_fields
from pigou.wire.openai_requests import without_bom
from pigou.wire.request_validation import REQUEST_ID_HEADER

#: Header of what overflowed: the model that was asked for. It does not overflow again.
OVERFLOW_HEADER = "x-pigou-overflow"
#: Seconds for a connection to another fleet.
_CONNECT_S = 5.0
_REPLY_HEADERS = ("content-type", "cache-control", "retry-after")


async def unless_full(
    run: GatewayRun, price_s: float, serve: Callable[[], Awaitable[web.StreamResponse]]
) -> web.StreamResponse | None:
    """Serve a request; return None without a route within `price_s` seconds."""
    limit = asyncio.timeout(price_s)

    def routed(_: Choice) -> None:
        if not limit.expired():
            limit.reschedule(None)

    run.on_route = routed
    try:
        async with limit:
            return await serve()
    except TimeoutError:
        if not limit.expired():
            raise
    except APIError as error:
        if error.status != 503:
            raise
    return None


def with_fields(data: bytes, fields: Mapping[str, str]) -> bytes:
    """Return a body with these fields; run it on a thread for a large one (`SMALL`)."""
    body = read_fields(without_bom(data))
    body |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    return msgspec.json.encode(body)


class OtherFleets:
    """Forwards requests to other fleets over persistent connections."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def forward(
        self, request: web.Request, data: bytes, run: GatewayRun, overflow: Overflow
    ) -> web.StreamResponse:
        """Pass a request on, and its answer back; raise `APIError` 503 without an answer."""
        model = run.parsed.fields.model or ""
        headers = {"content-type": "application/json", OVERFLOW_HEADER: model}
        headers[REQUEST_ID_HEADER] = run.parsed.wire_id
        if run.trace is None:
            headers |= run.trace_headers
        else:
            headers |= run.trace.context.header_map(run.trace.leg_id)
        if overflow.key:
            headers["authorization"] = f"Bearer {overflow.key}"
        url = overflow.to.rstrip("/").removesuffix("/v1") + request.path
        out: web.StreamResponse | None = None
        try:
            async with self._connections().post(url, data=data, headers=headers) as reply:
                sent = {name: reply.headers[name] for name in _REPLY_HEADERS
                        if name in reply.headers}  # fmt: skip
                sent |= {OVERFLOW_HEADER: model}
                out = web.StreamResponse(status=reply.status, headers=sent)
                await out.prepare(request)
                async for part in reply.content.iter_any():
                    await out.write(part)
        except (aiohttp.ClientError, TimeoutError) as error:
            if out is not None:
                raise ConnectionResetError(f"{url} broke off: {error}") from error
            raise APIError(
                503,
                f"The model `{model}` has no worker free, and {overflow.to}, where its requests "
                f"overflow to, cannot be reached ({type(error).__name__}).",
                retry_after=1,
            ) from error
        await out.write_eof()
        return out

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout
            )
        return self._session
