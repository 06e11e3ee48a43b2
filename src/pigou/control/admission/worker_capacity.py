"""Worker capacity: streams, tokens, prompts and parallel sequences that workers can take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.latency_model.estimates import Estimates
from pigou.control.messages import Choice, LoadReport
from pigou.control.peers.bookings import EXPECTED
from pigou.control.routing.view import FleetView
from pigou.control.state import FleetState, all_workers
from pigou.request import SECOND, Counts, Flags, Request

#: Milliseconds of pending prompts after which no more are sent, where an order holds back.
PREFILL_AHEAD_MS = 50
_MILLISECONDS = 1000.0
_PRIOR = Estimates.prior(1)
#: Streams of a worker before its first report.
FIRST_LIMIT = 32.0
_LESS = 0.7
_MORE = 1.0 / 16.0
#: Least nanoseconds between two changes of a learned limit: loads may be pushed at each step.
_JUDGED_EVERY = SECOND // 2
#: The sequences of one request may make a step of a worker this many times as long as one alone.
MAX_SLOWDOWN = 2.0
#: They take at least and at most these parts of a worker's streams.
MIN_PART, MAX_PART = 1.0 / 64.0, 1.0 / 2.0
#: Part of each worker's streams and tokens that further sequences leave to other requests.
RESERVE = 1.0 / 8.0
#: No further sequence is sent while all workers have prompts for more than this many seconds.
AHEAD_S = 0.05
#: Streams of a worker that has no limit, as far as these bounds go.
UNLIMITED = 256
_LOADS = 2.0 ** np.arange(0, 11)


#: Standard deviations above the mean that a worker's outputs stay below with probability 0.9.
_SURE_DEVIATIONS = 1.2816


def _variance(request: Request, fleet: FleetView) -> float:
    """Return the variance of a request's predicted output; its sequences are alike."""
    return fleet.lengths.variance * request.sequences**2 if fleet.lengths is not None else 0.0


class _StreamTokens(msgspec.Struct):
    worker: str
    uncached: int
    output: int
    variance: float = 0.0  # squared output tokens


class WorkerCapacity:
    """Says which workers can take one more request.

    Limits per worker: `max_inflight` streams, `max_inflight_tokens` (uncached prompts and expected
    output), and `prefill_ahead_ms` of pending prompts. An empty worker takes anything. The share
    `reserve` is closed to tenants above their share of the fleet.
    """

    def __init__(self, config: ControlConfig, holds_back: bool, reserve: float = 0.0) -> None:
        self._open_share = 1.0 - reserve
        self._max_streams = config.max_inflight
        self._max_tokens = config.max_inflight_tokens
        ahead = config.prefill_ahead_ms or (PREFILL_AHEAD_MS if holds_back else 0)
        self._ahead_s = ahead / _MILLISECONDS
        self._caps = PreemptionCaps() if config.preemption_cap else None
        self._limit = ConcurrencyLimit() if holds_back and not config.max_inflight else None
        self._expected: dict[str, _StreamTokens] = {}
        self._tokens: dict[str, int] = {}
        self._variances: dict[str, float] = {}  # sum over streams, by worker
        self._total = 0  # sum of `_tokens`; `FleetState` has tokens above them
        self._changed_at: dict[str, int] = {}

    @property
    def holds_prompts(self) -> bool:
        """True if the end of a prompt frees capacity."""
        return self._ahead_s > 0.0

    def take(self, request: Request, choice: Choice, row: int, fleet: FleetView, now: int) -> None:
        """Record that a request was routed to row `row`; `fleet` is the view used."""
        output = int(fleet.output) * request.sequences
        need = request.prompt - fleet.resident_on(row, request.prompt) + output
        variance = _variance(request, fleet)
        self._expected[request.id] = _StreamTokens(choice.decode, need - output, output, variance)
        if variance:
            self._variances[choice.decode] = self._variances.get(choice.decode, 0.0) + variance
        self._tokens[choice.decode] = self._tokens.get(choice.decode, 0) + need
        self._total += need
        self._changed_at[choice.prefill or choice.decode] = now

    def prefilled(self, worker: str, now: int) -> None:
        """Record that a worker finished or dropped a prompt."""
        self._changed_at[worker] = now

    def free(self, request: str) -> int:
        """Record a departure; return the tokens it had requested, 0 if unknown."""
        held = self._expected.pop(request, None)
        if held is None:
            return 0
        gone = held.uncached + held.output
        self._tokens[held.worker] -= gone
        self._total -= gone
        if held.variance:
            self._variances[held.worker] = max(0.0, self._variances[held.worker] - held.variance)
        return gone

    def down(self, worker: str) -> None:
        """Forget a worker and all it held."""
        for request in [key for key, held in self._expected.items() if held.worker == worker]:
            del self._expected[request]
        self._total -= self._tokens.pop(worker, 0)
        self._variances.pop(worker, None)
        self._changed_at.pop(worker, None)
        for learned in (self._limit, self._caps):
            if learned is not None:
                learned.forget(worker)

    def report(self, report: LoadReport, state: FleetState) -> None:
        """Update from a worker's load report."""
        row = state.row.get(report.worker)
        if row is None:
            return
        streams, now = int(state.columns.decode_requests[row]), state.reported[report.worker]
        if self._limit is not None:
            self._limit.report(report, streams, now)
        if self._caps is not None:
            self._caps.report(report, streams, now)

    def expected_tokens(self, ids: Sequence[str]) -> list[int]:
        """Return the tokens requested of each worker, (workers,)."""
        return [self._tokens.get(worker, 0) for worker in ids]

    def streams(self, state: FleetState, above: bool = False) -> Flags:
        """Return which workers can take one more stream, (workers,); read-only."""
        columns = state.columns
        capped = self._caps is not None and bool(self._caps.caps)
        if not capped and self._max_streams * (self._open_share if above else 1.0) > state.inflight:
            return columns.decodes  # any worker has room for all that there are
        if not (capped or self._max_streams or self._limit is not None or state.limited):
            return columns.decodes
        limits = self._stream_limits(state)
        if above:
            limits = np.ceil(limits * self._open_share).astype(np.int64)
        flags: Flags = columns.decodes & ((limits == 0) | (columns.decode_requests < limits))
        return flags

    def sequences_fit(self, request: Request, state: FleetState) -> Flags:
        """Return which workers can take all sequences of a request, (workers,)."""
        streams = state.columns.decode_requests
        flags: Flags = (streams == 0) | (
            streams + request.sequences <= self.max_streams(state, 2**62)
        )
        return flags

    def max_streams(self, state: FleetState, unlimited: int) -> Counts:
        """Return the maximum of streams of each worker, `unlimited` if unknown."""
        limits = self._stream_limits(state)
        streams: Counts = np.where(limits > 0, limits, unlimited)
        return streams

    def _stream_limits(self, state: FleetState) -> Counts:
        """Return the maximum of streams of each worker, (workers,); 0 for no limit."""
        limits: Counts = state.columns.max_seqs
        if self._max_streams:
            limits = np.full(len(limits), self._max_streams)
        elif self._limit is not None:
            limits = self._limit.of(limits, state.ids)
        if self._caps is None or not self._caps.caps:
            return limits
        caps = np.array([self._caps.caps.get(worker, UNLIMITED) for worker in state.ids])
        bounded: Counts = np.minimum(np.where(limits > 0, limits, UNLIMITED), caps.astype(np.int64))
        return bounded

    def max_tokens(self, state: FleetState) -> Counts:
        """Return the maximum of tokens of each worker, (workers,); 0 for no limit."""
        columns = state.columns
        if self._max_tokens:
            return np.full(len(state.ids), self._max_tokens)
        tokens: Counts = columns.blocks * columns.block_size
        return tokens

    def tokens(self, state: FleetState) -> Counts:
        """Return the tokens held or expected on each worker, (workers,)."""
        expected = np.array(self.expected_tokens(state.ids), dtype=np.int64)
        tokens: Counts = expected + state.columns.over_expected_tokens
        tokens += state.peers.total[EXPECTED]
        return tokens

    def fits(
        self, request: Request, fleet: FleetView, state: FleetState, above: bool = False,
        owed: Counts | None = None,
    ) -> Flags:  # fmt: skip
        """Return which workers have the tokens for a request, those `owed` to others apart."""
        if not self._max_tokens and not state.sized:
            return all_workers(len(fleet.ids))
        output = int(fleet.output) * request.sequences
        margin = self._margin(request, fleet)
        total = self._total + state.over_expected_tokens + request.prompt + output
        total += 0 if margin is None else int(margin.sum())
        if state.peers.streams:
            total += int(state.peers.total[EXPECTED].sum())
        if owed is None and total <= self._max_tokens * (self._open_share if above else 1.0):
            return all_workers(len(fleet.ids))  # any worker has room for all that there is
        limits = self.max_tokens(state)
        if above:
            limits = np.ceil(limits * self._open_share).astype(np.int64)
        empty = state.columns.decode_requests == 0
        needed = self.tokens(state) + request.prompt - fleet.resident(request.prompt) + output
        if margin is not None:
            needed = needed + margin
        if owed is not None:
            needed = needed + owed
        flags: Flags = (limits == 0) | empty | (needed <= limits)
        return flags

    def _margin(self, request: Request, fleet: FleetView) -> Counts | None:
        """Return tokens kept for outputs above their mean, (workers,); None if all are certain.

        The sum of a worker's outputs stays below mean plus margin in 90% of cases (Past-Future).
        """
        variance = _variance(request, fleet)
        if not (variance or self._variances):
            return None
        held = np.array([self._variances.get(worker, 0.0) for worker in fleet.ids])
        margin: Counts = np.ceil(_SURE_DEVIATIONS * np.sqrt(held + variance)).astype(np.int64)
        return margin

    def ready(
        self, request: Request, fleet: FleetView, now: int, above: bool = False
    ) -> tuple[Flags, Flags]:
        """Return which workers may take this prompt, and which its stream, (workers,) each.

        At least one prefill worker must be ready if any can compute the prompt. Tenants `above`
        their share get only workers without pending prompts.
        """
        everywhere = all_workers(len(fleet.ids))
        if not self._ahead_s:
            return everywhere, everywhere
        ready = self._pending(fleet, now) <= (0.0 if above else self._ahead_s)
        ready |= fleet.prefill_requests == 0
        pure = fleet.prefills & ~fleet.decodes
        able = pure & (request.prompt >= fleet.block_size)
        if not (request.splits and able.any()):
            return everywhere, ready
        return ready | ~pure, everywhere if (ready & able).any() else ~everywhere

    def _pending(self, fleet: FleetView, now: int) -> NDArray[np.float64]:
        """Return the seconds of pending prompts per worker, (workers,)."""
        known = fleet.estimates
        changed = np.array(
            [self._changed_at.get(worker, now) for worker in fleet.ids], dtype=np.int64
        )
        seconds = known.work(fleet.prefill_requests, fleet.prefill_tokens, fleet.prefill_pairs)
        pending: NDArray[np.float64] = seconds - (now - changed) / SECOND
        return pending


def fastest_ttft_s(request: Request, fleet: FleetView) -> float:
    """Return the minimum seconds to the first token over workers; 0 while unknown."""
    known, prior = fleet.estimates, _PRIOR
    learned = known.prefill_token != prior.prefill_token
    learned |= known.prefill_base != prior.prefill_base
    if not learned.all() or not len(learned):
        return 0.0
    rows = np.arange(len(learned))
    uncached = request.prompt - fleet.cached(request.prompt).astype(np.float64)
    seconds = known.service(rows, uncached, request.prompt)
    return float(seconds.min())


class ConcurrencyLimit:
    """Learned concurrency limit of workers that report none (AIMD, Chiu and Jain 1989).

    Falls by 30% while requests wait inside the worker; otherwise doubles until its first fall, then
    rises by a sixteenth, whenever it is reached; at most once in `_JUDGED_EVERY`.
    """

    def __init__(self) -> None:
        self._limits: dict[str, float] = {}
        self._fell: set[str] = set()
        self._judged: dict[str, int] = {}

    def report(self, report: LoadReport, streams: int, now: int) -> None:
        """Update from a report at `now` (ns); `streams` were sent there and are running."""
        if now - self._judged.get(report.worker, -_JUDGED_EVERY) < _JUDGED_EVERY:
            return  # effects of the last change are not seen yet
        self._judged[report.worker] = now
        limit = self._limits.get(report.worker, FIRST_LIMIT)
        if report.waiting > 0 and report.running > 0:
            self._fell.add(report.worker)
            limit = max(1.0, float(report.running), _LESS * limit)
        elif report.waiting == 0 and streams >= int(limit):
            limit += max(1.0, _MORE * limit) if report.worker in self._fell else limit
        self._limits[report.worker] = limit

    def of(self, said: NDArray[np.int64], ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the limits, (workers,): reported or learned."""
        if said.all():
            return said
        learned = np.array([int(self._limits.get(worker, FIRST_LIMIT)) for worker in ids])
        limits: NDArray[np.int64] = np.where(said > 0, said, learned)
        return limits

    def forget(self, worker: str) -> None:
        """Forget a worker."""
        self._limits.pop(worker, None)
        self._fell.discard(worker)
        self._judged.pop(worker, None)


class PreemptionCaps:
    """Caps on the streams of workers that preempt: multiplicative decrease, additive increase.

    Preemptions lower it by their share of the streams there, to `FALL` of these at once. Each
    second without one, while it is reached, gives `RISE` streams more, or those for which KV is
    free up to `FULL`. It is gone once it is out of reach for `GONE_AFTER`.
    """

    FALL, RISE, FULL, GONE_AFTER = 0.8, 1.0, 0.95, 60 * SECOND

    def __init__(self) -> None:
        self.caps: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._changed: dict[str, int] = {}  # when a cap fell, rose or was reached last

    def report(self, report: LoadReport, streams: int, now: int) -> None:
        """Update from a report at `now` (ns); `streams` were sent there and are running."""
        worker, count = report.worker, report.preemptions
        if count is msgspec.UNSET:
            return
        before = self._counts.get(worker, count)
        self._counts[worker] = count
        cap, passed = self.caps.get(worker), now - self._changed.get(worker, -SECOND)
        if count > before:
            running = float(streams) if cap is None else min(cap, streams)
            self.caps[worker] = max(1.0, self.FALL * running, running - (count - before))
            self._changed[worker] = now
        elif cap is not None and streams >= int(cap):
            rise = max(self.RISE, (self.FULL - report.kv_usage) * streams)
            self.caps[worker] = cap + rise * min(passed, SECOND) / SECOND
            self._changed[worker] = now
        elif passed >= self.GONE_AFTER:
            self.caps.pop(worker, None)

    def forget(self, worker: str) -> None:
        """Forget a worker."""
        for known in (self.caps, self._counts, self._changed):
            known.pop(worker, None)


def _max_per_worker(known: Estimates, streams: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each worker's largest power of two n with f(n) <= `MAX_SLOWDOWN` f(1)."""
    rows = np.arange(len(streams))
    single_itl = known.itl(rows, np.ones(len(streams)))
    sequences = np.ones(len(streams))
    for load in _LOADS:
        slow = known.itl(rows, np.full(len(streams), load)) > MAX_SLOWDOWN * single_itl
        sequences = np.where(slow, sequences, load)
        if slow.all():
            break
    low = np.maximum(1.0, np.floor(streams * MIN_PART))
    high = np.maximum(1.0, np.floor(streams * MAX_PART))
    bounded: NDArray[np.int64] = np.clip(sequences, low, high).astype(np.int64)
    return bounded


def max_per_request(
    state: FleetState, known: Estimates, capacity: WorkerCapacity, limit: int
) -> int:
    """Return the maximum of parallel sequences per request; `limit` unless that is 0."""
    if limit:
        return limit
    sequences = _max_per_worker(known, capacity.max_streams(state, UNLIMITED))
    return sum(sequences[state.columns.decodes].tolist())


def has_capacity(
    tokens: int, state: FleetState, known: Estimates, capacity: WorkerCapacity
) -> bool:
    """True if a further sequence can start now and leaves enough for other requests."""
    columns = state.columns
    decodes = columns.decodes
    streams = capacity.max_streams(state, UNLIMITED)
    open_ = columns.decode_requests < np.maximum(1.0, np.floor(streams * (1.0 - RESERVE)))
    limits = capacity.max_tokens(state)
    empty = columns.decode_requests == 0
    open_ &= (limits == 0) | empty | (capacity.tokens(state) + tokens <= limits * (1.0 - RESERVE))
    if not (open_ & decodes).any():
        return False
    computes = columns.prefills if columns.prefills.any() else decodes
    work = known.work(columns.prefill_requests, columns.prefill_tokens, columns.prefill_pairs)
    return bool(work[computes].min() <= AHEAD_S)
