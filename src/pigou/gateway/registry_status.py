"""What a gateway shows of the registry that it discovers workers in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class RegistryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a registry, as a gateway sees it."""

    stale: bool  # whether it does not answer; the last view is served then
    why: str  # the reason that it does not answer; empty while it does
    age_s: float | None  # of the last snapshot, in seconds; None before one
    entries: int  # workers of the view, suspects too
    suspects: list[str]  # workers that are not registered any more, and get nothing new
    ignored: int  # records that are no entries of this fleet
    outages: int  # times that it stopped answering

    def health(self) -> dict[str, Any]:
        """Return what `/health` says of it: no names."""
        return {"stale": self.stale, "entries": self.entries, "suspects": len(self.suspects)}


class RegistryMetrics(Collector):
    """The families `pigou_registry_*`, read anew at each scrape."""

    def __init__(self, read: Callable[[], RegistryStatus]) -> None:
        """Export what `read` returns."""
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the families are the same at each scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield whether it is stale, its entries, suspects and what was ignored."""
        status = self._read()
        gauges = {
            "stale": ("1 while the registry does not answer.", status.stale),
            "entries": ("Workers of the view, suspects too.", status.entries),
            "suspects": ("Workers that are not registered any more.", len(status.suspects)),
            "ignored": ("Records that are no entries of this fleet.", status.ignored),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(f"pigou_registry_{name}", help, value=float(value))
        yield CounterMetricFamily(
            "pigou_registry_outages", "Times that it stopped answering.", value=status.outages
        )
