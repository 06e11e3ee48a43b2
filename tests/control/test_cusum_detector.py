"""Sequential change detection keeps its false-alarm rate; the no-queue law finds the law."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.saturation.cusum_detector import (
    Cusum,
    LongRunVariance,
    UnloadedLaw,
    cusum_threshold,
)


@pytest.mark.parametrize(("arl", "shift"), [(200, 1.0), (500, 0.5), (1000, 1.0), (300, 1.5)])
def test_run_length_to_a_false_alarm_is_what_was_asked(arl: float, shift: float) -> None:
    rng = np.random.default_rng(1)
    height = cusum_threshold(arl, shift)
    lengths = []
    for _ in range(300):
        one, count = Cusum(0.0, shift, min_observations=1), 0
        while not one.on:
            one.update(rng.normal(-shift / 2), 1.0, height)
            count += 1
        lengths.append(count)
    # One observation counts for at most the height, which hardly matters; 300 runs scatter by 6 %.
    assert np.mean(lengths) == pytest.approx(arl, rel=0.2)


@given(st.floats(1, 1e9), st.floats(0.01, 5))
def test_the_height_solves_siegmunds_equation(arl: float, shift: float) -> None:
    height = cusum_threshold(arl, shift)
    y = height + 1.166 * shift
    found = 2 * (math.expm1(y) - y) / shift**2
    assert found >= arl * (1 - 1e-6)
    if height > 0:
        assert found == pytest.approx(arl, rel=1e-5)


def test_bad_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="arl is 0"):
        cusum_threshold(0, 1.0)
    with pytest.raises(ValueError, match="shift is 0"):
        cusum_threshold(100, 0)


def test_a_switch_turns_back_when_the_mean_falls() -> None:
    rng = np.random.default_rng(2)
    one = Cusum(1.0, 1.0)
    height = cusum_threshold(1e5, 1.0)
    states = [
        one.update(rng.normal(m), 1.0, height) for m in [0.0] * 300 + [2.0] * 300 + [0.0] * 300
    ]
    assert not any(states[:300])
    assert all(states[340:600])
    assert not any(states[640:])


@given(st.integers(1, 8), st.floats(10, 1e6))
def test_no_change_takes_fewer_observations_than_asked(least: int, value: float) -> None:
    one = Cusum(0.0, 1.0, least)
    count = next(i for i in range(1, 20) if one.update(value, 1.0, 5.0))
    assert count == least


def test_correlated_noise_has_a_greater_long_run_variance() -> None:
    rng = np.random.default_rng(3)
    found = []
    for phi in (0.0, 0.7):
        one, x = LongRunVariance(100.0), 0.0
        for _ in range(20_000):
            x = phi * x + 0.1 * rng.normal()
            one.observe(x)
        found.append(one.value)
    assert found[0] == pytest.approx(0.01, rel=0.4)
    # (0.1 / 0.3)^2 = 0.11 for ever-longer batches; those of 8 reach over half of it.
    assert 0.05 < found[1] < 0.14


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_law_is_found_under_any_share_of_waiting(share: float) -> None:
    rng = np.random.default_rng(4)
    one = UnloadedLaw()
    for _ in range(3000):
        tokens = float(rng.integers(1, 4000))
        waits = rng.random() < share
        seconds = (0.03 + 2e-4 * tokens) * rng.lognormal(0, 0.1) + waits * rng.exponential(2.0)
        one.observe(tokens, seconds, nobody_ahead=not waits, steady=True)
    for tokens in (100, 1000, 4000):
        assert one(tokens) == pytest.approx(0.03 + 2e-4 * tokens, rel=0.1)


def test_the_lower_envelope_is_found_where_nobody_tells_who_waited() -> None:
    rng = np.random.default_rng(5)
    one = UnloadedLaw()
    for _ in range(3000):
        tokens = float(rng.integers(1, 4000))
        waited = rng.exponential(1.0) if rng.random() < 0.5 else 0.0
        seconds = (0.03 + 2e-4 * tokens) * rng.lognormal(0, 0.1) + waited
        one.observe(tokens, seconds, nobody_ahead=None, steady=True)
    assert one(1000) == pytest.approx(0.23, rel=0.35)


def test_a_long_saturation_is_not_learned_as_normal() -> None:
    one = UnloadedLaw()
    for _ in range(200):
        one.observe(100, 0.05, nobody_ahead=True, steady=True)
    for _ in range(20_000):
        one.observe(100, 5.0, nobody_ahead=False, steady=False)
    assert one(100) == pytest.approx(0.05, rel=0.01)
