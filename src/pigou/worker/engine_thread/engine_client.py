"""EngineClient: the event loop's interface to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVarTuple

from pigou.config import KVQuota
from pigou.engine.plan import Finished
from pigou.logs import about
from pigou.request import FinishReason, Request
from pigou.runtime.step_output import RankedLogprobs as Report
from pigou.wire.errors import REQUEST_FAILED, APIError
from pigou.worker.engine_thread.commands import (
    Abort,
    Add,
    Begun,
    ClearCache,
    Command,
    EndLease,
    LeaseCached,
    SetLimits,
)
from pigou.worker.engine_thread.commands import Report as EngineReport
from pigou.worker.http.reply import Reply, ReplySequence
from pigou.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")

#: Retry-After for a full queue, in seconds.
RETRY_AFTER = 1


class EngineClient:
    """Submits sequences to the engine thread, and routes its reports to replies."""

    def __init__(
        self, put: Callable[[Command], None], metrics: WorkerMetrics,
        publish: Callable[[list[dict[str, Any]]], None], max_in_engine: int = 0,
    ) -> None:  # fmt: skip
        """`max_in_engine`: concurrent sequences in the engine per request; 0 for all."""
        self._held = WaitingSequences(max_in_engine)
        self._put = put
        self._metrics = metrics
        self._publish = publish
        self._flights: dict[str, tuple[ReplySequence, Reply, Add]] = {}
        self._followers: dict[str, list[Add]] = {}
        self._lease_futures: dict[str, asyncio.Future[dict[str, Any] | None]] = {}
        self._added = 0
        self.dead = False
        self.draining = False
        self._shaken: Callable[[], None] | None = None
        self._closed: APIError | None = None

    @property
    def in_flight(self) -> int:
        """Unfinished sequences."""
        return len(self._flights)

    @property
    def adapters(self) -> tuple[set[str], set[str]]:
        """LoRA adapters of running and of waiting sequences."""
        versions: tuple[set[str], set[str]] = set(), set()
        for sequence, _, add in self._flights.values():
            if add.request.model:
                versions[not sequence.begun].add(add.request.model)
        return versions

    @property
    def waiting(self) -> int:
        """Accepted sequences without a row, in the engine or not yet sent to it."""
        gauges, followers = self._metrics.gauges, sum(map(len, self._followers.values()))
        return gauges.waiting + self._added - gauges.added_total + len(self._held) + followers

    def metrics_page(self) -> bytes:
        """Return the Prometheus page, with current values."""
        self._metrics.waiting = self.waiting
        return self._metrics.page()

    def check_open(self) -> None:
        """Raise `APIError` 503 or 500 if no request can be accepted."""
        if self.dead:
            raise APIError(500, "The engine has died; this worker is about to exit.")
        if self.draining:
            why = "This worker is shutting down: send the request to another."
            raise APIError(503, why, retry_after=RETRY_AFTER)

    def submit(self, reply: Reply, pairs: list[tuple[ReplySequence, Add]]) -> None:
        """Compute one prompt's choices; those after the first wait for it to fill the cache."""
        if self._closed is not None:
            reply.fail(self._closed)
            return
        for sequence, add in pairs:
            reply.add(sequence)
            self._flights[sequence.id] = (sequence, reply, add)
        leader = pairs[0][1]
        if len(pairs) > 1:
            self._followers[leader.request.id] = [add for _, add in pairs[1:]]
        self._send(reply, leader)

    def _send(self, reply: Reply, add: Add) -> None:
        if self._held.enters(id(reply), add):
            self._enter(add)

    def _enter(self, add: Add) -> None:
        self._added += 1
        self._put(add)

    def _left(self, reply: Reply) -> None:
        if (add := self._held.left(id(reply))) is not None:
            self._enter(add)

    def cancel(self, reply: Reply) -> None:
        """Abort the remaining work of an abandoned reply."""
        for sequence in reply.sequences:
            for add in self._followers.pop(sequence.id, ()):
                self._flights.pop(add.request.id, None)
        for add in self._held.drop(id(reply)):
            self._flights.pop(add.request.id, None)
        for sequence in reply.sequences:
            if sequence.id in self._flights:
                self._put(Abort(sequence.id))

    def _follow(self, leader: str) -> None:
        for add in self._followers.pop(leader, ()):
            flight = self._flights.get(add.request.id)
            if flight is not None:
                self._send(flight[1], add)

    async def lease_cached(self, request: Request) -> dict[str, Any] | None:
        """Offer a prompt's cached blocks; return the ticket. Raises APIError 500 if dead."""
        future: asyncio.Future[dict[str, Any] | None]
        future = self._lease_futures[request.id] = asyncio.get_running_loop().create_future()
        self._put(LeaseCached(request))
        try:
            return await future
        finally:
            self._lease_futures.pop(request.id, None)

    def _on_lease(self, request: str, ticket: dict[str, Any] | None) -> None:
        future = self._lease_futures.pop(request, None)
        if future is not None and not future.done():
            future.set_result(ticket)
        elif ticket is not None:
            self._put(EndLease(request))

    def clear_cache(self, salts: list[str] | None = None) -> None:
        """Clear the prefix cache, or what tenures have there, which end."""
        self._put(ClearCache(salts))

    def set_limits(
        self, max_seqs: int, max_batched_tokens: int, kv_quotas: dict[str, KVQuota] | None
    ) -> None:
        """Limit running sequences and tokens per step, up to those at the start; set quotas."""
        self._put(SetLimits(max_seqs, max_batched_tokens, kv_quotas))

    def died(self, error: BaseException) -> None:
        """Fail everything: the engine thread has ended."""
        self.dead = True
        self._fail_all(APIError(500, f"The engine died: {type(error).__name__}."))
        self._flights.clear()
        self._held.clear()

    def cut_off(self) -> int:
        """Fail everything in flight and all later requests; return the number of failed replies."""
        self._closed = APIError(
            503,
            "This worker is shutting down, and the time for requests in flight is over: send the "
            "request to another.",
            retry_after=RETRY_AFTER,
        )
        return self._fail_all(self._closed)

    def _fail_all(self, error: APIError) -> int:
        replies = {id(reply): reply for _, reply, _ in self._flights.values() if not reply.done}
        for reply in replies.values():
            reply.fail(error)
        for future in self._lease_futures.values():
            if not future.done():
                future.set_exception(error)
        return len(replies)

    # --- reports ----------------------------------------------------------------------------

    def deliver(self, report: EngineReport) -> None:
        """Distribute a step's report."""
        for _ in range(report.steps):
            self._metrics.step(report.computed)
        for begun in report.begun:
            self._isolated(begun.request, self._begin, begun)
        for request, start_ns, end_ns, tokens in report.chunks:
            if (flight := self._flights.get(request)) is not None:
                flight[0].chunks = (*flight[0].chunks, (start_ns, end_ns, tokens))
        for request, prompt in report.prompts:
            self._isolated(request, _explain_prompt, prompt)
        for request, states in report.pooled:
            if (flight := self._flights.get(request)) is not None:
                flight[0].pooled = states
        if report.tokens:
            self._take_tokens(report)
        for request, ticket in report.leases.items():
            self._on_lease(request, ticket)
        for failed in report.failed:
            retry = RETRY_AFTER if failed.status == 503 else None
            error = APIError(
                failed.status, failed.message, type=failed.type or None, retry_after=retry
            )
            self._fail(failed.request, error)
        for finished in report.finished:
            ticket = report.tickets.get(finished.request)
            self._isolated(finished.request, self._finish, finished, ticket)
        if report.events:
            self._publish(report.events)

    def _isolated(
        self, request: str, work: Callable[[ReplySequence, Reply, Add, *_Arguments], None],
        *args: *_Arguments,
    ) -> None:  # fmt: skip
        """Handle one request's part of a report; an exception fails that request alone."""
        if (flight := self._flights.get(request)) is None:
            return
        try:
            work(*flight, *args)
        except Exception as error:
            self._broke(request, flight[1], error)

    def _broke(self, request: str, reply: Reply, error: Exception) -> None:
        extra = about(request)
        log.error("request %s failed on its way out, alone", request, exc_info=error, extra=extra)
        self._flights.pop(request, None)
        self._put(Abort(request))
        why = f"{type(error).__name__}: {error}"[:300]
        message = f"The worker failed on this request alone ({why})."
        reply.fail(APIError(500, message, type=REQUEST_FAILED))
        self.cancel(reply)
        self._settled()

    def _begin(self, sequence: ReplySequence, _: Reply, add: Add, begun: Begun) -> None:
        if sequence.begun:
            return
        sequence.begun, sequence.loading = begun.now, begun.loading
        sequence.cached, sequence.loaded = begun.computed, begun.loaded
        self._metrics.begun(sequence, add.request.remote)

    def _take_tokens(self, report: EngineReport) -> None:
        flights, metrics, now = self._flights, self._metrics, report.now
        for request, token, logprobs in report.tokens:
            flight = flights.get(request)
            if flight is None:
                continue
            sequence, reply, _ = flight
            if sequence.choice.finish is not None:
                continue  # tokens after a stop string, sampled before the abort arrived
            if self._followers:
                self._follow(request)
            metrics.token(sequence, now)
            try:
                if reply.take(sequence, token, logprobs) and sequence.choice.is_cut:
                    self._put(Abort(request, turn_ended=True))
            except Exception as error:
                self._broke(request, reply, error)
        metrics.generated_tokens += len(report.tokens)

    def _fail(self, request: str, error: APIError) -> None:
        flight = self._flights.pop(request, None)
        if flight is not None:
            flight[1].fail(error)
            self.cancel(flight[1])
            self._left(flight[1])
            self._settled()

    def _finish(
        self, sequence: ReplySequence, reply: Reply, add: Add, finished: Finished,
        ticket: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        del self._flights[finished.request]
        sequence.preemptions = finished.preemptions
        self._follow(finished.request)
        self._left(reply)
        reason = finished.reason.value
        if sequence.choice.finish is not None:
            reason = sequence.choice.finish
        elif finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            reply.end(sequence, reason)
        else:
            reply.fail(APIError(500, f"The engine ended the request: {reason}."))
        self._metrics.finished(sequence, finished, reason, add.params.max_tokens)
        reply.hand_over(ticket)
        self._settled()

    def _settled(self) -> None:
        if self._shaken is not None and not self._flights:
            self._shaken()

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call `call` whenever nothing is in flight; now, if that is the case."""
        self._shaken = call
        self._settled()


def _explain_prompt(
    sequence: ReplySequence, reply: Reply, _: Add, reports: list[Report | None]
) -> None:
    assert sequence.explainer is not None
    explainer = sequence.explainer.fresh()
    logprobs = [
        explainer.bare(token) if report is None else explainer.explain(report)
        for token, report in zip(sequence.prompt, reports, strict=True)
    ]
    sequence.prompt_logprobs = logprobs
    options = reply.options
    if options.echo is not None and options.logprobs and not options.resumed:
        sequence.logprobs += logprobs


class WaitingSequences:
    """Bounds the sequences per reply (identified by number) in the engine; queues the rest."""

    def __init__(self, max_in_engine: int = 0) -> None:
        self._max_in_engine = max_in_engine
        self._inside: dict[int, int] = {}
        self._held: dict[int, deque[Add]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def enters(self, reply: int, add: Add) -> bool:
        """True if the sequence may go to the engine; otherwise it is queued."""
        inside = self._inside.get(reply, 0)
        if self._max_in_engine and inside >= self._max_in_engine:
            self._held.setdefault(reply, deque()).append(add)
            return False
        self._inside[reply] = inside + 1
        return True

    def left(self, reply: int) -> Add | None:
        """Return the queued sequence that replaces one that left the engine."""
        waiting = self._held.get(reply)
        if waiting:
            add = waiting.popleft()
            if not waiting:
                del self._held[reply]
            return add
        inside = self._inside.get(reply, 0) - 1
        if inside > 0:
            self._inside[reply] = inside
        else:
            self._inside.pop(reply, None)
        return None

    def drop(self, reply: int) -> Iterator[Add]:
        """Remove and return a reply's queued sequences."""
        return iter(self._held.pop(reply, ()))

    def clear(self) -> None:
        """Drop all queued sequences."""
        self._inside.clear()
        self._held.clear()
