"""What a worker tells of its tiers: metrics for Prometheus, and what `/health` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pigou.worker.kv_offload import WorkerTiers

_LABELS = ("model_name", "engine", "tier")


class TierMetrics(Collector):
    """Reads the tiers' figures when the page is asked for."""

    def __init__(self, tiers: WorkerTiers, model: str) -> None:
        """Tell of `tiers`, all under the name of the model."""
        self._tiers = tiers
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Return one family for each figure, with a sample for each tier."""
        figures = {name: _figures(self._tiers, i) for i, name in enumerate(self._tiers.names)}
        for key, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"pigou_tier_{key}", text, labels=_LABELS)
            for name, values in figures.items():
                gauge.add_metric((self._model, "0", name), values[key])
            yield gauge
        for key, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"pigou_tier_{key}", text, labels=_LABELS)
            for name, values in figures.items():
                counter.add_metric((self._model, "0", name), values[key])
            yield counter


_GAUGES = {
    "up": "1 while its store takes work, else 0.",
    "blocks": "KV blocks that it holds, those on their way included.",
    "used_bytes": "Bytes taken in its store.",
    "cap_bytes": "Bytes that its store never exceeds.",
    "price": "Price of a byte in seconds of prefill; 0 where its policy has none.",
    "queued_blocks": "Blocks that wait to be read or written.",
}
_COUNTERS = {
    "stored_blocks": "Blocks written to it.",
    "restored_blocks": "Blocks read from it into the device for a request.",
    "recalled_blocks": "Blocks read from it for a session that was expected back.",
    "evicted_blocks": "Blocks that it gave up for others.",
    "lost_blocks": "Blocks that could not be written or read.",
    "corrupt_blocks": "Blocks that were torn or altered: misses.",
    "refused_blocks": "Blocks that were turned away as queues were full or the store down.",
}


def _figures(tiers: WorkerTiers, number: int) -> dict[str, float]:
    status = tiers.status()[tiers.names[number]]
    tier, counts = tiers.tiers.tiers[number], tiers.tiers.counts[number]
    return {
        "up": float(status.up),
        "blocks": len(tier),
        "used_bytes": status.used_bytes,
        "cap_bytes": status.cap_bytes,
        "price": float(getattr(tier.policy, "price", 0.0)),
        "queued_blocks": status.reads.blocks + status.writes.blocks,
        "stored_blocks": counts.stored,
        "restored_blocks": counts.restored,
        "recalled_blocks": counts.recalled,
        "evicted_blocks": counts.evicted,
        "lost_blocks": counts.lost,
        "corrupt_blocks": status.counts.corrupt,
        "refused_blocks": status.reads.refused + status.writes.refused,
    }


def health_of(tiers: WorkerTiers) -> dict[str, dict[str, Any]]:
    """Say of each tier, by name, whether its store works, and if not, why."""
    return {
        name: {
            "up": status.up,
            "reason": status.reason,
            "used_bytes": status.used_bytes,
            "cap_bytes": status.cap_bytes,
        }
        for name, status in tiers.status().items()
    }
