"""Observations of a fleet: requests, their stages, and the loads they met."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, Indices

#: Prefill worker of a request whose decode worker prefilled.
LOCAL = -1


_ONE: Floats = np.float64(1.0)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class RequestWindow:
    """R completed requests; every field has shape (requests,), times in seconds.

    Loads count requests on the same worker, totals those on all, as means over the stage, itself
    counted. A prefill worker of -1 is local prefill. A stage of work v takes v f(n). Raises
    ValueError for bad data.
    """

    waiting: Floats  # before any worker had the request
    prefill: Indices
    prefill_seconds: Floats
    prefill_load: Floats
    prefill_total: Floats
    decode: Indices
    decode_seconds: Floats
    decode_load: Floats
    decode_total: Floats
    prefill_work: Floats = _ONE
    decode_work: Floats = _ONE

    def __post_init__(self) -> None:
        for name in ("prefill_work", "decode_work"):
            work = np.broadcast_to(getattr(self, name), np.shape(self.decode))
            object.__setattr__(self, name, work)
            if not (np.isfinite(work).all() and (work > 0).all()):
                raise ValueError(f"{name} must be finite, and above 0")
        sizes = {f.name: np.shape(getattr(self, f.name)) for f in fields(self)}
        if len(set(sizes.values())) != 1 or len(self.waiting.shape) != 1 or not len(self.waiting):
            raise ValueError(f"fields have shapes {sizes}: give (requests,) of each, 1 or more")
        self._check_stage("decode", np.ones(len(self.decode), dtype=bool), 0)
        self._check_stage("prefill", self.prefill != LOCAL, LOCAL)
        if not (np.isfinite(self.waiting).all() and (self.waiting >= 0).all()):
            raise ValueError("waiting must be finite, and 0 or more")

    @classmethod
    def from_times(
        cls,
        *,
        arrived: ArrayLike,
        started: ArrayLike,
        prefill_done: ArrayLike,
        ended: ArrayLike,
        prefill: ArrayLike,
        decode: ArrayLike,
        scored: ArrayLike | None = None,
        prefill_work: ArrayLike = 1.0,
        decode_work: ArrayLike = 1.0,
    ) -> RequestWindow:
        """Build a window from times in seconds, (requests,); prefill worker -1 means local prefill.

        Requests that are not `scored` only load the workers, which keeps loads at the window's
        edges right. Raises ValueError when a request ends a stage before it begins.
        """
        arrivals, begun, given, done = (
            np.asarray(t, dtype=np.float64) for t in (arrived, started, prefill_done, ended)
        )
        prefills, decodes = (np.asarray(w, dtype=np.intp) for w in (prefill, decode))
        remote = prefills != LOCAL
        entered = np.where(remote, given, begun)
        if (begun < arrivals).any() or (done <= entered).any() or (given <= begun)[remote].any():
            raise ValueError(
                "each request must arrive, start, be handed over and end in this order"
            )
        picked = slice(None) if scored is None else np.asarray(scored, dtype=bool)
        works = [np.broadcast_to(w, begun.shape) for w in (prefill_work, decode_work)]
        prefill_load, prefill_total = np.ones(len(begun)), np.ones(len(begun))
        first = _loads(begun[remote], given[remote], prefills[remote])
        prefill_load[remote], prefill_total[remote] = first
        decode_load, decode_total = _loads(entered, done, decodes)
        return cls(
            waiting=(begun - arrivals)[picked],
            prefill=prefills[picked],
            prefill_seconds=np.where(remote, given - begun, 0.0)[picked],
            prefill_load=prefill_load[picked],
            prefill_total=prefill_total[picked],
            decode=decodes[picked],
            decode_seconds=(done - entered)[picked],
            decode_load=decode_load[picked],
            decode_total=decode_total[picked],
            prefill_work=works[0][picked],
            decode_work=works[1][picked],
        )

    def _check_stage(self, stage: str, ran: np.ndarray, min_worker: int) -> None:
        if (getattr(self, stage) < min_worker).any():
            raise ValueError(
                f"{stage} names a worker below {min_worker}: use indices into the laws"
            )
        seconds = getattr(self, f"{stage}_seconds")[ran]
        load, total = (getattr(self, f"{stage}_{name}")[ran] for name in ("load", "total"))
        if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
            raise ValueError(f"{stage}_seconds must be finite, and 0 or more")
        if (load <= 0).any() or (total < load - 1e-6).any():
            raise ValueError(f"{stage}_load must be above 0 and at most {stage}_total")

    @property
    def observed(self) -> Floats:
        """Seconds from arrival to end, (requests,)."""
        remote = np.where(self.prefill == LOCAL, 0.0, self.prefill_seconds)
        seconds: Floats = self.waiting + remote + self.decode_seconds
        return seconds


def _loads(begin: Floats, end: Floats, worker: Indices) -> tuple[Floats, Floats]:
    """Return mean requests on the same worker, and on all, over each request's stage."""
    total = _mean_present(begin, end)
    load = np.empty_like(total)
    for w in np.unique(worker):
        mask = worker == w
        load[mask] = _mean_present(begin[mask], end[mask])
    return load, np.maximum(load, total)


def _mean_present(begin: Floats, end: Floats) -> Floats:
    """Return the mean number of open intervals over each interval."""
    origin = begin.min() if len(begin) else 0.0  # sums of clock readings would lose digits
    begin, end = begin - origin, end - origin

    def elapsed(since: Floats, at: Floats) -> Floats:
        """Sum over intervals of the time from ``since`` to ``at``, for those that began."""
        ordered = np.sort(since)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, at)
        return np.asarray(at * count - sums[count])

    def open_time(at: Floats) -> Floats:
        return elapsed(begin, at) - elapsed(end, at)

    mean: Floats = (open_time(end) - open_time(begin)) / (end - begin)
    return np.maximum(mean, 1.0)
