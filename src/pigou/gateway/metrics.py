"""The gateway's own metrics, under `pigou:` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

#: Rows of the fleet's table: (worker, role, name -> value).
Rows = Iterable[tuple[str, str, dict[str, float]]]


class Metrics:
    """Counters and histograms of requests, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "pigou:requests", "Requests by route and HTTP status.",
            ["route", "status"], registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "pigou:prompt_tokens", "Prompt tokens of finished requests.",
            ["tenant"], registry=self.registry,
        )  # fmt: skip
        self.generation_tokens = Counter(
            "pigou:generation_tokens", "Generated tokens that passed through.",
            ["tenant"], registry=self.registry,
        )  # fmt: skip
        self.migrations = Counter(
            "pigou:migrations", "Requests sent to another worker after one failed, by phase.",
            ["phase", "reason"], registry=self.registry,
        )  # fmt: skip
        self.unfinished = Counter(
            "pigou:requests_failed", "Requests that no worker could finish.",
            ["reason"], registry=self.registry,
        )  # fmt: skip
        self.cancelled = Counter(
            "pigou:requests_cancelled", "Requests whose client left.", registry=self.registry
        )
        self.shed = Counter(
            "pigou:requests_shed", "Requests refused because the fleet was full.",
            registry=self.registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "pigou:time_to_first_token_seconds", "From arrival to the first token relayed.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.prefill = Histogram(
            "pigou:prefill_leg_seconds", "From leg 1's request to its reply.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.duration = Histogram(
            "pigou:request_duration_seconds", "From arrival to the end of the reply.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.inflight = Gauge(
            "pigou:requests_inflight", "Requests being served.", registry=self.registry
        )
        self.queued = Gauge(
            "pigou:requests_queued", "Requests that wait for a worker.", registry=self.registry
        )

    def add_fleet(self, rows: Callable[[], Rows]) -> None:
        """Export the fleet's table, read anew at each scrape, as gauges `pigou:worker_*`."""
        self.registry.register(_Fleet(rows))


class _Fleet(Collector):
    def __init__(self, rows: Callable[[], Rows]) -> None:
        self._rows = rows

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for worker, role, values in self._rows():
            for name, value in values.items():
                family = families.setdefault(
                    name,
                    GaugeMetricFamily(
                        f"pigou:worker_{name}",
                        f"{name.replace('_', ' ').capitalize()} of a worker.",
                        labels=["worker", "role"],
                    ),
                )
                family.add_metric([worker, role], value)
        yield from families.values()
