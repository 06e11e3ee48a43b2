"""The Kalman predictors give Dynamo's forecasts to the printed digits, faults included."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou_lab.predictors.kalman import (
    DynamoKalman,
    DynamoKalmanParams,
    Kalman,
    KalmanParams,
    LocalLinearTrend,
)

FALL = (100.0, 80.0, 60.0, 40.0, 20.0, 10.0, 0.0, 0.0)
FALLING = (100.0, 70.154, 40.584, 20.205, 0.104, -11.642, -21.241, -23.796)
RISING = (149.6, 208.3, 244.6, 265.3, 275.3, 278.4, 277.3, 273.8, 269.2)


def bare(**params: float) -> DynamoKalman:
    """Dynamo's filter without its minimum of values and its later floor."""
    return DynamoKalman(DynamoKalmanParams(min_points=0, floor=False, **params))


def test_dynamos_forecasts_while_load_falls() -> None:
    predictor = bare()
    for load, mean in zip(FALL, FALLING, strict=True):
        predictor.observe(load)
        forecast = predictor.forecast()
        assert forecast.mean == pytest.approx(mean, abs=6e-4)
        assert 0 <= forecast.low <= forecast.high


def test_dynamos_forecasts_after_a_step_overshoot() -> None:
    predictor = bare()
    for _ in range(40):
        predictor.observe(60.0)
    means = []
    for _ in range(20):
        predictor.observe(240.0)
        means.append(predictor.forecast().mean)
    assert means[: len(RISING)] == pytest.approx(RISING, abs=0.06)
    assert max(means) / 240 == pytest.approx(1.16, abs=0.005)
    assert next(i for i, mean in enumerate(means, 1) if mean > 240) == 3


def test_the_gain_settles_where_dynamos_does() -> None:
    one = LocalLinearTrend(1.0, 0.1, 10.0)
    for _ in range(200):
        one.advance()
        level, trend = one.level, one.trend
        one.update(level + 1.0)
    assert one.level - level == pytest.approx(0.4217, abs=5e-5)
    assert one.trend - trend == pytest.approx(0.0760, abs=5e-5)


def test_dynamo_gives_the_last_value_before_five() -> None:
    predictor = DynamoKalman()
    means = []
    for load in FALL:
        predictor.observe(load)
        means.append(predictor.forecast().mean)
    assert means == pytest.approx([100, 80, 60, 40, 0.104, 0, 0, 0], abs=6e-4)


def test_dynamo_skips_zeros_before_the_first_request_alone() -> None:
    loads = (50.0, 60.0, 55.0, 58.0, 61.0)
    late, early = DynamoKalman(), DynamoKalman()
    for load in (0.0, 0.0, *loads):
        late.observe(load)
    for load in loads:
        early.observe(load)
    before = early.forecast().mean
    assert late.forecast().mean == before
    late.observe(0.0)
    assert late.forecast().mean < 0.8 * before


def test_dynamos_filter_of_logarithms() -> None:
    predictor = DynamoKalman(DynamoKalmanParams(log1p=True))
    for load in (10.0, 20.0, 40.0, 80.0, 160.0, 320.0):
        predictor.observe(load)
    linear = LocalLinearTrend(1.0, 0.1, 10.0)
    logs = np.log1p([10.0, 20.0, 40.0, 80.0, 160.0, 320.0])
    linear.start(logs[0])
    for value in logs[1:]:
        linear.advance()
        linear.update(value)
    assert predictor.forecast().mean == pytest.approx(np.expm1(linear.level + linear.trend))


@given(
    st.lists(st.floats(0, 1e4), min_size=2, max_size=30),
    st.floats(0.01, 100), st.floats(0.01, 10), st.floats(0.1, 100),
)  # fmt: skip
def test_the_filter_is_the_matrix_one(loads: list[float], q: float, u: float, r: float) -> None:
    one = LocalLinearTrend(q, u, r)
    one.start(loads[0])
    x, p = np.array([loads[0], 0.0]), 1000.0 * np.eye(2)
    f, h = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 0.0]])
    for load in loads[1:]:
        one.advance()
        one.update(load)
        x, p = f @ x, f @ p @ f.T + np.diag([q, u])
        k = (p @ h.T / (h @ p @ h.T + r)).ravel()
        x = x + k * (load - x[0])
        joseph = np.eye(2) - np.outer(k, h)
        p = joseph @ p @ joseph.T + r * np.outer(k, k)
    assert (one.level, one.trend) == pytest.approx(tuple(x), rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=30), st.integers(1, 200))
def test_a_gap_moves_the_forecast_by_at_most_twice_the_trend(loads: list[float], gap: int) -> None:
    predictor = Kalman()
    for load in loads:
        predictor.observe(load)
    before = predictor.forecast(1).mean, predictor.forecast(3).mean
    for _ in range(gap):
        predictor.observe(None)
    low, high = sorted(before)
    assert low - 1e-6 <= predictor.forecast().mean <= high + 1e-6


def test_without_its_floor_ours_goes_below_zero_too() -> None:
    free, floored = Kalman(KalmanParams(floor=False)), Kalman()
    for load in FALL:
        free.observe(load)
        floored.observe(load)
    assert free.forecast().mean == pytest.approx(FALLING[-1], abs=6e-4)
    assert floored.forecast().mean == 0
    assert free.forecast().low == 0


@pytest.mark.parametrize(
    ("name", "value"),
    list(itertools.product(("level_variance", "trend_variance", "load_variance"), (0.0, -1.0))),
)
def test_variances_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        KalmanParams(**{name: value})
