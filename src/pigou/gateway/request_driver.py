"""Drives the life of one request (`pigou.lifecycle`) by the wall clock, over HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.control.messages import Choice, PrefillClaimed, Recall, Route, Shed
from pigou.gateway.failure import Rejected, WorkerFailed, busy, surrender, suspect, unknown_model
from pigou.gateway.gateway_request import COMPLETIONS, Body, GatewayRequest
from pigou.gateway.metrics import Metrics
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.pulled_prefill import (
    GatewayPrefillQueue,
    LocalPrefill,
    PrefillDropped,
    PrefillLeg,
)
from pigou.gateway.reply_parsing import cached_tokens
from pigou.gateway.request_parsing import overrides_refused
from pigou.gateway.request_spans import decided, within_step
from pigou.gateway.sse_relay import Relay
from pigou.gateway.upstream import MAX_TICKET_BYTES, Engine, Upstream, fetch_kv
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
    SubmitRequest,
    TokensReceived,
)
from pigou.lifecycle.request import RECALLED, Effects, RequestLifecycle
from pigou.request import SECOND
from pigou.wire.errors import APIError
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
