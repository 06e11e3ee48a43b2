"""Which routes attached servers have, by their `/openapi.json` or their 404."""

from __future__ import annotations

import asyncio
import json
import re
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
from aiohttp import web

from pigou.gateway.gateway_request import CHAT, COMPLETIONS
from pigou.gateway.upstream import Upstream
from pigou.wire.errors import APIError, absent_route

#: Routes outside `/v1` that are passed on, too.
ROOT_PATHS = ("/rerank", "/v2/rerank", "/score", "/pooling", "/classify")
#: What the gateway answers itself below `/v1`, with the methods that it takes.
_OWN = {COMPLETIONS: "POST", CHAT: "POST", "/v1/models": "GET"}
#: Never passed on: they change a server, or belong to the fleet alone.
_CLOSED = ("kv", "load_lora_adapter", "unload_lora_adapter")
_PATH = re.compile(r"(/[A-Za-z0-9_~:-][A-Za-z0-9._~:-]{0,255}){1,8}")
_TIMEOUT_S = 5.0


class ServerRoutes:
    """Learns the routes of each attached server, and forgets them with the server."""

    def __init__(self) -> None:
        """Begin without knowledge."""
        self._routes: WeakKeyDictionary[Upstream, list[tuple[re.Pattern[str], set[str]]] | None]
        self._routes = WeakKeyDictionary()
        self._lacks: WeakKeyDictionary[Upstream, set[tuple[str, str]]] = WeakKeyDictionary()
        self._learning = asyncio.Lock()

    async def having(self, servers: list[Upstream], method: str, path: str) -> list[Upstream]:
        """Return the servers that have a route, or may have it; asks those that are new."""
        async with self._learning:  # one at a time: many requests ask for the same page
            for upstream in servers:
                if upstream not in self._routes:
                    self._routes[upstream] = await _listed_routes(upstream)
        having = []
        for upstream in servers:
            routes = self._routes.get(upstream)
            lacks = self._lacks.get(upstream, ())
            listed = routes is None or any(
                pattern.fullmatch(path) and method in methods for pattern, methods in routes
            )
            if listed and (method, _kind(path)) not in lacks:
                having.append(upstream)
        return having

    def known(self) -> list[str]:
        """Return what attached servers have beside the gateway's own routes."""
        listed = [route for routes in list(self._routes.values()) for route in routes or ()]
        paths = {pattern.pattern for pattern, methods in listed if "POST" in methods}
        return sorted(path for path in paths if path.startswith("/v1/") and path not in _OWN
                      and "[" not in path and path.split("/")[2] not in _CLOSED)  # fmt: skip

    def note_absent(self, upstream: Upstream, method: str, path: str) -> None:
        """Note that a server answered that it has no such route."""
        self._lacks.setdefault(upstream, set()).add((method, _kind(path)))


def check_path(path: str, request: web.Request) -> None:
    """Refuse a path that is not passed on.

    Raises:
        APIError: 404. web.HTTPMethodNotAllowed: the path is the gateway's own.
    """
    own = _OWN.get(path) or ("GET" if path.startswith("/v1/models/") else None)
    if own is not None:
        raise web.HTTPMethodNotAllowed(request.method, [own])
    if not _PATH.fullmatch(path) or path.split("/")[2:3] in [[name] for name in _CLOSED]:
        raise absent_route(request.method, path, ())
    if "upgrade" in request.headers.get("connection", "").lower():
        raise APIError(404, f"{path} is not served over WebSockets here; use POST.", final=True)


def absent_route_here(method: str, path: str, attached: list[str]) -> APIError:
    """Return the error for a route that neither the gateway nor an attached server has."""
    return absent_route(method, path, [*_OWN, "/tokenize", "/detokenize", *attached[:40]])


async def _listed_routes(upstream: Upstream) -> list[tuple[re.Pattern[str], set[str]]] | None:
    """Return what a server's `/openapi.json` lists; None where it does not say."""
    try:
        status, page = await upstream.get("/openapi.json", _TIMEOUT_S)
        paths = msgspec.json.decode(page).get("paths") if status == 200 else None
        if not isinstance(paths, dict):
            return None
        routes = []
        for path, methods in paths.items():
            pattern = "".join(
                "[^/]+" if part.startswith("{") else re.escape(part).replace("\\-", "-")
                for part in re.split(r"(\{[^{}]*\})", str(path))
            )
            routes.append((re.compile(pattern), {str(name).upper() for name in methods}))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, AttributeError, TypeError,
            re.error, RecursionError):  # fmt: skip
        return None
    return routes


def is_absent(status: int, answer: bytes) -> bool:
    """Whether a refusal means that the route is not there, and not that an object is not."""
    if status != 404:
        return True
    try:
        body = json.loads(answer)
    except (ValueError, RecursionError):
        return True
    return not isinstance(body, dict) or "error" not in body


def _kind(path: str) -> str:
    """Return what stands for a path where a server lacks it: its first parts."""
    return "/".join(path.split("/")[:4])
