"""An OpenAI endpoint under load: the fields that it takes, a streaming client, its model card."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
import msgspec

from pigou.config import RunError
from pigou.wire.errors import DECODING_ERRORS
from pigou.wire.sse import EventTooLong, Reader
from pigou.workload.prompts import PromptJob
from pigou.workload.token_counter import BrokenStream, Failure, SentRequest, Stream, TokenCounter

# Servers close idle connections (uvicorn after 5 s); a request on one that is just being closed
# would fail through no fault of the endpoint.
_IDLE_SECONDS = 3.0
#: Maximum bytes read of an error's body.
_ERROR_BYTES = 4096
_JSON = {"content-type": "application/json"}
#: Bytes of an answer that is not streamed: the tokens of a text, a list of models, metrics.
MAX_ANSWER = 64 * 2**20
#: Maximum bytes of a stream: a fixed part, and a part for each requested token.
_STREAM_BYTES, _TOKEN_BYTES = 2**20, 2**16
_REFUSED = ("HTTP 400", "HTTP 422")
_CARD_SECONDS = 30.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class ApiFlavour:
    """Request fields beyond model, prompt and stream."""

    continuous: bool = True  # usage on every chunk (vLLM, SGLang, Pigou)
    ignore_eos: bool = True  # continue past the end token (vLLM, SGLang, Pigou)
    temperature: bool = True  # 0, for greedy output
    usage: bool = True  # usage at the end of the stream
    limit: str = "max_tokens"  # name of the output limit's field

    def body(self, model: str, job: PromptJob, *, chat: bool) -> dict[str, Any]:
        """Return the body of a streamed request for the job."""
        body: dict[str, Any] = {"model": model, "stream": True, self.limit: job.output}
        if chat:
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            body["prompt"] = job.prompt
        if self.temperature:
            body["temperature"] = 0
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.usage:
            body["stream_options"] = {"include_usage": True}
            if self.continuous:
                body["stream_options"]["continuous_usage_stats"] = True
        return body

    def simpler(self, refusal: str) -> ApiFlavour | None:
        """Return the flavour without the refused field, else without the rarest."""
        steps: dict[str, tuple[bool, dict[str, Any]]] = {
            "continuous_usage_stats": (self.usage and self.continuous, {"continuous": False}),
            "ignore_eos": (self.ignore_eos, {"ignore_eos": False}),
            "temperature": (self.temperature, {"temperature": False}),
            "stream_options": (self.usage, {"usage": False}),
            "max_tokens": (self.limit == "max_tokens", {"limit": "max_completion_tokens"}),
        }
        possible = {name: changes for name, (present, changes) in steps.items() if present}
        if not possible:
            return None
        named = [name for name in possible if name in refusal]
        changes = possible[named[0] if named else next(iter(possible))]
        return replace(self, **changes)


def open_session(api_key: str = "") -> aiohttp.ClientSession:
    """Return a session without connection limit or timeouts."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
    )


@dataclass(frozen=True)
class EndpointClient:
    """Sends completions to one endpoint."""

    session: aiohttp.ClientSession  # from `open_session`
    base: str  # URL of the endpoint without `/v1`
    model: str  # model name in requests
    flavour: ApiFlavour  # fields the endpoint accepts
    chat: bool = False  # chat completions, not completions
    timeout: float = 600.0  # seconds from sending to the end of the stream

    async def send(self, job: PromptJob, intended: int) -> SentRequest:
        """Send a request meant for `intended` (monotonic ns); failures are returned."""
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


class AnswerTooLong(aiohttp.ClientPayloadError):
    """An answer over the byte limit."""


async def read_answer(reply: aiohttp.ClientResponse, max_bytes: int | None = None) -> bytes:
    """Return an answer's body; raises `AnswerTooLong`, and closes the connection, beyond a size."""
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


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Await the work; cancel it and return None if `stop` is set first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for future in (task, stopped):
            future.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})


def stream_bound(output: int) -> int:
    """Return the maximum bytes of a stream of `output` tokens."""
    return _STREAM_BYTES + _TOKEN_BYTES * max(1, output)


class EndpointError(RunError):
    """The endpoint cannot be loaded as asked; says what it answered."""


@dataclass(frozen=True)
class ModelCard:
    """A served model."""

    id: str
    max_model_len: int | None = None  # prompt and output; None if unknown
    parent: str | None = None  # base model of an adapter; None for a model


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def find_model(session: aiohttp.ClientSession, base: str, name: str) -> ModelCard:
    """Return the card of the named model, or of the first base model; raises EndpointError."""
    reply = await request(session, "GET", f"{base}/v1/models")
    models = decoded(reply, _ModelList)
    cards = models.data if models else []
    if name:
        return next((card for card in cards if card.id == name), ModelCard(name))
    if not cards:
        answer = reply[1][:200].decode(errors="replace")
        raise EndpointError(
            f"{base}/v1/models lists no model ({reply[0]}: {answer}); name one with --model"
        )
    return next((card for card in cards if not card.parent), cards[0])


async def tokenize(
    session: aiohttp.ClientSession, base: str, model: str, text: str
) -> list[int] | None:
    """Return the text's token ids, without special ones; None when the endpoint offers none."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    reply = decoded(await request(session, "POST", f"{base}/tokenize", body), _Tokens)
    return reply.tokens if reply and reply.tokens else None


async def find_flavour(
    client: EndpointClient, probe: PromptJob, ignore_eos: bool | None
) -> ApiFlavour:
    """Return the richest API flavour that the endpoint accepts; raises EndpointError.

    `ignore_eos`: True requires it, None uses it where known, False leaves it out.
    """
    flavour: ApiFlavour | None = ApiFlavour(ignore_eos=ignore_eos is not False)
    first: Failure | None = None
    while flavour is not None:
        speaker = EndpointClient(
            client.session, client.base, client.model, flavour, client.chat, client.timeout
        )
        answer = (await speaker.send(probe, 0)).result
        if not isinstance(answer, Failure) or answer.reason == "no tokens":
            return flavour
        first = first or answer
        if answer.reason not in _REFUSED:
            break
        simpler = flavour.simpler(answer.detail)
        if ignore_eos and simpler and not simpler.ignore_eos:
            raise EndpointError(
                f"{client.base} refuses ignore_eos ({answer.detail}); use --no-ignore-eos"
            )
        flavour = simpler
    assert first is not None
    raise EndpointError(
        f"{client.base} does not answer a small request: {first.reason}: {first.detail}"
    )


async def request(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> tuple[int, bytes]:
    """Return status and body of an answer; raises EndpointError without one."""
    try:
        async with (
            asyncio.timeout(_CARD_SECONDS),
            session.request(method, url, json=body) as reply,
        ):
            return reply.status, await read_answer(reply)
    except (aiohttp.ClientError, OSError) as error:
        raise EndpointError(f"{url} does not answer: {error or type(error).__name__}") from error


def decoded(reply: tuple[int, bytes], kind: type[_T]) -> _T | None:
    """Decode a reply of `request`; None for an error or another type."""
    if reply[0] != 200:
        return None
    try:
        return msgspec.json.decode(reply[1], type=kind)
    except DECODING_ERRORS:
        return None
