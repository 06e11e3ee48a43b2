"""A page of the API: path, access and handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from pigou.gateway.auth.keys import Key, current_key
from pigou.wire.bodies import no_interim_answer
from pigou.wire.errors import APIError, bad_request

JSON = "application/json"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access(IntEnum):
    """Access to a page."""

    PROBE = 0  # everybody, also over a connection above the cap
    OPEN = 1  # everybody
    KEY = 2  # any key, if the gateway has keys
    ADMIN = 3  # an administrator's key


@dataclass(frozen=True, slots=True)
class APIPage:
    """A route of a module in `pigou.gateway.api`."""

    path: str
    answer: Answer
    access: Access = Access.KEY
    parameters: tuple[str, ...] | None = ()  # query parameters; None for any
    method: str = "GET"
    head: bool = True  # a GET page answers HEAD as well
    late_body: bool = False  # the body is asked for once the head was checked
    is_own: bool = True  # metrics have its path as label; else "other"

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        is_free = self.parameters is None and self.access is not Access.ADMIN
        answer = self.answer if is_free else self._checked
        if self.method == "GET":
            router.add_get(self.path, answer, allow_head=self.head)
        else:
            late = no_interim_answer if self.late_body else None
            router.add_route(self.method, self.path, answer, expect_handler=late)

    async def _checked(self, request: web.Request) -> web.StreamResponse:
        known = self.parameters
        unknown = () if known is None else [name for name in request.query if name not in known]
        if unknown:
            others = f"has {' and '.join(known)} alone" if known else "has none"
            raise bad_request(
                f"The query parameter {unknown[0][:40]!r} is not known: {request.path} {others}.",
                unknown[0][:40],
            )
        if self.access is Access.ADMIN:
            check_admin(current_key())
        return await self.answer(request)


class APIPages(NamedTuple):
    """Pages, background tasks and cleanup of a module of the API."""

    pages: Sequence[APIPage]
    background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = {}  # by task name
    close: Callable[[], Awaitable[None]] | None = None


def check_admin(key: Key) -> None:
    """Raise `APIError` 403 unless the key is an administrator's."""
    if not key.admin:
        raise APIError(
            403,
            "The workers are shown to an administrator's key alone (`pigou key TENANT "
            "--admin` makes one); this key sees /usage and its own /decisions.",
            "authorization",
        )


def seen_tenant() -> str | None:
    """Return the tenant that the current key can see; None for all."""
    key = current_key()
    return None if key.admin else key.tenant


def json_response(value: object, status: int = 200) -> web.Response:
    """Return a response with a value as its JSON body."""
    return web.Response(body=msgspec.json.encode(value), content_type=JSON, status=status)


def number_parameter(request: web.Request, name: str, default: int, largest: int) -> int:
    """Return a numeric query parameter of at least 1; raise `APIError` 400 for others."""
    text = request.query.get(name, str(default))
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= value <= largest:
        raise bad_request(
            f"{name} is {text[:40]!r}; it must be a number from 1 to {largest}.", name
        )
    return value
