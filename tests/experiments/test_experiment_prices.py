"""Laws of prices against thresholds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pigou_lab.experiments import prices
from pigou_lab.experiments.fleets import fleet


def test_prices_give_what_a_tuned_threshold_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 340B fleet with serial prefill and 128 users, one seed; static gives the ceiling."""
    some = [each for each in prices.CONTENDERS if each.name in ("toll", "threshold-2")]
    monkeypatch.setattr(prices, "CONTENDERS", some)
    monkeypatch.setattr(prices, "HOLD_S", 60.0)
    which = fleet("340b-1p2d")
    toll, threshold = prices.prices(which, "fair", (1,), (128,))
    assert toll["ttft_p99_s"] <= prices.SLO_S
    assert toll["rps"] >= 1.2 * which.ceiling
    assert toll["rps"] >= 0.99 * threshold["rps"]
    assert toll["e2e_mean_s"] <= 1.01 * threshold["e2e_mean_s"]


def test_a_paired_interval_is_students() -> None:
    mean, low, high = prices.paired([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    assert mean == 2.0
    assert (low, high) == pytest.approx((2.0 - 4.3027 / 3**0.5, 2.0 + 4.3027 / 3**0.5), rel=1e-4)
    assert prices.paired([1.0], [1.0]) == (0.0, float("-inf"), float("inf"))


def test_thresholds_are_a_grid_of_whole_prompts() -> None:
    assert all(low < high for low, high in pairwise(prices.THRESHOLDS))
    assert prices.threshold(2).params["prefill_busy_threshold"] == 1.5
