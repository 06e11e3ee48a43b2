"""Metrics as rows: name, help and labels on one line, and families that are read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: The one value of a family without labels, or pairs of label values and value.
Samples: TypeAlias = float | Iterable[tuple[Sequence[str], float]]


def gauge_family(name: str, help: str, samples: Samples, *labels: str) -> Metric:
    """Return a gauge with its samples."""
    return _filled(GaugeMetricFamily(name, help, labels=labels), samples)


def counter_family(name: str, help: str, samples: Samples, *labels: str) -> Metric:
    """Return a counter with its samples; the name is without `_total`."""
    return _filled(CounterMetricFamily(name, help, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for values, value in samples if isinstance(samples, Iterable) else [((), samples)]:
        family.add_metric(values, value)
    return family


class MetricSet:
    """A registry of its own, and the metrics in it."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        """Add a counter; its name is without `_total`."""
        return Counter(name, help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, *labels: str) -> Gauge:
        """Add a gauge."""
        return Gauge(name, help, labels, registry=self.registry)

    def histogram(self, name: str, help: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """Add a histogram with these upper bounds."""
        return Histogram(name, help, labels, registry=self.registry, buckets=buckets)

    def scrape(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add the families that `read` returns at each scrape."""
        self.registry.register(Scraped(read))


class Scraped(Collector):
    """Families that `read` returns at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._read()
