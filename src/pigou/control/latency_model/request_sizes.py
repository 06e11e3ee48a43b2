"""Sizes of requests: tokens of prompts, tokens that streams hold, tokens of outputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Prompts that count half: a variance needs many.
_PROMPT_HALF_LIFE = 512.0
#: Prompts before which their variance is unknown.
_MIN_PROMPTS = 16
#: Samples of streams that count half.
_CONTEXT_HALF_LIFE = 128.0
#: Outputs that the expected output is a mean over, and its first value in tokens.
_OUTPUTS = 64.0
_FIRST_OUTPUT = 128.0


class PromptSizes:
    """Running means, variances and covariance of uncached tokens and of pairs, with forgetting.

    Tokens and pairs are kept apart and combined by the present law. A size in which a pair counts
    for some tokens would change its meaning with every change of the law. A law is `base` seconds
    a prompt, `token` seconds a token and `pair` seconds a pair
    (`pigou.control.latency_model.estimates.pairs`).

        sizes = PromptSizes()
        sizes.observe(1000.0, 500_000.0)
        sizes.mean(0.005, 1e-4, 1e-9)  # seconds of a prompt in the mean
    """

    def __init__(self) -> None:
        self._keep = 0.5 ** (1.0 / _PROMPT_HALF_LIFE)
        self._weight = self._tokens = self._pairs = 0.0
        self._tokens_squared = self._tokens_pairs = self._pairs_squared = 0.0
        self._observed = 0

    def observe(self, tokens: float, pairs: float) -> None:
        """Add a prompt of so many uncached tokens and pairs."""
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
        """Tokens before a computed one that it attends to, in the mean."""
        return self._pairs / max(1.0, self._tokens)

    def mean(self, base: float, token: float, pair: float) -> float:
        """Return the mean seconds of a prompt; `base` before the first prompt."""
        weight = max(self._weight, 1e-12)
        return base + (token * self._tokens + pair * self._pairs) / weight

    def cv2(self, base: float, token: float, pair: float) -> float:
        """Return the variance of a prompt's seconds over their squared mean; 1 while unknown."""
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
    """Running mean of the tokens that a stream holds, prompt and output, with forgetting."""

    def __init__(self) -> None:
        self._streams = self._tokens = 0.0

    def observe(self, streams: NDArray[np.float64], tokens: NDArray[np.float64]) -> None:
        """Add samples: streams of a worker, and the tokens that they held, (samples,) each."""
        keep = 0.5 ** (len(streams) / _CONTEXT_HALF_LIFE)
        self._streams = keep * self._streams + float(streams.sum())
        self._tokens = keep * self._tokens + float(tokens.sum())

    @property
    def mean(self) -> float:
        """Tokens that a stream holds in the mean; 0 before the first sample."""
        return self._tokens / self._streams if self._streams > 0.0 else 0.0


class OutputLength:
    """Running mean of the tokens that requests generate.

    Attributes:
        observed: requests that ended.
    """

    def __init__(self) -> None:
        self._mean = _FIRST_OUTPUT
        self.observed = 0

    def observe(self, tokens: int) -> None:
        """Add a request that generated so many tokens."""
        self.observed += 1
        share = 1.0 / min(self.observed, _OUTPUTS)
        self._mean += share * (tokens - self._mean)

    def expected(self, max_tokens: int) -> float:
        """Return the tokens that a request with this limit is expected to generate, at least 1."""
        return max(1.0, min(float(max_tokens), self._mean))
