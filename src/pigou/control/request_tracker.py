"""The watch: follows each routed request, and learns from it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.control.assessment import Snapshot
from pigou.control.latency_model.estimates import Estimates
from pigou.control.latency_model.model import LatencyModel
from pigou.control.messages import Choice
from pigou.control.prefix_index import Overlaps, PrefixIndex
from pigou.control.price_of_anarchy import Audit
from pigou.control.regimes.parameters import Finish
from pigou.control.regimes.routing_controllers import Controller, Static
from pigou.control.routing.view import FleetView
from pigou.control.saturation.regime import Detector, Sample
from pigou.control.state import Load, State
from pigou.request import SECOND, Request, Worker

#: Between two harvests of the estimator, in nanoseconds.
_HARVEST = SECOND // 2


class Watch:
    """State, estimates and history, kept in step.

    Attributes:
        state: the workers, and what weighs on them.
        estimator: what is known of their speed.
        audit: the requests that ended, for the Price of Anarchy.
        detector: of saturation, told of first tokens.
        controller: of the router's parameters, told of outcomes.
        setting: of the controller, that requests are routed under now.
    """

    def __init__(self, detector: Detector, controller: Controller) -> None:
        self.state = State()
        self.detector = detector
        self.controller = controller
        self.setting = 0
        self.estimator = LatencyModel()
        self.audit = Audit()
        self._silent: dict[str, int] = {}  # prompts whose end nobody will tell: when it is due
        self._harvested = 0
        self._usual: _Usual | None = None

    def up(self, worker: Worker, now: int) -> None:
        """A worker is there, or changed."""
        new = worker.id not in self.state.row
        self.state.up(worker)
        if new:
            self.estimator.add_worker(worker.rehearsed, now)

    def down(self, worker: str) -> None:
        """A worker is gone."""
        row = self.state.down(worker)
        if row is not None:
            self.estimator.remove_worker(row)
            self.audit.forget(worker)

    def routed(
        self, request: Request, choice: Choice, now: int, priority: int = 0, output: int = 0
    ) -> None:
        """A request was sent to its workers, with this priority; so many tokens are expected."""
        uncached = max(1, request.prompt - choice.computed)
        row = self.state.row[choice.prefill or choice.decode]
        self._advance(row, now)
        load = self.state.start(request, choice, uncached, now, priority, output)
        load.setting = self.setting
        self.estimator.prompt_sent(row, now)
        if not request.streamed and not load.remote:
            known, queue = self.estimates(now), self.state.columns
            work = known.work(queue.prefill_requests, queue.prefill_tokens, queue.prefill_pairs)
            self._silent[request.id] = now + int(work.item(row) * SECOND)

    def prefill_done(self, request: str, well: bool, now: int) -> None:
        """The prefill leg of a request ended; `well` says whether its prompt was computed."""
        load = self.state.loads.get(request)
        if load is None or load.prefill is None:
            return
        if load.remote and well:
            load.handed = now
            row = self.state.row[load.prefill]
            self._advance(row, now)
            self._learn(row, load, now)
        self._computed(load, now)

    def read_failed(self, request: str, now: int) -> None:
        """Nothing could be read of a prompt: all that its worker lacks is computed."""
        load = self.state.loads.get(request)
        if load is None or load.read is None:
            return
        if load.prefill is not None:
            self._advance(self.state.row[load.prefill], now)
        self.state.unread(load, max(1, load.request.prompt - load.cached))

    def first_token(self, request: str, now: int) -> None:
        """The first token of a request came."""
        load = self.state.loads.get(request)
        if load is None or load.first:
            return
        row = None if load.decode is None else self.state.row[load.decode]
        if row is not None:
            self._advance(row, now)
        if not load.remote and row is not None and load.prefill is not None:
            self._learn(row, load, now)
        elif load.handed and row is not None:
            self.estimator.transferred(row, load.request.prompt, now - load.handed, now)
        self._computed(load, now, row)
        load.first = now
        self.state.seats.flowing[load.seat] = True
        arrived = min(load.request.arrival or load.routed, load.routed)
        ttft = (now - arrived) / SECOND
        sample = Sample(ttft, load.uncached, load.inflight, load.ahead, load.setting)
        self.detector.update(now, sample)
        self.controller.observe(now, sample)
        if row is not None:
            self.estimator.sampler.change_streams(row, load.request.sequences)

    def came(self, seats: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """More tokens of requests came; as `ControlPlane.came`."""
        state, columns = self.state, self.state.columns
        state.beyond += state.seats.grow(
            seats, counts, columns.decode_tokens, columns.beyond, self.estimator.sampler.tokens
        )

    def ended(self, request: str, now: int) -> bool:
        """A request is over; return whether it had been routed."""
        load = self._release(request, now)
        if load is None:
            return False
        generated = load.generated
        if generated:
            self.estimator.generated(max(1, generated // load.request.sequences))
            self.audit.ended(load, now)
            known = self.estimates(now)
            if not isinstance(self.controller, Static):  # which learns nothing
                self.controller.observe(now, self._finish(load, known, now))
        return True

    def failed(self, request: str, now: int) -> bool:
        """A request lost its worker, if it had one; return whether it had."""
        return self._release(request, now) is not None

    def tick(self, now: int, queued: int) -> None:
        """Let time pass; `queued` requests wait for a worker."""
        if self._silent:
            self._listen(now)
        if now - self._harvested >= _HARVEST:
            self._harvested = now
            columns = self.state.columns
            streams, prompts = columns.decoding.tolist(), columns.prefill_requests.tolist()
            contexts = (columns.decode_tokens - columns.coming).tolist()
            self.estimator.sampler.advance_all(streams, contexts, prompts, now)
            self.estimator.sample(now)
            for load in self.state.loads.values():
                if not load.first and load.request.streamed:
                    queued += 1
            self.detector.tick(now, queued)

    def _listen(self, now: int) -> None:
        """Take prompts for computed whose end nobody tells, once that is due."""
        for request, due in list(self._silent.items()):
            if now >= due:
                del self._silent[request]
                load = self.state.loads.get(request)
                if load is not None:
                    self._computed(load, now)

    def snapshot(self, now: int) -> Snapshot | None:
        """Return what the Price of Anarchy is computed from; None when too little happened."""
        columns = self.state.columns
        prefill = np.flatnonzero(columns.prefills & ~columns.decodes).tolist()
        known = self.estimates(now).copy()
        return self.audit.snapshot(self.state.loads.values(), self.state.row, prefill, known, now)

    def estimates(self, now: int) -> Estimates:
        """Return the speeds of the workers, as far as they are known."""
        return self.estimator.estimates(now)

    def view(self, request: Request, index: PrefixIndex, now: int) -> FleetView:
        """Return the fleet as policies see it when they route this request."""
        columns, ids = self.state.columns, self.state.ids
        held = self._held(request, index).rows  # unpacking an array takes three times as long
        return FleetView(
            ids,
            columns.prefills,
            columns.decodes,
            columns.prefill_requests,
            columns.prefill_tokens,
            columns.prefill_pairs,
            columns.decode_requests,
            columns.decode_tokens,
            columns.served,
            columns.running,
            columns.waiting,
            columns.kv_usage,
            held[3],
            held[0],
            held[1],
            held[2],
            index.recomputed_share(ids),
            columns.block_size,
            columns.blocks,
            self.estimates(now),
            self.estimator.expected_output(request.max_tokens),
            columns.layout,
            backlog=self.state.lines,
            now=now,
        )

    def _held(self, request: Request, index: PrefixIndex) -> Overlaps:
        """Return the leading blocks that each worker holds, each by blocks of its own size."""
        sizes = self.state.block_sizes
        if len(sizes) == 1:
            (size,) = sizes
            return index.overlaps(self.state.ids, request.keys_of(size))
        rows = np.zeros((4, len(self.state.ids)), dtype=np.int64)
        for size in sizes:
            seen = index.overlaps(self.state.ids, request.keys_of(size))
            mine = self.state.columns.block_size == size
            np.copyto(rows, seen.rows, where=mine)
        return Overlaps(rows)

    def _finish(self, load: Load, known: Estimates, now: int) -> Finish:
        """Return what a request took, beside what it would have taken on an idle fleet."""
        if self._usual is None or self._usual.known is not known:
            self._usual = _Usual(known)
        alone = self._usual.prompt(load.uncached, load.pairs) + load.generated * self._usual.itl
        arrived = min(load.request.arrival or load.routed, load.routed)
        return Finish((now - arrived) / SECOND, max(alone, 1e-6), load.setting)

    def _learn(self, row: int, load: Load, now: int) -> None:
        """A prompt is computed: learn what that took, and reading its beginning."""
        prompt = load.request.prompt
        if load.read is None:
            self.estimator.prompt_computed(row, load.uncached, load.routed, now, prompt)
        else:
            self.estimator.prompt_fetched(
                row, load.uncached, load.read.tokens, load.routed, now, prompt, not load.ahead
            )

    def _computed(self, load: Load, now: int, done: int | None = None) -> None:
        """The prompt of a request is computed, well or not; row `done` is at `now` already."""
        if self._silent:
            self._silent.pop(load.request.id, None)
        rows = self.state.row
        for worker in (load.prefill, None if load.decode == load.prefill else load.decode):
            if worker is not None and rows[worker] != done:
                self._advance(rows[worker], now)
        self.state.prefilled(load, now)

    def _release(self, request: str, now: int) -> Load | None:
        if self._silent:
            self._silent.pop(request, None)
        load = self.state.loads.get(request)
        if load is None:
            return None
        if load.prefill is not None:
            self._advance(self.state.row[load.prefill], now)
        if load.decode is not None:
            row = self.state.row[load.decode]
            self._advance(row, now)
            if load.first:
                self.estimator.sampler.change_streams(row, -load.request.sequences)
        return self.state.end(request, now)

    def _advance(self, row: int, now: int) -> None:
        columns = self.state.columns
        streams, prompts = columns.decoding.item(row), columns.prefill_requests.item(row)
        context = columns.decode_tokens.item(row) - columns.coming.item(row)
        self.estimator.sampler.advance(row, streams, context, prompts, now)


class _Usual:
    """What the worker of median speed takes, with nobody else there.

    Attributes:
        known: the estimates that it is of.
        itl: seconds between tokens of a single stream.
    """

    def __init__(self, known: Estimates) -> None:
        self.known = known
        rows = np.arange(len(known.a))
        self.itl = _median(known.itl(rows, np.ones(len(rows))))
        # Workers differ by a factor: they have one order, whatever the length of the prompt.
        columns = known.prefill_base, known.prefill_token, known.prefill_pair
        laws = sorted(zip(*(each.tolist() for each in columns), strict=True))
        self._laws: list[tuple[float, float, float]] = [
            laws[place] for place in ((len(laws) - 1) // 2, len(laws) // 2) if laws
        ]

    def prompt(self, uncached: int, pairs: int) -> float:
        """Return the seconds of a prompt with so many uncached tokens, and pairs of them."""
        if not self._laws:
            return math.nan
        seconds = (base + token * uncached + pair * pairs for base, token, pair in self._laws)
        return sum(seconds) / 2


def _median(values: NDArray[np.float64]) -> float:
    """Return the median of a few numbers, NaN of none; NumPy's takes ten times as long."""
    ordered: list[float] = sorted(values.tolist())
    if not ordered:
        return math.nan
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return (low + high) / 2
