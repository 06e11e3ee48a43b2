"""Bodies of an endpoint's answers, read within bounds."""

from __future__ import annotations

import aiohttp

#: Bytes of an answer that is not streamed: the tokens of a text, a list of models, metrics.
MAX_ANSWER = 64 * 2**20
#: Bytes of a stream: a part for each token that was asked for, and what is told besides.
_STREAM_BYTES, _TOKEN_BYTES = 2**20, 2**16


class AnswerTooLong(aiohttp.ClientPayloadError):
    """An answer that has more bytes than are read."""


async def read_answer(reply: aiohttp.ClientResponse, most: int | None = None) -> bytes:
    """Return an answer's body.

    Args:
        reply: whose body was not read yet.
        most: bytes of it; `MAX_ANSWER` by default.

    Raises:
        AnswerTooLong: it has more bytes; its connection is closed.
    """
    most = MAX_ANSWER if most is None else most
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > most:
            reply.close()
            raise AnswerTooLong(f"the answer has over {most} bytes")
    return bytes(body)


async def read_start(reply: aiohttp.ClientResponse, most: int) -> bytes:
    """Return at most `most` bytes of an answer's body, and leave the rest."""
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) >= most:
            reply.close()
            break
    return bytes(body[:most])


def stream_bound(output: int) -> int:
    """Return the bytes that a stream of so many tokens may have."""
    return _STREAM_BYTES + _TOKEN_BYTES * max(1, output)
