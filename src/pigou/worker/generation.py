"""HTTP handlers of completions and chats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from pigou.logs import accessed, describe_access, note_request, traced
from pigou.request import SECOND
from pigou.tracing.request_trace import RequestTrace
from pigou.tracing.tracer import Tracer
from pigou.wire.bodies import FairThreadPool, read_json
from pigou.wire.connections import (
    is_reserved,
    mark_event_stream,
    note_reply_id,
    too_many_connections,
)
from pigou.wire.errors import APIError, http_error, too_large
from pigou.wire.json_limits import SMALL, read_fields
from pigou.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    Known,
    UnknownFields,
    known_chat,
    known_completion,
    without_bom,
)
from pigou.wire.request_validation import REQUEST_ID_HEADER, request_id
from pigou.wire.sse import DONE, frame
from pigou.worker.engine_client import EngineClient
from pigou.worker.fleet_auth import fleet_tenant
from pigou.worker.input_processor import InputProcessor
from pigou.worker.reply import Reply
from pigou.worker.reply_spans import NOT_TRACED, TracedReply, UntracedReply

log = logging.getLogger(__name__)

#: What is answered also over connections above the cap.
_PROBES = ("/health", "/ping", "/metrics")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_R = TypeVar("_R", CompletionRequest, ChatRequest)


class Generation:
    """`POST /v1/completions` and `POST /v1/chat/completions`."""

    def __init__(
        self,
        intake: InputProcessor,
        service: EngineClient,
        bodies: Bodies,
        unknown: UnknownFields,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._intake = intake
        self._service = service
        self._bodies = bodies
        self._unknown = unknown

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete a prompt, or several."""
        return await self._generate(request, known_completion, self._intake.completion)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat."""
        return await self._generate(request, known_chat, self._intake.chat)

    async def _generate(
        self,
        request: web.Request,
        decode: Callable[[bytes], Known[_R]],
        begin: Callable[[_R, str, str, RequestTrace | None], Awaitable[Reply]],
    ) -> web.StreamResponse:
        with self._tracing(request) as spans:
            known = await self._bodies.read(request, decode)
            headers = self._unknown.judge(known.unknown)
            id = _id(request, known.request.request_id)
            spans.phase("receive")
            reply = await begin(known.request, id, fleet_tenant(), spans.trace)
            spans.take(reply)
            return await self._send(request, reply, headers, spans.trace_id)

    def _tracing(self, request: web.Request) -> UntracedReply:
        tracer = self._tracer
        return NOT_TRACED if tracer is None else TracedReply(tracer, tracer.begin(request.headers))

    async def _send(
        self, request: web.Request, reply: Reply, headers: dict[str, str], trace_id: str
    ) -> web.StreamResponse:
        note_request(reply.id, trace_id)
        try:
            with traced(reply.id, trace_id):
                if reply.options.stream:
                    return await self._stream(request, reply, headers)
                while not reply.done:
                    await reply.wait()
            if (failure := reply.failure()) is not None:
                raise failure
            return web.Response(body=reply.body(), content_type="application/json", headers=headers)
        finally:
            # Also when the client went away: its requests are computed no further.
            self._service.cancel(reply)
            _describe(reply, trace_id)

    async def _stream(
        self, request: web.Request, reply: Reply, headers: dict[str, str]
    ) -> web.StreamResponse:
        await reply.wait()
        if (failure := reply.failure()) is not None:
            raise failure  # before the first byte it can still have a status
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        mark_event_stream(request)
        await response.prepare(request)
        data = reply.opening()
        while True:
            ended, error = reply.done, reply.failure()
            data += reply.take_frames()
            if error is not None:
                await response.write(data + frame(error.body()) + DONE)
                break
            if ended:
                await response.write(data + reply.closing())
                break
            if data:
                await response.write(data)
            data = b""
            await reply.wait()
        await response.write_eof()
        return response


def _describe(reply: Reply, trace_id: str) -> None:
    sequences = reply.sequences
    leaders = sequences[:: reply.options.per_prompt]
    first = min((sequence.first for sequence in sequences if sequence.first), default=0)
    began = min((sequence.arrival for sequence in sequences), default=0)
    describe_access(
        request_id=reply.id,
        trace_id=trace_id or None,
        model=reply.model,
        stream=reply.options.stream,
        prompt_tokens=sum(len(sequence.prompt) for sequence in leaders),
        completion_tokens=sum(len(sequence.choice.tokens) for sequence in sequences),
        ttft_s=round((first - began) / SECOND, 6) if first else None,
    )


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into an error body, and log the access."""
    note_request()  # the task may have served another one before
    with accessed(request.method, request.path) as fields:
        response = await _answered(request, handler)
        fields["status"] = response.status
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if is_reserved(request) and request.path not in _PROBES:
            raise too_many_connections()
        response = await handler(request)
    except APIError as error:
        response = _error(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = _error(_explain(error, request))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client went away
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        response = _error(APIError(500, "The server failed on this request; its log says how."))
    return response


def _explain(error: web.HTTPException, request: web.Request) -> APIError:
    if error.status == 413:
        return too_large(request.client_max_size)
    return http_error(error.status, request.method, request.path, error.reason)


def _error(error: APIError) -> web.Response:
    response = web.Response(status=error.status, body=error.body(), content_type="application/json")
    response.headers.update(error.headers)
    return response


def _id(request: web.Request, body: str | None) -> str:
    id = request_id(request.headers.get(REQUEST_ID_HEADER), body)
    note_reply_id(request, id)
    return id


_B = TypeVar("_B")
#: Large bodies of one tenant that may wait for a thread.
_MAX_WAITING = 1024


class Bodies:
    """Reads and decodes bodies within bounds."""

    def __init__(self, max_bytes: int, context: int) -> None:
        self._max_bytes = max_bytes
        self._context = context
        self._large = FairThreadPool(max_waiting=_MAX_WAITING)

    async def read(self, request: web.Request, decode: Callable[[bytes], _B]) -> _B:
        """Return what `decode` makes of a request's body, which must be declared as JSON.

        Raises:
            APIError: as `pigou.wire.bodies.read_json`; 400 for a body out of bounds. Whatever
                `decode` raises.
        """
        data = await read_json(request, self._max_bytes)
        if len(data) <= SMALL:
            return self._decode(data, decode)
        return await self._large.run(fleet_tenant(), lambda: self._decode(data, decode))

    def close(self) -> None:
        """End the threads."""
        self._large.close()

    def _decode(self, data: bytes, decode: Callable[[bytes], _B]) -> _B:
        data = without_bom(data)
        read_fields(data, self._context)
        return decode(data)
