"""Last value, exponential mean and last season, by their formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou.control.planner.predictors.predictor import Ewma, EwmaParams, LastValue
from pigou_lab.predictors.seasonal import SeasonalNaive, SeasonalParams

values = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=1, max_size=40)


@given(values)
def test_the_last_value_is_the_last_one_known(history: list[float | None]) -> None:
    predictor = LastValue()
    for value in history:
        predictor.observe(value)
    known = [value for value in history if value is not None]
    assert predictor.forecast(7).mean == (known[-1] if known else 0.0)


@given(values, st.floats(0.2, 20))
def test_the_exponential_mean_is_the_weighted_sum(
    history: list[float | None], half_life: float
) -> None:
    predictor = Ewma(EwmaParams(half_life=half_life))
    for value in history:
        predictor.observe(value)
    weights = [0.5 ** (age / half_life) for age in range(len(history))][::-1]
    known = [(w, v) for w, v in zip(weights, history, strict=True) if v is not None]
    if known:
        mean = sum(w * v for w, v in known) / sum(w for w, _ in known)
        assert predictor.forecast().mean == pytest.approx(mean, rel=1e-6, abs=1e-9)


@given(values, st.integers(1, 12), st.integers(1, 30))
def test_last_season_is_found_by_looking_back(
    history: list[float | None], season: int, steps: int
) -> None:
    predictor = SeasonalNaive(SeasonalParams(season=season))
    for value in history:
        predictor.observe(value)
    known = [value for value in history if value is not None]
    at = len(history) - 1 + steps
    earlier = [i for i in range(at - season, -1, -season) if i < len(history)]
    expected = next((history[i] for i in earlier if history[i] is not None), None)
    if expected is None:
        expected = known[-1] if known else 0.0
    assert predictor.forecast(steps).mean == expected


def test_what_cannot_be_is_refused() -> None:
    for half_life in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="half_life"):
            EwmaParams(half_life=half_life)
    with pytest.raises(ConfigError, match="season"):
        SeasonalParams(season=0)
