"""Worker assignment: which workers serve a request now, and what charging them takes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.admission.admission_controller import AdmissionController
from pigou.control.admission.queue_order import QueuedRequest
from pigou.control.admission.worker_capacity import UNLIMITED
from pigou.control.cache_monitor import CacheMonitor
from pigou.control.messages import Choice, Route
from pigou.control.peers.bookings import PredictedPrompt
from pigou.control.prefix_index import PrefixIndex
from pigou.control.recall import ReturningWorkers
from pigou.control.request_tracker import RequestTracker
from pigou.control.router import Router
from pigou.control.routing.view import FleetView
from pigou.control.state import both
from pigou.request import Request

#: Predicted prompts that are remembered for other gateways.
_PREDICTED = 256


class Assignment(NamedTuple):
    """Where a request goes."""

    request: str  # its id
    choice: Choice
    uncached: int  # tokens of its prompt that are to be computed
    priority: int | None = None  # that the workers are sent; None for the client's own

    @property
    def route(self) -> Route:
        """As the driver is to carry it out."""
        return Route(self.request, self.choice, self.priority)


class WorkerAssigner:
    """Chooses workers for one request at a time, and charges them with it.

    Admission says which workers can take the request, the router which of these is best. The
    parts are the control plane's own; nothing here calls it back.
    """

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
    ) -> Assignment | None:
        """Choose workers and charge them; None when none can take the request."""
        request, capacity, state = waiting.request, self._admission.capacity, self._state
        if self._admission.allowance_spent(waiting):
            return None
        above = self._admission.above(waiting)
        streams = self._shared(waiting, capacity.streams(state, above), now)
        if request.sequences > 1:
            streams = streams & capacity.sequences_fit(request, state)
        open_ = state.open_to(waiting.exclude, request.eligible)
        if not np.count_nonzero(both(streams, open_)):  # quicker than `any`
            return None
        fleet = self._tracker.view(request, self._index, now) if fleet is None else fleet
        sent_priority = self._admission.priority(waiting, above)
        priority = request.priority if sent_priority is None else sent_priority
        if priority <= 0 and state.background:
            self._leave_out_background(fleet)
        prompts, fed = capacity.ready(request, fleet, now, above)
        room = both(streams, capacity.fits(request, fleet, state, above))
        if room is not streams and not np.count_nonzero(room):
            self._admission.allowance.tokens_lacked(now)
            return None
        room = both(room, fed)
        if room is not streams and not np.count_nonzero(room):
            return None
        sources = open_ if self._remote_kv_fetch and state.has_fetch_sources else None
        choice = router.choose(request, fleet, both(open_, prompts), room, now, sources)
        if choice is None:
            return None
        self._admission.began(request, choice, state.row[choice.decode], fleet, now)
        self._tracker.routed(request, choice, now, priority, int(fleet.output))
        computes, known = choice.prefill or choice.decode, fleet.max_cached(request.prompt)
        self._cache_monitor.routed(computes, request, choice.cached, known, now)
        self._predict(request, choice, now)
        return Assignment(request.id, choice, state.requests[request.id].uncached, sent_priority)

    def _shared(
        self, waiting: QueuedRequest, streams: NDArray[np.bool_], now: int
    ) -> NDArray[np.bool_]:
        if not self._returning:
            return streams
        state = self._state
        requests = len(state.requests) + max(1, len(self._admission.queue))
        limits = self._admission.capacity.max_streams(state, UNLIMITED)
        shares = self._returning.shares(limits, requests, waiting.since, now)
        if shares is None:
            return streams
        return streams & (state.columns.decode_requests < shares)

    def _leave_out_background(self, fleet: FleetView) -> None:
        columns = self._state.columns
        fleet.prefill_requests = columns.prefill_requests - columns.background_requests
        fleet.prefill_tokens = columns.prefill_tokens - columns.background_tokens
        fleet.prefill_pairs = columns.prefill_pairs - columns.background_pairs

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
