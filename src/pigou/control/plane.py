"""ControlPlane: who runs where, and at what price."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.admission.admission_controller import Chosen, Desk
from pigou.control.admission.parallel_sequences import UNLIMITED, has_place, most_of_one
from pigou.control.admission.queue import WaitQueue
from pigou.control.admission.queue_order import Waiting
from pigou.control.admission.worker_capacity import least_seconds
from pigou.control.assessment import Assessment, Snapshot
from pigou.control.cache_monitor import CachingWatch
from pigou.control.decisions import Explanation
from pigou.control.messages import (
    Action,
    Assess,
    Assessed,
    CacheChanged,
    CacheKeyed,
    CacheLost,
    Choice,
    Decision,
    Ended,
    FirstToken,
    GroupEnded,
    LoadReport,
    Observation,
    PrefillDone,
    ReadFailed,
    Recall,
    Route,
    Shed,
    WorkerDown,
    WorkerUp,
)
from pigou.control.prefix_index import PrefixIndex
from pigou.control.recall import REPORT_HOLDS, Returning, overdue, to_move
from pigou.control.regimes.routing_controllers import StaticConfig, controller, controller_config
from pigou.control.request_tracker import Watch
from pigou.control.router import Router
from pigou.control.routing.policy import RoutingPolicy, load, params_of
from pigou.control.routing.toll.policy import memory_prices, stream_tolls
from pigou.control.routing.view import FleetView
from pigou.control.saturation.paper_detector import detector, detector_config
from pigou.control.saturation.regime import Regime
from pigou.control.state import both, everybody
from pigou.control.status import Status
from pigou.request import NEVER, SECOND, Request, Worker

#: Nanoseconds between two assessments of the Price of Anarchy.
ASSESSED_EVERY = 5 * SECOND


class ControlPlane:
    """Admission, routing and the fleet's state; a state machine without a clock.

    A request is submitted, then routed at once, queued, or shed. A queued one is routed or shed
    by a later call. A routed one weighs on its workers until `Ended`, or until it is submitted
    again because its worker failed: then it goes before new requests, and is never shed for lack
    of space. All calls take `now` in nanoseconds, which must not fall.
    """

    def __init__(self, config: ControlConfig, policy: RoutingPolicy | None = None) -> None:
        """Start with no workers.

        Args:
            config: limits, and the name of the policy.
            policy: used instead of the named one.

        Raises:
            ConfigError: there is no policy, detector, controller or order of that name, or it has
                no such parameter.
        """
        self.config = config
        self.router = Router(
            load(config.policy, config.params) if policy is None else policy, config
        )
        found = detector(detector_config(config.saturation))
        tuning = controller_config(config.controller)
        self.watch = Watch(found, controller(tuning, found, np.random.default_rng(config.seed)))
        self.state = self.watch.state
        self._tunes = not isinstance(tuning, StaticConfig)
        limits = config.index
        self.index = PrefixIndex(limits.max_blocks, limits.max_total, limits.ttl)
        self.caching = CachingWatch()
        self.desk = Desk(config)
        self.returning = Returning(config.queue_timeout)
        self._reported: dict[str, int] = {}
        self._assessment: Assessment | None = None
        self._assessing = False
        self._assessed = 0
        self._regime: Regime | None = None

    @property
    def queue(self) -> WaitQueue:
        """Who waits for a worker."""
        return self.desk.queue

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """Decide what becomes of a request; `exclude` names workers that just failed it.

        Raises:
            ConfigError: its overrides name no parameter of the policy, or cannot be honoured.
        """
        if request.overrides:
            self.router.check(request.overrides)
        load = self.state.loads.get(request.id)
        if load is not None:
            self.desk.failed(load.request)
            self.watch.failed(request.id, now)
        returned = load is not None or bool(exclude)
        self.desk.queue.remove(request.id)
        fleet = self.view(request, now)
        uncached = request.prompt - fleet.longest(request.prompt)
        waiting = Waiting(
            request, now, uncached, int(fleet.output), exclude=exclude, returned=returned
        )
        least = least_seconds(request, fleet) if request.deadline < NEVER else 0.0
        return self.desk.submit(
            waiting, now, self.state.row, least, lambda each: self._choose(each, now, fleet)
        )

    def may_add(self, own: int, prompt: int, max_tokens: int, now: int) -> bool:
        """Whether another sequence of a client's request may be submitted now.

        Args:
            own: sequences of that request which are submitted, and have not ended.
            prompt: tokens of the next one's prompt.
            max_tokens: most tokens that it generates.
            now: nanoseconds.
        """
        if own == 0:
            return True
        tokens = prompt + int(self.watch.estimator.expected_output(max_tokens))
        most = self.config.max_request_inflight
        known = self.watch.estimator.peek(now)  # asking is not journalled: it changes nothing
        room = self.desk.room
        if own >= most_of_one(self.state, known, room, most):
            return False
        if len(self.queue):
            return self.desk.queue.order.holds_back  # it decides who of them goes first
        return has_place(tokens, self.state, known, room)

    def computes(self, request: str) -> bool:
        """Whether a routed request's prompt is still to be computed, as far as is known."""
        return self._computes(request) is not None

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """Take in a fact; return the decisions that it sets free, for queued requests."""
        if type(observation) is CacheChanged or type(observation) is CacheKeyed:  # most frequent
            self.index.apply(observation.worker, observation.events)
            return ()
        if type(observation) is FirstToken:
            return self._first_token(observation.request, now)
        if type(observation) is Ended:
            return self._ended(observation.request, now)
        match observation:
            case PrefillDone(request, well):
                worker = self._computes(request)
                self.watch.prefill_done(request, well, now)
                return self._prefilled(worker, now)
            case ReadFailed(request):
                self.watch.read_failed(request, now)
            case WorkerUp(worker):
                return self._up(worker, now)
            case WorkerDown(worker):
                self._expect_back(worker, now)
                self._reported.pop(worker, None)
                self.watch.down(worker)
                self.desk.room.down(worker)
                self.index.drop(worker)
            case GroupEnded(group):
                self.desk.queue.shares.release(group)
            case CacheLost(worker):
                self.index.lost(worker)
            case LoadReport():
                self._reported[observation.worker] = now
                self.state.report(observation)
                self.desk.room.report(observation, self.state)
            case Assessed(assessment):
                self._assessing = False
                self._assessment = assessment or self._assessment
        return ()

    def slot(self, request: str) -> int:
        """Return the number under which `on_tokens` takes a request's tokens; -1 without one.

        It is the request's own from its route to its end, or until it is submitted again.
        """
        load = self.state.loads.get(request)
        return -1 if load is None else load.seat

    def requests_in(self, slots: NDArray[np.int64]) -> list[str]:
        """Return the ids of the requests that have these slots."""
        return [self.state.seats.owner(slot).request.id for slot in slots.tolist()]

    def on_tokens(self, slots: NDArray[np.int64], counts: NDArray[np.int64], now: int) -> None:  # noqa: ARG002 (each call tells the time)
        """Take in that tokens of many requests came.

        Args:
            slots: of the requests (`slot`), (n,); one may be there several times.
            counts: tokens of each, at least 1, (n,).
            now: nanoseconds.
        """
        self.watch.came(slots, counts)
        if self.desk.counts:
            self.desk.came(self.state.seats, slots, counts)

    def tick(self, now: int) -> Sequence[Action]:
        """Let time pass: estimates are renewed, queued requests time out, failed workers are
        tried again. Call it several times a second.
        """
        waiting = len(self.desk.queue)
        self.watch.tick(now, waiting)
        self.index.expire(now)
        self.caching.tick(self.state, self.index, lambda: self.watch.estimates(now), now)
        if self.watch.detector.regime is not self._regime:  # an enum's value is slow to read
            self._regime = self.watch.detector.regime
            self.router.regime = self._regime.value
        if self._tunes:
            self._tune(now)
        shed = [*self.desk.displaced(), *self._overdue_inside(now)]
        if not waiting:
            return [*shed, *self._assess(now)] if shed else self._assess(now)
        shed += self.desk.overdue(now, bool(self.state.workers))
        return [*shed, *self._drain(now), *self._assess(now)]

    def assess(self, snapshot: Snapshot) -> Assessment | None:
        """Return the Price of Anarchy of a snapshot that `tick` gave out.

        It takes some milliseconds to tens of them, and touches nothing that other calls use: it
        may run on another thread, one call at a time.
        """
        return self.watch.audit.assess(snapshot)

    def status(self, now: int) -> Status:
        """Return the present prices and parameters; asking changes no decision."""
        columns, estimates = self.state.columns, self.watch.estimator.peek(now)
        output = self.watch.estimator.expected_output(NEVER)
        unknown = self._unknown(now)
        return Status(
            policy=self.router.name,
            controller=str(self.config.controller["controller"]),
            regime=self.watch.detector.regime,
            signal=self.watch.detector.signal,
            temperature=self.router.temperature,
            parameters=dict(params_of(self.router.policy)),
            assessment=None if unknown else self._assessment,
            unknown=unknown,
            caching=self.caching.status(self.state),
            workers=self.state.ids,
            tolls=stream_tolls(estimates, columns.decode_requests, output),
            memory=memory_prices(estimates, self.index.recomputed_share(self.state.ids)),
            estimates=estimates,
            output=output,
        )

    def decision(self, request: str) -> Explanation | None:
        """Return why a request went where it went; None when that is no longer known."""
        return self.router.ledger.get(request)

    def view(self, request: Request, now: int) -> FleetView:
        """Return the fleet as policies see it when they route this request.

        Its arrays are the control plane's own, and change with the next call.
        """
        return self.watch.view(request, self.index, now)

    def _unknown(self, now: int) -> str:
        """Return why the Price of Anarchy is not known now; empty where it is."""
        if away := self.returning.away(now):
            return f"the fleet is incomplete: {', '.join(sorted(away))} is down"
        if unknown := self.watch.audit.unknown(now):
            return unknown
        return "" if self._assessment is not None else "it was not assessed yet"

    def _tune(self, now: int) -> None:
        """Route by what the controller says now."""
        found = self.watch.controller.parameters(now)
        self.watch.setting = found.setting
        self.router.tune(found.temperature, {"overlap_weight": found.overlap_weight})

    def _assess(self, now: int) -> Sequence[Assess]:
        """Ask for an assessment, every few seconds, one at a time."""
        if self._assessing or now - self._assessed < ASSESSED_EVERY:
            return ()
        self._assessed = now
        snapshot = self.watch.snapshot(now)
        if snapshot is None:
            return ()
        self._assessing = True
        return (Assess(snapshot),)

    def _up(self, worker: Worker, now: int) -> Sequence[Decision]:
        """A worker is there: it takes from the queue, and from those that have too much."""
        new = worker.id not in self.state.row
        self.returning.up(worker.id, now)
        self.watch.up(worker, now)
        self.index.expect(worker.id, worker.blocks)
        self.queue.readmit(worker.id)
        routes = self._drain(now)
        if not new:
            return routes
        moves = to_move(self.state, self._slots(), worker.id)
        return [*routes, *(Recall(load.request.id, other) for load, other in moves)]

    def _expect_back(self, worker: str, now: int) -> None:
        """A worker went down: keep in mind how many streams it ran at once."""
        row = self.state.row.get(worker)
        if row is not None:
            decodes = bool(self.state.columns.decodes[row])
            self.returning.down(worker, int(self._slots()[row]) if decodes else 0, now)

    def _slots(self) -> NDArray[np.int64]:
        return self.desk.room.slots(self.state, UNLIMITED)

    def _overdue_inside(self, now: int) -> list[Shed]:
        """Give up what waits inside workers for longer than a request may wait; once each."""
        if not np.count_nonzero(self.state.columns.waiting):
            return []
        found = []
        for late, worker in list(overdue(self.state, now - self.config.queue_timeout)):
            if not late.given_up and now - self._reported.get(worker, 0) <= REPORT_HOLDS:
                late.given_up = True
                found.append(self.desk.give_up(late.request, worker, now))
        return found

    def _ended(self, request: str, now: int) -> Sequence[Route]:
        load = self.state.loads.get(request)
        if self.desk.queue.remove(request) or load is None:
            return ()
        self.watch.ended(request, now)
        self.desk.ended(load.request, now)
        return self._drain(now)

    def _first_token(self, request: str, now: int) -> Sequence[Route]:
        worker = self._computes(request)
        self.watch.first_token(request, now)
        return self._prefilled(worker, now)

    def _computes(self, request: str) -> str | None:
        """Return the worker that a request's prompt is still to be computed by; None for none."""
        load = self.state.loads.get(request)
        return None if load is None else load.prefill

    def _prefilled(self, worker: str | None, now: int) -> Sequence[Route]:
        """A worker computed a prompt: where prompts are held back, the next may go."""
        if worker is None or not self.desk.room.holds_prompts:
            return ()
        self.desk.room.prefilled(worker, now)
        return self._drain(now)

    def _drain(self, now: int) -> list[Route]:
        """Route queued requests, in order, as far as workers have room."""
        return self.desk.drain(now, self.state.row, lambda each: self._choose(each, now))

    def _choose(self, waiting: Waiting, now: int, fleet: FleetView | None = None) -> Chosen | None:
        """Choose workers and charge them; None when none can take the request."""
        request, admits = waiting.request, self.desk.room
        above = self.desk.above(waiting)
        streams = self._shared(waiting, admits.streams(self.state, above), now)
        if request.sequences > 1:
            streams = streams & admits.several(request, self.state)
        open_ = self._open(waiting.exclude)
        if not np.count_nonzero(both(streams, open_)):  # quicker than `any`
            return None
        fleet = self.view(request, now) if fleet is None else fleet
        told = self.desk.priority(waiting, above)
        priority = request.priority if told is None else told
        if priority <= 0 and self.state.background:
            self._overtake(fleet)
        prompts, fed = admits.ready(request, fleet, now, above)
        room = both(streams, both(fed, admits.fits(request, fleet, self.state, above)))
        if room is not streams and not np.count_nonzero(room):
            return None
        sources = open_ if self.config.peer_reads and self.state.lends else None
        choice = self.router.choose(request, fleet, both(open_, prompts), room, now, sources)
        if choice is None:
            return None
        self.desk.began(request, choice, self.state.row[choice.decode], fleet, now)
        self.watch.routed(request, choice, now, priority, int(fleet.output))
        computes, known = choice.prefill or choice.decode, fleet.longest(request.prompt)
        self.caching.routed(computes, request, choice.cached, known, now)
        self._predict(request, choice, now)
        return Chosen(choice, self.state.loads[request.id].uncached, told)

    def _shared(self, waiting: Waiting, streams: NDArray[np.bool_], now: int) -> NDArray[np.bool_]:
        """Leave out the workers that have their share, where others are expected back."""
        if not self.returning:
            return streams
        requests = len(self.state.loads) + max(1, len(self.queue))
        shares = self.returning.shares(self._slots(), requests, waiting.since, now)
        if shares is None:
            return streams
        return streams & (self.state.columns.decode_requests < shares)

    def _overtake(self, fleet: FleetView) -> None:
        """Leave out of a view the prompts that its request will not wait for."""
        columns = self.state.columns
        fleet.prefill_requests = columns.prefill_requests - columns.background_requests
        fleet.prefill_tokens = columns.prefill_tokens - columns.background_tokens
        fleet.prefill_pairs = columns.prefill_pairs - columns.background_pairs

    def _predict(self, request: Request, choice: Choice, now: int) -> None:
        """Expect the prompt in the caches of those that do not tell of theirs."""
        other = choice.prefill or choice.decode
        for name in (choice.decode,) if other == choice.decode else (choice.decode, other):
            worker = self.state.workers[self.state.row[name]]
            if worker.events:
                continue
            keys = request.keys_of(worker.block_size)
            if len(keys):
                self.index.predict(name, keys, now)

    def _open(self, exclude: frozenset[str]) -> NDArray[np.bool_]:
        """Which workers are not excluded, (workers,)."""
        if not exclude:
            return everybody(len(self.state.workers))
        found = np.ones(len(self.state.workers), dtype=np.bool_)
        for worker in exclude:
            row = self.state.row.get(worker)
            if row is not None:
                found[row] = False
        return found
