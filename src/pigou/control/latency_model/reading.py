"""What reading from another worker's cache takes, learned from the prompts that did."""

from __future__ import annotations

from pigou.control.latency_model.estimates import PRIOR_FETCH
from pigou.request import SECOND

#: Tokens of the two reads that are assumed before any was seen, as long as `PRIOR_FETCH` says.
_ASSUMED = (16.0, 4096.0)
#: Half of what was seen counts after so many more.
_HALF_LIFE = 32.0
#: An observation counts as if it took at most so many times what was expected.
_MOST = 8.0
#: Nanoseconds without an observation after which what is assumed is taken in again.
_FORGIVEN = 60 * SECOND
#: Seconds that reading takes at least.
_LEAST = 1e-5


class Reading:
    """Seconds of a read by its tokens: a line by least squares with forgetting, never below 0.

    What is dear is not done, and teaches nothing. So it starts from what is assumed, which is
    cheap; a single slow read (the first one of a process, a machine that was busy) moves it by a
    bounded factor; and one that nobody tries any more is forgiven, minute by minute, until
    somebody tries it again. What a wrong guess costs is one slow prompt at a time.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, x, x x, y, x y
        self._law = PRIOR_FETCH
        self._seen = False
        self._at = 0
        self._assume()

    @property
    def law(self) -> tuple[float, float]:
        """Seconds apart from tokens, and of each; exactly what is assumed until one was seen."""
        return self._law if self._seen else PRIOR_FETCH

    def observe(self, tokens: float, seconds: float, now: int) -> None:
        """Take in that so many tokens took so many seconds."""
        base, token = self._law
        most = _MOST * max(base + token * tokens, _LEAST)
        self._take(tokens, min(max(seconds, _LEAST), most))
        self._seen, self._at = True, now

    def tick(self, now: int) -> None:
        """Let time pass."""
        if self._seen and now - self._at >= _FORGIVEN:
            self._at = now
            self._assume()

    def _assume(self) -> None:
        base, token = PRIOR_FETCH
        for tokens in _ASSUMED:
            self._take(tokens, base + token * tokens)

    def _take(self, x: float, y: float) -> None:
        keep = 0.5 ** (1.0 / _HALF_LIFE)
        one = (1.0, x, x * x, y, x * y)
        self._sums = sums = tuple(keep * a + b for a, b in zip(self._sums, one, strict=True))
        n, sx, sxx, sy, sxy = sums
        spread = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / spread if spread > 0.0 else 0.0
        base = (sy - slope * sx) / n
        if slope < 0.0:
            base, slope = sy / n, 0.0
        elif base < 0.0:
            base, slope = 0.0, sxy / sxx
        self._law = (base, slope)
