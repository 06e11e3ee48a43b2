"""Seconds of a remote KV fetch, learned from prompts whose beginning was fetched."""

from __future__ import annotations

from pigou.control.latency_model.estimates import PRIOR_FETCH
from pigou.request import SECOND

#: Tokens of the two fetches that are assumed before the first, as long as `PRIOR_FETCH` says.
_PRIOR_TOKENS = (16.0, 4096.0)
#: Observations that count half.
_HALF_LIFE = 32.0
#: An observation counts as if it took at most so many times what was expected.
_MAX_RATIO = 8.0
#: Nanoseconds without an observation after which the prior is added again.
_FORGIVE_NS = 60 * SECOND
#: Seconds that a fetch takes at least.
_MIN_FETCH_S = 1e-5


class FetchFit:
    """Seconds of a fetch by its tokens: a line by least squares with forgetting, never below 0.

    Fetches that look dear are not tried, so they teach nothing. Three rules keep the line honest.
    It starts from a cheap prior. A single slow fetch (the first of a process, a busy machine)
    moves it by a bounded factor. Without fetches, the prior is added again every minute.

        fit = FetchFit()
        fit.observe(4096.0, 0.02, now)  # 4,096 tokens took 20 ms
        base_s, token_s = fit.law
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, x, x x, y, x y
        self._law = PRIOR_FETCH
        self._observed = False
        self._observed_at = 0
        self._add_prior()

    @property
    def law(self) -> tuple[float, float]:
        """Seconds apart from tokens, and of each token; the prior before the first fetch."""
        return self._law if self._observed else PRIOR_FETCH

    def observe(self, tokens: float, seconds: float, now: int) -> None:
        """Add a fetch of so many tokens that took so many seconds."""
        base, token = self._law
        max_s = _MAX_RATIO * max(base + token * tokens, _MIN_FETCH_S)
        self._add(tokens, min(max(seconds, _MIN_FETCH_S), max_s))
        self._observed, self._observed_at = True, now

    def tick(self, now: int) -> None:
        """Let time pass."""
        if self._observed and now - self._observed_at >= _FORGIVE_NS:
            self._observed_at = now
            self._add_prior()

    def _add_prior(self) -> None:
        base, token = PRIOR_FETCH
        for tokens in _PRIOR_TOKENS:
            self._add(tokens, base + token * tokens)

    def _add(self, x: float, y: float) -> None:
        keep = 0.5 ** (1.0 / _HALF_LIFE)
        terms = (1.0, x, x * x, y, x * y)
        self._sums = sums = tuple(keep * a + b for a, b in zip(self._sums, terms, strict=True))
        n, sx, sxx, sy, sxy = sums
        determinant = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / determinant if determinant > 0.0 else 0.0
        base = (sy - slope * sx) / n
        if slope < 0.0:
            base, slope = sy / n, 0.0
        elif base < 0.0:
            base, slope = 0.0, sxy / sxx
        self._law = (base, slope)
