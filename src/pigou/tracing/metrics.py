"""Metrics of the span exporter: how many spans arrived, and how many were lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pigou.tracing.exporter import SpanExporter

REASONS = ("queue_full", "rejected", "refused", "unreachable")


class SpanExporterMetrics(Collector):
    """Reads the exporter's counters at each scrape."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Tell of an exporter."""
        self._exporter = exporter

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are known once they are read."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield what was sent, what was lost by reason, and what waits."""
        exporter = self._exporter
        yield CounterMetricFamily(
            "pigou_trace_spans_exported", "Spans that the receiver took.", value=exporter.exported
        )
        lost = CounterMetricFamily(
            "pigou_trace_spans_dropped", "Spans that it did not get or take.", labels=["reason"]
        )
        for reason in REASONS:
            lost.add_metric([reason], exporter.dropped[reason])
        yield lost
        yield CounterMetricFamily(
            "pigou_trace_export_retries", "Batches that were sent again.", value=exporter.retries
        )
        yield GaugeMetricFamily(
            "pigou_trace_spans_queued", "Spans that wait to be sent.", value=exporter.queued
        )
