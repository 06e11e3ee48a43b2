"""Measurements of a profile, and the timing that fits them: least squares of relative errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from pigou.request import SECOND
from pigou.sim.timing_measured import TimeCurve, VariationTable, WorkerProfile, seconds_at
from pigou.workload.token_counter import Stream

#: Least gaps, and least seconds, that a mean gap is taken of.
MIN_GAPS, MIN_SECONDS = 16, 0.05
#: Number of equally likely factors of a step's time.
CLASSES = 50
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decode-only steps of `n` sequences reading `kv` cache entries."""

    n: int
    kv: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prompts:
    """Time of `prompts` of `tokens` tokens in total."""

    tokens: int
    reads: float  # cache entries that each token reads, itself included, summed over the tokens
    prompts: float  # prompts ended; a fraction, if steps hold less than a prompt
    seconds: float


@dataclass(slots=True)
class Measurements:
    """All that a profile has seen; each a median of repeated measurements."""

    decodes: list[Decodes] = field(default_factory=list)  # decode-only steps
    prefill_mixed: list[Prompts] = field(default_factory=list)  # beside a running stream
    prefill_alone: list[Prompts] = field(default_factory=list)  # without decodes
    first: list[Prompts] = field(default_factory=list)  # send to first token, alone
    rhythm: VariationTable = ()  # seconds by step of a plan over their mean, by decodes
    scatter: VariationTable = ()  # by how many decode, equally likely factors of a step's time


@dataclass(frozen=True)
class Window:
    """Steps in which all of several streams decode."""

    steps: int
    seconds: float
    generated: int  # tokens of all together at the middle


def arrivals(stream: Stream) -> NDArray[np.int64]:
    """Return when each token came, in nanoseconds, shape (tokens,)."""
    return stream.first + np.concatenate([[0], np.cumsum(stream.gaps)]).astype(np.int64)


def window(streams: Sequence[Stream]) -> Window | None:
    """Return the steps between the last first token and the first last one; None for below 2."""
    times = [arrivals(stream) for stream in streams]
    start, end = (
        max(stream_times[0] for stream_times in times),
        min(stream_times[-1] for stream_times in times),
    )
    middle = (start + end) // 2
    inside = [
        stream_times[(stream_times >= start) & (stream_times <= end)] for stream_times in times
    ]
    if min(len(stream_times) for stream_times in inside) < 3:
        return None
    mean = [
        (stream_times[-1] - stream_times[0]) / (len(stream_times) - 1) for stream_times in inside
    ]
    generated = sum(int(stream_times.searchsorted(middle, "right")) for stream_times in times)
    steps = min(len(stream_times) for stream_times in inside) - 1
    return Window(steps, float(np.median(mean)) / SECOND, generated)


def excess(times: NDArray[np.int64], sent: int, ended: int) -> float | None:
    """Return the seconds that a stream lost to another request; None if it is too short.

    From its token before `sent` to the second after `ended`, less as many mean gaps.
    """
    around = side_gaps(times)
    before = int(times.searchsorted(sent, "right")) - 1
    after = int(times.searchsorted(ended, "right")) + 1
    if before < around or after + around >= len(times):
        return None
    quiet = times[before] - times[before - around] + times[after + around] - times[after]
    mean_gap = float(quiet) / (2 * around)
    return float(times[after] - times[before] - (after - before) * mean_gap) / SECOND


def side_gaps(times: NDArray[np.int64]) -> int:
    """Return how many gaps on either side tell a stream's mean gap."""
    mean = float(times[-1] - times[0]) / max(1, len(times) - 1)
    return max(MIN_GAPS, math.ceil(MIN_SECONDS * SECOND / max(mean, 1.0)))


@dataclass(frozen=True)
class StreamGaps:
    """Seconds between tokens while `n` streams, and nobody else, decode."""

    n: int
    seconds: NDArray[np.float64]  # shape (gaps,)
    ages: NDArray[np.int64]  # steps decoded together before each, shape (gaps,)


def gaps_of(streams: Sequence[Stream]) -> StreamGaps:
    """Return the gaps of streams from the last first token on, until one of them ends."""
    times = [arrivals(stream) for stream in streams]
    last = max(times, key=lambda stream_times: int(stream_times[0]))
    start, end = int(last[0]), min(int(stream_times[-1]) for stream_times in times)
    # Tokens of one step come one after another: those of the step of `start` a bit before it, too.
    early = start - int(np.median(np.diff(last[: last.searchsorted(end, "right")]))) // 2
    stream_times = [np.diff(one[(one >= early) & (one <= end)]) for one in times]
    ages = [np.arange(len(one), dtype=np.int64) for one in stream_times]
    return StreamGaps(len(streams), np.concatenate(stream_times) / SECOND, np.concatenate(ages))


def spreads(
    seen: Sequence[Sequence[StreamGaps]], decodes: Sequence[Decodes], steps: int
) -> tuple[VariationTable, VariationTable]:
    """Return rhythm and scatter per number of streams, from all gaps and their medians."""
    rows, factors = [], []
    for n in sorted({entry.n for entry in decodes}):
        mine = [at for at, entry in enumerate(decodes) if entry.n == n]
        places = rhythm([run for at in mine for run in seen[at]], steps)
        drawn = scatter([(run, decodes[at].seconds) for at in mine for run in seen[at]], places)
        rows += [(n, places)] if places else []
        factors += [(n, drawn)] if drawn else []
    return tuple(rows), tuple(factors)


def rhythm(seen: Sequence[StreamGaps], steps: int) -> tuple[float, ...]:
    """Return each step's seconds over the plan's mean; empty if runs are too short."""
    deviations = []
    for run in seen:
        if steps > 1 and len(run.ages) and int(run.ages.max()) + 1 >= 2 * steps:
            places = run.ages % steps
            means = [float(run.seconds[places == step].mean()) for step in range(steps)]
            deviations.append(np.array(means) - np.mean(means))
    if not deviations:
        return ()
    middle = np.median(np.stack(deviations), axis=0)
    middle -= middle.mean()
    return tuple(float(value) for value in middle)


def scatter(seen: Sequence[tuple[StreamGaps, float]], places: Sequence[float]) -> tuple[float, ...]:
    """Return `CLASSES` equally likely factors of a step's time, rising, with mean 1; or ()."""
    ratios = []
    for run, mean_step_s in seen:
        said = np.full(len(run.ages), mean_step_s)
        if len(places):
            said += np.array(places)[run.ages % len(places)]
        ratios.append(run.seconds / np.maximum(said, 0.1 * mean_step_s))
    every = np.sort(np.concatenate(ratios)) if ratios else np.empty(0)
    if len(every) < 4 * CLASSES:
        return ()
    means = np.array([part.mean() for part in np.array_split(every, CLASSES)])
    return tuple(float(value) for value in means / means.mean())


@dataclass(frozen=True)
class FitError:
    """Errors of a fit, relative to the measurements."""

    what: str  # was seen
    count: int
    median: float
    largest: float


def fit(seen: Measurements, about: dict[str, Any] | None = None) -> WorkerProfile:
    """Return the timing nearest to the measurements; raises ValueError without decodes or prompts.

    Non-negative least squares of relative errors (Lawson and Hanson) over ramps; `alone` and
    `overhead` are medians of the rest.
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
    """Return the errors of a timing against measurements."""
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
    """Return the seconds that prompts add to a stream's steps, without the next plan's begin."""
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
    """Return for each interval between two places the part that a value covers."""
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
