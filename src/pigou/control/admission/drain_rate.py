"""Drain rate: requests and tokens a second that leave the fleet."""

from __future__ import annotations

from collections import deque

import numpy as np

from pigou.request import SECOND

#: Departures that the rate is fitted to.
_WINDOW = 64
#: Silence of so many mean gaps lowers the rate: gaps this long are rare (5% of Poisson's).
_SILENCE = 3.0
MIN_RETRY = SECOND
MAX_RETRY = 60 * SECOND


class DrainRate:
    """Requests and tokens that leave, fitted to the last departures.

    The rate is the Theil-Sen estimator (Theil 1950, Sen 1968) on pairs that do not overlap: the
    median slope of the cumulative count over time between departures half a window apart. A
    burst or a pause within the window does not move it much. While nothing leaves it falls.
    """

    def __init__(self) -> None:
        self._departures: deque[tuple[int, int, int]] = deque(maxlen=_WINDOW)
        self._requests = 0
        self._tokens = 0

    def ended(self, now: int, tokens: int = 0) -> None:
        """Note that a request left, which asked for so many tokens (uncached and output)."""
        self._requests += 1
        self._tokens += tokens
        self._departures.append((now, self._requests, self._tokens))

    def rates(self, now: int) -> tuple[float, float]:
        """Return requests and tokens that leave in a second; zeros while that is not known."""
        if len(self._departures) < 2:
            return 0.0, 0.0
        times, requests, tokens = np.array(self._departures, dtype=np.float64).T
        half = len(times) // 2
        span = (times[half:] - times[: len(times) - half]) / SECOND
        whole = max((now - times[0]) / SECOND, 1e-9)
        silence = max((now - times[-1]) / SECOND, 1e-9)
        rates = []
        for counts in (requests, tokens):
            steps = counts[half:] - counts[: len(counts) - half]
            if (span > 0).all():
                rate = float(np.median(steps / span))
            else:  # many at the same time: the whole window tells how fast
                rate = float(counts[-1] - counts[0]) / whole
            mean = float(counts[-1] - counts[0]) / (len(counts) - 1)
            rates.append(min(rate, _SILENCE * mean / silence))
        return rates[0], rates[1]

    def retry_after(self, requests: float, tokens: float, now: int, part: float = 1.0) -> int:
        """Return nanoseconds until so much will have left, between 1 and 60 seconds.

        The slower of the two decides. With nothing measured, 1 second.

        Args:
            now: nanoseconds.
            part: share of what leaves that counts, above 0.
        """
        by_requests, by_tokens = self.rates(now)
        seconds = requests / (by_requests * part) if by_requests > 0.0 else 0.0
        if by_tokens > 0.0:
            seconds = max(seconds, tokens / (by_tokens * part))
        return int(min(MAX_RETRY, max(MIN_RETRY, seconds * SECOND)))
