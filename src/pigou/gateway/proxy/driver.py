"""Drives a request's lifecycle (`pigou.lifecycle`) by the wall clock, over HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from pigou.config import ConfigError
from pigou.control.messages import Choice, PrefillClaimed, Recall, Shed
from pigou.gateway.failure import Rejected, WorkerFailed, busy, surrender, suspect, unknown_model
from pigou.gateway.metrics import Metrics
from pigou.gateway.plane_driver import GatewayPrefillQueue, LocalPrefill, PlaneDriver, PrefillLeg
from pigou.gateway.proxy.connection import HTTPConnection, HTTPConnectionError
from pigou.gateway.proxy.migration import attempt_body
from pigou.gateway.proxy.relay import Relay, TooManyTokens
from pigou.gateway.proxy.reply_parsing import cached_tokens, whole, with_cached_tokens
from pigou.gateway.proxy.spans import decided, within_step
from pigou.gateway.proxy.token_endpoint import GENERATE, TokenRequest
from pigou.gateway.proxy.upstream import MAX_TICKET_BYTES, Engine, Upstream, fetch_kv
from pigou.gateway.proxy.writer import SSEWriter
from pigou.gateway.request import COMPLETIONS, Body
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
    PrefillBegan,
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
from pigou.lifecycle.migration import can_migrate, closing_frames, length_frame
from pigou.lifecycle.request import RECALLED, Effects, RequestLifecycle
from pigou.request import SECOND
from pigou.wire.errors import DECODING_ERRORS, APIError
from pigou.wire.openai_requests import without_bom
from pigou.wire.prefill_decode_legs import (
    context_ticket,
    first_token_leg,
    leg_one,
    leg_two,
    room_ticket,
    ticket,
)

_log = logging.getLogger("pigou.gateway")


Perform: TypeAlias = Callable[[Any], Awaitable[LifecycleEvent]]
#: The driver's method for each step of the lifecycle.
_PERFORM: dict[type[Step], str] = {
    SubmitRequest: "_submit", FetchKV: "_fetch", StartPrefill: "_prefill",
    StartDecode: "_decode", CompleteStream: "_complete",
}  # fmt: skip
_END_S = 1.0
#: A write that takes longer waited for the client.
_BLOCKED_NS = 10_000_000


class RequestDriver(ABC):
    """Carries out the steps of a request's lifecycle, one at a time.

    Each awaited step returns the next event; `interrupt` by the control plane cancels the step.
    """

    def __init__(self, plane_driver: PlaneDriver, metrics: Metrics, relay: Relay) -> None:
        self.run, self.relay = relay.run, relay
        self.life = RequestLifecycle(relay.run.parsed.id)
        self._plane_driver, self._metrics = plane_driver, metrics
        self._choice = Choice("")
        self._priority: int | None = None
        self._path = relay.run.parsed.path
        self._body: Body = relay.run.body
        self._tokens: TokenRequest | None = None  # this attempt, if it goes as token ids
        self._ids_refused = False  # just now, by the generate endpoint
        self._as_text = False  # it has refused them
        self._reply = b""
        self._transfer: dict[str, Any] | None = None  # params of what the next leg need not compute
        self._failure = WorkerFailed(RECALLED, "it was taken from worker to worker")
        self._refusal: APIError | None = None
        self._end: EndRequest | None = None
        self._awaiting: asyncio.Task[object] | None = None  # a step that may be broken off
        self._concurrent_prefill: asyncio.Task[None] | None = None  # beside the decode leg
        self._interrupted: Effects = ()

    async def drive(self) -> bytes:
        """Serve the request; return a whole reply or nothing; raise `APIError`."""
        task, trace = asyncio.current_task(), self.run.trace
        assert task is not None
        try:
            self._plane_driver.drivers[self.run.parsed.id] = self
            step = self._apply(self.life.begin())
            while step is not None:
                event: LifecycleEvent | None = None
                failure: WorkerFailed | None = None
                self._awaiting, cancelling = task, task.cancelling()
                try:
                    if self._ids_refused:
                        self._ids_refused, self._as_text = False, True
                        self._body = await self._attempt_body(self._choice.decode) or self._body
                    perform: Perform = getattr(self, _PERFORM[type(step)])
                    doing = perform(step)
                    event = await (doing if trace is None else within_step(self.run, step, doing))
                except asyncio.CancelledError:
                    if not self._interrupted or task.uncancel() > cancelling:
                        raise  # the client is gone
                except WorkerFailed as error:
                    failure = error
                except APIError as error:
                    if isinstance(error, Rejected) and self._tokens is not None:
                        self._ids_refused = True  # the step is repeated as text
                        continue
                    failure = self._without_adapter(step, error)
                    if failure is None:
                        self._refusal, event = error, RequestRefused(step.leg)
                finally:
                    self._awaiting = None
                    if self._concurrent_prefill is not None and type(step) is not StartPrefill:
                        self._concurrent_prefill.cancel()
                        self._concurrent_prefill = None
                step = self._apply(await self._follow(step, event, failure))
        finally:
            self._plane_driver.drivers.pop(self.run.parsed.id, None)
            left = self.life.take(ClientLeft(), time.monotonic_ns())
            self._apply((*self._interrupted, *left))
            self._count_end()
        return self._result()

    def interrupt(self, decision: Recall | Shed | LegFailed | RequestRefused) -> bool:
        """Apply what ends the routed request's attempt; True if it cancels the current step."""
        task = self._awaiting
        if task is None or self._interrupted:
            return False
        self._note_tokens()
        self._interrupted = self.life.take(decision, time.monotonic_ns())
        if not self._interrupted:
            return False
        self.relay.muted = True  # later chunks belong to the stopped leg
        task.cancel()
        return True

    def _token_body(self, decode: Engine) -> Body | None:
        """Return the attempt's body for the generate endpoint; None to send text."""
        driver, prefill = self._plane_driver, self._choice.prefill
        first = decode if prefill is None else driver.upstream(prefill).engine
        knows = self.run.parsed.chat in first.generate_defaults and driver.prefill_queue is None
        if self._as_text or not knows:
            return None
        self._tokens = TokenRequest.of(self.run, decode, self.relay.state.tokens)
        if self._tokens is None:
            return None
        self._metrics.untokenized.labels("prompt").inc(len(self._tokens.body["token_ids"]))
        self._path = GENERATE
        return self._tokens.body

    # --- effects ------------------------------------------------------------------------------

    def _apply(self, effects: Effects) -> Step | None:
        """Carry out immediate effects; return the next step, None at the end."""
        step: Step | None = None
        for effect in effects:
            match effect:
                case (
                    SubmitRequest() | FetchKV() | StartPrefill() | StartDecode() | CompleteStream()
                ):
                    step = effect
                case StopLeg():
                    pass  # the interruption has released the worker
                case ReportDeaths():
                    self._report(effect)
                case EndRequest():
                    self._over(effect)
                case _:
                    self._plane_driver.observe(effect)
        return step

    async def _follow(
        self, step: Step, event: LifecycleEvent | None, failure: WorkerFailed | None
    ) -> Effects:
        """Run a step; return the effects of its event, failure or interruption."""
        effects, self._interrupted = self._interrupted, ()
        if effects:
            return effects
        self._note_tokens()
        now_ns = time.monotonic_ns()
        if failure is not None:
            # Frames of the failure and its cause would keep this driver and what was read.
            self._failure = failure.with_traceback(None)
            failure.__cause__ = failure.__context__ = None
            event = await self._leg_failed(step.leg, failure)
        assert event is not None
        return self.life.take(event, now_ns)

    async def _leg_failed(self, leg: int, failure: WorkerFailed) -> LegFailed:
        fate = failure.fate if failure.may_be_death else None
        end = None if fate is None else await fate()
        complete = self.relay.state.finish is not None and self.run.parsed.single
        return LegFailed(leg, failure.workers, failure.reason, end, complete)

    def _without_adapter(self, step: Step, error: APIError) -> WorkerFailed | None:
        """Return the failure of a worker that unloaded the adapter; None for a refusal."""
        adapter = self.run.parsed.adapter
        if not (adapter and error.status == 404 and isinstance(step, StartPrefill | StartDecode)):
            return None
        upstream = self._plane_driver.upstreams.get(step.worker)
        if upstream is not None:
            upstream.forget(adapter)
        words = f"{step.worker} has unloaded {adapter}"
        return WorkerFailed("refused", words, frozenset({step.worker}), status=404)

    def _note_tokens(self) -> None:
        life, relay = self.life, self.relay
        event: LifecycleEvent | None = None
        if relay.counted > life.generated:
            event = TokensReceived(life.leg, relay.counted - life.generated)
        elif relay.started and not life.begun:
            event = StreamBegan(life.leg, token=False)
        if event is not None:
            self._apply(life.take(event, time.monotonic_ns()))

    def _report(self, report: ReportDeaths) -> None:
        id_, workers = self.run.parsed.wire_id, ", ".join(report.deaths)
        words = "request %s was under way when %s ended (%s)"
        _log.warning(words, id_, workers, self._failure)
        if report.suspect:
            self._metrics.unfinished.labels("suspect").inc()
            _log.error("request %s is refused: %s ended with it under way", id_, workers)

    def _over(self, end: EndRequest) -> None:
        self._end = end
        run = self.run
        self._plane_driver.end(run.parsed.id, end.finish)
        if run.choice is not None:
            run.stats.worker = run.choice.decode
        run.quota.ended(run.parsed.id)

    def _count_end(self) -> None:  # noqa: B027
        """Count a stream's tokens at its end; whole replies are counted on arrival."""

    def _result(self) -> bytes:
        end = self._end
        assert end is not None
        if end.outcome is RequestOutcome.DONE:
            return self._reply
        if end.shed is not None:
            raise busy(end.shed)
        if end.outcome is RequestOutcome.SUSPECT:
            raise suspect(self.run.parsed.wire_id, self.life.suspicion.deaths)
        if self._refusal is not None:
            raise self._refusal
        self._metrics.unfinished.labels(self._failure.reason).inc()
        raise surrender(self._failure)

    # --- steps --------------------------------------------------------------------------------

    async def _submit(self, step: SubmitRequest) -> LifecycleEvent:
        """Ask the control plane for workers, once the key's limits allow it."""
        run, quota, start_ns = self.run, self.run.quota, time.monotonic_ns()
        parsed, plane_driver = run.parsed, self._plane_driver
        if step.cause:
            self._count_move(step.cause)
        # Further sequences of a request were accepted with its first one.
        follows = parsed.group not in ("", parsed.id)
        await quota.take(parsed.id, None if follows else plane_driver.queue_timeout_s)
        exclude = step.exclude
        if exclude and step.cause != RECALLED:
            exclude = plane_driver.exclude_hosts(exclude)
        eligible = plane_driver.serving(parsed.adapter)
        if parsed.adapter and not eligible:
            raise unknown_model(parsed.adapter)
        try:
            decision = await plane_driver.decide(run.request(step.tokens, eligible), exclude)
        except ConfigError as error:
            raise overrides_refused(error) from error
        self._metrics.stages.queue_wait.observe((time.monotonic_ns() - start_ns) / SECOND)
        if isinstance(decision, Shed):
            return decision
        choice = run.choice = self._choice = decision.choice
        self._priority, self._transfer = decision.priority, None
        run.cached = None if choice.prefill is None else run.cached
        if not step.exclude:
            quota.sent(parsed.id)
        if run.on_route is not None:
            run.on_route(choice)
        why = plane_driver.plane.decision(parsed.id)
        if run.trace is not None:
            decided(run.trace, why, step.exclude)
        computes = plane_driver.upstreams.get(choice.prefill or choice.decode)
        if why is not None and computes is not None:
            keys = {} if step.cause else run.keys
            self._metrics.decided(why, computes.worker.block_size, keys)
        body = await self._attempt_body(choice.decode)
        if body is None:
            return StreamFinished(step.leg)
        if time.time_ns() >= parsed.expiry:  # cached blocks are void
            body = {**body, "cache_salt": f"expired-{parsed.id}"}
        self._body = body
        return decision

    async def _attempt_body(self, decode: str) -> Body | None:
        """Return an attempt's body for both legs; None if the reply is complete."""
        self._path = self.run.parsed.path
        engine, self._tokens = self._plane_driver.upstream(decode).engine, None
        return (self._token_body(engine) if engine.generate_defaults else None) or self.run.body

    async def _fetch(self, step: FetchKV) -> LifecycleEvent:
        source = self._plane_driver.upstreams.get(step.read.worker)
        params, outcome = None, "gone"
        if source is not None:
            run = self.run
            params, outcome = await fetch_kv(
                source, self._body, run.parsed.wire_id, step, run.parsed.tenant, run.outgoing
            )
        self._transfer = params
        self._metrics.read(outcome, step.read)
        return KVFetchFailed(step.leg) if params is None else KVFetched(step.leg)

    async def _prefill(self, step: StartPrefill) -> LifecycleEvent:
        run, start_ns = self.run, time.monotonic_ns()
        prefill, chat = self._plane_driver.upstream(step.worker), self._path != COMPLETIONS
        engine, queue = prefill.engine, self._plane_driver.prefill_queue
        if engine.bootstrap is not None:
            self._transfer = room_ticket(*engine.bootstrap)
            leg = self._leg_body(engine, first_token_leg(self._body, self._transfer))
            self._concurrent_prefill = asyncio.create_task(
                self._prefill_concurrently(step.leg + 1, prefill, leg)
            )
            return PrefillBegan(step.leg)
        if engine.family:
            leg, queue = first_token_leg(self._body, None), None
        else:
            leg = leg_one(self._body, chat=chat, read=self._transfer) | {"return_token_ids": False}
        leg = self._leg_body(engine, leg)
        try:
            if queue is not None:
                pulled = await self._pull(queue, prefill, leg)
                if pulled is None:
                    return PrefillStays(step.leg)
                reply = pulled
            else:
                reply = await self._prefill_reply(prefill, leg)
            self._transfer = context_ticket(reply, chat=chat) if engine.family else ticket(reply)
        except DECODING_ERRORS as error:
            raise prefill.broke("garbage", error) from error
        run.cached = None if self._transfer is None else cached_tokens(reply)
        self._computed(start_ns)
        return Prefilled(step.leg)

    async def _prefill_reply(self, prefill: Upstream, leg: Body) -> bytes:
        run = self.run
        with prefill.busy():
            return await prefill.whole(
                self._path, leg, run.parsed.wire_id, run.parsed.tenant, run.outgoing,
                held=run.reply_bytes, max_bytes=MAX_TICKET_BYTES,
            )  # fmt: skip

    def _computed(self, start_ns: int) -> None:
        now_ns = time.monotonic_ns()
        self._metrics.prefill.observe((now_ns - start_ns) / SECOND)
        if self.run.metered is not None:
            self.run.metered.computed_ns = now_ns

    async def _prefill_concurrently(self, decode_leg: int, prefill: Upstream, leg: Body) -> None:
        """Run a prefill leg beside the decode leg, which waits for its KV and fails with it."""
        start_ns = time.monotonic_ns()
        try:
            await self._prefill_reply(prefill, leg)
        except WorkerFailed as failure:
            failed = await self._leg_failed(decode_leg, failure)
            if self.life.overlapped and self.interrupt(failed):
                self._failure = failure.with_traceback(None)
        except APIError as error:
            if self.life.overlapped and self.interrupt(RequestRefused(decode_leg)):
                self._refusal = error
        else:
            self._computed(start_ns)
            self._apply(self.life.take(Prefilled(decode_leg), time.monotonic_ns()))

    async def _pull(
        self, queue: GatewayPrefillQueue, forecast: Upstream, leg: Body
    ) -> bytes | None:
        """Return the reply of the worker that pulls the prompt; None if prefill is local."""
        run, plane = self.run, self._plane_driver.plane
        routed = plane.state.requests.get(run.parsed.id)
        if routed is None or routed.decode is None:
            return None

        def claimed(worker: str, cached: int) -> None:
            self._choice = msgspec.structs.replace(self._choice, prefill=worker, cached=cached)
            run.choice = self._choice
            self._plane_driver.observe(PrefillClaimed(run.parsed.id, worker, cached))

        mark, parent = forecast.mark(run.parsed.tenant), run.traceparent
        sent = PrefillLeg(self._path, run.parsed.wire_id, mark, leg, forecast.worker.id, parent)
        try:
            return await queue.prefill(routed.request, sent, claimed)
        except LocalPrefill as reason:
            self._metrics.unpulled_prompts.labels(str(reason)).inc()
        self._transfer = run.cached = None
        self._choice = msgspec.structs.replace(self._choice, prefill=None, cached=0)
        run.choice = self._choice
        self._plane_driver.observe(PrefillClaimed(run.parsed.id, self._choice.decode, 0))
        return None

    @abstractmethod
    async def _decode(self, step: StartDecode) -> LifecycleEvent:
        """Run the decode leg."""

    async def _complete(self, step: CompleteStream) -> LifecycleEvent:
        raise NotImplementedError(f"{type(self).__name__} streams nothing that could be completed")

    def _leg_body(self, engine: Engine, body: Body) -> Body:
        """Return a leg's body with priority and deadline for the worker's queue."""
        parsed = self.run.parsed
        if parsed.deadline_ms is not None and self._plane_driver.heeds_deadlines:
            body = engine.dated(body, parsed.left_ms(time.monotonic_ns()))
        if not parsed.wants_ids:
            body = engine.fitted(body, chat=self._path != COMPLETIONS)
        return engine.addressed(engine.ranked(body, self._priority), parsed.fields.model)

    def _meter_prompt(self) -> None:
        metered, choice = self.run.metered, self._choice
        if metered is not None and not metered.first_token_ns:
            routed = self._plane_driver.plane.state.requests.get(self.run.parsed.id)
            uncached = None if routed is None else routed.uncached
            self._plane_driver.meter.begun(self.run, choice.prefill or choice.decode, uncached)

    def _count_move(self, cause: str) -> None:
        if self.run.metered is not None:
            self.run.metered.moves += 1
        phase = "stream" if self.life.generated else "prompt"
        self._metrics.migrations.labels(phase, cause).inc()


class ReplyDriver(RequestDriver):
    """Serves a request with a whole reply."""

    async def _decode(self, step: StartDecode) -> LifecycleEvent:
        run, decode = self.run, self._plane_driver.upstream(step.worker)
        params = self._transfer
        body = self._body if params is None else leg_two(self._body, params)
        body = self._leg_body(decode.engine, body)
        with decode.busy(), decode.in_one_piece():
            reply = await decode.whole(
                self._path, body, run.parsed.wire_id, run.parsed.tenant, run.outgoing,
                held=run.reply_bytes,
            )  # fmt: skip
        try:
            if self._tokens is not None:
                reply = self._tokens.whole(reply)
            read = whole(without_bom(reply))
        except DECODING_ERRORS as error:
            run.reply_bytes.shrink(len(reply))
            del reply  # the error's frames would keep it
            raise decode.broke("garbage", error) from None
        tokens = 0 if read.usage is None else read.usage.completion_tokens
        if run.parsed.token_limit and tokens > run.parsed.token_limit:
            raise decode.broke("garbage", TooManyTokens(run.parsed.token_limit))
        if any(choice.finish_reason in ("abort", "error") for choice in read.choices):
            worker = decode.worker.id
            raise WorkerFailed("abort", f"{worker} gave the request up", frozenset({worker}))
        self._meter_prompt()
        if run.trace is not None:
            reasons = (choice.finish_reason or "" for choice in read.choices)
            run.stats.finish_reasons += tuple(filter(None, reasons))
        if read.usage is not None:
            decode.tokens += tokens
            self._plane_driver.on_tokens(((run.parsed.id, tokens),))
            self._metrics.generation_tokens.labels(run.parsed.tenant).inc(tokens)
            self._metrics.prompt_tokens.labels(run.parsed.tenant).inc(read.usage.prompt_tokens)
            run.stats.add(read.usage.prompt_tokens, tokens)
            if self._tokens is not None:
                self._metrics.untokenized.labels("output").inc(tokens)
        self._reply = reply if run.cached is None else with_cached_tokens(reply, run.cached)
        return StreamFinished(step.leg)


class StreamDriver(RequestDriver):
    """Serves a request with a streamed reply."""

    def __init__(
        self, plane_driver: PlaneDriver, metrics: Metrics, relay: Relay, writer: SSEWriter
    ) -> None:
        super().__init__(plane_driver, metrics, relay)
        self._writer = writer
        self._worker: Upstream | None = None
        self._mapped = False
        if self.run.metered is not None:
            self.run.metered.relays.append(relay)
        plane_driver.watch(self.run.parsed.id, relay)

    async def _attempt_body(self, decode: str) -> Body | None:
        run, state = self.run, self.relay.state
        self._worker = worker = self._plane_driver.upstream(decode)
        engine = worker.engine
        if not can_migrate(
            state, single=run.parsed.single, portable=run.parsed.portable, stock=engine.stock
        ):
            raise APIError(
                502,
                f"The worker of this stream failed ({self._failure}), and the stream cannot go on "
                "elsewhere: it has several choices, tokens whose ids no worker told, or depends on "
                "state that a stock worker does not resume.",
            )
        if engine.stock and (dropped := state.drop_unshown()):
            self.life.take(TokensDropped(dropped), time.monotonic_ns())
        sent = attempt_body(
            run, state, stock=engine.stock,
            max_model_len=engine.max_model_len, dynamo=engine.dynamo,
        )  # fmt: skip
        if sent.body.get("max_tokens") == 0:
            ended = length_frame(state, chat=run.parsed.chat)
            await self._writer.write(ended + self._closing_frames())
            return None
        self._path, self._mapped = sent.path, sent.mapped
        self._tokens = None
        if engine.generate_defaults and (tokens := self._token_body(engine)) is not None:
            self._mapped = False
            return tokens
        return sent.body

    async def _decode(self, step: StartDecode) -> LifecycleEvent:
        run, decode = self.run, self._worker
        assert decode is not None
        params = self._transfer
        body = self._body if params is None else leg_two(self._body, params)
        body = self._leg_body(decode.engine, body)
        self.relay.begin(stock=decode.engine.stock, mapped=self._mapped, tokens=self._tokens)
        with decode.busy():
            connection = await decode.ask(
                self._path, body, run.parsed.wire_id, run.parsed.tenant, run.outgoing
            )
            try:
                await self._pump(step, decode, connection)
            finally:
                decode.give_back(connection)
        return StreamFinished(step.leg)

    def _count_end(self) -> None:
        relay, run = self.relay, self.run
        prompt_tokens = relay.state.prompt_tokens
        self._metrics.generation_tokens.labels(run.parsed.tenant).inc(relay.counted)
        self._metrics.prompt_tokens.labels(run.parsed.tenant).inc(prompt_tokens)
        run.stats.add(prompt_tokens, relay.counted)
        if self._tokens is not None:
            self._metrics.untokenized.labels("output").inc(relay.counted)
        if run.trace is not None and relay.state.finish:
            run.stats.finish_reasons += (relay.state.finish,)

    async def _complete(self, step: CompleteStream) -> LifecycleEvent:
        self._count_move(self._failure.reason)
        await self._writer.write(self._closing_frames())
        return StreamFinished(step.leg)

    def _closing_frames(self) -> bytes:
        parsed, state = self.run.parsed, self.relay.state
        return closing_frames(state, chat=parsed.chat, wants_usage=parsed.wants_usage)

    async def _pump(self, step: StartDecode, decode: Upstream, connection: HTTPConnection) -> None:
        """Relay the worker's bytes until the stream ends."""
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
                    # Where the client stopped reading, the gap is not the engine's.
                    if read_ns <= last_ns and stall(gap_s) and self.run.trace is not None:
                        self.run.trace.event("engine stall", last_ns, (("pigou.gap_s",), (gap_s,)))
                elif before == 0:
                    self._first_token(step)
                last_ns = relay.last_token_ns = now_ns
            elif out and relay.started:  # the server tells no token ids
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
        stats = self.run.stats
        stats.first_token = stats.first_token or now_ns
        self._metrics.first_token.observe((now_ns - self.run.parsed.arrival) / SECOND)
        metered = self.run.metered
        if self._transfer is not None and metered is not None and metered.computed_ns:
            self._metrics.stages.transfer.observe((now_ns - metered.computed_ns) / SECOND)
        self._meter_prompt()


async def _written(decode: Upstream, writing: Awaitable[None]) -> int:
    """Wait for the client; return when a long wait ended, else 0."""
    before_ns = time.monotonic_ns()
    with decode.waiting():
        await writing
    now_ns = time.monotonic_ns()
    return now_ns if now_ns - before_ns > _BLOCKED_NS else 0


async def _to_end(connection: HTTPConnection) -> None:
    """Read the bytes after the last event, so that the connection can be kept."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_END_S):
            while await connection.read():
                pass
