"""A streaming client of an OpenAI endpoint that notes when each token arrived."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import msgspec

from pigou.wire.sse import EventTooLong, Reader
from pigou.workload.api_flavour import ApiFlavour
from pigou.workload.prompts import PromptJob
from pigou.workload.request_outcome import Failure, SentRequest, Stream
from pigou.workload.token_counter import BrokenStream, TokenCounter

# Servers close idle connections (uvicorn after 5 s); a request on one that is just being closed
# would fail through no fault of the endpoint.
_IDLE_SECONDS = 3.0
#: Bytes of an error's body that are read.
_ERROR_BYTES = 4096
_JSON = {"content-type": "application/json"}


def open_session(api_key: str = "") -> aiohttp.ClientSession:
    """Return a session without any limit of connections and without timeouts of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
    )


@dataclass(frozen=True)
class EndpointClient:
    """Sends completions to one endpoint."""

    session: aiohttp.ClientSession  # what `open_session` gave
    base: str  # URL of the endpoint without `/v1`
    model: str  # name to ask for
    flavour: ApiFlavour  # fields that the endpoint takes
    chat: bool = False  # chat completions, not completions
    timeout: float = 600.0  # seconds from sending to the end of the stream

    async def send(self, job: PromptJob, intended: int) -> SentRequest:
        """Send one request now and follow its stream to the end; failures are returned.

        Args:
            intended: when it was meant to be sent, on the clock of `time.monotonic_ns`.
        """
        body = msgspec.json.encode(self.flavour.body(self.model, job, chat=self.chat))
        sent = time.monotonic_ns()
        result: Stream | Failure
        try:
            async with asyncio.timeout(self.timeout):
                result = await self._stream(body, stream_bound(job.output))
        except BrokenStream as broken:
            result = broken.failure
        except TimeoutError:
            result = Failure("timeout", f"no end within {self.timeout:g} s")
        return SentRequest(intended, sent, job.output, result)

    async def _stream(self, body: bytes, bytes_left: int) -> Stream:
        """Send a body; return the stream that comes, of at most `bytes_left` bytes."""
        path = "chat/completions" if self.chat else "completions"
        counter, reader, answered = TokenCounter(), Reader(), False
        try:
            async with self.session.post(
                f"{self.base}/v1/{path}", data=body, headers=_JSON
            ) as reply:
                answered = True
                await _check(reply)
                async for data in reply.content.iter_any():
                    now = time.monotonic_ns()
                    bytes_left -= len(data)
                    if bytes_left < 0:
                        raise BrokenStream("endless stream", "it has 64 KiB for each token asked")
                    for payload in reader.feed(data):
                        counter.feed(payload, now)
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise BrokenStream(
                "connection refused" if refused else "cannot connect", str(error)
            ) from error
        except EventTooLong as error:
            raise BrokenStream("endless stream", str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            reason = "broken stream" if answered else "disconnected"
            raise BrokenStream(reason, str(error) or type(error).__name__) from error
        return counter.close()


async def _check(reply: aiohttp.ClientResponse) -> None:
    if reply.status != 200:
        start = await read_start(reply, _ERROR_BYTES)
        raise BrokenStream(f"HTTP {reply.status}", start.decode(errors="replace")[:500])
    if reply.content_type != "text/event-stream":
        raise BrokenStream(
            "no stream", f"the answer is {reply.content_type}, not text/event-stream"
        )


#: Bytes of an answer that is not streamed: the tokens of a text, a list of models, metrics.
MAX_ANSWER = 64 * 2**20
#: Bytes of a stream: a part for each token that was asked for, and what is told besides.
_STREAM_BYTES, _TOKEN_BYTES = 2**20, 2**16


class AnswerTooLong(aiohttp.ClientPayloadError):
    """An answer that has more bytes than are read."""


async def read_answer(reply: aiohttp.ClientResponse, max_bytes: int | None = None) -> bytes:
    """Return an answer's body.

    Raises:
        AnswerTooLong: it has more bytes; its connection is closed.
    """
    max_bytes = MAX_ANSWER if max_bytes is None else max_bytes
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > max_bytes:
            reply.close()
            raise AnswerTooLong(f"the answer has over {max_bytes} bytes")
    return bytes(body)


async def read_start(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return at most `max_bytes` bytes of an answer's body, and leave the rest."""
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) >= max_bytes:
            reply.close()
            break
    return bytes(body[:max_bytes])


def stream_bound(output: int) -> int:
    """Return the bytes that a stream of so many tokens may have."""
    return _STREAM_BYTES + _TOKEN_BYTES * max(1, output)
