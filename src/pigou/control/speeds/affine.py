"""An affine law fitted as observations come: seconds = base + slope * size."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Residuals beyond this many times the running median count for less (Huber's weight).
_HUBER = 3.0
_MEDIAN_STEP = 0.05


class AffineFit:
    """Weighted least squares with forgetting; both parameters are at least 0.

    Each observation counts half after `half_life` more. Residuals are relative to the law.
    Outliers count less by Huber's weight against a running median of residuals (Huber, "Robust
    Estimation of a Location Parameter", 1964).

    Attributes:
        seen: observations.
    """

    def __init__(self, half_life: float = 128.0) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._sums = [0.0] * 5  # of 1, size, size^2, seconds, size * seconds
        self._spread = 0.25
        self.seen = 0

    def __call__(self, size: float) -> float:
        """Return the seconds that something of this size takes; 0 before anything was seen."""
        base, slope = self.law
        return base + slope * size

    @property
    def law(self) -> tuple[float, float]:
        """Base and slope."""
        return _fit(self._sums)

    @property
    def mean_size(self) -> float:
        """Mean size that was observed."""
        return self._sums[1] / max(self._sums[0], 1e-12)

    def observe(self, size: float, seconds: float) -> None:
        """Take in that something of this size took so many seconds, above 0."""
        expected = self(size) if self.seen else seconds
        scale = max(expected, 1e-3 * seconds, 1e-9)
        residual = abs(seconds / scale - 1.0)
        limit = _HUBER * max(self._spread, 1e-3)
        trust = min(1.0, limit / max(residual, 1e-12)) / scale**2
        step = _MEDIAN_STEP if residual > self._spread else -_MEDIAN_STEP
        self._spread = min(max(self._spread * math.exp(step), 1e-3), 1e3)
        keep, row = self._keep, (1.0, size, size * size, seconds, size * seconds)
        self._sums = [keep * each + trust * new for each, new in zip(self._sums, row, strict=True)]
        self.seen += 1


def _fit(sums: Sequence[float]) -> tuple[float, float]:
    """Least squares over base, slope >= 0."""
    count, size, square, seconds, product = sums
    if count <= 0.0:
        return 0.0, 0.0
    det = count * square - size * size
    if det > 1e-9 * count * square:
        slope = (count * product - size * seconds) / det
        base = (seconds - slope * size) / count
        if slope >= 0.0 and base >= 0.0:
            return base, slope
    # The optimum is on an edge of the quadrant: the one that explains more.
    if square > 0.0 and product * product * count >= seconds * seconds * square:
        return 0.0, product / square
    return seconds / count, 0.0
