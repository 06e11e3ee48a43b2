"""Speeds of one worker: prefill seconds of a prompt, and ITL of its streams."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import numpy as np

from pigou.games.latency import LatencyLaw

#: Bisections of a number of streams.
_HALVINGS = 26
#: x of a point (x, y).
_ABSCISSA = itemgetter(0)


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Lengths, hit rate and arrivals of a model's requests."""

    isl: float  # mean prompt tokens, above 0
    osl: float  # mean output tokens, at least 1
    hit_rate: float = 0.0  # cached share of prompt tokens; shortens prefill, not decode
    isl_scv: float = 0.0  # variance of prompt tokens over the squared mean
    arrival_scv: float = 1.0  # variance of interarrival times over the squared mean; 1: Poisson

    @property
    def computed(self) -> float:
        """Mean uncached tokens of a prompt."""
        return self.isl * (1.0 - self.hit_rate)

    @property
    def context(self) -> float:
        """Mean tokens a stream holds while it decodes: isl + osl / 2."""
        return self.isl + 0.5 * self.osl


class PrefillSpeed(Protocol):
    """Prefill seconds of a prompt alone on a worker."""

    def seconds(self, tokens: float, prompt: float) -> float:
        """Return the seconds of a prompt with `tokens` uncached."""
        ...


class DecodeSpeed(Protocol):
    """ITL of a worker's streams."""

    def itl_s(self, streams: float, context: float) -> float:
        """Return seconds between tokens of `streams` with `context` tokens each; rises in both."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """base_s + token_s u + pair_s u (c + u / 2), u uncached tokens after c cached ones."""

    base_s: float
    token_s: float
    pair_s: float = 0.0

    def seconds(self, tokens: float, prompt: float) -> float:
        """Return the seconds of a prompt."""
        pairs = tokens * max(prompt - 0.5 * tokens, 0.0)
        return self.base_s + self.token_s * tokens + self.pair_s * pairs


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Measured (prompt tokens, seconds), linear between and beyond; cached tokens cost nothing."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        _check_rising(self.points, "prefill points")

    def seconds(self, tokens: float, prompt: float) -> float:  # noqa: ARG002
        """Return the seconds of a prompt."""
        return interpolate(self.points, tokens)


@dataclass(frozen=True, slots=True)
class DecodeLaw:
    """law(n) + context_token_s n (context - mean_context)."""

    law: LatencyLaw  # seconds between tokens of n streams with `mean_context` tokens each
    context_token_s: float = 0.0  # seconds each held token adds to a step
    mean_context: float = 0.0  # tokens per stream when the law was learned

    def itl_s(self, streams: float, context: float) -> float:
        """Return the seconds between tokens, at least a tenth of the law's."""
        base = self.law(float(streams))
        return max(
            base + self.context_token_s * streams * (context - self.mean_context), 0.1 * base
        )


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Measured (context, points (streams, seconds)); linear between and beyond."""

    rows: tuple[tuple[float, tuple[tuple[float, float], ...]], ...]

    def __post_init__(self) -> None:
        _check_rising([(context, 0.0) for context, _ in self.rows], "contexts of decode points")
        for _, points in self.rows:
            _check_rising(points, "decode points")

    @classmethod
    def of(cls, points: Iterable[tuple[float, float, float]]) -> DecodeTable:
        """Make a table of (streams, context, seconds) in any order."""
        rows: dict[float, list[tuple[float, float]]] = {}
        for streams, context, seconds in points:
            rows.setdefault(context, []).append((streams, seconds))
        return cls(tuple((context, tuple(sorted(rows[context]))) for context in sorted(rows)))

    def itl_s(self, streams: float, context: float) -> float:
        """Return the seconds between tokens."""
        column = [(at, interpolate(points, streams)) for at, points in self.rows]
        return interpolate(column, context)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return y at x, linear through points (x, y) and beyond the last, constant below the first."""
    index = bisect.bisect_right(points, x, key=_ABSCISSA)
    if index == 0 or len(points) == 1:
        return points[0][1]
    is_after = index == len(points)
    (x0, y0), (x1, y1) = points[index - 1 - is_after], points[index - is_after]
    slope = (y1 - y0) / (x1 - x0)
    if is_after:
        return y1 + max(slope, 0.0) * (x - x1)
    return y0 + slope * (x - x0)


def largest_batch(speed: DecodeSpeed, context: float, itl_s: float, max_streams: float) -> float:
    """Return the most streams with ITL within `itl_s`, up to the throughput peak; or 0.0."""
    if speed.itl_s(1.0, context) > itl_s:
        return 0.0
    high = max(max_streams, 1.0)
    if speed.itl_s(high, context) > itl_s:
        high, _ = halved(1.0, high, lambda n: speed.itl_s(n, context) <= itl_s, _HALVINGS)
    if elasticity(speed, high, context) <= 1.0:
        return high
    return halved(1.0, high, lambda n: elasticity(speed, n, context) <= 1.0, _HALVINGS)[0]


def halved(
    low: float, high: float, is_inside: Callable[[float], bool], halvings: int
) -> tuple[float, float]:
    """Return the interval after bisections; its lower end is inside the limit."""
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_inside(middle) else (low, middle)
    return low, high


def elasticity(speed: DecodeSpeed, streams: float, context: float) -> float:
    """Return n ITL'(n) / ITL(n): per cent of ITL per per cent of streams."""
    step = 1e-3 * max(streams, 1e-3)
    rise = speed.itl_s(streams + step, context) - speed.itl_s(streams - step, context)
    return streams * rise / (2.0 * step) / speed.itl_s(streams, context)


def crossing(excess: Callable[[float], float], high: float) -> float:
    """Return the root of an increasing function in [0, high] (Illinois method)."""
    low, below, above = 0.0, excess(0.0), excess(high)
    if below >= 0.0:
        return 0.0
    side = 0
    for _ in range(40):
        at = high - above * (high - low) / (above - below)
        value = excess(at)
        if abs(value) <= 1e-7 * high or high - low <= 1e-7 * high:
            return at
        if value < 0.0:
            low, below = at, value
            above *= 0.5 if side < 0 else 1.0
            side = -1
        else:
            high, above = at, value
            below *= 0.5 if side > 0 else 1.0
            side = 1
    return high


def doubling(low: int, high: int) -> list[int]:
    """Return low, 2 low, 4 low ... below `high`, then `high`."""
    values = [low]
    while 2 * values[-1] < high:
        values.append(2 * values[-1])
    return values if values[-1] == high else [*values, high]


def step_below(value: float, step: float) -> float:
    """Return the next multiple of a step below; relative for values above 1."""
    if value <= 1.0:
        return math.floor(value / step) * step
    return math.exp(math.floor(math.log(value) / step) * step)


def _check_rising(points: Sequence[tuple[float, float]], what: str) -> None:
    if not points:
        raise ValueError(f"{what}: give at least one")
    if not all(math.isfinite(x) and math.isfinite(y) and y >= 0 for x, y in points):
        raise ValueError(f"{what}: give finite numbers, seconds of 0 or more")
    if not np.all(np.diff([x for x, _ in points]) > 0):
        raise ValueError(f"{what}: give each once, rising")
