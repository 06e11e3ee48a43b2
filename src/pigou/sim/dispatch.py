"""The dispatcher: drives the control plane and the lifecycles of requests by the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.messages import (
    Action,
    Assess,
    CacheChanged,
    Decision,
    Ended,
    FirstToken,
    Observation,
    PrefillDone,
    ReadFailed,
    Recall,
    Route,
    SetEngineLimits,
)
from pigou.control.plane import ControlPlane
from pigou.control.pull_queue.config import PullQueueConfig
from pigou.engine.checks import QueueFull
from pigou.engine.plan import Finished
from pigou.lifecycle.messages import (
    ClientTimedOut,
    EndRequest,
    Fact,
    FetchKV,
    KVFetched,
    KVFetchFailed,
    LegFailed,
    LifecycleEvent,
    Prefilled,
    RequestRefused,
    StartDecode,
    StartPrefill,
    StopLeg,
    StreamBegan,
    StreamFinished,
    SubmitRequest,
    TokensReceived,
)
from pigou.lifecycle.request import Effects, RequestLifecycle
from pigou.objectives import Objectives
from pigou.sim.gateways import AnyPlane
from pigou.sim.kv_transfer import KVLeases, RemoteKVFetches
from pigou.sim.network import Network
from pigou.sim.prefill_pull import PrefillPull
from pigou.sim.request_run import (
    CLIENT_OUTCOMES,
    NO_SOURCE,
    Attempt,
    KVSource,
    Leg,
    RequestRun,
    RunOutcome,
)
from pigou.sim.virtual_clock import Clock, Phase
from pigou.sim.worker import LaggingWorkers
from pigou.sim.worker_spec import FleetWorker
from pigou.sim.workload import block_hashes


class TokenReports:
    """Reports tokens to the control plane, in preallocated arrays."""

    def __init__(self, plane: AnyPlane) -> None:
        self._plane = plane
        self._slots: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._counts = self._slots.copy()
        self._one_stream = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)

    def add_slots(self, streams: int) -> None:
        """Grow the arrays by `streams` streams."""
        self._slots = np.zeros(len(self._slots) + streams, dtype=np.int64)
        self._counts = self._slots.copy()

    def publish(self, workers: Sequence[FleetWorker], now: int) -> None:
        """Tell of the tokens generated since the last call."""
        slots, counts, size = self._slots, self._counts, 0
        for worker in workers:
            if worker.sim is not None:
                size = worker.sim.publish_tokens(now, slots, counts, size)
        if size:
            self._plane.on_tokens(slots[:size], counts[:size], now)

    def publish_one(self, slot: int, count: int, now: int) -> None:
        """Report `count` tokens of one stream."""
        slots, counts = self._one_stream
        slots[0], counts[0] = slot, count
        self._plane.on_tokens(slots, counts, now)


class Dispatcher:
    """Sends requests to workers, and reports to the control plane."""

    def __init__(
        self, plane: AnyPlane, clock: Clock, network: Network,
        workers: Mapping[str, FleetWorker], overhead_ns: int, lease_ns: int,
        act: Callable[[Assess | SetEngineLimits, int], None], leg_ns: int = 0,
        lagging: LaggingWorkers | None = None, pull: PullQueueConfig | None = None,
    ) -> None:  # fmt: skip
        self.shed = 0
        self.objectives = Objectives()
        self._plane, self._clock = plane, clock
        self._workers, self._act = workers, act
        self._overhead_ns, self._leg_ns = overhead_ns, leg_ns
        self._lagging = {} if lagging is None else lagging
        self._attempts: dict[str, Attempt] = {}
        self._attempt_of: dict[RequestRun, Attempt] = {}
        self.leases = KVLeases(clock, workers, network, lease_ns)
        self.wanted = self.leases.transfer
        self.kv_fetches = RemoteKVFetches(
            clock, workers, leg_ns, self._kv_fetched,
            lambda attempt, fetch, now: self.take(attempt, KVFetchFailed(fetch.leg), now),
        )  # fmt: skip
        self.tokens = TokenReports(plane)
        one = plane if isinstance(plane, ControlPlane) else plane.planes[0]
        self.pull = None if pull is None else PrefillPull(pull, one, clock, workers, self)

    @property
    def inflight(self) -> int:
        """Attempts under way, queued ones included."""
        return len(self._attempts)

    def legs_on(self, worker: str) -> list[Leg]:
        """Return the legs running on a worker, or on their way there."""
        legs = [attempt.leg for attempt in self._attempts.values()]
        return [leg for leg in legs if leg is not None and leg.worker == worker]

    # --- the client's side --------------------------------------------------------------------

    def send(self, run: RequestRun, now: int) -> None:
        """Begin an attempt; `on_end` is called at its end."""
        run.sent_ns = now
        run.attempts += 1
        run.first_token_ns = run.last_token_ns = run.output_tokens = 0
        run.outcome, run.reason = RunOutcome.PENDING, ""
        if not self._overhead_ns:
            self._begin(run, now)
            return
        number = run.attempts

        def arrive(at: int) -> None:
            if run.attempts == number and run.outcome is RunOutcome.PENDING:
                self._begin(run, at)

        self._clock.at(now + self._overhead_ns, Phase.SEND, run.number, arrive)

    def time_out(self, run: RequestRun, now: int) -> None:
        """The client gives an attempt up; `on_end` is called."""
        attempt = self._attempt_of.get(run)
        if attempt is None:
            self._end_run(run, RunOutcome.TIMED_OUT, "", now)
            return
        if attempt.leg is not None:
            self._settle(attempt.leg, now)
        self.take(attempt, ClientTimedOut(), now)

    def _begin(self, run: RequestRun, now: int) -> None:
        id_ = run.attempt_id
        size = next(iter(self._workers.values())).info.block_size
        lifecycle = RequestLifecycle(id_)
        attempt = Attempt(run, lifecycle, block_hashes(run.spec, run.number, size), size, now)
        self._attempts[id_] = self._attempt_of[run] = attempt
        self._perform(attempt, lifecycle.begin(), now)

    def _end(self, attempt: Attempt, end: EndRequest, now: int) -> None:
        run, id_ = attempt.run, attempt.lifecycle.id
        if end.shed is not None:
            self.shed += 1
            run.retry_after_ns = end.shed.retry_after
        del self._attempts[id_], self._attempt_of[run]
        self.observe(Ended(id_, end.finish), now)
        self._end_run(run, CLIENT_OUTCOMES[end.outcome], end.reason, now)

    def _end_run(self, run: RequestRun, outcome: RunOutcome, reason: str, now: int) -> None:
        run.outcome, run.reason, run.ended_ns = outcome, reason, now
        run.on_end(run, now)

    # --- the control plane's side -------------------------------------------------------------

    def observe(self, observation: Observation, now: int) -> None:
        """Report an event to the control plane, and apply its decisions."""
        if self._lagging and len(self._plane.queue):  # a queued request may be routed
            self.catch_up()
        decisions = self._plane.observe(observation, now)
        if decisions:
            self.perform(decisions, now)
        if self.pull is not None:
            self.pull.observe(observation, now)

    def perform(self, decisions: Iterable[Decision | Action], now: int) -> None:
        """Apply the control plane's decisions."""
        for decision in decisions:
            if isinstance(decision, Assess | SetEngineLimits):
                self._act(decision, now)
            elif (attempt := self._attempts.get(decision.request)) is not None:
                self._decided(attempt, decision, now)

    def tick(self, now: int) -> None:
        """Tick the control plane, and apply its decisions."""
        if self._lagging and len(self._plane.queue):
            self.catch_up()
        if actions := self._plane.tick(now):
            self.perform(actions, now)

    def cache_changed(self, changed: CacheChanged, now: int) -> None:
        """Tell the control plane of a worker's KV events; it decides nothing upon them."""
        self._plane.observe(changed, now)

    def catch_up(self) -> None:
        """Have all past KV events published, before they matter."""
        for worker in list(self._lagging.values()):
            worker.catch_up()

    # --- the lifecycle of an attempt ----------------------------------------------------------

    def _decided(self, attempt: Attempt, decision: Decision, now: int) -> None:
        run = attempt.run
        if isinstance(decision, Route):
            attempt.priority, attempt.source = decision.priority or 0, NO_SOURCE
            run.routed_ns = now
            choice = decision.choice
            run.decode_worker, run.prefill_worker = choice.decode, choice.prefill or ""
            attempt.slot = self._plane.slot(attempt.lifecycle.id)
            if run.spec.max_tokens:
                attempt.expected = self._plane.expected(attempt.lifecycle.id)
        effects = attempt.lifecycle.take(decision, now)
        if effects and isinstance(decision, Recall):
            run.moves += 1
        self._perform(attempt, effects, now)

    def take(self, attempt: Attempt, event: LifecycleEvent, now: int) -> None:
        """Pass an event to the lifecycle, and apply its effects."""
        self._perform(attempt, attempt.lifecycle.take(event, now), now)

    def _perform(self, attempt: Attempt, effects: Effects, now: int) -> None:
        """Apply effects; skip a step that is no longer the next."""
        effect: Any
        for effect in effects:
            step = _STEPS.get(type(effect))
            if step is None:
                _EFFECTS[type(effect)](self, attempt, effect, now)
            elif effect.leg == attempt.lifecycle.leg:
                step(self, attempt, effect, now)

    def _report(self, _: Attempt, fact: Fact, now: int) -> None:
        self.observe(fact, now)

    def _submit(self, attempt: Attempt, submit: SubmitRequest, now: int) -> None:
        request = attempt.plane_request(submit.tokens)
        if self.objectives.classes:
            workload = self.objectives.name_of(request.tenant, attempt.run.spec.prompt_tokens)
            request = msgspec.structs.replace(request, workload=workload)
        attempt.request = request
        if self._lagging:
            self.catch_up()
        self._decided(attempt, self._plane.submit(request, now, submit.exclude), now)

    # --- legs ---------------------------------------------------------------------------------

    def _prefill(self, attempt: Attempt, start: StartPrefill, now: int) -> None:
        if self.pull is not None:
            self.pull.start(attempt, start, now)
        else:
            self.send_prefill(attempt, start.worker, start.leg, now)

    def send_prefill(self, attempt: Attempt, worker: str, number: int, now: int) -> None:
        """Begin the leg that computes the prompt."""
        request, source = attempt.leg_request(1, keep_blocks=True), attempt.source
        leg = attempt.leg = Leg(attempt, worker, request, number, source, streams=False)
        self._send_leg(leg, now)

    def _decode(self, attempt: Attempt, start: StartDecode, now: int) -> None:
        request, source = attempt.request, attempt.source
        declared = attempt.run.spec.max_tokens  # it ends by itself, before
        if request is None or attempt.lifecycle.moves or source.tokens or declared:
            rest = attempt.run.spec.output_tokens - attempt.run.output_tokens
            request = attempt.leg_request(rest)
        leg = attempt.leg = Leg(attempt, start.worker, request, start.leg, source)
        self._send_leg(leg, now)

    def _fetch(self, attempt: Attempt, fetch: FetchKV, now: int) -> None:
        self.kv_fetches.start(attempt, fetch, now)

    def _kv_fetched(
        self, attempt: Attempt, fetch: FetchKV, worker: str, hold_id: str, blocks: int, now: int
    ) -> None:
        """A worker holds blocks of a prompt, for the worker that computes the rest."""
        self.leases.add(worker, hold_id, attempt.run.number, now)
        attempt.source = KVSource(worker, hold_id, blocks * attempt.block_size)
        self.take(attempt, KVFetched(fetch.leg), now)

    def _send_leg(self, leg: Leg, now: int) -> None:
        if not self._leg_ns:
            self._add_leg(leg, now)
            return

        def arrive(at: int) -> None:
            if leg is leg.attempt.leg:
                self._add_leg(leg, at)

        self._clock.at(now + self._leg_ns, Phase.SEND, leg.attempt.run.number, arrive)

    def _add_leg(self, leg: Leg, now: int) -> None:
        worker = self._workers.get(leg.worker)
        if worker is None or worker.sim is None:
            self._failed(leg, "it is gone", now)
        else:
            worker.sim.add(leg, now)

    def _stop(self, attempt: Attempt, stop: StopLeg, now: int) -> None:
        """Take a leg from its worker; a fetch ends by its number alone."""
        if self.pull is not None:
            self.pull.stop(attempt, now)
        leg = attempt.leg
        if leg is None or leg.number != stop.leg:
            return
        attempt.leg = None
        worker = self._workers[leg.worker]
        if worker.sim is not None:
            worker.sim.abort(leg, now)
        if leg.source.worker:
            self.leases.release(leg.source.worker, leg.source.hold_id, now)

    def _settle(self, leg: Leg, now: int) -> None:
        worker = self._workers[leg.worker]
        if worker.sim is not None:
            worker.sim.settle(leg)
        if leg.streams:
            self._count_tokens(leg, now)

    def _count_tokens(self, leg: Leg, now: int) -> None:
        attempt = leg.attempt
        attempt.run.output_tokens += leg.produced
        if leg.produced > leg.published:
            if self._lagging and len(self._plane.queue):
                self.catch_up()
            self.tokens.publish_one(attempt.slot, leg.produced - leg.published, now)
        if leg.produced:
            self.take(attempt, TokensReceived(leg.number, leg.produced), now)

    def broken(self, leg: Leg, now: int) -> None:
        """A leg's worker died under it."""
        if leg is leg.attempt.leg and self.pull is not None and not leg.streams:
            leg.attempt.leg = None  # delivered again once its lease ends, or the death is noticed
        elif leg is leg.attempt.leg:
            self._failed(leg, "its worker died", now)

    def _failed(self, leg: Leg, reason: str, now: int) -> None:
        attempt = leg.attempt
        self._settle(leg, now)
        attempt.run.moves += 1
        self.take(attempt, LegFailed(leg.number, frozenset({leg.worker}), reason), now)

    # --- events of workers --------------------------------------------------------------------

    def refused(self, leg: Leg, error: Exception, now: int) -> None:
        """A leg was refused."""
        attempt = leg.attempt
        if leg is not attempt.leg:
            return
        if isinstance(error, QueueFull):
            self._failed(leg, str(error), now)
            return
        self.take(attempt, RequestRefused(leg.number, str(error)), now)

    def first_token(self, leg: Leg, now: int) -> None:
        """A leg generated its first token."""
        attempt = leg.attempt
        if attempt.run.output_tokens == 0:
            attempt.run.first_token_ns = now
        self.take(attempt, StreamBegan(leg.number), now)

    def finished(self, leg: Leg, finished: Finished, now: int) -> None:
        """A leg ended by itself."""
        attempt, run = leg.attempt, leg.attempt.run
        if leg is not attempt.leg:
            if len(finished.held):
                self._workers[leg.worker].sim.release(finished.request, now)  # type: ignore[union-attr]
            return
        attempt.leg = None
        if not leg.streams:
            self._prefilled(leg, finished, now)
            return
        if not run.prefill_worker and not run.moves:
            run.cached_tokens = finished.cached
        self._count_tokens(leg, now)
        run.last_token_ns = now
        self.take(attempt, StreamFinished(leg.number), now)

    def _prefilled(self, leg: Leg, finished: Finished, now: int) -> None:
        attempt = leg.attempt
        if not attempt.lifecycle.moves:
            attempt.run.cached_tokens = finished.cached
        attempt.source = NO_SOURCE
        if len(finished.held):
            self.leases.add(leg.worker, finished.request, attempt.run.number, now)
            tokens = len(finished.held) * attempt.block_size
            attempt.source = KVSource(leg.worker, finished.request, tokens)
        if self.pull is not None:
            self.pull.computed(leg, now)
        self.take(attempt, Prefilled(leg.number), now)


_Apply = Callable[[Dispatcher, Attempt, Any, int], None]
#: The method for each effect that is skipped once the lifecycle has moved to another leg.
_STEPS: dict[type, _Apply] = {
    SubmitRequest: Dispatcher._submit,
    FetchKV: Dispatcher._fetch,
    StartPrefill: Dispatcher._prefill,
    StartDecode: Dispatcher._decode,
}
#: The method for each other effect.
_EFFECTS: dict[type, _Apply] = {
    StopLeg: Dispatcher._stop,
    EndRequest: Dispatcher._end,
    PrefillDone: Dispatcher._report,
    FirstToken: Dispatcher._report,
    ReadFailed: Dispatcher._report,
}
