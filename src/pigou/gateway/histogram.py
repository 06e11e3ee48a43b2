"""A histogram for the hot path: an addition costs a bisection, and takes no lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class FastHistogram(Collector):
    """Counts observations by bucket; to be used by one thread.

    Attributes:
        total: sum of all observations.
    """

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        """Begin; `bounds` are the upper bounds of the buckets, ascending."""
        self._name = name
        self._help = help
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def describe(self) -> list[Metric]:
        """Return its name and help, without values."""
        return [HistogramMetricFamily(self._name, self._help)]

    def collect(self) -> Iterator[Metric]:
        """Yield the cumulative counts."""
        buckets, so_far = [], 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), so_far))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self.total)
