"""Routes of attached servers, by their `/openapi.json` or their 404."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Iterable
from typing import TypeAlias
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web

from pigou.gateway.proxy.upstream import Upstream
from pigou.gateway.request import CHAT, COMPLETIONS
from pigou.wire.errors import APIError, absent_route
from pigou.wire.messages import PATH as MESSAGES

#: Routes of Pigou's own workers that pool hidden states.
POOLED_PATHS = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/rerank", "/v2/rerank", "/score")
#: Routes outside `/v1` that are passed on, too.
ROOT_PATHS = ("/rerank", "/v2/rerank", "/score", "/pooling", "/classify")
#: Routes below `/v1` that the gateway answers itself, with their methods.
_OWN = {COMPLETIONS: "POST", CHAT: "POST", "/v1/models": "GET"}
#: Routes that are translated to chats where not every server has them.
RESPONSES = "/v1/responses"
#: Never passed on: they change a server, or belong to the fleet alone.
_CLOSED = ("kv", "load_lora_adapter", "unload_lora_adapter")
_PATH = re.compile(r"(/[A-Za-z0-9_~:-][A-Za-z0-9._~:-]{0,255}){1,8}")
_TIMEOUT_S = 5.0


#: Paths of a route, and the methods that it takes.
Route: TypeAlias = tuple[re.Pattern[str], set[str]]


class ServerRoutes:
    """Learns each attached server's routes, and forgets them with the server."""

    def __init__(self) -> None:
        self._routes: WeakKeyDictionary[Upstream, list[Route] | None]
        self._routes = WeakKeyDictionary()
        self._lacks: WeakKeyDictionary[Upstream, set[tuple[str, str]]] = WeakKeyDictionary()
        self._learning = asyncio.Lock()

    async def having(self, servers: list[Upstream], method: str, path: str) -> list[Upstream]:
        """Return the servers that have or may have a route; asks new ones."""
        await self._learn(servers)
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

    async def all_list(self, servers: Collection[Upstream], method: str, path: str) -> bool:
        """True if there are servers, all attached, and each one lists the route."""
        if not servers or not all(upstream.engine.stock for upstream in servers):
            return False
        await self._learn(servers)
        return all(
            any(pattern.fullmatch(path) and method in methods for pattern, methods in routes)
            for routes in (self._routes.get(upstream) or () for upstream in servers)
        )

    async def _learn(self, servers: Collection[Upstream]) -> None:
        async with self._learning:  # one at a time: many requests ask for the same page
            new = [upstream for upstream in servers if upstream not in self._routes]
            learnt = await asyncio.gather(*map(_listed_routes, new))
            self._routes.update(zip(new, learnt, strict=True))

    def known(self) -> list[str]:
        """Return attached servers' routes beyond the gateway's own."""
        routes = (_posts(routes or ()) for routes in list(self._routes.values()))
        return sorted(set().union(*routes) - _OWN.keys())

    async def endpoints(self, servers: Collection[Upstream]) -> list[str]:
        """Return the POST paths with a model at these servers; unlisted: the gateway's own."""
        await self._learn([upstream for upstream in servers if upstream.engine.stock])
        listed = (self._routes.get(upstream) for upstream in servers)
        own = {path for path, method in _OWN.items() if method == "POST"}
        posts = set().union(*(own if routes is None else _posts(routes) for routes in listed))
        return sorted(posts | ({RESPONSES, MESSAGES} if CHAT in posts else set()))

    def note_absent(self, upstream: Upstream, method: str, path: str) -> None:
        """Record that a server lacks a route."""
        self._lacks.setdefault(upstream, set()).add((method, _kind(path)))


def check_path(path: str, request: web.Request) -> None:
    """Raise `APIError` 404, or 405 for the gateway's own paths, if not forwarded."""
    own = _OWN.get(path) or ("GET" if path.startswith("/v1/models/") else None)
    if own is not None:
        raise web.HTTPMethodNotAllowed(request.method, [own])
    if not _PATH.fullmatch(path) or path.split("/")[2:3] in [[name] for name in _CLOSED]:
        raise absent_route(request.method, path, ())
    if "upgrade" in request.headers.get("connection", "").lower():
        raise APIError(404, f"{path} is not served over WebSockets here; use POST.", final=True)


def absent_route_here(method: str, path: str, attached: list[str]) -> APIError:
    """Return the error for a route that nobody has."""
    return absent_route(
        method, path, [*_OWN, RESPONSES, MESSAGES, "/tokenize", "/detokenize", *attached[:40]]
    )


def _posts(routes: Iterable[Route]) -> set[str]:
    """Return the POST paths that may be forwarded."""
    paths = {pattern.pattern for pattern, methods in routes if "POST" in methods}
    return {path for path in paths if path in ROOT_PATHS or (
        path.startswith("/v1/") and "[" not in path and path.split("/")[2] not in _CLOSED
    )}  # fmt: skip


async def _listed_routes(upstream: Upstream) -> list[Route] | None:
    """Return the routes in a server's `/openapi.json`; None without one."""
    page = await upstream.page("/openapi.json", _TIMEOUT_S)
    try:
        paths = None if page is None else msgspec.json.decode(page).get("paths")
        if not isinstance(paths, dict):
            return None
        routes = []
        for path, methods in paths.items():
            pattern = "".join(
                "[^/]+" if part.startswith("{") else re.escape(part).replace("\\-", "-")
                for part in re.split(r"(\{[^{}]*\})", str(path))
            )
            routes.append((re.compile(pattern), {str(name).upper() for name in methods}))
    except (ValueError, AttributeError, TypeError, re.error, RecursionError):
        return None
    return routes


def is_absent(status: int, answer: bytes) -> bool:
    """True if a refusal means that the route, not an object, is missing."""
    if status != 404:
        return True
    try:
        body = json.loads(answer)
    except (ValueError, RecursionError):
        return not answer.lstrip().startswith(b"{")  # an object's refusal may be cut off
    return not isinstance(body, dict) or "error" not in body


def _kind(path: str) -> str:
    """Return a path's first parts, which stand for it when a server lacks it."""
    return "/".join(path.split("/")[:4])
