"""Drives the life of one request (`pigou.lifecycle`) by the wall clock, over HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.control.messages import Choice, PrefillClaimed, Recall, Route, Shed
from pigou.gateway.failure import Rejected, WorkerFailed, busy, surrender, suspect, unknown_model
from pigou.gateway.metrics import Metrics
from pigou.gateway.plane_driver import (
    GatewayPrefillQueue,
    LocalPrefill,
    PlaneDriver,
    PrefillDropped,
    PrefillLeg,
)
from pigou.gateway.proxy import sequences
from pigou.gateway.proxy.connection import HTTPConnection, HTTPConnectionError
from pigou.gateway.proxy.migration import attempt_body, closing_frames, length_frame
from pigou.gateway.proxy.relay import Relay, TooManyTokens
from pigou.gateway.proxy.reply_parsing import cached_tokens, whole, with_cached_tokens
from pigou.gateway.proxy.spans import decided, within_step
from pigou.gateway.proxy.upstream import MAX_TICKET_BYTES, Engine, Upstream, fetch_kv
from pigou.gateway.proxy.writer import SSEWriter
from pigou.gateway.request import COMPLETIONS, Body, GatewayRequest
from pigou.gateway.request_parsing import overrides_refused
from pigou.lifecycle.messages import (
    ClientLeft,
    CompleteStream,
    EndRequest,
    FetchKV,
    KVFetched,
    KVFetchFailed,
    LegFailed,
    LifecycleEvent,
    Prefilled,
    PrefillStays,
    ReportDeaths,
    RequestOutcome,
    RequestRefused,
    StartDecode,
    StartPrefill,
    Step,
    StopLeg,
    StreamBegan,
    StreamFinished,
    SubmitRequest,
    TokensDropped,
    TokensReceived,
)
from pigou.lifecycle.migration import can_migrate
from pigou.lifecycle.request import RECALLED, Effects, RequestLifecycle
from pigou.request import SECOND
from pigou.wire.errors import APIError
from pigou.wire.openai_requests import without_bom
from pigou.wire.prefill_decode_legs import leg_one, leg_two, ticket

_log = logging.getLogger("pigou.gateway")


class RequestDriver(ABC):
    """Does what the life of a request asks for, one step after another.

    A step is awaited; the event that it returns brings the next one. Decisions of the control
    plane about a routed request (`interrupt`) break the step off that is awaited.

    Attributes:
        relay: the stream to its client.
    """

    def __init__(self, plane_driver: PlaneDriver, metrics: Metrics, relay: Relay) -> None:
        self.call: GatewayRequest = relay.call
        self.relay = relay
        self.life = RequestLifecycle(relay.call.id)
        self._plane_driver = plane_driver
        self._metrics = metrics
        self._choice = Choice("")
        self._priority: int | None = None
        self._path = relay.call.path
        self._body: Body = relay.call.body
        self._reply = b""
        self._transfer: dict[str, Any] | None = None  # params of what the next leg need not compute
        self._failure = WorkerFailed(RECALLED, "it was taken from worker to worker")
        self._refusal: APIError | Rejected | None = None
        self._end: EndRequest | None = None
        self._awaiting: asyncio.Task[object] | None = None  # a step that may be broken off
        self._interrupted: Effects = ()

    async def run(self) -> bytes:
        """Serve the request; return its reply, empty where that was streamed.

        Raises:
            APIError: no worker could serve it. Rejected: a worker refused it.
        """
        try:
            with self._plane_driver.driving(self.call.id, self):
                step = self._apply(self.life.begin())
                while step is not None:
                    step = self._apply(await self._follow(step))
        finally:
            left = self.life.take(ClientLeft(), time.monotonic_ns())
            self._apply((*self._interrupted, *left))
        return self._result()

    def interrupt(self, decision: Recall | Shed) -> bool:
        """Take in a decision about the routed request; return whether it breaks a step off."""
        task = self._awaiting
        if task is None or self._interrupted:
            return False
        self._note_tokens()
        self._interrupted = self.life.take(decision, time.monotonic_ns())
        if not self._interrupted:
            return False
        self.relay.muted = True  # what still arrives belongs to the leg that is stopped
        task.cancel()
        return True

    # --- effects ------------------------------------------------------------------------------

    def _apply(self, effects: Effects) -> Step | None:
        """Do what needs no waiting; return the step to be followed, None at the end."""
        step: Step | None = None
        for effect in effects:
            match effect:
                case (
                    SubmitRequest() | FetchKV() | StartPrefill() | StartDecode() | CompleteStream()
                ):
                    step = effect
                case StopLeg():
                    pass  # who broke the step off has let go of its worker
                case ReportDeaths():
                    self._report(effect)
                case EndRequest():
                    self._over(effect)
                case _:
                    self._plane_driver.observe(effect)
        return step

    async def _follow(self, step: Step) -> Effects:
        """Follow a step to its end; return what comes after it."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        event: LifecycleEvent | None = None
        failure: WorkerFailed | None = None
        self._awaiting = task
        try:
            doing = self._perform(step)
            event = await (
                doing if self.call.trace is None else within_step(self.call, step, doing)
            )
        except asyncio.CancelledError:
            if not self._interrupted or task.uncancel() > cancelling:
                raise  # the client is gone
        except WorkerFailed as error:
            failure = error
        except (APIError, Rejected) as error:
            failure = self._without_adapter(step, error)
            if failure is None:
                self._refusal = error
                event = RequestRefused(step.leg)
        finally:
            self._awaiting = None
        effects, self._interrupted = self._interrupted, ()
        if effects:
            return effects
        self._note_tokens()
        now_ns = time.monotonic_ns()
        if failure is not None:
            event = await self._failed(step, failure)
        assert event is not None
        return self.life.take(event, now_ns)

    def _without_adapter(self, step: Step, error: APIError | Rejected) -> WorkerFailed | None:
        """Return the failure of a worker that has unloaded the adapter; None for a refusal."""
        if not (self.call.adapter and error.status == 404):
            return None
        if not isinstance(step, StartPrefill | StartDecode):
            return None
        upstream = self._plane_driver.upstreams.get(step.worker)
        if upstream is not None:
            upstream.forget(self.call.adapter)
        words = f"{step.worker} has unloaded {self.call.adapter}"
        return WorkerFailed("refused", words, frozenset({step.worker}), status=404)

    async def _failed(self, step: Step, failure: WorkerFailed) -> LegFailed:
        """Return the event of a worker's failure, with how the worker ended if it did."""
        # Its frames, and those of its cause, would keep this driver and what was read.
        self._failure = failure.with_traceback(None)
        failure.__cause__ = failure.__context__ = None
        fate = failure.fate if failure.may_be_death else None
        end = None if fate is None else await fate()
        complete = self.relay.state.finish is not None and self.call.single
        return LegFailed(step.leg, failure.workers, failure.reason, end, complete)

    def _note_tokens(self) -> None:
        """Report new tokens to the lifecycle."""
        life, relay = self.life, self.relay
        event: LifecycleEvent | None = None
        if relay.counted > life.generated:
            event = TokensReceived(life.leg, relay.counted - life.generated)
        elif relay.started and not life.begun:
            event = StreamBegan(life.leg, token=False)
        if event is not None:
            self._apply(life.take(event, time.monotonic_ns()))

    def _report(self, report: ReportDeaths) -> None:
        """Warn of deaths with the request under way."""
        id_, workers = self.call.wire_id, ", ".join(report.deaths)
        words = "request %s was under way when %s ended (%s)"
        _log.warning(words, id_, workers, self._failure)
        if report.suspect:
            self._metrics.unfinished.labels("suspect").inc()
            _log.error("request %s is refused: %s ended with it under way", id_, workers)

    def _over(self, end: EndRequest) -> None:
        self._end = end
        call = self.call
        self._plane_driver.end(call.id, end.finish)
        if call.choice is not None:
            call.stats.worker = call.choice.decode
        if call.quota is not None:
            call.quota.ended(call.id)

    def _result(self) -> bytes:
        """Return the reply, or raise the error in its place."""
        end = self._end
        assert end is not None
        if end.outcome is RequestOutcome.DONE:
            return self._reply
        if end.shed is not None:
            raise busy(end.shed)
        if end.outcome is RequestOutcome.SUSPECT:
            raise suspect(self.call.wire_id, self.life.suspicion.deaths)
        if self._refusal is not None:
            raise self._refusal
        self._metrics.unfinished.labels(self._failure.reason).inc()
        raise surrender(self._failure)

    # --- steps --------------------------------------------------------------------------------

    async def _perform(self, step: Step) -> LifecycleEvent:
        match step:
            case SubmitRequest():
                return await self._submit(step)
            case FetchKV():
                return await self._fetch(step)
            case StartPrefill():
                return await self._prefill(step)
            case StartDecode():
                return await self._decode(step)
        return await self._complete(step)

    async def _submit(self, step: SubmitRequest) -> LifecycleEvent:
        """Ask the control plane for workers, once the key's limits let the request go."""
        call, quota, start_ns = self.call, self.call.quota, time.monotonic_ns()
        if step.cause:
            self._count_move(step.cause)
        if quota is not None:
            # Further sequences of a request were accepted with its first one.
            follows = call.group not in ("", call.id)
            await quota.take(call.id, None if follows else self._plane_driver.queue_timeout_s)
        exclude, nearby = step.exclude, self._plane_driver.exclude_hosts
        exclude = nearby(exclude) if exclude and step.cause != RECALLED else exclude
        eligible = self._plane_driver.serving(call.adapter)
        if call.adapter and not eligible:
            raise unknown_model(call.adapter)
        try:
            decision = await self._plane_driver.decide(call.request(step.tokens, eligible), exclude)
        except ConfigError as error:
            raise overrides_refused(error) from error
        self._metrics.stages.queue_wait.observe((time.monotonic_ns() - start_ns) / SECOND)
        if isinstance(decision, Shed):
            return decision
        choice = call.choice = self._choice = decision.choice
        self._priority, self._transfer = decision.priority, None
        if quota is not None and not step.exclude:
            quota.sent()
        if call.on_route is not None:
            call.on_route(choice)
        why = self._plane_driver.plane.decision(call.id)
        if call.trace is not None:
            decided(call.trace, why, step.exclude)
        computes = self._plane_driver.upstreams.get(choice.prefill or choice.decode)
        if why is not None and computes is not None:
            keys = {} if step.cause else call.keys
            self._metrics.decided(why, computes.worker.block_size, keys)
        return await self._prepare(step, decision)

    async def _prepare(self, step: SubmitRequest, route: Route) -> LifecycleEvent:  # noqa: ARG002
        """Make up the body of a routed attempt; return the route, or why there is no leg."""
        self._set_body(self.call.body)
        return route

    def _set_body(self, body: Body) -> None:
        """Take a body for both legs; one whose tenure has expired finds nothing cached."""
        self._body = self.call.current(body, time.time_ns())

    async def _fetch(self, step: FetchKV) -> LifecycleEvent:
        """Ask another worker for what it has cached of the prompt."""
        source = self._plane_driver.upstreams.get(step.read.worker)
        params, outcome = None, "gone"
        if source is not None:
            call = self.call
            params, outcome = await fetch_kv(
                source, self._body, call.wire_id, step, call.tenant, call.outgoing
            )
        self._transfer = params
        self._metrics.read(outcome, step.read)
        return KVFetchFailed(step.leg) if params is None else KVFetched(step.leg)

    async def _prefill(self, step: StartPrefill) -> LifecycleEvent:
        """Have the prefill worker compute the prompt, or one that pulls it."""
        call, start_ns = self.call, time.monotonic_ns()
        prefill = self._upstream(step.worker)
        leg = leg_one(self._body, chat=self._path != COMPLETIONS, read=self._transfer)
        leg = self._ordered(prefill.engine, leg | {"return_token_ids": False})
        try:
            queue = self._plane_driver.prefill_queue
            if queue is not None:
                pulled = await self._pull(queue, prefill, leg)
                if pulled is None:
                    return PrefillStays(step.leg)
                reply = pulled
            else:
                with prefill.busy():
                    reply = await prefill.whole(
                        self._path, leg, call.wire_id, call.tenant, call.outgoing,
                        held=call.reply_bytes, max_bytes=MAX_TICKET_BYTES,
                    )  # fmt: skip
            self._transfer = ticket(reply)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise prefill.broke("garbage", error) from error
        call.cached = None if self._transfer is None else cached_tokens(reply)
        now_ns = time.monotonic_ns()
        self._metrics.prefill.observe((now_ns - start_ns) / SECOND)
        if call.metered is not None:
            call.metered.computed_ns = now_ns
        return Prefilled(step.leg)

    async def _pull(
        self, queue: GatewayPrefillQueue, forecast: Upstream, leg: Body
    ) -> bytes | None:
        """Return the reply of the worker that pulls the prompt; None where the prompt stays.

        Until one does, it weighs on the worker that the control plane expects.

        Raises:
            Rejected: the worker refused it. APIError: nobody computed it.
        """
        call, plane = self.call, self._plane_driver.plane
        routed = plane.state.requests.get(call.id)
        if routed is None or routed.decode is None:
            return None

        def claimed(worker: str, cached: int) -> None:
            self._choice = msgspec.structs.replace(self._choice, prefill=worker, cached=cached)
            call.choice = self._choice
            self._plane_driver.observe(PrefillClaimed(call.id, worker, cached))

        mark, parent = forecast.mark(call.tenant), call.traceparent
        sent = PrefillLeg(self._path, call.wire_id, mark, leg, forecast.worker.id, parent)
        try:
            pulled = await queue.prefill(routed.request, sent, claimed)
        except PrefillDropped as dropped:
            status = 503 if dropped.expired else 502
            raise APIError(status, f"{dropped}.", retry_after=1) from dropped
        if isinstance(pulled, LocalPrefill):
            self._metrics.unpulled_prompts.labels(pulled.reason).inc()
            self._transfer = None
            self._choice = msgspec.structs.replace(self._choice, prefill=None, cached=0)
            call.choice = self._choice
            self._plane_driver.observe(PrefillClaimed(call.id, self._choice.decode, 0))
            return None
        if pulled.status != 200:
            raise Rejected(pulled.status, pulled.reply)
        return pulled.reply

    @abstractmethod
    async def _decode(self, step: StartDecode) -> LifecycleEvent:
        """Have the decode worker generate the reply."""

    async def _complete(self, step: CompleteStream) -> LifecycleEvent:
        """Write the end of a stream that has all its tokens."""
        raise NotImplementedError(f"{type(self).__name__} streams nothing that could be completed")

    def _decode_body(self, engine: Engine) -> Body:
        """Return what the decode worker is sent."""
        if self._choice.prefill is None:
            self.call.cached = None
        params = self._transfer
        body = self._body if params is None else leg_two(self._body, params)
        return self._ordered(engine, body)

    def _ordered(self, engine: Engine, body: Body) -> Body:
        """Return a body with what matters to the order inside a worker, as that understands it."""
        if self.call.deadline_ms is not None and self._plane_driver.heeds_deadlines:
            body = engine.dated(body, self.call.left_ms(time.monotonic_ns()))
        body = engine.ranked(body, self._priority)
        return engine.addressed(body, self.call.fields.model)

    def _upstream(self, worker: str) -> Upstream:
        upstream = self._plane_driver.upstreams.get(worker)
        if upstream is None:
            raise WorkerFailed("connect", f"{worker} is gone", frozenset({worker}))
        return upstream

    def _meter_prompt(self) -> None:
        """Note that the prompt was computed, and by which worker."""
        metered, choice = self.call.metered, self._choice
        if metered is not None and not metered.first_token_ns:
            routed = self._plane_driver.plane.state.requests.get(self.call.id)
            uncached = None if routed is None else routed.uncached
            self._plane_driver.meter.begun(self.call, choice.prefill or choice.decode, uncached)

    def _count_move(self, cause: str) -> None:
        if self.call.metered is not None:
            self.call.metered.moves += 1
        phase = "stream" if self.life.generated else "prompt"
        self._metrics.migrations.labels(phase, cause).inc()


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
