"""Demand: rates and gaps of arrivals, tokens of prompts, contexts and outputs."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.latency_model.estimates import ARRIVALS, BUSY, FLEET_ARRIVALS
from pigou.request import SECOND

#: Averaging time of a worker's arrival rate, in seconds.
RATE_S = 10.0
#: Averaging window of the fleet's arrival rate, in gaps: it is known at once, at any rate.
_RATE_GAPS = 128.0
#: Cap of a gap, in seconds: a quiet night says nothing of tomorrow's rate.
_MAX_GAP_S = 10.0
#: Seconds of the gap that is assumed before the first; it counts as one.
_FIRST_GAP_S = 0.5
#: A worker is taken to compute prompts at most this share of its time: else queues are infinite.
MAX_BUSY = 0.95
#: Gaps that count half in their variance, which needs many.
_VARIANCE_HALF_LIFE = 512.0
#: Gaps before which their variance is unknown.
_MIN_GAPS = 16
#: Prompts that count half: a variance needs many.
_PROMPT_HALF_LIFE = 512.0
#: Prompts before which their variance is unknown.
_MIN_PROMPTS = 16
#: Samples of streams that count half.
_CONTEXT_HALF_LIFE = 128.0
#: Outputs that the expected output is a mean over, and its first value in tokens.
_OUTPUTS = 64.0
_FIRST_OUTPUT = 128.0


class FleetRate:
    """Recent rate of prompts of the whole fleet."""

    def __init__(self) -> None:
        self._keep = 1.0 - 1.0 / _RATE_GAPS
        self._weight, self._seconds = 1.0, _FIRST_GAP_S

    def observe(self, gap_s: float) -> None:
        """Add the seconds between two arrivals, at least 0."""
        self._weight = self._keep * self._weight + 1.0
        self._seconds = self._keep * self._seconds + min(gap_s, _MAX_GAP_S)

    @property
    def per_second(self) -> float:
        """Prompts per second."""
        return self._weight / max(self._seconds, 1e-9)


class ArrivalGaps:
    """Running mean and variance of the gaps between arrivals, with forgetting."""

    def __init__(self) -> None:
        self._keep = 0.5 ** (1.0 / _VARIANCE_HALF_LIFE)
        self._weight = self._sum = self._squares = 0.0
        self._observed = 0

    def observe(self, gap_s: float) -> None:
        """Add the seconds between two arrivals, at least 0."""
        self._weight = self._keep * self._weight + 1.0
        self._sum = self._keep * self._sum + gap_s
        self._squares = self._keep * self._squares + gap_s * gap_s
        self._observed += 1

    @property
    def cv2(self) -> float:
        """Variance over squared mean; 1 while unknown."""
        if self._observed < _MIN_GAPS or self._sum <= 0.0:
            return 1.0
        mean = self._sum / self._weight
        return max(0.0, self._squares / self._weight - mean * mean) / (mean * mean)


@bare_kernel
def decay_rates(
    rate: NDArray[np.float64], rated_at: NDArray[np.int64], service_s: NDArray[np.float64],
    now: int, fleet_rate: float, table: NDArray[np.float64],
) -> None:  # fmt: skip
    """Write rates decayed to `now`, each worker's share of time spent on prefill, and the fleet's
    rate into `Estimates.table`.
    """
    for w in range(rate.shape[0]):
        age = max(0, now - rated_at[w]) / SECOND / RATE_S
        table[ARRIVALS, w] = rate[w] * math.exp(-age)
        table[BUSY, w] = min(MAX_BUSY, table[ARRIVALS, w] * service_s[w])
        table[FLEET_ARRIVALS, w] = fleet_rate


class PromptSizes:
    """Running means and covariance of uncached tokens and pairs, with forgetting."""

    def __init__(self) -> None:
        self._keep = 0.5 ** (1.0 / _PROMPT_HALF_LIFE)
        self._weight = self._tokens = self._pairs = 0.0
        self._tokens_squared = self._tokens_pairs = self._pairs_squared = 0.0
        self._observed = 0

    def observe(self, tokens: float, pairs: float) -> None:
        """Add a prompt by its uncached tokens and pairs."""
        keep = self._keep
        self._weight = keep * self._weight + 1.0
        self._tokens = keep * self._tokens + tokens
        self._pairs = keep * self._pairs + pairs
        self._tokens_squared = keep * self._tokens_squared + tokens * tokens
        self._tokens_pairs = keep * self._tokens_pairs + tokens * pairs
        self._pairs_squared = keep * self._pairs_squared + pairs * pairs
        self._observed += 1

    @property
    def pairs_per_token(self) -> float:
        """Mean number of earlier tokens that a computed token attends to."""
        return self._pairs / max(1.0, self._tokens)

    def mean(self, base: float, token: float, pair: float) -> float:
        """Return the mean seconds of a prompt; `base` before the first."""
        weight = max(self._weight, 1e-12)
        return base + (token * self._tokens + pair * self._pairs) / weight

    def cv2(self, base: float, token: float, pair: float) -> float:
        """Return the variance of a prompt's seconds over squared mean; 1 while unknown."""
        mean = self.mean(base, token, pair)
        if self._observed < _MIN_PROMPTS or mean <= 0.0:
            return 1.0
        squares = (
            token * token * self._tokens_squared
            + 2.0 * token * pair * self._tokens_pairs
            + pair * pair * self._pairs_squared
        )
        variance = squares / self._weight - (mean - base) ** 2
        return max(0.0, variance) / (mean * mean)


class ContextLength:
    """Running mean of a stream's tokens, prompt and output, with forgetting."""

    def __init__(self) -> None:
        self._streams = self._tokens = 0.0

    def observe(self, streams: NDArray[np.float64], tokens: NDArray[np.float64]) -> None:
        """Add samples of streams and their tokens, (samples,) each."""
        keep = 0.5 ** (len(streams) / _CONTEXT_HALF_LIFE)
        self._streams = keep * self._streams + float(streams.sum())
        self._tokens = keep * self._tokens + float(tokens.sum())

    @property
    def mean(self) -> float:
        """Mean tokens per stream; 0 before the first sample."""
        return self._tokens / self._streams if self._streams > 0.0 else 0.0


class OutputLength:
    """Running mean of output tokens per request."""

    def __init__(self) -> None:
        self._mean = _FIRST_OUTPUT
        self.observed = 0  # requests that ended

    def observe(self, tokens: int) -> None:
        """Add a request's output tokens."""
        self.observed += 1
        share = 1.0 / min(self.observed, _OUTPUTS)
        self._mean += share * (tokens - self._mean)

    def expected(self, max_tokens: int) -> float:
        """Return the expected output tokens under this limit, at least 1."""
        return max(1.0, min(float(max_tokens), self._mean))
