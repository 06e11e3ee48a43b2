"""The audit: what the fleet's requests took, over what they would take at best."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pigou.control.assessment import Assessment, Record, Snapshot, Split
from pigou.control.latency_model.estimates import Estimates
from pigou.control.state import Load
from pigou.games.latency import LatencyLaw, OnlineFit
from pigou.games.legacy_estimator import LegacyEstimator
from pigou.games.price_of_anarchy import PriceOfAnarchy, calibrated
from pigou.games.request_window import LOCAL, RequestWindow
from pigou.request import SECOND

#: A window has the requests that ended within this time, at most so many, and at least so many.
SPAN = 60 * SECOND
MOST = 1000
LEAST = 20
#: Requests that a law remembers: half of its weight is on the last so many.
_HALF_LIFE = 512.0
_MOST_LOAD = 256.0


class Audit:
    """Keeps what ended, and assesses it.

    Laws are of stretch: a stage's seconds over the seconds that its work would take on a worker
    of median speed with nobody else there, against the load that it met. So requests of unequal
    size can be compared, and a slow worker shows in its law.
    """

    def __init__(self) -> None:
        self._ended: deque[Record] = deque(maxlen=MOST)
        self._fresh = 0
        self._decode: dict[str, OnlineFit] = {}
        self._prefill: dict[str, OnlineFit] = {}

    def ended(self, load: Load, now: int) -> None:
        """Keep a request that ended."""
        record = _record(load, now)
        if record is not None:
            self._ended.append(record)
            self._fresh += 1

    def forget(self, worker: str) -> None:
        """A worker is gone: what it did counts no more."""
        kept = [each for each in self._ended if worker not in (each.prefill, each.decode)]
        self._ended = deque(kept, maxlen=MOST)
        self._fresh = min(self._fresh, len(kept))
        self._decode.pop(worker, None)
        self._prefill.pop(worker, None)

    def unknown(self, now: int) -> str:
        """Return why the last minute says nothing of the Price of Anarchy; empty where it does."""
        lately = 0
        for each in reversed(self._ended):
            if now - each.ended > SPAN or lately == LEAST:
                break
            lately += 1
        if lately >= LEAST:
            return ""
        span_s = SPAN // SECOND
        return f"{lately} requests ended in the last {span_s} s; at least {LEAST} are needed"

    def snapshot(
        self, loads: Iterable[Load], row: Mapping[str, int], prefill: Sequence[int],
        estimates: Estimates, now: int,
    ) -> Snapshot | None:  # fmt: skip
        """Return what is to be assessed; None when too few requests ended lately."""
        while self._ended and now - self._ended[0].ended > SPAN:
            self._ended.popleft()
        if len(self._ended) < LEAST or not self._fresh:
            return None
        self._fresh = 0
        running = [_record(load, now) for load in loads]
        records = (*self._ended, *(each for each in running if each is not None))
        scored = np.arange(len(records)) < len(self._ended)
        return Snapshot(records, scored, tuple(row), tuple(prefill), estimates)

    def assess(self, snapshot: Snapshot) -> Assessment | None:
        """Return the Price of Anarchy of a snapshot; None where there is nothing to compare.

        It takes some milliseconds, and only it uses the laws of stretch: it may run on another
        thread, one call at a time.
        """
        row = {worker: place for place, worker in enumerate(snapshot.workers)}
        records = snapshot.records
        if any(each.decode not in row or each.prefill not in {"", *row} for each in records):
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
        legacy, split = _legacy(window, len(laws)), _split(anarchy, snapshot)
        return Assessment(anarchy, legacy, len(window.decode), by_worker, split)

    def _learn(self, window: RequestWindow, workers: Sequence[str]) -> None:
        """Take the window's stages into the laws."""
        decode = window.decode_seconds / window.decode_work
        for place, load, stretch in zip(
            window.decode.tolist(), window.decode_load.tolist(), decode.tolist(), strict=True
        ):
            _observe(self._decode, workers[place], load, stretch)
        remote = window.prefill != LOCAL
        prefill = window.prefill_seconds[remote] / window.prefill_work[remote]
        for place, load, stretch in zip(
            window.prefill[remote].tolist(), window.prefill_load[remote].tolist(),
            prefill.tolist(), strict=True,
        ):  # fmt: skip
            _observe(self._prefill, workers[place], load, stretch)


def _observe(fits: dict[str, OnlineFit], worker: str, load: float, stretch: float) -> None:
    if stretch > 0.0:
        fit = fits.get(worker)
        if fit is None:
            fit = fits[worker] = OnlineFit(_MOST_LOAD, _HALF_LIFE)
        fit.observe(load, stretch)


def _record(load: Load, now: int) -> Record | None:
    if load.decode is None:
        return None
    return Record(
        arrived=min(load.request.arrival or load.routed, load.routed),
        routed=load.routed,
        handed=(load.handed or now) if load.remote else load.routed,
        ended=now,
        prefill=load.prefill_worker,
        decode=load.decode,
        uncached=load.uncached,
        pairs=load.pairs,
        generated=max(1, load.generated),
    )


def _window(records: Sequence[Record], row: Mapping[str, int], snapshot: Snapshot) -> RequestWindow:
    """Return the scored records as a window, with the work of each stage."""
    origin = min(each.arrived for each in records)

    def seconds(name: str) -> NDArray[np.float64]:
        return np.array([getattr(each, name) - origin for each in records]) / SECOND

    prefill = np.array([row[each.prefill] if each.prefill else LOCAL for each in records])
    started, handed = seconds("routed"), seconds("handed")
    handed = np.maximum(handed, started + 1e-9)
    entered = np.where(prefill == LOCAL, started, handed)
    prompts, streams = _work(records, snapshot.estimates)
    return RequestWindow.from_times(
        arrived=seconds("arrived"),
        started=started,
        handed=handed,
        ended=np.maximum(seconds("ended"), entered + 1e-9),
        prefill=prefill,
        decode=np.array([row[each.decode] for each in records]),
        scored=snapshot.scored,
        prefill_work=prompts,
        decode_work=np.where(prefill == LOCAL, prompts + streams, streams),
    )


def _work(
    records: Sequence[Record], known: Estimates
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds of each record's prompt and stream, alone on a worker of median speed."""
    rows = np.arange(len(known.a))
    itl = float(np.median(known.itl(rows, np.ones(len(rows)))))
    base, token = float(np.median(known.prefill_base)), float(np.median(known.prefill_token))
    pair = float(np.median(known.prefill_pair))
    uncached = np.array([each.uncached for each in records], dtype=np.float64)
    pairs = np.array([each.pairs for each in records], dtype=np.float64)
    generated = np.array([each.generated for each in records], dtype=np.float64)
    return np.maximum(base + token * uncached + pair * pairs, 1e-6), np.maximum(
        itl * generated, 1e-6
    )


def _filled(fits: Sequence[OnlineFit | None]) -> list[LatencyLaw] | None:
    """Return a law for each worker; one that did nothing has the median of the others'."""
    laws = [each.law() if each is not None and each.weight > 0 else None for each in fits]
    known = sorted((law for law in laws if law is not None), key=lambda law: law(1.0))
    if not known:
        return None
    return [known[len(known) // 2] if law is None else law for law in laws]


def _split(anarchy: PriceOfAnarchy, snapshot: Snapshot) -> Split | None:
    """Return the split that would be better than the present one, by name; None for none."""
    best = frozenset(anarchy.prefill_workers)
    if best == frozenset(snapshot.prefill) or anarchy.split_saves <= 0.0:
        return None
    names = snapshot.workers
    prefill = tuple(names[row] for row in sorted(best))
    decode = tuple(each for each in names if each not in prefill)
    moves = tuple(names[row] for row in sorted(best ^ frozenset(snapshot.prefill)))
    return Split(prefill, decode, moves, anarchy.split_saves)


def _legacy(window: RequestWindow, workers: int) -> float:
    estimator = LegacyEstimator(workers)
    for seconds in window.observed[-estimator.window :].tolist():  # it looks at no others
        estimator.observe(seconds)
    return estimator.poa()
