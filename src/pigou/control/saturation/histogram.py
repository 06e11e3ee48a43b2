"""Prometheus histograms: read from an exposition, subtracted, and their quantiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

#: What engines and frontends call the time to first token, in seconds.
VLLM_TTFT = "vllm:time_to_first_token_seconds"
DYNAMO_TTFT = "dynamo_frontend_time_to_first_token_seconds"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts of observations at or below each bound."""

    # upper bounds in rising order, the last one infinite; shape (buckets,).
    bounds: tuple[float, ...]
    # observations at or below each bound, since the process began; shape (buckets,).
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) != len(self.counts):
            raise ValueError(f"{len(self.bounds)} bounds and {len(self.counts)} counts: give equal")
        if not self.bounds or self.bounds[-1] != math.inf:
            raise ValueError("the histogram has no +Inf bucket: scrape all of its buckets")
        if any(a >= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"bounds {self.bounds} do not rise: give each once, in order")

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.counts[-1]

    def __add__(self, other: Self) -> Histogram:
        """Return the histogram of both; raises ValueError where the bounds differ."""
        self._same(other)
        return Histogram(
            self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        )

    def since(self, before: Self) -> Histogram:
        """Return what was observed since an earlier scrape.

        A count that fell means that the process began anew: then all of the later scrape counts,
        as with Prometheus's `increase`. Raises ValueError where the bounds differ.
        """
        self._same(before)
        if any(a < b for a, b in zip(self.counts, before.counts, strict=True)):
            return Histogram(self.bounds, self.counts)
        return Histogram(
            self.bounds, tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        )

    def quantile(self, share: float) -> float:
        """Return the quantile, by the rules of Prometheus's `histogram_quantile`.

        Linear inside the bucket that holds rank `share * count`, from 0 in the first one; the
        last finite bound where the rank is in the +Inf bucket; NaN for an empty histogram, or one
        with fewer than 2 buckets; -Inf and +Inf for shares outside [0, 1].
        """
        if math.isnan(share) or len(self.bounds) < 2 or self.count <= 0:
            return math.nan
        if share < 0:
            return -math.inf
        if share > 1:
            return math.inf
        rank = share * self.count
        index = next(i for i, count in enumerate(self.counts) if count >= rank)
        if index == len(self.bounds) - 1:
            return self.bounds[-2]
        end = self.bounds[index]
        if index == 0 and end <= 0:
            return end
        start, below = (self.bounds[index - 1], self.counts[index - 1]) if index else (0.0, 0.0)
        inside = self.counts[index] - below
        return end if inside <= 0 else start + (end - start) * (rank - below) / inside

    def _same(self, other: Self) -> None:
        if self.bounds != other.bounds:
            raise ValueError(
                "the histograms have different buckets: compare one metric with itself"
            )


def quantile_of(cumulative: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of cumulative counts by upper bound; None without observations.

    It is that of `Histogram.quantile`, for a `share` above 0 and at most 1.
    """
    bounds = sorted(cumulative)
    counts = [cumulative[bound] for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    if bounds[-1] != math.inf:
        bounds, counts = [*bounds, math.inf], [*counts, counts[-1]]
    return Histogram(tuple(bounds), tuple(counts)).quantile(share) if len(bounds) > 1 else None


def parse_histogram(
    text: str, name: str, labels: Mapping[str, str] | None = None
) -> Histogram | None:
    """Read a histogram from a Prometheus text exposition.

    Series that differ in labels (engine, model, data-parallel rank) are added.

    Args:
        text: the body of `/metrics`.
        name: of the metric, such as `VLLM_TTFT` or `DYNAMO_TTFT`.
        labels: only series with these labels; all by default.

    Returns:
        The histogram; None where the exposition has no such series (a vLLM before its first
        request, say).

    Raises:
        ValueError: the text is no exposition, or a series has no +Inf bucket, or their buckets
            differ.
    """
    series: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    wanted = dict(labels or {})
    for family in text_string_to_metric_families(text):
        if family.name != name:
            continue
        for sample in family.samples:
            if sample.name != f"{name}_bucket" or not wanted.items() <= sample.labels.items():
                continue
            rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            series.setdefault(rest, {})[float(sample.labels["le"])] = float(sample.value)
    total: Histogram | None = None
    for buckets in series.values():
        bounds = tuple(sorted(buckets))
        histogram = Histogram(bounds, tuple(buckets[bound] for bound in bounds))
        total = histogram if total is None else total + histogram
    return total
