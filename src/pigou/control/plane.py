"""ControlPlane: routes requests to workers, at a price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig, LaneConfig
from pigou.control.admission.admission_controller import AdmissionController
from pigou.control.admission.admission_queue import AdmissionQueue
from pigou.control.admission.queue_order import QueuedRequest, WorkerLimits
from pigou.control.admission.worker_capacity import UNLIMITED, fastest_ttft_s
from pigou.control.cache_monitor import CacheMonitor, CacheStatus
from pigou.control.latency_model.estimates import Estimates
from pigou.control.lengths import LengthScore
from pigou.control.lengths import load as load_lengths
from pigou.control.messages import (
    Action,
    AdapterReport,
    Assess,
    Assessed,
    CacheChanged,
    CacheKeyed,
    CacheLost,
    Decision,
    Ended,
    FirstToken,
    GroupEnded,
    LoadReport,
    Observation,
    PeerGone,
    PeerReport,
    PrefillClaimed,
    PrefillDone,
    Queue,
    ReadFailed,
    Recall,
    Report,
    Route,
    SetEngineLimits,
    Shed,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from pigou.control.peers.reports import PeerReports
from pigou.control.prefix_index import PrefixIndex
from pigou.control.price_of_anarchy import PoAEstimate, PoASnapshot
from pigou.control.request_tracker import RequestTracker
from pigou.control.router import Explanation, Router
from pigou.control.routing.policy import RoutingPolicy, load, params_of
from pigou.control.routing.view import FleetView
from pigou.control.routing_controller import OperatingPoint, OperatingPoints, Static
from pigou.control.routing_controller import load as load_controller
from pigou.control.saturation.regime import Regime
from pigou.control.saturation.regime import load as load_detector
from pigou.control.worker_assignment import (
    REPORT_HOLDS,
    ReturningWorkers,
    WorkerAssigner,
    hand_over,
    overdue,
    to_move,
)
from pigou.request import NEVER, SECOND, Request, Worker

#: Nanoseconds between two assessments of the Price of Anarchy.
ASSESSED_EVERY = 5 * SECOND


@dataclass(frozen=True, slots=True)
class Status:
    """Current prices and parameters."""

    policy: str  # routing policy
    controller: str  # routing controller; "static" keeps parameters
    point: OperatingPoint  # operating point in force; empty where none was given
    regime: Regime
    signal: float  # detector input: smoothed TTFT P99, or its own statistic
    temperature: float
    parameters: dict[str, float]
    poa: PoAEstimate | None  # Price of Anarchy of the last minute; None if unknown
    # how full memory is, what was evicted, and the Price of Anarchy of the placement.
    caching: CacheStatus
    workers: tuple[str, ...]  # ids, in the order of the arrays
    # seconds that one more stream on each worker would cost those there, (workers,).
    tolls: NDArray[np.float64]
    # seconds of prefill that a token of KV on each worker pushes out, (workers,).
    memory: NDArray[np.float64]
    estimates: Estimates
    output: float  # expected output tokens per request
    lengths: LengthScore | None = None  # predicted output lengths; None for the mean of all
    unknown: str = ""  # why the Price of Anarchy is unknown; empty if it is known


def stream_tolls(
    known: Estimates, streams: NDArray[np.int64], output: float
) -> NDArray[np.float64]:
    """Return the seconds one more stream costs the others, (workers,): N n (f(n+1) - f(n))."""
    rows, n = np.arange(len(streams)), streams.astype(np.float64)
    tolls: NDArray[np.float64] = output * n * (known.itl(rows, n + 1.0) - known.itl(rows, n))
    return tolls


class ControlPlane:
    """Admission, routing and fleet state; a state machine without a clock.

    A request is routed, queued or shed; a queued one is routed or shed by a later call. After a
    worker failure it is submitted again, goes first, and is not shed for space. `now` is in
    nanoseconds and must not fall.

    Example:
        plane = ControlPlane(ControlConfig(policy="least-loaded"))
        plane.observe(WorkerUp(Worker("w0", "http://127.0.0.1:8001")), now=0)
        route = plane.submit(Request("r1", prompt=700, max_tokens=64), now=1)
        assert route.choice.decode == "w0"
        plane.observe(Ended("r1", FinishReason.STOP), now=2)
    """

    def __init__(self, config: ControlConfig, policy: RoutingPolicy | None = None) -> None:
        self.config = config
        self.router = Router(
            load(config.policy, config.params) if policy is None else policy, config
        )
        detector = load_detector(config.saturation)
        chosen = config.controller
        if config.operating_points:
            chosen = {"controller": "operating-points", **config.operating_points}
        controller = load_controller(chosen, detector, np.random.default_rng(config.seed))
        if isinstance(controller, OperatingPoints):
            self.router.check(controller.config.light.params)
            self.router.check(controller.config.heavy.params)
        self.controller = str(chosen["controller"])
        self.tracker = RequestTracker(
            detector, controller, load_lengths(config.lengths, config.length_model)
        )
        self.state = self.tracker.state
        self._tunes = not isinstance(controller, Static)
        self._started_with = dict(params_of(self.router.policy))
        self.point = OperatingPoint()  # in force
        limits = config.index
        self.index = PrefixIndex(limits.max_blocks, limits.max_total, limits.ttl)
        self.cache_monitor = CacheMonitor()
        self.admission = AdmissionController(config)
        self._use_lane(LaneConfig.parse(config.long_lane))
        self.returning = ReturningWorkers(config.queue_timeout)
        self._assigner = WorkerAssigner(
            config, self.admission, self.tracker, self.index, self.cache_monitor, self.returning
        )  # fmt: skip
        self._peers = PeerReports(self.admission, self.tracker, self.index)
        self.predicted = self._assigner.predicted
        self._poa: PoAEstimate | None = None
        self._assessing = False
        self._assessed = 0
        self._regime: Regime | None = None

    @property
    def queue(self) -> AdmissionQueue:
        """Requests waiting for a worker."""
        return self.admission.queue

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """Route, queue or shed a request; raises ConfigError for invalid overrides."""
        if request.overrides:
            self.router.check(request.overrides)
        request = self.admission.paid(request)
        routed = self.state.requests.get(request.id)
        if routed is not None:
            self.admission.failed(routed.request, now)
            self.tracker.release(request.id, now)
        returned = routed is not None or bool(exclude)
        self.admission.queue.remove(request.id)
        fleet = self.view(request, now)
        uncached = request.prompt - fleet.max_cached(request.prompt)
        waiting = QueuedRequest(
            request, now, uncached, int(fleet.output), exclude=exclude, returned=returned,
            length=fleet.output if fleet.lengths is None else fleet.lengths.rank,
        )  # fmt: skip
        min_ttft_s = fastest_ttft_s(request, fleet) if request.deadline < NEVER else 0.0
        return self._admit(waiting, now, fleet, min_ttft_s)

    def _admit(
        self, waiting: QueuedRequest, now: int, fleet: FleetView, min_ttft_s: float
    ) -> Decision:
        """Route a request at once, queue it, or shed it."""
        admission = self.admission
        shed = admission.arrive(waiting, now)
        if shed is not None:
            return shed
        skips_queue = admission.skips_queue(waiting)
        if skips_queue:
            route = self._assigner.assign(waiting, self.router, now, fleet)
            if route is not None:
                admission.queue.passed(waiting, self._uncached(waiting))
                return route
        entry = admission.enqueue(waiting, now, min_ttft_s)
        is_next = not skips_queue and admission.is_next(waiting, now, self.state)
        if is_next:
            route = self._assigner.assign(waiting, self.router, now, fleet)
            if route is not None:
                admission.queue.take(waiting, self._uncached(waiting))
                return route
        decision = admission.conclude(waiting, entry, now)
        blocked = skips_queue or is_next or waiting.limits in admission.queue.limits()
        if blocked and isinstance(decision, Queue):
            admission.queue.step_aside(waiting)
        return decision

    def may_add(self, own: int, prompt: int, max_tokens: int, now: int) -> bool:
        """True if a client's request with `own` sequences in flight may submit another."""
        if own == 0:
            return True
        tokens = prompt + int(self.tracker.latency_model.outputs.expected(max_tokens))
        known = self.tracker.latency_model.peek(now)  # asking is not journalled: it changes nothing
        return self.admission.may_add(own, tokens, self.state, known)

    def computes(self, request: str) -> str | None:
        """Return the worker that is still to compute a routed prompt; None for none."""
        routed = self.state.requests.get(request)
        return None if routed is None else routed.prefill

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """Apply an observation; return resulting decisions on queued requests."""
        if type(observation) is CacheChanged or type(observation) is CacheKeyed:  # most frequent
            self.index.apply(observation.worker, observation.events)
            return ()
        if type(observation) is FirstToken:
            return self._first_token(observation.request, now)
        if type(observation) is Ended:
            return self._ended(observation.request, now)
        return self._observe(observation, now)

    def _observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        decisions: Sequence[Decision] = ()
        match observation:
            case PrefillDone(request, well):
                worker = self.computes(request)
                self.tracker.prefill_done(request, well, now)
                return self._prefilled(worker, now)
            case PrefillClaimed(request, worker, cached):
                self.tracker.claimed(request, worker, cached, now)
            case ReadFailed(request):
                self.tracker.read_failed(request, now)
            case WorkerUp(worker):
                return self._up(worker, now)
            case WorkerDraining(worker):
                self.state.drain(worker)
                decisions = hand_over(self.state, worker)
            case WorkerDown(worker):
                self._expect_back(worker, now)
                if self.router.meter is not None:
                    self.router.meter.take(worker)
                self.tracker.down(worker)
                self.admission.capacity.down(worker)
                self.index.drop(worker)
            case GroupEnded(group):
                self.admission.queue.quota.release(group)
            case CacheLost(worker):
                self.index.lost(worker)
            case LoadReport() | AdapterReport() | PeerReport() | PeerGone():
                decisions = self._take_report(observation, now)
            case Assessed(poa):
                self._assessing = False
                self._poa = poa or self._poa
        return decisions

    def slot(self, request: str) -> int:
        """Return a routed request's slot for `on_tokens`, valid until its end; -1 for none."""
        routed = self.state.requests.get(request)
        return -1 if routed is None else routed.slot

    def expected(self, request: str) -> int:
        """Return a routed request's predicted output tokens; 0 if it is not routed."""
        routed = self.state.requests.get(request)
        if routed is None:
            return 0
        expected = self.state.slots.expected.item(routed.slot) - routed.request.prompt
        return int(max(1, expected // routed.request.sequences))

    def requests_in(self, slots: NDArray[np.int64]) -> list[str]:
        """Return the ids of the requests in these slots."""
        return [self.state.slots.owner(slot).request.id for slot in slots.tolist()]

    def on_tokens(self, slots: NDArray[np.int64], counts: NDArray[np.int64], now: int) -> None:  # noqa: ARG002 (all calls take the time)
        """Count output tokens: `counts` (at least 1) of the requests in these slots, (n,)."""
        self.tracker.on_tokens(slots, counts)
        if self.admission.counts_tokens:
            self.admission.on_tokens(self.state.slots, slots, counts)

    def tick(self, now: int) -> Sequence[Action]:
        """Update estimates, and time out and retry requests; call it several times a second."""
        admission = self.admission
        self.tracker.tick(now, waiting := len(admission.queue))
        self.index.expire(now)
        self.cache_monitor.tick(self.state, self.index, self.tracker.estimates, now)
        admission.reprice(self.tracker, self.index, now)
        if self._peers.tenants:
            self._peers.tick(now)
        if self.tracker.detector.regime is not self._regime:  # an enum's value is slow to read
            self._regime = self.tracker.detector.regime
            self.router.regime = self._regime.value
        actions: list[Action] = [*admission.displaced]
        if self._tunes:
            actions += self._tune(now)
        admission.displaced.clear()
        if self.state.oldest_arrival <= now - self.config.queue_timeout:
            actions += self._overdue_inside(now)
        if waiting:
            actions += admission.overdue(now, bool(self.state.workers))
            actions += self._drain(now)
        if now - self._assessed >= ASSESSED_EVERY and not self._assessing:
            actions += self._assess(now)
        return actions

    def assess(self, snapshot: PoASnapshot) -> PoAEstimate | None:
        """Return a snapshot's Price of Anarchy; may run on a thread, one call at a time."""
        return self.tracker.poa.assess(snapshot)

    def status(self, now: int) -> Status:
        """Return current prices and parameters, without side effects."""
        tracker, router = self.tracker, self.router
        state, detector = self.state, tracker.detector
        unknown, estimates = self._unknown(now), tracker.latency_model.peek(now)
        output = tracker.latency_model.outputs.expected(NEVER)
        return Status(
            policy=router.name, controller=self.controller, point=self.point,
            regime=detector.regime, signal=detector.signal, temperature=router.temperature,
            parameters=dict(params_of(router.policy)), poa=None if unknown else self._poa,
            unknown=unknown, caching=self.cache_monitor.status(state), workers=state.ids,
            tolls=stream_tolls(estimates, state.columns.decode_requests, output),
            memory=self.index.recomputed_share(state.ids) * estimates.prefill_per_token,
            estimates=estimates, output=output,
            lengths=None if tracker.lengths is None else tracker.lengths.score,
        )  # fmt: skip

    def _unknown(self, now: int) -> str:
        """Return why the Price of Anarchy is unknown; empty if it is known."""
        if away := self.returning.away(now):
            return f"the fleet is incomplete: {', '.join(sorted(away))} is down"
        if gateways := self.state.peers.gateways:
            return f"{len(gateways)} other gateways send requests to the workers, too"
        if unknown := self.tracker.poa.unknown(now):
            return unknown
        return "" if self._poa is not None else "it was not assessed yet"

    def decision(self, request: str) -> Explanation | None:
        """Return the explanation of a request's route; None if no longer known."""
        return self.router.ledger.get(request)

    def view(self, request: Request, now: int) -> FleetView:
        """Return the fleet as policies see it for this request, valid until the next call."""
        return self.tracker.view(request, self.index, now)

    def _tune(self, now: int) -> Sequence[SetEngineLimits]:
        """Apply the controller's parameters; return changed limits of the engines."""
        parameters = self.tracker.controller.parameters(now)
        self.tracker.setting = parameters.setting
        point, old = parameters.point, self.point
        if point is None:
            self.router.tune(parameters.temperature, {"overlap_weight": parameters.overlap_weight})
            return ()
        if point is old:
            return ()
        self.point = point
        temperature = self.config.temperature if point.temperature is None else point.temperature
        self.router.tune(temperature, self._started_with | point.params)
        return () if point.limits == old.limits else (SetEngineLimits(point.limits),)

    def _assess(self, now: int) -> Sequence[Assess]:
        self._assessed = now
        snapshot = self.tracker.snapshot(now)
        if snapshot is None:
            return ()
        self._assessing = True
        return (Assess(snapshot),)

    def _up(self, worker: Worker, now: int) -> Sequence[Decision]:
        """Add a worker, which takes requests from the queue and from overloaded workers."""
        new = worker.id not in self.state.row
        self.returning.up(worker.id, now)
        self.tracker.up(worker, now)
        if worker.long_lane and self.state.lane is None:
            self._use_lane(LaneConfig.parse(worker.long_lane))
        self.index.expect(worker.id, worker.blocks)
        self.queue.readmit(worker.id)
        routes = self._drain(now)
        if not new:
            return routes
        moves = to_move(self.state, self._max_streams(), worker.id)
        return [*routes, *(Recall(routed.request.id, other) for routed, other in moves)]

    def _take_report(self, report: Report, now: int) -> Sequence[Decision]:
        if isinstance(report, LoadReport):
            self.state.report(report, now)
            self.admission.capacity.report(report, self.state)
            return ()
        if isinstance(report, AdapterReport):
            self.tracker.adapters.report(report)
            return ()
        self._peers.observe(report, now)
        return self._drain(now)

    def _expect_back(self, worker: str, now: int) -> None:
        row = self.state.row.get(worker)
        if row is not None and worker not in self.state.draining:
            decodes = bool(self.state.columns.decodes[row])
            self.returning.down(worker, int(self._max_streams()[row]) if decodes else 0, now)

    def _max_streams(self) -> NDArray[np.int64]:
        return self.admission.capacity.max_streams(self.state, UNLIMITED)

    def _overdue_inside(self, now: int) -> list[Shed]:
        if not any(self.state.columns.waiting.tolist()):  # quicker than NumPy's for few workers
            return []
        shed = []
        for late, worker in list(overdue(self.state, now - self.config.queue_timeout)):
            if not late.given_up and now - self.state.reported.get(worker, 0) <= REPORT_HOLDS:
                late.given_up = True
                shed.append(self.admission.give_up(late.request, worker, now))
        return shed

    def _ended(self, request: str, now: int) -> Sequence[Route]:
        routed = self.state.requests.get(request)
        if self.admission.queue.remove(request) or routed is None:
            return ()
        self.tracker.ended(request, now)
        self.admission.ended(routed.request, now)
        return self._drain(now)

    def _first_token(self, request: str, now: int) -> Sequence[Route]:
        worker = self.computes(request)
        self.tracker.first_token(request, now)
        return self._prefilled(worker, now)

    def _prefilled(self, worker: str | None, now: int) -> Sequence[Route]:
        if worker is None or not self.admission.capacity.holds_prompts:
            return ()
        self.admission.capacity.prefilled(worker, now)
        return self._drain(now)

    def _uncached(self, waiting: QueuedRequest) -> int:
        return self.state.requests[waiting.request.id].uncached

    def _use_lane(self, lane: LaneConfig | None) -> None:
        """Give long prompts a lane; those that wait already have none."""
        self.state.lane = self.admission.lanes.long_lane = lane

    def _drain(self, now: int) -> list[Route]:
        """Route queued requests in order until no worker can take the next of any lane."""
        routes: list[Route] = []
        queue = self.admission.queue
        if not queue:
            return routes
        skip: list[WorkerLimits] = []
        self.admission.update_held(self.state, now)
        blocked = self.admission.full(self.state)
        while (waiting := queue.next(now, skip, blocked)) is not None:
            if waiting.limits in skip:
                queue.step_aside(waiting)
                continue
            if waiting.lane in blocked and not (waiting.returned or waiting.aside):
                break  # an order that knows no lanes
            route = self._assigner.assign(waiting, self.router, now)
            if route is not None:
                queue.take(waiting, self._uncached(waiting))
                routes.append(route)
            elif waiting.exclude.isdisjoint(self.state.row) and not waiting.request.eligible:
                lanes = self.admission.blocked(waiting, self.state)
                if lanes is None or waiting.returned:
                    break
                blocked |= lanes
            else:
                queue.step_aside(waiting)
                skip.append(waiting.limits)
        return routes
