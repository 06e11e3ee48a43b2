"""Histograms are subtracted, and have quantiles, as Prometheus does it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.saturation.regime import Regime
from pigou.request import SECOND
from pigou_lab.detectors import Histogram, PaperConfig, PaperDetector

BOUNDS = (0.1, 0.5, 1.0, 5.0)


def scraped(seconds: list[float]) -> Histogram:
    bounds = (*BOUNDS, math.inf)
    return Histogram(bounds, tuple(float(sum(v <= b for v in seconds)) for b in bounds))


def test_a_quantile_is_interpolated_in_its_bucket() -> None:
    one = Histogram((1.0, 2.0, 4.0, math.inf), (10, 30, 40, 40))
    assert one.quantile(0.5) == pytest.approx(1.5)
    assert one.quantile(0.25) == pytest.approx(1.0)
    assert one.quantile(0.1) == pytest.approx(0.4)
    assert one.quantile(0.99) == pytest.approx(2 + 2 * (39.6 - 30) / 10)


def test_edges_are_those_of_histogram_quantile() -> None:
    one = Histogram((1.0, 2.0, math.inf), (0, 5, 10))
    assert one.quantile(0.9) == 2.0, "in the +Inf bucket: the last finite bound"
    assert math.isnan(Histogram((1.0, math.inf), (0, 0)).quantile(0.5))
    assert math.isnan(Histogram((math.inf,), (3,)).quantile(0.5))
    assert one.quantile(-1) == -math.inf
    assert one.quantile(2) == math.inf
    assert Histogram((-1.0, 2.0, math.inf), (5, 5, 5)).quantile(0.5) == -1.0


@given(st.lists(st.floats(0, 20), min_size=1), st.floats(0.001, 1))
def test_a_quantile_lies_in_the_bucket_of_the_order_statistic(
    values: list[float], share: float
) -> None:
    found = scraped(values).quantile(share)
    true = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    edges = (0.0, *BOUNDS)
    bucket = int(np.searchsorted(BOUNDS, true))
    if bucket == len(BOUNDS):
        assert found == BOUNDS[-1]
    else:
        assert edges[bucket] - 1e-9 <= found <= BOUNDS[bucket] + 1e-9


def test_a_restart_counts_from_nothing() -> None:
    before = Histogram((1.0, math.inf), (50, 60))
    assert Histogram((1.0, math.inf), (3, 4)).since(before).counts == (3, 4)
    assert Histogram((1.0, math.inf), (51, 64)).since(before).counts == (1, 4)


def test_different_buckets_do_not_mix() -> None:
    with pytest.raises(ValueError, match="different buckets"):
        Histogram((1.0, math.inf), (0, 0)).since(Histogram((2.0, math.inf), (0, 0)))
    with pytest.raises(ValueError, match=r"\+Inf"):
        Histogram((1.0,), (0,))


def test_the_detector_sees_only_what_came_between_scrapes() -> None:
    one = PaperDetector(PaperConfig(theta1=0.5, theta2=4.0, consecutive=1, margin=0.1, alpha=1.0))
    seen: list[float] = [0.05] * 1000
    regimes = []
    for poll, fresh in enumerate([[], [0.05] * 20, [0.9] * 20, [4.9] * 50, [], [0.05] * 9]):
        seen += fresh
        regimes.append(one.scrape(poll * 5 * SECOND, scraped(seen)))
    below, transition, saturated = Regime
    assert regimes == [below, below, transition, saturated, saturated, below]


def test_scrapes_between_polls_are_passed_over() -> None:
    one = PaperDetector(PaperConfig())
    bounds = (0.1, 1.0, math.inf)
    one.scrape(0, Histogram(bounds, (0, 0, 0)))
    one.scrape(SECOND, Histogram(bounds, (0, 9, 9)))
    assert math.isnan(one.signal)
    one.scrape(5 * SECOND, Histogram(bounds, (0, 9, 9)))
    assert one.signal == pytest.approx(0.1 + 0.9 * 0.99)
