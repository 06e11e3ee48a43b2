"""Bodies of requests: read in bounded size and time, never inflated."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from pigou.wire.errors import APIError, bad_request, too_large

_JSON = "application/json"
#: Seconds that a body may take, besides what its size takes at the least rate.
_GRACE_S = 15.0
#: Bytes a second, at least, that a client must send.
_LEAST_RATE = 16 * 1024


async def no_interim_answer(_: web.Request) -> None:
    """Take the place of aiohttp's answer to `Expect`: `read_body` sends it, after the checks."""


async def read_json(request: web.Request, most: int) -> bytes:
    """Return a request's body, which must be declared as JSON.

    Args:
        request: whose body was not read yet.
        most: bytes of the body.

    Raises:
        APIError: 400, it is not declared as JSON; else as `read_body`.
    """
    if request.content_type != _JSON:
        raise APIError(
            400,
            f"Content-Type is {request.content_type[:80]!r}; send application/json.",
            "content-type",
        )
    return await read_body(request, most)


async def read_body(request: web.Request, most: int) -> bytes:
    """Return a request's body.

    Raises:
        APIError: 413 it is too large, 415 it is compressed, 408 it comes too slowly, 417 it has
            an unknown `Expect`, 400 its framing is broken.
    """
    _check_encoding(request)
    length = request.content_length
    if length is not None and length > most:
        raise too_large(most)
    await _expected(request)
    loop = asyncio.get_running_loop()
    start, body = loop.time(), bytearray()
    content = request.content
    while not content.at_eof():
        try:
            async with asyncio.timeout_at(start + _GRACE_S + len(body) / _LEAST_RATE):
                body += await content.readany()
        except TimeoutError:
            raise APIError(
                408,
                f"After {loop.time() - start:.0f} s {len(body)} bytes of the body have come; send "
                f"at least {_LEAST_RATE} bytes a second.",
            ) from None
        except (web.RequestPayloadError, web.PayloadAccessError) as error:
            raise bad_request(f"The body cannot be read: {error}.") from None
        if len(body) > most:
            raise too_large(most)
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


async def _expected(request: web.Request) -> None:
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
