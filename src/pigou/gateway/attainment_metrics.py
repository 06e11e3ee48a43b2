"""Objectives and their attainment for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pigou.gateway.request_meter import RequestMeter
from pigou.objectives import Slo, class_label


class AttainmentMetrics(Collector):
    """The families `pigou_slo_*`, read anew at each scrape; none without objectives."""

    def __init__(self, meter: RequestMeter) -> None:
        """Export what a meter counted."""
        self._meter = meter

    def describe(self) -> Iterable[Metric]:
        """Return nothing: classes are known once there are objectives."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield counters of requests, and the objectives."""
        meter = self._meter
        objectives, attainment = meter.objectives, meter.attainment
        if not objectives.known:
            return
        requests = CounterMetricFamily(
            "pigou_slo_requests", "Requests offered, refused and failed ones among them.",
            labels=["class"],
        )  # fmt: skip
        attained = CounterMetricFamily(
            "pigou_slo_attained", "Of those, requests inside their objective.", labels=["class"]
        )
        recent = GaugeMetricFamily(
            "pigou_slo_attained_ratio",
            "Share of the requests offered in the last five minutes that attained.",
            labels=["class"],
        )
        limits = GaugeMetricFamily(
            "pigou_slo_limit_seconds", "Objectives of latencies.", labels=["class", "latency"]
        )
        targets = GaugeMetricFamily(
            "pigou_slo_target_ratio", "Share of offered requests that shall attain.",
            labels=["class"],
        )  # fmt: skip
        for name, (count, inside) in meter.recent().items():
            label = class_label(name)
            slo = objectives.slo_of(name)
            requests.add_metric([label], attainment.requests[name])
            attained.add_metric([label], attainment.inside[name])
            if count:
                recent.add_metric([label], inside / count)
            for latency, limit_s in _limits(slo):
                limits.add_metric([label, latency], limit_s)
            if slo is not None:
                targets.add_metric([label], slo.share)
        yield from (requests, attained, recent, limits, targets)


def _limits(slo: Slo | None) -> list[tuple[str, float]]:
    """Return the latencies that an objective limits, and their seconds."""
    pairs = [] if slo is None else [("ttft", slo.ttft_s), ("itl", slo.itl_s)]
    return [(name, limit_s) for name, limit_s in pairs if math.isfinite(limit_s)]
