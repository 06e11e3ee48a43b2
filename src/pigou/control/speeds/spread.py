"""Spread: how much times or sizes differ, as they come."""

from __future__ import annotations

#: Observations are forgotten by half after so many more: a variance takes many to be known.
_HALF_LIFE = 512.0
#: Observations before which nothing is said.
_LEAST = 16


class Spread:
    """Running mean and variance, with forgetting."""

    def __init__(self) -> None:
        self._keep = 0.5 ** (1.0 / _HALF_LIFE)
        self._weight = self._sum = self._squares = 0.0
        self._seen = 0

    def observe(self, value: float) -> None:
        """Take in a value, at least 0."""
        self._weight = self._keep * self._weight + 1.0
        self._sum = self._keep * self._sum + value
        self._squares = self._keep * self._squares + value * value
        self._seen += 1

    @property
    def moments(self) -> tuple[float, float] | None:
        """Mean and variance; None while too few values came."""
        if self._seen < _LEAST:
            return None
        mean = self._sum / self._weight
        return mean, max(0.0, self._squares / self._weight - mean * mean)

    def mean(self, otherwise: float) -> float:
        """Return the mean; `otherwise` while too few values came."""
        found = self.moments
        return otherwise if found is None else found[0]

    def squared(self, base: float = 0.0, slope: float = 1.0) -> float:
        """Return variance over squared mean of base + slope x; 1 while that is not known."""
        found = self.moments
        if found is None:
            return 1.0
        mean = base + slope * found[0]
        return slope * slope * found[1] / (mean * mean) if mean > 0.0 else 1.0
