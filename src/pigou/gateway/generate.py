"""Serves generation requests: one life for each of a request's sequences."""

from __future__ import annotations

import time

import msgspec

from pigou.gateway import sequences
from pigou.gateway.call import Call
from pigou.gateway.failure import WorkerFailed
from pigou.gateway.metrics import Metrics
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.regular import whole, with_cached_tokens
from pigou.gateway.request_driver import RequestDriver
from pigou.gateway.sse_relay import Relay
from pigou.gateway.sse_writer import SSEWriter
from pigou.gateway.stream_driver import StreamDriver
from pigou.lifecycle.messages import LifecycleEvent, StartDecode, StreamFinished
from pigou.request import SECOND
from pigou.wire.openai_requests import without_bom


class Generator:
    """Serves generation requests over the fleet."""

    def __init__(self, plane_driver: PlaneDriver, metrics: Metrics) -> None:
        self._plane_driver = plane_driver
        self._metrics = metrics

    async def whole(self, call: Call) -> bytes:
        """Return the JSON body of a reply that is not streamed.

        Raises:
            APIError: no worker could serve it. Rejected: a worker refused it.
        """
        if sequences.splits(call):
            reply = await sequences.whole(self._plane_driver, call, self._whole)
        else:
            reply = await self._whole(call)
        self._metrics.duration.observe((time.monotonic_ns() - call.arrival) / SECOND)
        return reply

    async def _whole(self, call: Call) -> bytes:
        """Return the reply of one sequence, or of several that are not to be split."""
        return await ReplyDriver(self._plane_driver, self._metrics, Relay(call)).run()

    async def stream(self, call: Call, writer: SSEWriter) -> None:
        """Stream a reply to `outlet`.

        Raises:
            APIError, Rejected: as `whole`; when something was written before, the caller ends the
                stream with an error event.
        """
        if sequences.splits(call):
            await sequences.stream(self._plane_driver, call, writer, self._stream)
        else:
            await self._stream(call, writer)
        self._metrics.duration.observe((time.monotonic_ns() - call.arrival) / SECOND)

    async def _stream(self, call: Call, writer: SSEWriter) -> None:
        """Stream one sequence, or several that are not to be split."""
        relay = Relay(call)
        self._plane_driver.watch(relay)
        try:
            await StreamDriver(self._plane_driver, self._metrics, relay, writer).run()
        finally:
            prompt_tokens = relay.state.prompt_tokens
            self._metrics.generation_tokens.labels(call.tenant).inc(relay.counted)
            self._metrics.prompt_tokens.labels(call.tenant).inc(prompt_tokens)
            call.stats.add(prompt_tokens, relay.counted)


class ReplyDriver(RequestDriver):
    """Serves a request whose reply comes in one piece."""

    async def _decode(self, step: StartDecode) -> LifecycleEvent:
        call, decode = self.call, self._upstream(step.worker)
        body = self._decode_body(decode.engine)
        with decode.busy():
            reply = await decode.whole(self._path, body, call.wire_id, call.tenant)
        try:
            read = whole(without_bom(reply))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise decode.broke("garbage", error) from error
        if any(choice.finish_reason in ("abort", "error") for choice in read.choices):
            worker = decode.worker.id
            raise WorkerFailed("abort", f"{worker} gave the request up", frozenset({worker}))
        if read.usage is not None:
            tokens = read.usage.completion_tokens
            decode.tokens += tokens
            self._plane_driver.on_tokens(((call.id, tokens),))
            self._metrics.generation_tokens.labels(call.tenant).inc(tokens)
            self._metrics.prompt_tokens.labels(call.tenant).inc(read.usage.prompt_tokens)
            call.stats.add(read.usage.prompt_tokens, tokens)
        self._reply = reply if call.cached is None else with_cached_tokens(reply, call.cached)
        return StreamFinished(step.leg)
