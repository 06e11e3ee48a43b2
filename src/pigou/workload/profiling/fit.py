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
from pigou.workload.profiling.seen import Decodes, Prompts, Seen

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Error:
    """How far a fit is from what was seen, as shares of that.

    Attributes:
        what: was seen.
        count: of measurements.
        median: of the errors' sizes.
        most: of them.
    """

    what: str
    count: int
    median: float
    most: float


def fit(seen: Seen, about: dict[str, Any] | None = None) -> WorkerProfile:
    """Return the timing that is nearest to what was seen.

    Curves are sums of ramps between the places that were measured, whose slopes are at least 0
    (and never fall, of the cache that decodes read);
    with the other terms they are found by non-negative least squares of relative errors (Lawson
    and Hanson, through scipy). `alone` and `overhead` are medians of what is left then.

    Raises:
        ValueError: nothing was seen of decodes or of prompts.
    """
    if not seen.decodes or not seen.beside:
        raise ValueError("there are no measurements of decodes, or none of prompts")
    decodes, cache = _decodes(seen.decodes)
    prompts, context, prompt = _prompts(_beside(seen))
    found = WorkerProfile(
        decodes=decodes, cache=cache, prompts=prompts, context=context, prompt=prompt,
        rhythm=seen.rhythm, scatter=seen.scatter, about=about or {},
    )  # fmt: skip
    alone = _left(seen.alone, lambda each: added(found, each))
    overhead = _left(seen.first, lambda each: alone + added(found, each))
    return msgspec.structs.replace(found, alone=alone, overhead=overhead)


def errors(found: WorkerProfile, seen: Seen) -> list[Error]:
    """Return how well a timing fits what was seen."""
    fixed = found.alone
    groups: dict[str, list[tuple[float, float]]] = {
        "decodes": [
            (seconds_at(found.decodes, d.n) + seconds_at(found.cache, d.kv), d.seconds)
            for d in seen.decodes
        ],
        "prompts beside a stream": [(added(found, p), p.seconds) for p in _beside(seen)],
        "prompts alone": [(fixed + added(found, p), p.seconds) for p in seen.alone],
        "first token": [(fixed + found.overhead + added(found, p), p.seconds) for p in seen.first],
    }
    return [_error(what, pairs) for what, pairs in groups.items() if pairs]


def added(found: WorkerProfile, each: Prompts) -> float:
    """Return the seconds that prompts add to a step."""
    read = found.context * each.reads
    return seconds_at(found.prompts, each.tokens) + read + found.prompt * each.prompts


def _beside(seen: Seen) -> list[Prompts]:
    """Return what prompts add to the steps of a stream, but for the plan that begins after them.

    It is the rhythm's, and would be counted twice.
    """
    begins = max(0.0, seen.rhythm[0][1][0]) if seen.rhythm else 0.0
    return [replace(each, seconds=max(0.0, each.seconds - begins)) for each in seen.beside]


def _decodes(seen: Sequence[Decodes]) -> tuple[TimeCurve, TimeCurve]:
    """Fit decodes and the reading of the cache, of which an entry never takes less beyond more.

    Were it free to, reading the first entries could take all that a step takes in any case.
    """
    places = sorted({1, *(each.n for each in seen)})
    sizes = np.array([each.n for each in seen], dtype=np.float64)
    kv = np.array([each.kv for each in seen])
    sums = _sums(float(kv.min()), float(kv.max()))
    bends = [np.maximum(kv - bend, 0.0) for bend in sums[:-1]]
    found = _solve(
        [np.ones(len(seen)), *_ramps(places, sizes), *bends], [each.seconds for each in seen]
    )
    split = len(places)
    values = np.cumsum([found[0], *(found[1:split] * np.diff(places))])
    read = np.cumsum([0.0, *(np.cumsum(found[split:]) * np.diff(sums))])
    return _curve(places, values), _curve(sums, read)


def _sums(least: float, most: float) -> list[int]:
    """Return the places of the cache's curve: four times as far each, up to the most seen."""
    places = [max(1, math.ceil(most))]
    while places[0] // 4 >= 2 * least:
        places.insert(0, places[0] // 4)
    return [0, *places]


def _prompts(seen: Sequence[Prompts]) -> tuple[TimeCurve, float, float]:
    places = sorted({0, *(each.tokens for each in seen)})
    tokens = np.array([each.tokens for each in seen], dtype=np.float64)
    reads = np.array([each.reads for each in seen])
    ends = np.array([each.prompts for each in seen])
    found = _solve([*_ramps(places, tokens), reads, ends], [each.seconds for each in seen])
    values = np.cumsum([0.0, *(found[:-2] * np.diff(places))])
    return _curve(places, values), float(found[-2]), float(found[-1])


def _ramps(places: Sequence[int], values: _Array) -> list[_Array]:
    """Return for each stretch between two places how much of it a value covers."""
    return [np.clip(values - left, 0.0, right - left) for left, right in pairwise(places)]


def _solve(columns: Sequence[_Array], seconds: Iterable[float]) -> _Array:
    target = np.array(list(seconds))
    # What is much shorter than the rest is noise to a good part: it does not count for more.
    weights = 1.0 / np.maximum(target, 0.05 * float(np.median(np.abs(target))) + 1e-9)
    matrix = np.stack(columns, axis=1) * weights[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, target * weights, maxiter=100 * matrix.shape[1])
    solved: _Array = found / scale
    return solved


def _curve(places: Sequence[int], values: _Array) -> TimeCurve:
    return tuple(zip(places, values.tolist(), strict=True))


def _left(seen: Sequence[Prompts], said: Callable[[Prompts], float]) -> float:
    if not seen:
        return 0.0
    return max(0.0, float(np.median([each.seconds - said(each) for each in seen])))


def _error(what: str, pairs: Sequence[tuple[float, float]]) -> Error:
    sizes = [abs(said / saw - 1.0) for said, saw in pairs if saw]
    return Error(what, len(pairs), float(np.median(sizes)), float(max(sizes)))
