"""Spread: how much gaps between arrivals differ."""

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
    def squared(self) -> float:
        """Variance over squared mean; 1 while too few values came."""
        if self._seen < _LEAST or self._sum <= 0.0:
            return 1.0
        mean = self._sum / self._weight
        return max(0.0, self._squares / self._weight - mean * mean) / (mean * mean)
