"""Fits a timing to what was seen: least squares of relative errors, nothing negative."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from pigou.sim.timing_measured import TimeCurve, WorkerProfile, seconds_at
from pigou.workload.profiling.measurements import Decodes, Measurements, Prompts

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class FitError:
    """How far a fit is from what was seen, as shares of that."""

    what: str  # was seen
    count: int
    median: float
    largest: float


def fit(seen: Measurements, about: dict[str, Any] | None = None) -> WorkerProfile:
    """Return the timing that is nearest to what was seen.

    Curves are sums of ramps between the places that were measured, whose slopes are at least 0
    (and never fall, of the cache that decodes read);
    with the other terms they are found by non-negative least squares of relative errors (Lawson
    and Hanson, through scipy). `alone` and `overhead` are medians of what is left then.

    Raises:
        ValueError: nothing was seen of decodes or of prompts.
    """
    if not seen.decodes or not seen.prefill_mixed:
        raise ValueError("there are no measurements of decodes, or none of prompts")
    decodes, cache = _decodes(seen.decodes)
    prompts, context, prompt = _prompts(_mixed(seen))
    timing = WorkerProfile(
        decodes=decodes, cache=cache, prompts=prompts, context=context, prompt=prompt,
        rhythm=seen.rhythm, scatter=seen.scatter, about=about or {},
    )  # fmt: skip
    alone_s = _left(seen.prefill_alone, lambda step: added(timing, step))
    overhead = _left(seen.first, lambda step: alone_s + added(timing, step))
    return msgspec.structs.replace(timing, alone=alone_s, overhead=overhead)


def errors(timing: WorkerProfile, seen: Measurements) -> list[FitError]:
    """Return how well a timing fits what was seen."""
    fixed = timing.alone
    groups: dict[str, list[tuple[float, float]]] = {
        "decodes": [
            (seconds_at(timing.decodes, d.n) + seconds_at(timing.cache, d.kv), d.seconds)
            for d in seen.decodes
        ],
        "prompts beside a stream": [(added(timing, p), p.seconds) for p in _mixed(seen)],
        "prompts alone": [(fixed + added(timing, p), p.seconds) for p in seen.prefill_alone],
        "first token": [
            (fixed + timing.overhead + added(timing, p), p.seconds) for p in seen.first
        ],
    }
    return [_error(what, pairs) for what, pairs in groups.items() if pairs]


def added(timing: WorkerProfile, prompts: Prompts) -> float:
    """Return the seconds that prompts add to a step."""
    read = timing.context * prompts.reads
    return seconds_at(timing.prompts, prompts.tokens) + read + timing.prompt * prompts.prompts


def _mixed(seen: Measurements) -> list[Prompts]:
    """Return what prompts add to the steps of a stream, but for the plan that begins after them."""
    begins = max(0.0, seen.rhythm[0][1][0]) if seen.rhythm else 0.0
    return [
        replace(mixed, seconds=max(0.0, mixed.seconds - begins)) for mixed in seen.prefill_mixed
    ]


def _decodes(seen: Sequence[Decodes]) -> tuple[TimeCurve, TimeCurve]:
    """Fit decodes and the reading of the cache, of which an entry never takes less beyond more."""
    places = sorted({1, *(step.n for step in seen)})
    sizes = np.array([step.n for step in seen], dtype=np.float64)
    kv = np.array([step.kv for step in seen])
    sums = _sums(float(kv.min()), float(kv.max()))
    bends = [np.maximum(kv - bend, 0.0) for bend in sums[:-1]]
    solution = _solve(
        [np.ones(len(seen)), *_ramps(places, sizes), *bends], [step.seconds for step in seen]
    )
    split = len(places)
    values = np.cumsum([solution[0], *(solution[1:split] * np.diff(places))])
    read = np.cumsum([0.0, *(np.cumsum(solution[split:]) * np.diff(sums))])
    return _curve(places, values), _curve(sums, read)


def _sums(min_entries: float, max_entries: float) -> list[int]:
    """Return the places of the cache's curve: four times as far each, up to the most seen."""
    places = [max(1, math.ceil(max_entries))]
    while places[0] // 4 >= 2 * min_entries:
        places.insert(0, places[0] // 4)
    return [0, *places]


def _prompts(seen: Sequence[Prompts]) -> tuple[TimeCurve, float, float]:
    places = sorted({0, *(step.tokens for step in seen)})
    tokens = np.array([step.tokens for step in seen], dtype=np.float64)
    reads = np.array([step.reads for step in seen])
    prompt_ends = np.array([step.prompts for step in seen])
    solution = _solve(
        [*_ramps(places, tokens), reads, prompt_ends], [step.seconds for step in seen]
    )
    values = np.cumsum([0.0, *(solution[:-2] * np.diff(places))])
    return _curve(places, values), float(solution[-2]), float(solution[-1])


def _ramps(places: Sequence[int], values: _Array) -> list[_Array]:
    """Return for each stretch between two places how much of it a value covers."""
    return [np.clip(values - left, 0.0, right - left) for left, right in pairwise(places)]


def _solve(columns: Sequence[_Array], seconds: Iterable[float]) -> _Array:
    target = np.array(list(seconds))
    # What is much shorter than the rest is noise to a good part: it does not count for more.
    weights = 1.0 / np.maximum(target, 0.05 * float(np.median(np.abs(target))) + 1e-9)
    matrix = np.stack(columns, axis=1) * weights[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    solution, _ = nnls(matrix / scale, target * weights, maxiter=100 * matrix.shape[1])
    solved: _Array = solution / scale
    return solved


def _curve(places: Sequence[int], values: _Array) -> TimeCurve:
    return tuple(zip(places, values.tolist(), strict=True))


def _left(seen: Sequence[Prompts], said: Callable[[Prompts], float]) -> float:
    if not seen:
        return 0.0
    return max(0.0, float(np.median([step.seconds - said(step) for step in seen])))


def _error(what: str, pairs: Sequence[tuple[float, float]]) -> FitError:
    sizes = [abs(said / saw - 1.0) for said, saw in pairs if saw]
    return FitError(what, len(pairs), float(np.median(sizes)), float(max(sizes)))
