"""Demand of a workload: lengths, rate and shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pigou.config import ConfigError
from pigou.performance.pool_load import LengthClasses
from pigou.performance.speed import RequestMix
from pigou.request import SECOND
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec
from pigou.workload.workload_spec import LengthMix, read_workload_spec

#: Requests that a mix without a rate is described by.
_SAMPLE = 4000
#: Classes of prompts, and of outputs within one.
_PROMPT_PARTS, _OUTPUT_PARTS = 12, 4
#: Requests of a trace that is planned for: its busiest ones in a row.
_WINDOW = 4000


@dataclass(frozen=True)
class RequestTable:
    """Requests of a workload in order of their arrival, (requests,) each."""

    starts_s: np.ndarray  # start of the session
    after_s: np.ndarray  # think times before it in its session
    places: np.ndarray  # requests before it in its session
    prompts: np.ndarray  # tokens
    computed: np.ndarray  # uncached prompt tokens
    outputs: np.ndarray  # tokens


@dataclass(frozen=True)
class Demand:
    """A workload as a plan is made for it."""

    mix: RequestMix  # means and variances of its requests
    classes: LengthClasses
    table: RequestTable
    rate_rps: float  # requests a second; 0.0 where the plan shall find the most
    loop: OpenLoop  # the requests themselves; of a mix without a rate, at one a second
    max_tokens: int  # prompt and output of the longest request

    def with_hit_rate(self, hit_rate: float) -> Demand:
        """Return the same requests with another share of cached prompt tokens."""
        classes, mix = self.classes, self.mix
        computed = np.maximum(classes.computed * (1.0 - hit_rate) / (1.0 - mix.hit_rate), 1.0)
        changed = LengthClasses(classes.prompts, computed, classes.outputs, classes.shares)
        fewer = self.table.computed * (1.0 - hit_rate) / (1.0 - mix.hit_rate)
        table = replace(self.table, computed=np.maximum(fewer, 1.0))
        mix = replace(self.mix, hit_rate=hit_rate)
        return replace(self, mix=mix, classes=changed, table=table)

    def at(self, rate_rps: float, requests: int) -> OpenLoop:
        """Return the first requests of the workload at a rate: all times are stretched alike."""
        sessions = self.loop.sessions
        own = self.rate_rps or 1.0
        taken: list[RequestSession] = []
        count = 0
        for session in sessions:
            if count >= requests:
                break
            count += len(session.requests)
            taken.append(replace(session, start_ns=round(session.start_ns * own / rate_rps)))
        return OpenLoop(tuple(taken), rates=(RateSchedule.of(rate_rps),))


def read_demand(text: str, seed: int) -> Demand:
    """Parse `--workload`: a mix of lengths, generated requests, or a trace."""
    if text.startswith("mix=") and not Path(text).exists():
        mix, rest = LengthMix.parse(text)
        if not rest:
            return describe(mix.arrivals(1.0, 1.0, _SAMPLE, 0.0, seed), known_rate=False)
        if "n=" not in rest and "hold=" not in rest:
            text = f"{text},n={_SAMPLE}"
    loop = read_workload_spec(text, seed).workload
    if not isinstance(loop, OpenLoop) or loop.concurrency:
        raise ConfigError(
            f"workload is {text!r}, whose users wait for answers; plan for arrivals: mix=, "
            "poisson:, gamma:, or a trace"
        )
    return describe(busiest(loop, _WINDOW), known_rate=True)


def busiest(loop: OpenLoop, requests: int) -> OpenLoop:
    """Return the consecutive sessions with at least `requests` requests in the shortest time."""
    sessions = sorted(loop.sessions, key=lambda session: session.start_ns)
    counts = np.cumsum([0, *(len(session.requests) for session in sessions)])
    if counts[-1] <= requests:
        return replace(loop, sessions=tuple(sessions))
    starts = np.array([session.start_ns for session in sessions], dtype=np.int64)
    window_ends = np.searchsorted(counts, counts[:-1] + requests)
    fits = np.flatnonzero(window_ends <= len(sessions))
    first = int(fits[np.argmin(starts[window_ends[fits] - 1] - starts[fits])])
    begin = starts[first]
    taken = tuple(
        replace(session, start_ns=int(session.start_ns - begin))
        for session in sessions[first : int(window_ends[first])]
    )
    return replace(loop, sessions=taken)


def describe(loop: OpenLoop, *, known_rate: bool) -> Demand:
    """Return the demand of a workload; without `known_rate` its times mean nothing."""
    requests = [spec for session in loop.sessions for spec in session.requests]
    prompts = np.array([spec.prompt_tokens for spec in requests], dtype=float)
    outputs = np.array([spec.output_tokens for spec in requests], dtype=float)
    isl, osl = float(prompts.mean()), float(outputs.mean())
    shared = shared_tokens(requests)
    starts = np.sort([session.start_ns for session in loop.sessions]) / SECOND
    seconds = float(starts[-1] - starts[0]) if len(starts) > 1 else 0.0
    rate = len(requests) / seconds if seconds > 0 else 0.0
    if known_rate and not rate:
        raise ConfigError("workload: its requests come all at once; give more, or a mix without "
                          "a rate")  # fmt: skip
    mix = RequestMix(
        isl=isl,
        osl=osl,
        hit_rate=float(shared.sum() / prompts.sum()),
        isl_scv=float(prompts.var() / isl**2),
        arrival_scv=_gap_scv(starts) if known_rate else 1.0,
    )
    max_tokens = int((prompts + outputs).max())
    classes = length_classes(prompts, outputs, shared)
    places = [i for session in loop.sessions for i in range(len(session.requests))]
    thinks = [0.0, *(spec.think_ns / SECOND for spec in requests)]
    after_s = np.cumsum(thinks)[1:]
    first = np.maximum.accumulate(np.where(np.array(places) == 0, np.arange(len(places)), 0))
    table = RequestTable(
        np.repeat([session.start_ns / SECOND for session in loop.sessions],
                  [len(session.requests) for session in loop.sessions]),
        after_s - after_s[first], np.array(places), prompts, np.maximum(prompts - shared, 1.0),
        outputs,
    )  # fmt: skip
    return Demand(mix, classes, table, rate if known_rate else 0.0, loop, max_tokens)


def length_classes(prompts: np.ndarray, outputs: np.ndarray, shared: np.ndarray) -> LengthClasses:
    """Return requests in up to 12 classes by uncached tokens, each in up to 4 by output."""
    computed = np.maximum(prompts - shared, 1.0)
    order = np.lexsort((outputs, computed))
    rows: list[tuple[float, float, float, int]] = []
    for part in _parts(computed[order], order, _PROMPT_PARTS):
        inner = part[np.argsort(outputs[part], kind="stable")]
        for piece in _parts(outputs[inner], inner, _OUTPUT_PARTS):
            means = prompts[piece].mean(), computed[piece].mean(), outputs[piece].mean()
            rows.append((*means, len(piece)))
    lengths = np.array(rows)
    shares = lengths[:, 3] / len(prompts)
    return LengthClasses(lengths[:, 0], lengths[:, 1], lengths[:, 2], shares)


def _parts(values: np.ndarray, indices: np.ndarray, count: int) -> list[np.ndarray]:
    """Return indices in up to `count` parts, by their sorted values; equal values stay together."""
    distinct, starts = np.unique(values, return_index=True)
    if len(distinct) <= count:
        cuts = starts[1:]
    else:
        aims = (np.arange(1, count) * len(values)) // count
        cuts = np.unique(starts[np.minimum(np.searchsorted(starts, aims), len(starts) - 1)])
        cuts = cuts[(cuts > 0) & (cuts < len(values))]
    return [part for part in np.split(indices, cuts) if len(part)]


def shared_tokens(requests: Sequence[RequestSpec]) -> np.ndarray:
    """Return the prompt tokens of each request, in order, that an unbounded cache would have."""
    scopes: dict[int, set[int]] = {}
    shared = np.zeros(len(requests))
    for i, spec in enumerate(requests):
        seen = scopes.setdefault(spec.hash_scope, set())
        hits = 0
        for block in spec.block_ids:
            if block not in seen:
                break
            hits += 1
        shared[i] = min(int(hits * spec.block_tokens), spec.prompt_tokens - 1)
        seen.update(spec.block_ids)
    return shared


def _gap_scv(starts: np.ndarray) -> float:
    """Variance of the gaps over their squared mean, between 0 and 16; 1 where there are few."""
    gaps = np.diff(starts)
    if len(gaps) < 20:
        return 1.0
    return float(min(gaps.var() / gaps.mean() ** 2, 16.0))
