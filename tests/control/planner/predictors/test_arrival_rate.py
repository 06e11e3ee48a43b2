"""The arrival rate follows a step within its arrivals, and false alarms keep to their bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binom

from pigou.config import ConfigError
from pigou.control.planner.predictors.arrivals import (
    ArrivalParams,
    ArrivalRate,
    Dispersion,
    likelihood_ratio,
)


def delay(ratio: float, threshold: float) -> float:
    """Return the arrivals of the new rate after which a step is found, by the docstring."""
    return threshold / (math.log(ratio) - 1 + 1 / ratio)


@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 40), st.floats(0.5, 15))
def test_the_ratio_passes_a_height_as_rarely_as_chernoff_says(
    total: int, new_bins: int, old_bins: int, height: float
) -> None:
    """Exactly, for every rate: given the total, the newer count is binomial."""
    newer = np.arange(total + 1)
    ratios = np.array([likelihood_ratio(n, new_bins, total - n, old_bins) for n in newer])
    chance = binom.pmf(newer, total, new_bins / (new_bins + old_bins))
    assert chance[ratios >= height].sum() <= 2 * math.exp(-height) * (1 + 1e-9)


#: Below the smallest normal float, a count in a bin rounds to 0, and its logarithm is infinite.
counts = st.floats(0, 1e6, allow_subnormal=False)


@given(
    counts, st.integers(1, 50), counts, st.integers(1, 50),
    st.floats(0.1, 10),
)  # fmt: skip
def test_the_ratio_is_that_of_three_likelihoods(
    newer: float, new_bins: int, older: float, old_bins: int, scale: float
) -> None:
    def term(count: float, bins: float) -> float:
        return count * math.log(count / bins) if count else 0.0

    ratio = likelihood_ratio(newer, new_bins, older, old_bins)
    direct = (
        term(newer, new_bins) + term(older, old_bins) - term(newer + older, new_bins + old_bins)
    )
    assert ratio == pytest.approx(max(direct, 0), rel=1e-6, abs=1e-6 * (1 + newer + older))
    assert ratio >= 0
    same = likelihood_ratio(scale * new_bins, new_bins, scale * old_bins, old_bins)
    assert same == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("per_bin", [0.2, 1.0, 5.0, 50.0, 1000.0])
def test_false_alarms_are_no_more_than_said(per_bin: float) -> None:
    """A hundred times the time allowed between two brings at most a hundred."""
    params = ArrivalParams(bin_s=1.0, bins=20, false_alarm_s=50.0)
    predictor = ArrivalRate(params)
    for count in np.random.default_rng(7).poisson(per_bin, 5000):
        predictor.observe(float(count))
    assert predictor.alarms <= 5000 / params.false_alarm_s


def test_clustered_arrivals_raise_no_more() -> None:
    """Counts of batches: their variance is ten times their mean."""
    rng = np.random.default_rng(8)
    predictor = ArrivalRate(ArrivalParams(bin_s=1.0, bins=20, false_alarm_s=500.0))
    for count in rng.negative_binomial(4, 4 / 40, 5000):
        predictor.observe(float(count))
    assert predictor.alarms <= 20
    assert 6 < predictor.dispersion < 14


@given(st.floats(2, 200), st.one_of(st.floats(1.3, 10), st.floats(0.05, 0.7)), st.integers(1, 36))
def test_an_even_step_is_found_after_the_arrivals_that_the_ratio_needs(
    per_bin: float, ratio: float, history: int
) -> None:
    """Even arrivals have no noise: the alarm comes at the very bin, and the rate is right."""
    predictor = ArrivalRate()
    for _ in range(history):
        predictor.observe(per_bin)
    new = per_bin * ratio
    bins = next(
        (
            n
            for n in range(1, predictor.params.bins)
            if likelihood_ratio(
                n * new, n, min(history, 36 - n) * per_bin, min(history, 36 - n)
            ) >= predictor.threshold
        ),
        predictor.params.bins,
    )  # fmt: skip
    for _ in range(bins):
        predictor.observe(new)
    assert predictor.rate.mean * predictor.params.bin_s == pytest.approx(new, rel=1e-6)


@pytest.mark.parametrize("ratio", [1.5, 2.0, 4.0, 8.0, 0.5, 0.25])
def test_a_step_of_poisson_arrivals_is_followed_within_its_arrivals(ratio: float) -> None:
    """After twice the arrivals that theory asks, and 64, it is 25% off in one run of ten."""
    near = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        predictor = ArrivalRate()
        for count in rng.poisson(40, 60):
            predictor.observe(float(count))
        arrivals = 0
        while arrivals < max(2 * delay(ratio, predictor.threshold), 64):
            count = rng.poisson(40 * ratio)
            arrivals += count
            predictor.observe(float(count))
        near += abs(predictor.rate.mean * predictor.params.bin_s / (40 * ratio) - 1) < 0.25
    assert near >= 36


def test_a_fourfold_step_takes_a_bin_and_no_filter_of_three_minutes() -> None:
    predictor = ArrivalRate()
    for _ in range(36):
        predictor.observe(10.0)
    predictor.observe(40.0)
    assert predictor.rate.mean == pytest.approx(40 / 5)
    assert predictor.alarms == 1


def test_the_rates_interval_covers_the_rate() -> None:
    for per_bin in (0.5, 4.0, 60.0):
        rng = np.random.default_rng(9)
        inside = 0
        for _ in range(300):
            predictor = ArrivalRate()
            for count in rng.poisson(per_bin, 12):
                predictor.observe(float(count))
            rate = predictor.rate
            assert 0 <= rate.low <= rate.mean <= rate.high
            inside += rate.low <= per_bin / 5 <= rate.high
        assert inside >= 0.87 * 300


@given(st.lists(st.floats(10, 14), min_size=1, max_size=50), st.floats(5, 200))
def test_without_a_change_the_rate_is_a_weighted_mean(
    counts: list[float], half_life_s: float
) -> None:
    predictor = ArrivalRate(ArrivalParams(half_life_s=half_life_s))
    for count in counts:
        predictor.observe(count)
    assert predictor.alarms == 0
    last = counts[-predictor.params.bins :]
    weights = 0.5 ** (predictor.params.bin_s / half_life_s * np.arange(len(last)))[::-1]
    assert predictor.rate.mean == pytest.approx(np.average(last, weights=weights) / 5)


def test_holes_change_nothing_and_silence_does() -> None:
    predictor = ArrivalRate()
    for _ in range(20):
        predictor.observe(30.0)
    before = predictor.rate
    for _ in range(50):
        predictor.observe(None)
    assert predictor.rate == before
    predictor.observe(0.0)
    predictor.observe(0.0)
    assert predictor.rate.mean == 0
    assert predictor.rate.high > 0


def test_the_unit_is_requests_a_second_whatever_the_bin() -> None:
    for bin_s in (1.0, 2.5, 5.0):
        predictor = ArrivalRate(ArrivalParams(bin_s=bin_s))
        for _ in range(10):
            predictor.observe(8 * bin_s)
        assert predictor.rate.mean == pytest.approx(8)
        assert predictor.forecast().mean == pytest.approx(8 * bin_s)


def test_bins_of_any_length_give_the_same_rate_and_no_more_alarms() -> None:
    rng = np.random.default_rng(10)
    predictor = ArrivalRate(ArrivalParams(bins=20, false_alarm_s=500.0))
    rates = []
    for seconds in rng.uniform(0.5, 12, 3000):
        predictor.observe_bin(float(rng.poisson(6 * seconds)), seconds)
        rates.append(predictor.rate.mean)
    assert predictor.alarms <= 30
    assert np.mean(rates[50:]) == pytest.approx(6, rel=0.02)
    assert predictor.dispersion == pytest.approx(1, abs=0.6)
    assert predictor.forecast().mean == pytest.approx(5 * predictor.rate.mean)
    before = predictor.rate
    predictor.observe_bin(None, 3.0)
    assert predictor.rate == before
    for seconds in (0.0, -1.0, 1e-4, 1e5, math.inf, math.nan):
        with pytest.raises(ValueError, match="seconds"):
            predictor.observe_bin(1.0, seconds)


@given(st.lists(st.floats(0, 500), min_size=1, max_size=50))
def test_bins_of_the_set_length_are_those_of_observe(counts: list[float]) -> None:
    one, other = ArrivalRate(), ArrivalRate()
    for count in counts:
        one.observe(count)
        other.observe_bin(count, 5.0)
    assert one.rate == other.rate
    assert one.forecast() == other.forecast()


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=100))
def test_a_step_is_no_dispersion(counts: list[int]) -> None:
    assume(any(counts))
    dispersion = Dispersion()
    for count in counts:
        before = dispersion.value
        dispersion.observe(float(count))
        assert dispersion.value <= max(before, 1.0) * 1.06
        assert dispersion.value >= 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("bin_s", 0.0), ("bins", 1), ("false_alarm_s", 1.0), ("false_alarm_s", float("nan"))],
)
def test_what_would_find_everything_or_nothing_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ArrivalParams(**{name: value})
