"""Bodies of requests and pages: bounded in bytes and time, and in sum by a memory budget."""

from __future__ import annotations

import asyncio
from typing import Self

import aiohttp
from aiohttp import HttpVersion11, web

from pigou.wire.errors import APIError, bad_request, too_large

#: Bytes per holder beyond the budget, so that small replies are served.
FREE_BYTES = 64 * 1024
_SHARE = 0.5
#: Maximum bytes of a worker's page, and of an API server's list.
MAX_PAGE_BYTES, MAX_LIST_BYTES = 2**23, 2**26
_JSON = "application/json"
#: Seconds for a body, plus its size at the minimum rate.
_GRACE_S = 15.0
#: Minimum bytes/s that a client must send.
_MIN_BYTES_PER_S = 16 * 1024


class OverBudget(Exception):
    """A holder wants more than its share of the budget."""


class ByteBudget:
    """Bytes in memory, for all holders in one process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self) -> ByteReservation:
        """Return a reservation of nothing yet."""
        return ByteReservation(self)


class ByteReservation:
    """Reservation of one reply, page or body; a context manager."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.size = 0

    def check(self, size: int) -> None:
        """Raise `OverBudget` unless it may grow by `size` bytes."""
        budget, wanted = self._budget, self.size + size
        free = budget.limit - budget.used
        if wanted > FREE_BYTES and (size > free or wanted > _SHARE * (free + self.size)):
            raise OverBudget(
                f"{wanted} bytes of one, while {budget.used} of {budget.limit} are in use"
            )

    def grow(self, size: int) -> None:
        """Take `size` bytes more. Raises OverBudget: more than its share; nothing was taken."""
        self.check(size)
        self.size += size
        self._budget.used += size

    def shrink(self, size: int) -> None:
        """Give `size` bytes back, as far as it holds them."""
        size = min(size, self.size)
        self.size -= size
        self._budget.used -= size

    def close(self) -> None:
        """Give everything back."""
        self.shrink(self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: Replies, events and pages of other servers, held by this process.
REPLIES = ByteBudget(256 * 2**20)
#: Request bodies held by this process.
BODIES = ByteBudget(512 * 2**20)


async def read_page(response: aiohttp.ClientResponse, max_bytes: int = MAX_PAGE_BYTES) -> bytes:
    """Return the body of another process's page. Raises aiohttp.ClientPayloadError: too large."""
    page, why = bytearray(), ""
    with REPLIES.reserve() as held:
        if (response.content_length or 0) > max_bytes:
            why = f"over {max_bytes} bytes"
        while not why and (part := await response.content.readany()):
            page += part
            try:
                held.grow(len(part))
            except OverBudget as error:
                why = str(error)
            if len(page) > max_bytes:
                why = f"over {max_bytes} bytes"
    if why:
        page.clear()
        response.close()
        raise aiohttp.ClientPayloadError(f"{response.url.path}: {why}")
    return bytes(page)


async def no_interim_answer(_: web.Request) -> None:
    """Take the place of aiohttp's answer to `Expect`: `read_body` sends it, after the checks."""


async def read_json(request: web.Request, max_bytes: int) -> bytes:
    """Return a request's body, which must be declared as JSON; raises as `read_body`."""
    if request.content_type != _JSON:
        raise APIError(
            400,
            f"Content-Type is {request.content_type[:80]!r}; send application/json.",
            "content-type",
        )
    return await read_body(request, max_bytes)


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Return a request's body; raises APIError 400, 408, 413, 415, 417 or 503 (no memory left)."""
    _check_encoding(request)
    length = request.content_length
    if length is not None and length > max_bytes:
        raise too_large(max_bytes)
    await send_continue(request)
    with BODIES.reserve() as held:
        return await _body(request, max_bytes, held)


async def _body(request: web.Request, max_bytes: int, held: ByteReservation) -> bytes:
    loop = asyncio.get_running_loop()
    start, body = loop.time(), bytearray()
    content = request.content
    while not content.at_eof():
        try:
            async with asyncio.timeout_at(start + _GRACE_S + len(body) / _MIN_BYTES_PER_S):
                data = await content.readany()
            held.grow(len(data))
            body += data
        except OverBudget as error:
            raise APIError(
                503, f"The bodies under way leave no room for this one ({error}). Try again later.",
                retry_after=1,
            ) from None  # fmt: skip
        except TimeoutError:
            raise APIError(
                408,
                f"After {loop.time() - start:.0f} s {len(body)} bytes of the body have come; send "
                f"at least {_MIN_BYTES_PER_S} bytes a second.",
            ) from None
        except (web.RequestPayloadError, web.PayloadAccessError) as error:
            raise bad_request(f"The body cannot be read: {error}.") from None
        if len(body) > max_bytes:
            raise too_large(max_bytes)
    return bytes(body)


def _check_encoding(request: web.Request) -> None:
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise APIError(
            415,
            f"Content-Encoding is {coding[:40]!r}; bodies are not unpacked here: send the body as "
            "it is, without this header.",
            "content-encoding",
        )
    transfer = request.headers.get("transfer-encoding", "chunked").strip().lower()
    if transfer != "chunked":
        raise APIError(
            415,
            f"Transfer-Encoding is {transfer[:40]!r}; only chunked is understood.",
            "transfer-encoding",
        )


async def send_continue(request: web.Request) -> None:
    """Answer `Expect: 100-continue`, now that the body is wanted."""
    expected = request.headers.get("expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.strip().lower() != "100-continue":
        raise APIError(
            417, f"Expect is {expected[:40]!r}; only 100-continue is understood.", "expect"
        )
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
