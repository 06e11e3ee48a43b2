"""Predictors that libraries fit: they follow trends and seasons, and survive the libraries."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from pigou.config import ConfigError
from pigou_lab.predictors.arima import (
    AutoArima,
    DynamoArima,
    DynamoArimaParams,
)
from pigou_lab.predictors.fitted import FittedParams
from pigou_lab.predictors.seasonal import HoltWinters, HoltWintersParams

# Imported by who fits alone: each process of `-n` collects this file.
HAS_LIBRARIES = all(find_spec(module) for module in ("pmdarima", "statsmodels"))
pytestmark = pytest.mark.skipif(not HAS_LIBRARIES, reason="needs pigou-lab[forecast]")


def test_holt_winters_follows_a_trend_and_damps_it() -> None:
    predictor = HoltWinters()
    for value in range(100, 400, 10):
        predictor.observe(float(value))
    assert predictor.forecast(1).mean == pytest.approx(400, rel=0.02)
    rise = predictor.forecast(100).mean - predictor.forecast(1).mean
    assert 0 < rise <= 99 * 10.5
    assert predictor.failures == 0


def test_holt_winters_follows_a_season_once_it_was_seen_twice() -> None:
    rng = np.random.default_rng(2)
    predictor = HoltWinters(HoltWintersParams(season=12))
    wave = 100 + 60 * np.sin(2 * np.pi * np.arange(84) / 12)
    errors, naive, last = [], [], 0.0
    for t, value in enumerate(wave + rng.normal(0, 3, len(wave))):
        if t > 42:
            errors.append(abs(predictor.forecast().mean - value))
            naive.append(abs(last - value))
        last = value
        predictor.observe(float(value))
    assert np.mean(errors) < 0.4 * np.mean(naive)


def test_arima_finds_a_correlation_that_the_last_value_does_not() -> None:
    rng = np.random.default_rng(4)
    predictor = AutoArima(FittedParams(refit=50))
    value, errors, naive = 0.0, [], []
    for t in range(160):
        new = -0.8 * value + rng.normal(0, 10)
        if t > 40:
            errors.append(abs(predictor.forecast().mean - (200 + new)))
            naive.append(abs(value - new))
        value = new
        predictor.observe(200 + value)
    assert np.mean(errors) < 0.6 * np.mean(naive)
    assert predictor.order is not None
    assert predictor.failures == 0


def test_dynamos_arima_before_five_values_is_the_last_one() -> None:
    predictor = DynamoArima()
    for value in (0.0, 10.0, 30.0, 20.0, 50.0):
        predictor.observe(value)
        assert predictor.forecast(3).mean == value
    assert predictor.order is None
    predictor.observe(40.0)
    assert predictor.order is not None


def test_dynamos_arima_of_logarithms_stays_above_zero() -> None:
    predictor = DynamoArima(DynamoArimaParams(log1p=True))
    for value in (100.0, 50.0, 20.0, 9.0, 4.0, 2.0, 1.0, 0.0, 0.0):
        predictor.observe(value)
        assert 0 <= predictor.forecast(5).mean <= 1000


def test_the_last_value_serves_where_the_library_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise np.linalg.LinAlgError("singular")

    monkeypatch.setattr(HoltWinters, "_fit", fails)
    predictor = HoltWinters()
    for value in range(20):
        predictor.observe(float(value))
    assert predictor.forecast().mean == 19
    assert predictor.failures == 9


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ConfigError, match="season is 200"):
        HoltWintersParams(season=200)
    with pytest.raises(ConfigError, match="season is 1"):
        HoltWintersParams(season=1)
    with pytest.raises(ConfigError, match="min_points"):
        HoltWintersParams(min_points=9)
    with pytest.raises(ConfigError, match="refit"):
        FittedParams(refit=-1)
