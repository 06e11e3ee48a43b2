"""Serves generation requests: one life for each of a request's sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress

import msgspec

from pigou.control.messages import Route
from pigou.gateway import sequences
from pigou.gateway.failure import WorkerFailed
from pigou.gateway.gateway_request import GatewayRequest
from pigou.gateway.http_connection import HTTPConnection, HTTPConnectionError
from pigou.gateway.metrics import Metrics
from pigou.gateway.migration import attempt_body, closing_frames, length_frame
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.reply_parsing import whole, with_cached_tokens
from pigou.gateway.request_driver import RequestDriver
from pigou.gateway.sse_relay import Relay, TooManyTokens
from pigou.gateway.sse_writer import SSEWriter
from pigou.gateway.upstream import Upstream
from pigou.lifecycle.messages import (
    CompleteStream,
    LifecycleEvent,
    StartDecode,
    StreamBegan,
    StreamFinished,
    SubmitRequest,
    TokensDropped,
)
from pigou.lifecycle.migration import can_migrate
from pigou.request import SECOND
from pigou.wire.errors import APIError
from pigou.wire.openai_requests import without_bom


class Generator:
    """Serves generation requests over the fleet."""

    def __init__(self, plane_driver: PlaneDriver, metrics: Metrics) -> None:
        self._plane_driver = plane_driver
        self._metrics = metrics

    async def whole(self, call: GatewayRequest) -> bytes:
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

    async def _whole(self, call: GatewayRequest) -> bytes:
        """Return the reply of one sequence, or of several that are not to be split."""
        return await ReplyDriver(self._plane_driver, self._metrics, Relay(call)).run()

    async def stream(self, call: GatewayRequest, writer: SSEWriter) -> None:
        """Stream a reply to `writer`.

        Raises:
            APIError, Rejected: as `whole`; when something was written before, the caller ends the
                stream with an error event.
        """
        if sequences.splits(call):
            await sequences.stream(self._plane_driver, call, writer, self._stream)
        else:
            await self._stream(call, writer)
        self._metrics.duration.observe((time.monotonic_ns() - call.arrival) / SECOND)

    async def _stream(self, call: GatewayRequest, writer: SSEWriter) -> None:
        """Stream one sequence, or several that are not to be split."""
        relay = Relay(call)
        if call.metered is not None:
            call.metered.relays.append(relay)
        self._plane_driver.watch(relay)
        try:
            await StreamDriver(self._plane_driver, self._metrics, relay, writer).run()
        finally:
            prompt_tokens = relay.state.prompt_tokens
            self._metrics.generation_tokens.labels(call.tenant).inc(relay.counted)
            self._metrics.prompt_tokens.labels(call.tenant).inc(prompt_tokens)
            call.stats.add(prompt_tokens, relay.counted)
            if call.trace is not None and relay.state.finish:
                call.stats.finish_reasons += (relay.state.finish,)


class ReplyDriver(RequestDriver):
    """Serves a request whose reply comes in one piece."""

    async def _decode(self, step: StartDecode) -> LifecycleEvent:
        call, decode = self.call, self._upstream(step.worker)
        body = self._decode_body(decode.engine)
        with decode.busy(), decode.in_one_piece():
            reply = await decode.whole(
                self._path, body, call.wire_id, call.tenant, call.outgoing, held=call.reply_bytes
            )
        try:
            read = whole(without_bom(reply))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            call.reply_bytes.shrink(len(reply))
            del reply  # the error's frames would keep it
            raise decode.broke("garbage", error) from None
        tokens = 0 if read.usage is None else read.usage.completion_tokens
        if call.token_limit and tokens > call.token_limit:
            raise decode.broke("garbage", TooManyTokens(call.token_limit))
        if any(choice.finish_reason in ("abort", "error") for choice in read.choices):
            worker = decode.worker.id
            raise WorkerFailed("abort", f"{worker} gave the request up", frozenset({worker}))
        self._meter_prompt()
        if call.trace is not None:
            reasons = (choice.finish_reason or "" for choice in read.choices)
            call.stats.finish_reasons += tuple(filter(None, reasons))
        if read.usage is not None:
            decode.tokens += tokens
            self._plane_driver.on_tokens(((call.id, tokens),))
            self._metrics.generation_tokens.labels(call.tenant).inc(tokens)
            self._metrics.prompt_tokens.labels(call.tenant).inc(read.usage.prompt_tokens)
            call.stats.add(read.usage.prompt_tokens, tokens)
        self._reply = reply if call.cached is None else with_cached_tokens(reply, call.cached)
        return StreamFinished(step.leg)


_END_S = 1.0
#: A write that takes longer waited for the client.
_BLOCKED_NS = 10_000_000


class StreamDriver(RequestDriver):
    """Serves a request whose reply is streamed."""

    def __init__(
        self, plane_driver: PlaneDriver, metrics: Metrics, relay: Relay, writer: SSEWriter
    ) -> None:
        super().__init__(plane_driver, metrics, relay)
        self._writer = writer
        self._worker: Upstream | None = None
        self._mapped = False

    async def _prepare(self, step: SubmitRequest, route: Route) -> LifecycleEvent:
        call, state = self.call, self.relay.state
        self._worker = decode = self._upstream(route.choice.decode)
        engine = decode.engine
        if not can_migrate(state, single=call.single, portable=call.portable, stock=engine.stock):
            raise APIError(
                502,
                f"The worker of this stream failed ({self._failure}), and the stream cannot go on "
                "elsewhere: it has several choices, tokens whose ids no worker told, or depends on "
                "state that a stock worker does not resume.",
            )
        if engine.stock and (dropped := state.drop_unshown()):
            self.life.take(TokensDropped(dropped), time.monotonic_ns())
        sent = attempt_body(
            call, state, stock=engine.stock, seed=_seed(call),
            max_model_len=engine.max_model_len, dynamo=engine.dynamo,
        )  # fmt: skip
        if sent.body.get("max_tokens") == 0:
            await self._writer.write(length_frame(call, state) + closing_frames(call, state))
            return StreamFinished(step.leg)
        self._path, self._mapped = sent.path, sent.mapped
        self._set_body(sent.body)
        return route

    async def _decode(self, step: StartDecode) -> LifecycleEvent:
        call, decode = self.call, self._worker
        assert decode is not None
        body = self._decode_body(decode.engine)
        self.relay.begin(stock=decode.engine.stock, mapped=self._mapped)
        with decode.busy():
            async with decode.stream(
                self._path, body, call.wire_id, call.tenant, call.outgoing
            ) as connection:
                await self._pump(step, decode, connection)
        return StreamFinished(step.leg)

    async def _complete(self, step: CompleteStream) -> LifecycleEvent:
        self._count_move(self._failure.reason)
        await self._writer.write(closing_frames(self.call, self.relay.state))
        return StreamFinished(step.leg)

    async def _pump(self, step: StartDecode, decode: Upstream, connection: HTTPConnection) -> None:
        """Pass the worker's bytes on until the stream is done.

        Once the client has the head of its response, chunks pass within the call that receives
        them (`take`); the task only wakes when the client is slow, or at the end.
        """
        relay, writer, state = self.relay, self._writer, self.relay.state
        last_ns = read_ns = 0
        itl, stall = self._metrics.itl.observe, self._metrics.stages.gap

        def feed(data: bytes) -> bytes:
            nonlocal last_ns
            before = relay.counted
            decode.bytes_read += len(data)
            out = relay.feed(data)
            now_ns = time.monotonic_ns()
            count = relay.counted - before
            if count:
                decode.tokens += count
                if last_ns:
                    gap_s = (now_ns - last_ns) / count / SECOND
                    itl(gap_s, count)
                    stalled = stall(gap_s, blocked=read_ns > last_ns)
                    if stalled and (trace := self.call.trace) is not None:
                        trace.event("engine stall", last_ns, (("pigou.gap_s",), (gap_s,)))
                elif before == 0:
                    self._first_token(step)
                last_ns = relay.last_token_ns = now_ns
            elif out and relay.started:  # of a server that tells no token ids
                self._meter_prompt()
            return out

        def take(data: bytes) -> bool:
            out = feed(data)
            room = not out or writer.push(out)
            return room and relay.failed is None and not state.done

        while True:
            try:
                data = await connection.read(take if writer.fast else None)
            except HTTPConnectionError as error:
                raise decode.broke("broke", error) from error
            if data:
                out = feed(data)
                if out:
                    read_ns = await _written(decode, writer.write(out)) or read_ns
            if relay.failed is not None:
                if isinstance(relay.failed, WorkerFailed):
                    relay.failed.workers = frozenset({decode.worker.id})
                    relay.failed.fate = decode.fate
                raise relay.failed
            if state.done:
                await _to_end(connection)
                return
            if data == b"" and (out := relay.end()):
                await writer.write(out)
                return
            if data == b"":
                raise decode.broke("broke", EOFError("the stream ended early"))
            if data is None:
                read_ns = await _written(decode, writer.drain()) or read_ns

    def _first_token(self, step: StartDecode) -> None:
        now_ns = time.monotonic_ns()
        self._apply(self.life.take(StreamBegan(step.leg), now_ns))
        stats = self.call.stats
        stats.first_token = stats.first_token or now_ns
        self._metrics.first_token.observe((now_ns - self.call.arrival) / SECOND)
        metered = self.call.metered
        if self._transfer is not None and metered is not None and metered.computed_ns:
            self._metrics.stages.transfer.observe((now_ns - metered.computed_ns) / SECOND)
        self._meter_prompt()


async def _written(decode: Upstream, writing: Awaitable[None]) -> int:
    """Wait for the client, not the worker; return when that ended if it took long, else 0."""
    before_ns = time.monotonic_ns()
    with decode.waiting():
        await writing
    now_ns = time.monotonic_ns()
    return now_ns if now_ns - before_ns > _BLOCKED_NS else 0


async def _to_end(connection: HTTPConnection) -> None:
    """Read what follows the last event, so that the connection can be kept."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_END_S):
            while await connection.read():
                pass


def _seed(call: GatewayRequest) -> int:
    """Return the seed of a request whose client gave none: the same in every attempt."""
    return int(call.id, 16) & 0x7FFF_FFFF_FFFF_FFFF
