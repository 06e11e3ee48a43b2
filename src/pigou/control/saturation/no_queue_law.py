"""The no-queue law: seconds to the first token of a prompt that need not wait."""

from __future__ import annotations

import math

#: Relative residuals beyond this many times the running median count for less (Huber).
_HUBER = 3.0
_MEDIAN_STEP = 0.05
_SMALLEST_SPREAD = 0.01
#: Weight of an observation above the line that may have waited: the fit is then an expectile
#: (Newey and Powell, "Asymmetric Least Squares Estimation and Testing", 1987).
_TAIL = 0.05
#: Weight of one with no prompt ahead, in a fleet that is believed to queue.
_DOUBTED = 0.25
#: As many observations that surely did not wait make the others needless.
_ENOUGH = 8.0


class UnloadedLaw:
    """seconds = base + slope * tokens, both at least 0, fitted as observations come.

    Relative least squares with forgetting, robust by Huber's weights. A prompt with none ahead of
    it did not wait, and counts in full. Of prompts that may have waited only the lower envelope
    counts, and nothing once enough are known that did not. So a fleet that is saturated for long
    does not pass its queue off as normal.
    """

    def __init__(self, half_life: float = 256.0) -> None:
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life}: give a number of requests above 0")
        self._keep = 0.5 ** (1.0 / half_life)
        self._sums = [0.0] * 5  # of 1, t, t^2, y, t y; each over the expected y squared
        self._sure = 0.0
        self._spread = 0.25
        self.base = 0.0
        self.slope = 0.0

    def __call__(self, tokens: float) -> float:
        """Return the seconds that a prompt with so many uncached tokens takes; 0 when unknown."""
        return self.base + self.slope * tokens

    def observe(
        self, tokens: float, seconds: float, nobody_ahead: bool | None, steady: bool
    ) -> None:
        """Take in a first token.

        Args:
            seconds: from arrival to first token, above 0.
            nobody_ahead: whether no prompt was ahead of it; None where that is not known.
            steady: whether the fleet is believed not to queue. While it does, prompts with none
                ahead count for less: other clients may send prompts to the same workers.
        """
        sure = nobody_ahead is True and steady
        if nobody_ahead is False and self._sure >= _ENOUGH:
            return
        expected = self(tokens) or seconds
        residual = seconds / expected - 1.0
        trust = 1.0 if sure or residual < 0 else _DOUBTED if nobody_ahead else _TAIL
        trust *= min(1.0, _HUBER * self._spread / max(abs(residual), 1e-12))
        if nobody_ahead or residual < 0:
            step = _MEDIAN_STEP if abs(residual) > self._spread else -_MEDIAN_STEP
            self._spread = max(self._spread * math.exp(step), _SMALLEST_SPREAD)
        if sure:
            self._sure = self._sure * self._keep + 1.0
        weight = trust / (expected * expected)
        keep = self._keep**trust
        count, size, square, time, product = self._sums
        self._sums = [
            keep * count + weight,
            keep * size + weight * tokens,
            keep * square + weight * (tokens * tokens),
            keep * time + weight * seconds,
            keep * product + weight * (tokens * seconds),
        ]
        self._solve()

    def _solve(self) -> None:
        count, size, square, seconds, product = self._sums
        det = count * square - size * size
        if det > 1e-9 * count * square:
            slope = (count * product - size * seconds) / det
            base = (seconds - slope * size) / count
            if slope >= 0.0 and base >= 0.0:
                self.base, self.slope = base, slope
                return
        # The optimum is on an edge of the quadrant: the one that explains more.
        if square > 0.0 and product * product * count >= seconds * seconds * square:
            self.base, self.slope = 0.0, product / square
        else:
            self.base, self.slope = seconds / count, 0.0
