"""Dynamo's performance model of one engine (1.6.1): a regression of steps, and what follows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from pigou.games import Floats
from pigou.performance.model import PerformanceModel
from pigou.request import Role
from pigou_lab.planner.dynamo_passes import ForwardPass, hit_discount, profile_passes

#: Samples of a regression, buckets of each feature, and the fewest samples that are fitted.
SAMPLES, BUCKETS, MIN_SAMPLES = 64, 4, 5
#: Batches at which a capacity is searched.
MAX_BATCHES = 128
#: Shortest step, seconds.
_SHORTEST_S = 1e-9


class Capacity(NamedTuple):
    """Requests a second of one engine, and whether it is inside the objective there."""

    rps: float
    inside: bool


class _Sample(NamedTuple):
    attention: float
    tokens: float
    seconds: float


class MovingAverage:
    """Mean of the last 64 values; zeros before the first value above 0 are left out."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAMPLES)

    def add(self, value: float) -> None:
        """Add a value."""
        if value > 0 or self._values:
            self._values.append(value)

    @property
    def value(self) -> float:
        """The mean; 0 without a value."""
        return sum(self._values) / len(self._values) if self._values else 0.0


class PassRegression:
    """seconds = a + b tokens + c attention with b, c >= 0, by least squares.

    Features fall into four log-spaced buckets; beyond 64 samples the fullest drops its oldest. Cold
    workers' samples count too (issue 12430). `aisimulate_core`, estimator `fpm_regression`.
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], deque[_Sample]] = {}
        self._low, self._high = [math.inf] * 2, [-math.inf] * 2
        self._theta: Floats | None = None
        self._stale = True

    def add(self, step: ForwardPass) -> None:
        """Add a step of positive time."""
        if step.seconds <= 0:
            return
        sample = _Sample(step.attention, step.tokens, step.seconds)
        low = [min(a, math.log1p(b)) for a, b in zip(self._low, sample, strict=False)]
        high = [max(a, math.log1p(b)) for a, b in zip(self._high, sample, strict=False)]
        if (low, high) != (self._low, self._high):
            samples = self._samples()
            self._low, self._high, self._buckets = low, high, {}
            for other in samples:
                self._bucket(other).append(other)
        self._bucket(sample).append(sample)
        if sum(map(len, self._buckets.values())) > SAMPLES:
            fullest = max(self._buckets, key=lambda key: (len(self._buckets[key]), key))
            self._buckets[fullest].popleft()
        self._stale = True

    def seconds(self, step: ForwardPass) -> float | None:
        """Return the seconds of a step, at least a nanosecond; None while it is not fitted."""
        if self._stale:
            self._theta, self._stale = self._fit(), False
        if self._theta is None:
            return None
        if not (step.tokens or step.attention):
            return 0.0
        a, c, b = self._theta
        return max(float(a + b * step.tokens + c * step.attention), _SHORTEST_S)

    def _samples(self) -> list[_Sample]:
        return [sample for key in sorted(self._buckets) for sample in self._buckets[key]]

    def _bucket(self, sample: _Sample) -> deque[_Sample]:
        key = []
        for value, low, high in zip(sample, self._low, self._high, strict=False):
            share = (math.log1p(value) - low) / (high - low) if high > low else 0.0
            key.append(min(int(share * BUCKETS), BUCKETS - 1))
        return self._buckets.setdefault((key[0], key[1]), deque())

    def _fit(self) -> Floats | None:
        rows = np.array(self._samples())
        if len(rows) < MIN_SAMPLES:
            return None
        means = rows.mean(axis=0)
        scale = rows.std(axis=0)[:2]
        if not (scale > 0).any():
            return None
        scale = np.where(scale > 0, scale, 1.0)
        slopes, _ = nnls((rows[:, :2] - means[:2]) / scale, rows[:, 2] - means[2])
        slopes = slopes / scale
        return np.array([means[2] - float(slopes @ means[:2]), *slopes])


class EngineModel:
    """Dynamo's model of one pool's engine, begun with `profile_passes` if `is_profiled`."""

    def __init__(
        self, performance: PerformanceModel, role: Role, *, is_profiled: bool = True
    ) -> None:
        self.limits, self.role = performance, role
        self._regressions: dict[tuple[bool, bool], PassRegression] = {}
        self._prompt_tokens, self._context = MovingAverage(), MovingAverage()
        self._mixed_prompts, self._mixed_tokens = MovingAverage(), MovingAverage()
        for step in profile_passes(performance, role) if is_profiled else ():
            self.observe(step)

    def observe(self, step: ForwardPass) -> None:
        """Learn from a step."""
        self._prompt_tokens.add(step.prompt_tokens / step.prompts if step.prompts else 0.0)
        if step.streams:
            self._context.add(step.stream_tokens / step.streams)
        self._mixed_prompts.add(float(step.prompts))
        self._mixed_tokens.add(float(step.prompt_tokens))
        self._regression_of(step).add(step)

    def _regression_of(self, step: ForwardPass) -> PassRegression:
        """Return the regression by kind: prompts, streams, mixtures."""
        kind = step.prompt_tokens > 0, step.streams > 0
        return self._regressions.setdefault(kind, PassRegression())

    def _seconds(self, step: ForwardPass) -> float | None:
        return self._regression_of(step).seconds(step)

    def ttft_s(
        self, seen: ForwardPass, hit_rate: float | None = None, *, queue: float = 1.0,
        streams: float = 1.0, waiting_streams: bool = False,
    ) -> float | None:  # fmt: skip
        """Return the seconds until the next prompt is computed; factors scale queue and streams."""
        own = self._prompt_tokens.value
        tokens = _ceil((seen.queued_prompt_tokens * queue + own) * hit_discount(hit_rate))
        prompts = max(_ceil(seen.queued_prompts * queue + (own > 0)), 1)
        factor = int(waiting_streams and self.role.decodes)
        count = _ceil((seen.streams + factor * seen.queued_streams) * streams)
        held = _ceil((seen.stream_tokens + factor * seen.queued_stream_tokens) * streams)
        if not self.role.decodes:
            count = held = 0
        return self._chunked_s(tokens, prompts, count, held)

    def itl_s(
        self, seen: ForwardPass, *, streams: float = 1.0, queued_prompts: bool = False
    ) -> float | None:
        """Return the ITL in seconds with one more request."""
        factor = int(queued_prompts)
        count = seen.streams + seen.queued_streams + factor * seen.queued_prompts
        held = seen.stream_tokens + seen.queued_stream_tokens + factor * seen.queued_prompt_tokens
        own = self._context.value
        tokens = _ceil(self._mixed_tokens.value) if self.role.prefills else 0
        prompts = max(_ceil(self._mixed_prompts.value), int(tokens > 0)) if tokens else 0
        return self._seconds(
            ForwardPass(
                prompts=prompts, prompt_tokens=tokens, streams=_ceil(count * streams + (own > 0)),
                stream_tokens=_ceil(held * streams + own),
            )
        )  # fmt: skip

    def capacity(
        self, isl: float, osl: float, ttft_s: float, itl_s: float, hit_rate: float | None = None
    ) -> Capacity | None:
        """Return the highest rate inside the objective, or at all if none is; None if unfitted."""
        best: Capacity | None = None
        for result in self._capacities(math.ceil(isl), max(math.ceil(osl), 1), hit_rate):
            if result is None:
                return None
            rps, ttft, itl = result
            candidate = Capacity(rps, ttft <= ttft_s and itl <= itl_s)
            if best is None or (candidate.inside, candidate.rps) > (best.inside, best.rps):
                best = candidate
        return best

    def _capacities(
        self, isl: int, osl: int, hit_rate: float | None
    ) -> Iterator[tuple[float, float, float] | None]:
        """Yield requests a second, TTFT and ITL of batches; None where nothing is known."""
        computed = max(_ceil(isl * hit_discount(hit_rate)), 1)
        context = max(isl + osl // 2, 1)
        chunk, seqs = self.limits.chunk_tokens, self.limits.max_seqs
        held = int(min(self.limits.kv_tokens, 1e9) // context)
        if not self.role.decodes:
            for batch in _batches(1 if computed > chunk else min(seqs, chunk // computed)):
                ttft = self._chunked_s(computed * batch, 1, 0, 0)
                yield None if ttft is None else (batch / ttft, ttft, 0.0)
            return
        for batch in _batches(
            min(seqs, held, chunk - 1) if self.role.prefills else min(seqs, held)
        ):
            step, ttft = ForwardPass(streams=batch, stream_tokens=batch * context), 0.0
            if self.role.prefills:
                tokens = _ceil(batch * computed / osl)
                if tokens > max(chunk - batch, 0):
                    continue
                first = self._chunked_s(tokens + computed, 1, batch, batch * context)
                if first is None:
                    yield None
                    return
                ttft = first
                step = ForwardPass(
                    prompts=int(tokens > 0), prompt_tokens=tokens, streams=batch,
                    stream_tokens=batch * context,
                )  # fmt: skip
            itl = self._seconds(step)
            yield None if itl is None else (batch / (osl * itl), ttft, itl)

    def _chunked_s(self, tokens: int, prompts: int, streams: int, held: int) -> float | None:
        """Return the seconds of prompt tokens, in steps of as many as one may have."""
        total, left = 0.0, tokens
        while left > 0:
            chunk = min(left, self.limits.chunk_tokens)
            seconds = self._seconds(
                ForwardPass(
                    prompts=prompts, prompt_tokens=chunk, streams=streams, stream_tokens=held
                )
            )
            if seconds is None:
                return None
            full = left // chunk if chunk == self.limits.chunk_tokens else 1
            total, left = total + full * seconds, left - full * chunk
        return total


def _batches(limit: int) -> list[int]:
    if limit <= MAX_BATCHES:
        return list(range(1, limit + 1))
    return [1 + step * (limit - 1) // (MAX_BATCHES - 1) for step in range(MAX_BATCHES)]


def _ceil(value: float) -> int:
    return max(math.ceil(value), 0)
