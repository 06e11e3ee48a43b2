"""Request tracker: follows each routed request, and learns from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from pigou.control.adapters import AdapterTable
from pigou.control.latency_model.estimates import Estimates, MedianWorker
from pigou.control.latency_model.model import LatencyModel
from pigou.control.lengths import LengthPredictor, Prediction
from pigou.control.messages import Choice
from pigou.control.peers.bookings import BookedTimes, WorkerBookings, next_mean_s
from pigou.control.prefix_index import PrefixIndex
from pigou.control.prefix_index.holder_table import ON_DEVICE, ON_HOST, ON_STORAGE, RUN
from pigou.control.price_of_anarchy import PoAEstimator, PoASnapshot, RequestTimes
from pigou.control.routing.view import FleetView
from pigou.control.routing_controller import Controller, E2ESample, Static
from pigou.control.saturation.regime import Detector, TTFTSample
from pigou.control.state import FleetState, RoutedRequest
from pigou.request import SECOND, Request, Worker

#: Nanoseconds between two fits of the latency model to the streams.
_FIT_EVERY = SECOND // 2
_PREDICTED = 8192  # requests whose predicted length is kept
#: Fields of `Columns` come first: types cannot tell how many.
_fleet_view: Any = FleetView


class RequestTracker:
    """Keeps the fleet's state, the latency model and the history in step."""

    def __init__(
        self, detector: Detector, controller: Controller, lengths: LengthPredictor | None = None
    ) -> None:
        self.lengths = lengths  # None predicts the mean of all
        self.state = FleetState()
        self.detector = detector
        self.controller = controller
        self.setting = 0
        self.latency_model = LatencyModel()
        self.poa = PoAEstimator()
        self.sent_prompts: dict[str, int] = {}  # prompts sent for prefill so far, by worker
        self.booked_s = BookedTimes()  # how long prompts and streams stay on workers
        self.adapters = AdapterTable()
        self._predicted: dict[str, tuple[Request, Prediction]] = {}  # the first of them goes first
        self._due_at: dict[str, int] = {}  # expected ends of prompts whose end no driver sees
        self._fitted_at = 0
        self._median_worker: MedianWorker | None = None

    def up(self, worker: Worker, now: int) -> None:
        """Add a worker, or update it."""
        new = worker.id not in self.state.row
        self.state.up(worker)
        if new:
            self.latency_model.add_worker(worker.rehearsed, now, worker.location)
        else:
            self.latency_model.move_worker(self.state.row[worker.id], worker.location)

    def down(self, worker: str) -> None:
        """Forget a worker."""
        self.adapters.down(worker)
        row = self.state.down(worker)
        if row is not None:
            self.latency_model.remove_worker(row)
            self.poa.forget(worker)

    def routed(
        self, request: Request, choice: Choice, now: int, priority: int = 0, output: int = 0
    ) -> None:
        """Record a routed request with `output` expected tokens."""
        uncached = max(1, request.prompt - choice.computed)
        computes = choice.prefill or choice.decode
        row = self.state.row[computes]
        self._advance(row, now)
        routed = self.state.start(request, choice, uncached, now, priority, output)
        routed.setting = self.setting
        self.latency_model.prompt_sent(row, now)
        self.sent_prompts[computes] = self.sent_prompts.get(computes, 0) + 1
        if request.model:
            self.adapters.routed(request.id, request.model, {computes, choice.decode}, now)
        if not request.streamed and not routed.remote:
            known, queue = self.estimates(now), self.state.columns
            work = known.work(queue.prefill_requests, queue.prefill_tokens, queue.prefill_pairs)
            self._due_at[request.id] = now + int(work.item(row) * SECOND)

    def prefill_done(self, request: str, well: bool, now: int) -> None:
        """Record the end of a prefill leg; `well` if the prompt was computed."""
        routed = self.state.requests.get(request)
        if routed is None or routed.prefill is None:
            return
        if routed.remote and well:
            routed.prefill_done_at = now
            row = self.state.row[routed.prefill]
            self._advance(row, now)
            self._learn(row, routed, now)
            routed.transfer_alone = self._has_no_prompts(routed)
        self._computed(routed, now)

    def claimed(self, request: str, worker: str, cached: int, now: int) -> None:
        """Record that a worker pulled a prompt, with `cached` tokens of it."""
        routed = self.state.requests.get(request)
        if routed is None or routed.prefill_done_at or worker not in self.state.row:
            return
        for moved in (routed.prefill, worker):
            if moved is not None:
                self._advance(self.state.row[moved], now)
        self.state.claimed(routed, worker, cached, now)

    def read_failed(self, request: str, now: int) -> None:
        """Record a failed read: all uncached tokens are computed."""
        routed = self.state.requests.get(request)
        if routed is None or routed.read is None:
            return
        if routed.prefill is not None:
            self._advance(self.state.row[routed.prefill], now)
        self.state.fetch_failed(routed, max(1, routed.request.prompt - routed.cached))

    def first_token(self, request: str, now: int) -> None:
        """Record the first token of a request."""
        routed = self.state.requests.get(request)
        if routed is None or routed.first_token_at:
            return
        row = None if routed.decode is None else self.state.row[routed.decode]
        if row is not None:
            self._advance(row, now)
        if not routed.remote and row is not None and routed.prefill is not None:
            self._learn(row, routed, now)
        elif routed.transfer_alone and row is not None and self._has_no_prompts(routed):
            source = self.state.row.get(routed.prefill_worker)
            tokens = routed.request.prompt
            self.latency_model.transferred(row, tokens, routed.prefill_done_at, now, source)
        self._computed(routed, now, row)
        routed.first_token_at = now
        self.state.slots.streaming[routed.slot] = True
        ttft = (now - routed.arrived_at) / SECOND
        sample = TTFTSample(
            ttft, routed.uncached, routed.inflight, routed.prompts_ahead, routed.setting
        )
        self.detector.update(now, sample)
        self.controller.observe(now, sample)
        if row is not None:
            self.latency_model.sampler.change_streams(row, routed.request.sequences)

    def on_tokens(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Count output tokens, as in `ControlPlane.on_tokens`."""
        state, columns = self.state, self.state.columns
        state.over_expected_tokens += state.slots.add_tokens(
            slots, counts, columns.decode_tokens, columns.over_expected_tokens,
            self.latency_model.sampler.tokens,
        )  # fmt: skip

    def ended(self, request: str, now: int) -> None:
        """Record the end of a request, if it had been routed."""
        routed = self.release(request, now)
        if routed is None:
            return
        generated = routed.generated
        self.booked_s.stream = next_mean_s(self.booked_s.stream, now - routed.routed_at)
        if generated:
            output = max(1, generated // routed.request.sequences)
            self.latency_model.outputs.observe(output)
            if self.lengths is not None:
                self.lengths.observe(routed.request, output)
            self.poa.ended(_times(routed, now))
            known = self.estimates(now)
            if not isinstance(self.controller, Static):  # it learns nothing
                self.controller.observe(now, self._e2e_sample(routed, known, now))

    def book(self, gateway: str, bookings: Iterable[WorkerBookings], now: int) -> int:
        """Charge workers with another gateway's load; return prompts it sent since."""
        state, sent = self.state, 0
        for of_worker in bookings:
            row = state.row.get(of_worker.worker)
            new = state.peers.book(gateway, of_worker, row, now)
            if row is not None and new:
                self.latency_model.peer_prompts(row, new, now)
                sent += new
        change = state.peers.settle(state.columns)
        for row in np.flatnonzero(change.any(axis=0)).tolist():
            self._advance(row, now)
            state.add_booked(row, change[:, row].tolist())
        return sent

    def tick(self, now: int, queued: int) -> None:
        """Advance time; `queued` requests wait for a worker."""
        if self._due_at:
            self._expire_due(now)
        if now - self._fitted_at >= _FIT_EVERY:
            self._fitted_at = now
            columns = self.state.columns
            streams, prompts = columns.decoding.tolist(), columns.prefill_requests.tolist()
            contexts = (columns.decode_tokens - columns.pending_prefill_tokens).tolist()
            for row in range(len(streams)):
                self.latency_model.sampler.advance(
                    row, streams[row], contexts[row], prompts[row], now
                )
            self.latency_model.sample(now)
            for routed in self.state.requests.values():
                if not routed.first_token_at and routed.request.streamed:
                    queued += 1
            self.detector.tick(now, queued)

    def _expire_due(self, now: int) -> None:
        for request, due in list(self._due_at.items()):
            if now >= due:
                del self._due_at[request]
                routed = self.state.requests.get(request)
                if routed is not None:
                    self._computed(routed, now)

    def snapshot(self, now: int) -> PoASnapshot | None:
        """Return the inputs of the Price of Anarchy; None if too few requests ended."""
        columns = self.state.columns
        prefill = np.flatnonzero(columns.prefills & ~columns.decodes).tolist()
        known = self.estimates(now).copy()
        running = (_times(routed, now) for routed in self.state.requests.values())
        return self.poa.snapshot(running, self.state.row, prefill, known, now)

    def estimates(self, now: int) -> Estimates:
        """Return the estimated speeds of the workers."""
        return self.latency_model.estimates(now)

    def view(self, request: Request, index: PrefixIndex, now: int) -> FleetView:
        """Return the fleet as policies see it for this request."""
        ids = self.state.ids
        lengths = None if self.lengths is None else self._predict(self.lengths, request)
        expected = self.latency_model.outputs.expected(request.max_tokens)
        held = self._held(request, index)  # unpacking an array takes three times as long
        fleet: FleetView = _fleet_view(
            *astuple(self.state.columns), ids, held[RUN], held[ON_DEVICE], held[ON_HOST],
            held[ON_STORAGE], index.recomputed_share(ids), self.estimates(now),
            expected if lengths is None else max(1.0, lengths.mean), backlog=self.state.backlog,
            now=now, lengths=lengths,
        )  # fmt: skip
        if request.model:
            fleet.adapters = self.adapters.prices(request.model, ids, now)
        return fleet

    def _predict(self, lengths: LengthPredictor, request: Request) -> Prediction:
        """Return a request's predicted length, made when it is first viewed."""
        made = self._predicted.get(request.id)
        if made is None or made[0] is not request:
            made = self._predicted[request.id] = request, lengths.predict(request)
            if len(self._predicted) > _PREDICTED:
                del self._predicted[next(iter(self._predicted))]
        return made[1]

    def _held(self, request: Request, index: PrefixIndex) -> NDArray[np.int64]:
        sizes = self.state.block_sizes
        if len(sizes) == 1:
            (size,) = sizes
            return index.overlaps(self.state.ids, request.keys_of(size))
        rows = np.zeros((4, len(self.state.ids)), dtype=np.int64)
        for size in sizes:
            overlaps = index.overlaps(self.state.ids, request.keys_of(size))
            of_size = self.state.columns.block_size == size
            np.copyto(rows, overlaps, where=of_size)
        return rows

    def _e2e_sample(self, routed: RoutedRequest, known: Estimates, now: int) -> E2ESample:
        if self._median_worker is None or self._median_worker.known is not known:
            self._median_worker = MedianWorker(known)
        unloaded = (
            self._median_worker.prompt(routed.uncached, routed.pairs)
            + routed.generated * self._median_worker.itl
        )
        return E2ESample((now - routed.arrived_at) / SECOND, max(unloaded, 1e-6), routed.setting)

    def _learn(self, row: int, routed: RoutedRequest, now: int) -> None:
        if routed.request.id in self.adapters.cold:  # TTFT includes the load
            return
        prompt = routed.request.prompt
        sent_at = routed.claimed_at or routed.routed_at
        if self.state.peers.prompts_since(row, sent_at) and (
            self.latency_model.prompt_shared(row, routed.uncached, now, prompt)
        ):
            return
        if routed.read is None:
            self.latency_model.prompt_computed(row, routed.uncached, sent_at, now, prompt)
        else:
            self.latency_model.prompt_fetched(
                row, routed.uncached, routed.read.tokens, sent_at, now, prompt,
                not routed.prompts_ahead, self.state.row.get(routed.read.worker),
            )  # fmt: skip

    def _has_no_prompts(self, routed: RoutedRequest) -> bool:
        if routed.decode is None:
            return False
        return not self.state.columns.prefill_requests.item(self.state.row[routed.decode])

    def _computed(self, routed: RoutedRequest, now: int, done: int | None = None) -> None:
        """Record the end of a request's prompt; row `done` is already at `now`."""
        if self._due_at:
            self._due_at.pop(routed.request.id, None)
        rows = self.state.row
        for worker in (routed.prefill, None if routed.decode == routed.prefill else routed.decode):
            if worker is not None and rows[worker] != done:
                self._advance(rows[worker], now)
        if routed.prefill is not None:
            self.booked_s.prompt = next_mean_s(self.booked_s.prompt, now - routed.routed_at)
        self.state.prefilled(routed, now)

    def release(self, request: str, now: int) -> RoutedRequest | None:
        """Take a request from its workers, and return it; None if it was not routed."""
        if self._due_at:
            self._due_at.pop(request, None)
        self.adapters.cold.discard(request)
        self._predicted.pop(request, None)
        routed = self.state.requests.get(request)
        if routed is None:
            return None
        if routed.prefill is not None:
            self._advance(self.state.row[routed.prefill], now)
        if routed.decode is not None:
            row = self.state.row[routed.decode]
            self._advance(row, now)
            if routed.first_token_at:
                self.latency_model.sampler.change_streams(row, -routed.request.sequences)
        return self.state.end(request, now)

    def _advance(self, row: int, now: int) -> None:
        columns = self.state.columns
        streams, prompts = columns.decoding.item(row), columns.prefill_requests.item(row)
        context = columns.decode_tokens.item(row) - columns.pending_prefill_tokens.item(row)
        self.latency_model.sampler.advance(row, streams, context, prompts, now)


def _times(routed: RoutedRequest, now: int) -> RequestTimes | None:
    if routed.decode is None:
        return None
    return RequestTimes(
        arrived_at=routed.arrived_at, routed_at=routed.routed_at,
        prefill_done_at=(routed.prefill_done_at or now) if routed.remote else routed.routed_at,
        ended_at=now, prefill=routed.prefill_worker, decode=routed.decode,
        uncached=routed.uncached, pairs=routed.pairs, generated=max(1, routed.generated),
    )  # fmt: skip
