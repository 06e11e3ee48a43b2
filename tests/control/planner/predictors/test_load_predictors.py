"""Laws of every load predictor: holes, bounds, constants, determinism, parameters."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ConfigError
from pigou.control.planner.predictors.predictor import (
    MAX_LOAD,
    ErrorQuantiles,
    LoadPredictor,
    load,
    student,
)

FAST = ("last-value", "ewma", "seasonal-naive", "kalman", "dynamo-kalman", "arrivals")
FITTED = ("holt-winters", "auto-arima", "dynamo-arima")
PARAMS: dict[str, dict[str, Any]] = {"seasonal-naive": {"season": 5}, "arrivals": {"bins": 8}}
HAS_LIBRARIES = all(find_spec(module) for module in ("pmdarima", "statsmodels"))
needs_libraries = pytest.mark.skipif(not HAS_LIBRARIES, reason="needs pigou-lab[forecast]")
ALL = (*FAST, *(pytest.param(name, marks=needs_libraries) for name in FITTED))

loads = st.one_of(
    st.floats(0, 1e4), st.integers(0, 500).map(float), st.sampled_from([0.0, 1e-300, MAX_LOAD])
)
holes = st.sampled_from([None, math.nan, math.inf, -math.inf, -1.0, 2 * MAX_LOAD])
histories = st.lists(st.one_of(loads, loads, loads, holes), max_size=60)


def made(name: str, **params: Any) -> LoadPredictor:
    return load(name, {**PARAMS.get(name, {}), **params})


def fed(name: str, values: list[float | None], **params: Any) -> LoadPredictor:
    predictor = made(name, **params)
    for value in values:
        predictor.observe(value)
    return predictor


def check_bounds(name: str, values: list[float | None]) -> None:
    predictor = made(name)
    for value in [*values, None]:
        predictor.observe(value)
        for steps in (1, 2, 3, 7, 8, 9, 100):
            forecast = predictor.forecast(steps)
            assert 0 <= forecast.low <= forecast.mean <= forecast.high <= MAX_LOAD


@pytest.mark.parametrize("name", FAST)
@given(values=histories)
def test_forecasts_are_finite_and_never_below_zero(name: str, values: list[float | None]) -> None:
    check_bounds(name, values)


@needs_libraries
@pytest.mark.parametrize("name", FITTED)
@settings(max_examples=8)
@given(values=st.lists(st.one_of(loads, loads, holes), min_size=12, max_size=20))
def test_forecasts_of_libraries_are_too(name: str, values: list[float | None]) -> None:
    check_bounds(name, values)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(20))
@given(value=st.floats(0.001, 1e9), count=st.integers(1, 30), gap=st.integers(0, 3))
def test_a_constant_is_forecast_exactly(name: str, value: float, count: int, gap: int) -> None:
    predictor = fed(name, [value] * count + [None] * gap + [value])
    for steps in (1, 4, 20):
        forecast = predictor.forecast(steps)
        assert forecast.mean == pytest.approx(value, rel=1e-9)
        assert forecast.low == pytest.approx(value, rel=1e-6)
        assert forecast.high == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_hole_is_not_zero_traffic(name: str) -> None:
    """A busy fleet stays busy through a gap; one that is idle does not."""
    noise = [100.0 + 3 * ((7 * i) % 5 - 2) for i in range(30)]
    holes = [None, math.nan, math.inf, -1.0, None]
    assert fed(name, [*noise, *holes]).forecast().mean > 85
    assert fed(name, holes).forecast().mean == 0
    assert fed(name, [*noise, *[0.0] * 30]).forecast().mean < 60


@pytest.mark.parametrize("name", ALL)
def test_before_the_first_value_nothing_is_ready(name: str) -> None:
    predictor = fed(name, [None, math.nan])
    assert not predictor.ready
    predictor.observe(3.0)
    assert predictor.ready
    assert predictor.forecast().mean == 3


@pytest.mark.parametrize("name", ALL)
def test_equal_histories_give_equal_forecasts_whoever_asks_in_between(name: str) -> None:
    values = [float(value) for value in np.random.default_rng(3).poisson(40, 25)]
    one, other = made(name), made(name)
    for value in values:
        one.observe(value)
        other.observe(value)
        other.forecast(3)
        assert other.forecast(1) == other.forecast(1)
    assert [one.forecast(steps) for steps in range(1, 12)] == [
        other.forecast(steps) for steps in range(1, 12)
    ]


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_honoured_or_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no_such"):
        made(name, no_such=1)
    with pytest.raises(ConfigError, match="coverage"):
        made(name, coverage=1.5)
    with pytest.raises(ConfigError, match="errors"):
        made(name, errors=0)
    with pytest.raises(ConfigError, match="errors"):
        made(name, errors="many")
    count = 25 if name in FITTED else 60  # a fit takes milliseconds
    values: list[float | None] = [float(v) for v in np.random.default_rng(5).poisson(50, count)]
    wide, narrow = fed(name, values, coverage=0.95), fed(name, values, coverage=0.5)
    assert wide.forecast().mean == narrow.forecast().mean
    assert wide.forecast().high > narrow.forecast().high
    assert wide.forecast().low < narrow.forecast().low


@pytest.mark.parametrize("name", ALL)
def test_steps_are_from_one(name: str) -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        made(name).forecast(0)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"arrivals, auto-arima, .*seasonal-naive"):
        load("oracle")


@pytest.mark.parametrize("name", FITTED)
def test_a_missing_library_is_told_with_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pigou_lab.predictors.fitted.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=r"pip install './lab\[forecast\]'"):
        load(name)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9])
def test_ends_cover_what_they_say_on_independent_counts(name: str, coverage: float) -> None:
    rng = np.random.default_rng(11)
    values = rng.poisson(60, 1500).astype(float)
    predictor = made(name, coverage=coverage)
    inside = 0
    for value in values:
        forecast = predictor.forecast()
        inside += forecast.low <= value <= forecast.high
        predictor.observe(float(value))
    # Ties of counts and the finite number of errors widen the ends a little.
    assert coverage - 0.04 < inside / len(values) < coverage + 0.06


@given(st.lists(st.floats(0, 1e6), min_size=40, max_size=40), st.floats(0.5, 0.95))
def test_ends_lie_between_errors_that_were_made(values: list[float], coverage: float) -> None:
    assume(len(set(values)) > 1)
    quantiles = ErrorQuantiles(coverage, 64)
    for value in values:
        quantiles.compare(value)
        quantiles.record((100.0,) * 4)
    errors = [math.sqrt(value) - 10 for value in values[1:]]
    low, high = quantiles.offsets(1)
    assert min(0.0, *errors) <= low <= 0 <= high <= max(0.0, *errors)
    inside = sum(low <= error <= high for error in errors)
    assert inside >= coverage * len(errors) - 2


def test_ends_between_and_beyond_the_horizons() -> None:
    quantiles = ErrorQuantiles(0.9, 64)
    for value in range(60):
        quantiles.compare(float(value**2))
        quantiles.record((float(value**2),) * 4)  # an error of h in h steps
    assert [quantiles.offsets(steps)[1] for steps in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert 4 < quantiles.offsets(6)[1] < 8
    assert quantiles.offsets(32)[1] == pytest.approx(16)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 2.920), (3, 2.353), (5, 2.015), (10, 1.812), (30, 1.697)]
)
def test_students_quantiles(freedom: int, quantile: float) -> None:
    assert student(0.95, freedom) == pytest.approx(quantile, rel=0.1 if freedom < 3 else 0.03)
