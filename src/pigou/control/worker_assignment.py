"""Worker assignment: which workers serve a request, and which requests move."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.admission.admission_controller import AdmissionController
from pigou.control.admission.queue_order import QueuedRequest
from pigou.control.admission.worker_capacity import UNLIMITED
from pigou.control.cache_monitor import CacheMonitor
from pigou.control.messages import Choice, Recall, Route
from pigou.control.peers.bookings import PredictedPrompt
from pigou.control.prefix_index import PrefixIndex
from pigou.control.request_tracker import RequestTracker
from pigou.control.router import Router
from pigou.control.routing.view import FleetView
from pigou.control.state import FleetState, RoutedRequest, all_workers, both
from pigou.request import NEVER, SECOND, Request

#: A worker that went down is expected back within this time, in nanoseconds.
RETURN_WITHIN = 300 * SECOND
#: After one worker came back, the shares of those still expected are reserved this long at most.
HOLD_SHARES = 30 * SECOND
#: A load report holds for this time, in nanoseconds.
REPORT_HOLDS = 15 * SECOND
#: A request waits for no share in the last nanoseconds of the queue timeout, this many, or in its
#: last quarter where that is shorter.
MARGIN = 3 * SECOND
#: Predicted prompts that are remembered for other gateways.
_PREDICTED = 256


def _without_tokens(state: FleetState, worker: str) -> list[RoutedRequest]:
    """Return the requests at a worker without a token, in the order sent."""
    requests = [
        routed
        for routed in state.requests.values()
        if not routed.first_token_at
        and routed.generated == 0
        and (routed.prefill == worker or (routed.decode == worker and routed.prefill is None))
    ]
    return sorted(requests, key=lambda routed: routed.routed_at)


def _waiting_inside(state: FleetState, worker: str) -> list[RoutedRequest]:
    """Return the requests that a worker has not started, by its last report."""
    row, requests = state.row[worker], _without_tokens(state, worker)
    streaming = sum(
        routed.decode == worker and (routed.first_token_at > 0 or routed.generated > 0)
        for routed in state.requests.values()
    )
    begun = max(0, int(state.columns.running[row]) - streaming)
    count = min(int(state.columns.waiting[row]), len(requests) - begun)
    return requests[-count:] if count > 0 else []


def overdue(state: FleetState, before: int) -> Iterator[tuple[RoutedRequest, str]]:
    """Return requests waiting inside workers that arrived by `before` (ns), and their worker."""
    state.oldest_arrival = min(
        (
            routed.arrived_at
            for routed in state.requests.values()
            if not (routed.given_up or routed.first_token_at or routed.generated)
        ),
        default=NEVER,
    )
    if state.oldest_arrival > before:
        return
    for row in np.flatnonzero(state.columns.waiting > 0).tolist():
        worker = state.ids[row]
        for routed in _waiting_inside(state, worker):
            if routed.arrived_at <= before and not routed.request.is_follower:
                yield routed, worker


def _fair_shares(
    requests: int, max_streams: NDArray[np.int64], others: int = 0
) -> NDArray[np.int64]:
    """Return the number of requests each worker may have, rounded up, (workers,)."""
    whole = sum(max_streams.tolist()) + others  # Python integers do not overflow
    shares = np.ceil(requests * max_streams.astype(np.float64) / whole)
    counts: NDArray[np.int64] = shares.astype(np.int64)
    return counts


def to_move(
    state: FleetState, max_streams: NDArray[np.int64], new: str
) -> list[tuple[RoutedRequest, str]]:
    """Return requests without a token, last sent first, that a new worker should take over."""
    columns, own = state.columns, state.row[new]
    moves: list[tuple[RoutedRequest, str]] = []
    stages = (
        (columns.decodes, columns.decode_requests),
        (columns.prefills & ~columns.decodes, columns.prefill_requests),
    )
    for pool, held in stages:
        if not pool[own]:
            continue
        rows = np.flatnonzero(pool)
        shares = _fair_shares(int(held[pool].sum()), max_streams[rows])
        for row, share in zip(rows.tolist(), shares.tolist(), strict=True):
            excess = int(held[row]) - share
            if row == own or excess <= 0:
                continue
            worker = state.ids[row]
            waiting = set(map(id, _waiting_inside(state, worker)))
            movable = [
                routed
                for routed in _without_tokens(state, worker)[1:]
                if not routed.prefill_done_at
                and (routed.prefill == worker or id(routed) in waiting)
                and (not routed.request.eligible or new in routed.request.eligible)
            ]
            moves += [(routed, worker) for routed in movable[-excess:]]
    return moves


def hand_over(state: FleetState, draining: str) -> list[Recall]:
    """Recall the requests waiting inside a draining worker if others can take them."""
    if draining not in state.row or not state.columns.decodes.any():
        return []
    waiting = set(map(id, _waiting_inside(state, draining)))
    return [
        Recall(routed.request.id, draining)
        for routed in _without_tokens(state, draining)[1:]
        if not routed.prefill_done_at
        and (routed.prefill_worker == draining or id(routed) in waiting)
    ]


class ReturningWorkers:
    """Workers expected back, and the shares reserved for them for a bounded time."""

    def __init__(self, queue_timeout: int) -> None:
        self._latest = queue_timeout - min(MARGIN, queue_timeout // 4)
        self._share_time = min(HOLD_SHARES, self._latest)
        self.expected: dict[str, tuple[int, int]] = {}  # streams at most, and when it went down
        self._until = 0

    def down(self, worker: str, max_streams: int, now: int) -> None:
        """Record that a worker of `max_streams` (0: none) went down."""
        self.expected[worker] = max_streams, now

    def up(self, worker: str, now: int) -> None:
        """Record that a worker is up."""
        known = self.expected.pop(worker, None)
        self._forget(now)
        if known is not None and self.expected:
            self._until = now + self._share_time

    def away(self, now: int) -> Mapping[str, int]:
        """Return the maximum of streams of each worker expected back, by id."""
        self._forget(now)
        return {worker: max_streams for worker, (max_streams, _) in self.expected.items()}

    def shares(
        self, max_streams: NDArray[np.int64], requests: int, since: int, now: int
    ) -> NDArray[np.int64] | None:
        """Return the request limit of each worker, (workers,); None for no limit."""
        if now >= self._until or not self.expected or now - since >= self._latest:
            return None
        expected = sum(self.away(now).values())
        if not expected:
            return None
        return _fair_shares(requests, max_streams, expected)

    def _forget(self, now: int) -> None:
        for worker, (_, when) in list(self.expected.items()):
            if now - when > RETURN_WITHIN:
                del self.expected[worker]


class WorkerAssigner:
    """Chooses workers for one request at a time, and charges them with it."""

    def __init__(
        self, config: ControlConfig, admission: AdmissionController, tracker: RequestTracker,
        index: PrefixIndex, cache_monitor: CacheMonitor, returning: ReturningWorkers,
    ) -> None:  # fmt: skip
        self._remote_kv_fetch = config.peer_reads
        self._admission = admission
        self._tracker = tracker
        self._state = tracker.state
        self._index = index
        self._cache_monitor = cache_monitor
        self._returning = returning
        self.predicted: deque[PredictedPrompt] = deque(maxlen=_PREDICTED)

    def assign(
        self, waiting: QueuedRequest, router: Router, now: int, fleet: FleetView | None = None
    ) -> Route | None:
        """Choose and charge workers; None if none can take the request."""
        request, capacity, state = waiting.request, self._admission.capacity, self._state
        own_streams = self._admission.activity.own_total
        # this gateway has its part of the places, or the tenant its own
        spent = self._admission.allowance.spent(own_streams)
        if not waiting.returned and (spent or self._admission.is_held(waiting, state, now)):
            return None
        above = self._admission.above(waiting)
        streams, lane, owed = capacity.streams(state, above), state.lane, None
        if self._admission.lanes.some and not waiting.returned:
            rows, owed = self._lane_room(waiting, now)
            streams = both(streams, rows)
        if self._returning.expected:
            streams = self._shared(waiting, streams, now)
        if request.sequences > 1:
            streams = streams & capacity.sequences_fit(request, state)
        open_ = state.open_to(waiting.exclude, request.eligible)
        if not np.count_nonzero(both(streams, open_)):  # quicker than `any`
            return None
        fleet = self._tracker.view(request, self._index, now) if fleet is None else fleet
        sent_priority = self._admission.priority(waiting, above)
        priority = request.priority if sent_priority is None else sent_priority
        is_long = lane is not None and lane.is_long(request.prompt)
        if priority <= 0 and state.background and not is_long:
            self._leave_out_background(fleet)
        prompts, fed = capacity.ready(request, fleet, now, above)
        room = both(streams, capacity.fits(request, fleet, state, above, owed))
        if room is not streams and not np.count_nonzero(room):
            self._admission.allowance.tokens_lacked(now)
            return None
        room = both(room, fed)
        if room is not streams and not np.count_nonzero(room):
            return None
        sources = open_ if self._remote_kv_fetch and state.has_fetch_sources else None
        able = both(open_, prompts)
        allowed = self._admission.allowed(request, state, room, open_)
        choice = router.choose(request, fleet, able, allowed, now, sources)
        if choice is None and allowed is not room:  # no pair of them can
            choice = router.choose(request, fleet, able, room, now, sources)
        if choice is None:
            return None
        self._admission.began(waiting, choice, state.row[choice.decode], fleet, now)
        self._tracker.routed(request, choice, now, priority, int(fleet.output))
        computes, known = choice.prefill or choice.decode, fleet.max_cached(request.prompt)
        self._cache_monitor.routed(computes, request, choice.cached, known, now)
        self._predict(request, choice, now)
        return Route(request.id, choice, sent_priority)

    def _shared(
        self, waiting: QueuedRequest, streams: NDArray[np.bool_], now: int
    ) -> NDArray[np.bool_]:
        state = self._state
        requests = len(state.requests) + max(1, len(self._admission.queue))
        limits = self._admission.capacity.max_streams(state, UNLIMITED)
        shares = self._returning.shares(limits, requests, waiting.since, now)
        if shares is None:
            return streams
        return streams & (state.columns.decode_requests < shares)

    def _lane_room(
        self, waiting: QueuedRequest, now: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64] | None]:
        """Return the workers with a row for its lane, and the tokens owed to long prompts."""
        admission, state = self._admission, self._state
        queue, is_long = admission.queue, waiting.lane.is_long
        workers = int(np.count_nonzero(state.columns.decodes))
        if admission.lanes.at_cap(waiting, workers, queue.lanes):
            return ~all_workers(len(state.ids)), None
        if state.lane is None:
            return all_workers(len(state.ids)), None
        limits = admission.capacity.max_tokens(state)
        full = admission.full(state)
        others = {
            lane: count
            for lane, count in queue.lanes.items()
            if lane.is_long != is_long and lane not in full
        }
        max_streams = admission.capacity.max_streams(state, UNLIMITED)
        rows = admission.lanes.rows(waiting, state, max_streams, limits, sum(others.values()))
        if is_long or not others:
            return rows, None
        short = [lane for lane in queue.lanes if lane not in others]
        head = queue.next(now, queue.limits(), short)
        return rows, admission.lanes.owed_tokens(head, limits, state.ids)

    def _leave_out_background(self, fleet: FleetView) -> None:
        columns = self._state.columns
        fleet.prefill_requests = columns.prefill_requests - columns.background_requests
        fleet.prefill_tokens = columns.prefill_tokens - columns.background_tokens
        fleet.prefill_pairs = columns.prefill_pairs - columns.background_pairs
        if self._state.lane is not None:  # short prompts share a few steps with long ones' chunks
            shared = columns.background_requests > 0
            tokens = np.minimum(columns.background_tokens, self._state.lane.tokens) * shared
            mean = columns.background_pairs / np.maximum(1, columns.background_tokens)
            fleet.prefill_requests = fleet.prefill_requests + shared
            fleet.prefill_tokens = fleet.prefill_tokens + tokens
            fleet.prefill_pairs = fleet.prefill_pairs + (tokens * mean).astype(np.int64)

    def _predict(self, request: Request, choice: Choice, now: int) -> None:
        other = choice.prefill or choice.decode
        for name in (choice.decode,) if other == choice.decode else (choice.decode, other):
            worker = self._state.workers[self._state.row[name]]
            if worker.events:
                continue
            keys = request.keys_of(worker.block_size)
            if len(keys):
                self._index.predict(name, keys, now)
                self.predicted.append(PredictedPrompt(name, keys))
