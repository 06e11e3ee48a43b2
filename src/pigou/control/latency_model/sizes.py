"""Sizes: how many tokens prompts have, and pairs of them, as they come."""

from __future__ import annotations

#: Prompts are forgotten by half after so many more: a variance takes many to be known.
_HALF_LIFE = 512.0
#: Prompts before which nothing is said of their spread.
_LEAST = 16


class Sizes:
    """Running means, variances and covariance of uncached tokens and of pairs, with forgetting.

    Tokens and pairs are kept apart, and put together by the law of the moment: a size in which
    a pair counts for so many tokens would mean something else each time that the law changes.
    A law is `base` seconds a prompt, `token` seconds a token and `pair` seconds a pair
    (`pigou.control.latency_model.estimates.pairs`).
    """

    def __init__(self) -> None:
        self._keep = 0.5 ** (1.0 / _HALF_LIFE)
        self._weight = self._tokens = self._pairs = 0.0
        self._tokens2 = self._both = self._pairs2 = 0.0
        self._seen = 0

    def observe(self, tokens: float, pairs: float) -> None:
        """Take in a prompt of so many uncached tokens and pairs."""
        keep = self._keep
        self._weight = keep * self._weight + 1.0
        self._tokens = keep * self._tokens + tokens
        self._pairs = keep * self._pairs + pairs
        self._tokens2 = keep * self._tokens2 + tokens * tokens
        self._both = keep * self._both + tokens * pairs
        self._pairs2 = keep * self._pairs2 + pairs * pairs
        self._seen += 1

    @property
    def before(self) -> float:
        """Tokens before one that is computed, in the mean."""
        return self._pairs / max(1.0, self._tokens)

    def mean(self, base: float, token: float, pair: float) -> float:
        """Return the mean of a prompt's seconds; `base` before any prompt came."""
        weight = max(self._weight, 1e-12)
        return base + (token * self._tokens + pair * self._pairs) / weight

    def squared(self, base: float, token: float, pair: float) -> float:
        """Return the variance of a prompt's seconds over their squared mean; 1 while unknown."""
        mean = self.mean(base, token, pair)
        if self._seen < _LEAST or mean <= 0.0:
            return 1.0
        squares = (
            token * token * self._tokens2
            + 2.0 * token * pair * self._both
            + pair * pair * self._pairs2
        )
        varied = squares / self._weight - (mean - base) ** 2
        return max(0.0, varied) / (mean * mean)
