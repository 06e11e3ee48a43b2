"""A streaming client of an OpenAI endpoint that notes when each token arrived."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import msgspec

from pigou.wire.sse import EventTooLong, Reader
from pigou.workload.bounded import read_start, stream_bound
from pigou.workload.dialect import Dialect
from pigou.workload.outcome import Failure, Outcome, Stream
from pigou.workload.prompts import Job
from pigou.workload.tally import Broken, Tally

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
class Client:
    """Sends completions to one endpoint.

    Attributes:
        session: what `open_session` gave.
        base: URL of the endpoint without `/v1`.
        model: name to ask for.
        dialect: fields that the endpoint takes.
        chat: chat completions, not completions.
        timeout: seconds from sending to the end of the stream.
    """

    session: aiohttp.ClientSession
    base: str
    model: str
    dialect: Dialect
    chat: bool = False
    timeout: float = 600.0

    async def send(self, job: Job, intended: int) -> Outcome:
        """Send one request now and follow its stream to the end; failures are returned.

        Args:
            job: what to ask for.
            intended: when it was meant to be sent, on the clock of `time.monotonic_ns`.
        """
        body = msgspec.json.encode(self.dialect.body(self.model, job, chat=self.chat))
        sent = time.monotonic_ns()
        result: Stream | Failure
        try:
            async with asyncio.timeout(self.timeout):
                result = await self._stream(body, stream_bound(job.output))
        except Broken as broken:
            result = broken.failure
        except TimeoutError:
            result = Failure("timeout", f"no end within {self.timeout:g} s")
        return Outcome(intended, sent, job.output, result)

    async def _stream(self, body: bytes, most: int) -> Stream:
        """Send a body; return the stream that comes, of at most `most` bytes."""
        path = "chat/completions" if self.chat else "completions"
        tally, reader, answered = Tally(), Reader(), False
        try:
            async with self.session.post(
                f"{self.base}/v1/{path}", data=body, headers=_JSON
            ) as reply:
                answered = True
                await _check(reply)
                async for data in reply.content.iter_any():
                    now = time.monotonic_ns()
                    most -= len(data)
                    if most < 0:
                        raise Broken("endless stream", "it has 64 KiB for each token asked")
                    for payload in reader.feed(data):
                        tally.feed(payload, now)
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise Broken(
                "connection refused" if refused else "cannot connect", str(error)
            ) from error
        except EventTooLong as error:
            raise Broken("endless stream", str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            reason = "broken stream" if answered else "disconnected"
            raise Broken(reason, str(error) or type(error).__name__) from error
        return tally.close()


async def _check(reply: aiohttp.ClientResponse) -> None:
    if reply.status != 200:
        start = await read_start(reply, _ERROR_BYTES)
        raise Broken(f"HTTP {reply.status}", start.decode(errors="replace")[:500])
    if reply.content_type != "text/event-stream":
        raise Broken("no stream", f"the answer is {reply.content_type}, not text/event-stream")
