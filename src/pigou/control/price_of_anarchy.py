"""Price of Anarchy: the fleet's latency relative to the best possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.latency_model.estimates import Estimates
from pigou.games.latency import LatencyLaw, OnlineFit
from pigou.games.price_of_anarchy import PriceOfAnarchy, calibrated, legacy_index
from pigou.games.request_window import LOCAL, RequestWindow
from pigou.request import SECOND

#: Window of ended requests: its time, and the most and fewest requests.
SPAN = 60 * SECOND
MAX_REQUESTS = 1000
MIN_REQUESTS = 20
_HALF_LIFE = 512.0  # half-life of a law's observations, in requests
_MAX_LOAD = 256.0


class RequestTimes(msgspec.Struct, frozen=True):
    """Times of one request, nanoseconds; `prefill` is "" for local prefill."""

    arrived_at: int
    routed_at: int
    prefill_done_at: int
    ended_at: int
    prefill: str
    decode: str
    uncached: int
    pairs: int
    generated: int


@dataclass(frozen=True, slots=True)
class PoASnapshot:
    """Inputs of the Price of Anarchy at one moment, for use on any thread."""

    records: tuple[RequestTimes, ...]  # requests that ended, and then those that still run
    scored: NDArray[np.bool_]  # True for records that count, (records,); others only load workers
    workers: tuple[str, ...]  # ids, by row
    prefill: tuple[int, ...]  # rows whose role is prefill alone
    estimates: Estimates


@dataclass(frozen=True, slots=True)
class Split:
    """The split of workers between prefill and decode that costs requests least."""

    prefill: tuple[str, ...]  # ids of the workers that only prefill under it
    decode: tuple[str, ...]  # ids of the others
    moves: tuple[str, ...]  # ids of those whose role would change
    saves: float  # seconds that it would save a request, in the mean


@dataclass(frozen=True, slots=True)
class PoAEstimate:
    """The Price of Anarchy of a window."""

    anarchy: PriceOfAnarchy  # calibrated (`pigou.games.price_of_anarchy.calibrated`)
    legacy: float  # the paper's index (`legacy_index`); neither a bound nor an estimate
    requests: int
    # observed over best seconds of the requests that each worker computed a part of.
    by_worker: Mapping[str, float] = field(default_factory=dict)
    split: Split | None = None  # a better split than the present one; None where there is none
    # ends of the intervals of `by_worker`.
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def better_prefill(self) -> int | None:
        """Number of prefill workers in the better split; None for none."""
        return None if self.split is None else len(self.split.prefill)


class PoAEstimator:
    """Records requests that ended, and estimates their Price of Anarchy.

    Laws map load to stretch: a stage's seconds over those on an idle worker of median speed.

    Example:
        estimator = PoAEstimator()
        times = RequestTimes(0, 1, 2, 3, "", "w0", uncached=9, pairs=36, generated=4)
        estimator.ended(times)
        assert "1 requests ended" in estimator.unknown(now=4)
    """

    def __init__(self) -> None:
        self._ended: deque[RequestTimes] = deque(maxlen=MAX_REQUESTS)
        self._fresh = 0
        self._decode: dict[str, OnlineFit] = {}
        self._prefill: dict[str, OnlineFit] = {}

    def ended(self, times: RequestTimes | None) -> None:
        """Record a request that ended; None for one whose worker is gone."""
        if times is not None:
            self._ended.append(times)
            self._fresh += 1

    def forget(self, worker: str) -> None:
        """Forget a worker and its requests."""
        others = [times for times in self._ended if worker not in (times.prefill, times.decode)]
        self._ended = deque(others, maxlen=MAX_REQUESTS)
        self._fresh = min(self._fresh, len(others))
        self._decode.pop(worker, None)
        self._prefill.pop(worker, None)

    def unknown(self, now: int) -> str:
        """Return why the last minute has no Price of Anarchy; empty if it has."""
        recent = 0
        for times in reversed(self._ended):
            if now - times.ended_at > SPAN or recent == MIN_REQUESTS:
                break
            recent += 1
        if recent >= MIN_REQUESTS:
            return ""
        span_s = SPAN // SECOND
        return f"{recent} requests ended in the last {span_s} s; at least {MIN_REQUESTS} are needed"

    def snapshot(
        self, running: Iterable[RequestTimes | None], row: Mapping[str, int],
        prefill: Sequence[int], estimates: Estimates, now: int,
    ) -> PoASnapshot | None:  # fmt: skip
        """Return the inputs of `assess`; None if too few requests ended."""
        while self._ended and now - self._ended[0].ended_at > SPAN:
            self._ended.popleft()
        if len(self._ended) < MIN_REQUESTS or not self._fresh:
            return None
        self._fresh = 0
        records = (*self._ended, *(times for times in running if times is not None))
        scored = np.arange(len(records)) < len(self._ended)
        return PoASnapshot(records, scored, tuple(row), tuple(prefill), estimates)

    def assess(self, snapshot: PoASnapshot) -> PoAEstimate | None:
        """Return a snapshot's Price of Anarchy or None; may run on a thread, one call at a time."""
        row = {worker: index for index, worker in enumerate(snapshot.workers)}
        records = snapshot.records
        if any(times.decode not in row or times.prefill not in {"", *row} for times in records):
            return None
        window = _window(records, row, snapshot)
        self._learn(window, snapshot.workers)
        laws = _filled([self._decode.get(worker) for worker in snapshot.workers])
        prefill_laws = _filled([self._prefill.get(worker) for worker in snapshot.workers])
        if laws is None:
            return None
        try:
            anarchy = calibrated(window, laws, prefill_laws, prefill_workers=snapshot.prefill)
        except ValueError:
            return None
        shares = zip(snapshot.workers, anarchy.workers, strict=True)
        by_worker = {worker: share for worker, share in shares if share is not None}
        by_row = zip(snapshot.workers, anarchy.worker_ranges, strict=True)
        ranges = {worker: pair for worker, pair in by_row if pair is not None}
        legacy, split = legacy_index(window.observed.tolist(), len(laws)), _split(anarchy, snapshot)
        requests = len(window.decode)
        return PoAEstimate(anarchy, legacy, requests, by_worker, split, ranges)

    def _learn(self, window: RequestWindow, workers: Sequence[str]) -> None:
        """Update the laws from a window's stages."""
        decode = window.decode_seconds / window.decode_work
        for index, load, stretch in zip(
            window.decode.tolist(), window.decode_load.tolist(), decode.tolist(), strict=True
        ):
            _observe(self._decode, workers[index], load, stretch)
        remote = window.prefill != LOCAL
        prefill = window.prefill_seconds[remote] / window.prefill_work[remote]
        for index, load, stretch in zip(
            window.prefill[remote].tolist(), window.prefill_load[remote].tolist(),
            prefill.tolist(), strict=True,
        ):  # fmt: skip
            _observe(self._prefill, workers[index], load, stretch)


def _observe(fits: dict[str, OnlineFit], worker: str, load: float, stretch: float) -> None:
    if stretch > 0.0:
        fit = fits.get(worker)
        if fit is None:
            fit = fits[worker] = OnlineFit(_MAX_LOAD, _HALF_LIFE)
        fit.observe(load, stretch)


def _window(
    records: Sequence[RequestTimes], row: Mapping[str, int], snapshot: PoASnapshot
) -> RequestWindow:
    origin = min(times.arrived_at for times in records)

    def seconds(name: str) -> NDArray[np.float64]:
        return np.array([getattr(times, name) - origin for times in records]) / SECOND

    prefill = np.array([row[times.prefill] if times.prefill else LOCAL for times in records])
    started = seconds("routed_at")
    prefill_done = np.maximum(seconds("prefill_done_at"), started + 1e-9)
    entered = np.where(prefill == LOCAL, started, prefill_done)
    prompts, streams = _work(records, snapshot.estimates)
    return RequestWindow.from_times(
        arrived=seconds("arrived_at"), started=started, prefill_done=prefill_done,
        ended=np.maximum(seconds("ended_at"), entered + 1e-9), prefill=prefill,
        decode=np.array([row[times.decode] for times in records]), scored=snapshot.scored,
        prefill_work=prompts, decode_work=np.where(prefill == LOCAL, prompts + streams, streams),
    )  # fmt: skip


def _work(
    records: Sequence[RequestTimes], known: Estimates
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds of each prompt and stream alone on a worker of median speed."""
    rows = np.arange(len(known.a))
    itl = float(np.median(known.itl(rows, np.ones(len(rows)))))
    base, token = float(np.median(known.prefill_base)), float(np.median(known.prefill_token))
    pair = float(np.median(known.prefill_pair))
    uncached = np.array([times.uncached for times in records], dtype=np.float64)
    pairs = np.array([times.pairs for times in records], dtype=np.float64)
    generated = np.array([times.generated for times in records], dtype=np.float64)
    return np.maximum(base + token * uncached + pair * pairs, 1e-6), np.maximum(
        itl * generated, 1e-6
    )


def _filled(fits: Sequence[OnlineFit | None]) -> list[LatencyLaw] | None:
    """Return a law per worker, the median law for idle ones."""
    laws = [fit.law() if fit is not None and fit.weight > 0 else None for fit in fits]
    known = sorted((law for law in laws if law is not None), key=lambda law: law(1.0))
    if not known:
        return None
    return [known[len(known) // 2] if law is None else law for law in laws]


def _split(anarchy: PriceOfAnarchy, snapshot: PoASnapshot) -> Split | None:
    best = frozenset(anarchy.prefill_workers)
    if best == frozenset(snapshot.prefill) or anarchy.split_saves <= 0.0:
        return None
    names = snapshot.workers
    prefill = tuple(names[row] for row in sorted(best))
    decode = tuple(name for name in names if name not in prefill)
    moves = tuple(names[row] for row in sorted(best ^ frozenset(snapshot.prefill)))
    return Split(prefill, decode, moves, anarchy.split_saves)
