"""Prometheus text pages as numbers that can be subtracted."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Self, TypeAlias

from pigou.wire.metrics_text import all_samples

_BOUND = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|Inf)")
#: Largest page, in bytes.
_MAX_BYTES = 2**25


#: Name, labels and value.
MetricSample: TypeAlias = tuple[str, Mapping[str, str], float]


class MetricPage:
    """The samples of a page."""

    def __init__(self, samples: Iterable[MetricSample] = ()) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for name, labels, value in samples:
            self._samples[name].append((labels, value))

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a page; lines that are no samples are skipped."""
        return cls(all_samples(text.encode(errors="replace"), _MAX_BYTES))

    def by_label(self, label: str) -> dict[str, Self]:
        """Return a page per value of a label."""
        pages: dict[str, Self] = {}
        for name, samples in self._samples.items():
            for labels, value in samples:
                if label in labels:
                    page = pages.setdefault(labels[label], type(self)())
                    page._samples[name].append((labels, value))
        return pages

    def __contains__(self, name: str) -> bool:
        """True if a metric has samples."""
        return name in self._samples

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of a metric's samples with these labels; None without any."""
        values = [value for known, value in self._samples.get(name, ())
                  if labels.items() <= known.items() and math.isfinite(value)]  # fmt: skip
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return sums of a metric's samples by a label."""
        sums: dict[str, float] = defaultdict(float)
        for known, value in self._samples.get(name, ()):
            if label in known and math.isfinite(value):
                sums[known[label]] += value
        return dict(sums)

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric's samples; None without any."""
        values = [value for _, value in self._samples.get(name, ()) if math.isfinite(value)]
        return sum(values) / len(values) if values else None

    def maximum(self, name: str) -> float | None:
        """Return the largest of a metric's samples; None without any."""
        return max((v for _, v in self._samples.get(name, ()) if math.isfinite(v)), default=None)

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """Return the labels of a metric's samples."""
        return [labels for labels, _ in self._samples.get(name, ())]

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, summed over labels."""
        counts: dict[float, float] = defaultdict(float)
        for known, value in self._samples.get(f"{name}_bucket", ()):
            if labels.items() <= known.items() and _BOUND.fullmatch(known.get("le", "")):
                counts[float(known["le"])] += value
        return dict(counts)


def increase(before: float | None, now: float | None) -> float | None:
    """Return a counter's increase, its value after a reset, or None if unknown."""
    if now is None:
        return None
    return now if before is None or now < before else now - before


def quantile(
    before: Mapping[float, float], now: Mapping[float, float], share: float
) -> float | None:
    """Return a histogram's quantile between two pages; None without observations."""
    counts = {bound: max(0.0, count - before.get(bound, 0.0)) for bound, count in now.items()}
    return quantile_of(counts, share)


def quantile_of(cumulative: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of cumulative counts, as Prometheus's `histogram_quantile` does."""
    bounds = sorted(cumulative)
    counts = [cumulative[bound] for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    if bounds[-1] != math.inf:
        bounds, counts = [*bounds, math.inf], [*counts, counts[-1]]
    if len(bounds) < 2:
        return None
    rank = share * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= rank)
    if index == len(bounds) - 1:
        return bounds[-2]
    end = bounds[index]
    if index == 0 and end <= 0:
        return end
    start, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    inside = counts[index] - below
    return end if inside <= 0 else start + (end - start) * (rank - below) / inside


def summed(values: Iterable[float | None]) -> float:
    """Return the sum of the known values."""
    return sum(value for value in values if value is not None)
