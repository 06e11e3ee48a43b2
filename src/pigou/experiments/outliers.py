"""The paper's rule for outliers, registered beforehand (section 7.4)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pigou.experiments.paper import OUTLIER


def flagged(ttft_p99_s: Sequence[float], factor: float = OUTLIER) -> list[int]:
    """Return the places of iterations beyond `factor` medians of their strategy and phase."""
    limit = factor * statistics.median(ttft_p99_s)
    return [place for place, value in enumerate(ttft_p99_s) if value > limit]


def without(runs: Sequence[Mapping[str, Any]], factor: float = OUTLIER) -> dict[str, Any]:
    """Return who is flagged, and the mean TTFT P99 with and without them.

    The rule excludes a flagged iteration only where the cause, a queue left over from the phase
    before, can be seen. Iterations here begin with an empty fleet, so that flags are reported
    and nothing is excluded.
    """
    values = [each["ttft_p99_s"] for each in runs]
    marked = flagged(values, factor)
    kept = [value for place, value in enumerate(values) if place not in marked]
    return {
        "flagged": marked,
        "ttft_p99_with_s": statistics.fmean(values),
        "ttft_p99_without_s": statistics.fmean(kept),
    }
