"""Predictors of what repeats: the load of a season ago, and Holt and Winters' method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from pigou.config import ConfigError, check_fields
from pigou.control.planner.predictors.predictor import (
    MAX_COUNT,
    CalibratedPredictor,
    PredictorParams,
)
from pigou_lab.predictors.fitted import FittedParams, FittedPredictor


class SeasonalParams(PredictorParams, frozen=True, kw_only=True):
    """Parameters of `SeasonalNaive`."""

    season: int = 480  # intervals of a season; 480 of 180 s are a day

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "season", ge=1, le=MAX_COUNT)


class SeasonalNaive(CalibratedPredictor):
    """The load of one season ago (Hyndman, Athanasopoulos): y(t + h - season ceil(h / season))."""

    Params: ClassVar[type[PredictorParams]] = SeasonalParams

    def __init__(self, params: SeasonalParams | None = None) -> None:
        super().__init__(params)
        self._loads: dict[int, float] = {}
        self._now = -1
        self._last = 0.0

    def observe(self, value: float | None) -> None:
        """Take in the load of one interval, None for a hole."""
        self._now = (self._now + 1) % self.params.season
        super().observe(value)

    def _update(self, load: float) -> None:
        self._last = self._loads[self._now] = load

    def _mean(self, steps: int) -> float:
        return self._loads.get((self._now + steps) % self.params.season, self._last)


#: Seasons that a history needs for a seasonal model.
_SEASONS = 2


class HoltWintersParams(FittedParams, frozen=True, kw_only=True):
    """Parameters of `HoltWinters`."""

    # intervals of a season, at least 2; 0 for a model without one. The history must hold two
    # seasons.
    season: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "min_points", "history", ge=10, le=MAX_COUNT)
        if self.season and not 2 <= self.season <= self.history // _SEASONS:
            raise ConfigError(
                f"season is {self.season}; it must be 0, or from 2 to half of history "
                f"({self.history})"
            )


class HoltWinters(FittedPredictor):
    """Exponential smoothing with a damped additive trend, and an optional additive season.

    y(t + h) = level + (phi + ... + phi^h) trend + season(t + h): Holt 1957, Winters 1960, Gardner
    and McKenzie 1985, by maximum likelihood (statsmodels' `ETSModel`).
    """

    Params: ClassVar[type[PredictorParams]] = HoltWintersParams

    params: HoltWintersParams

    def __init__(self, params: HoltWintersParams | None = None) -> None:
        super().__init__(params)
        self._weights: Any = None
        self._result: Any = None
        self._season = 0

    def _fit(self, loads: Sequence[float]) -> None:
        season = self.params.season
        self._season = season if len(loads) >= _SEASONS * season else 0
        self._result = self._model(loads).fit(disp=False)
        self._weights = self._result.params

    def _append(self, loads: Sequence[float]) -> None:
        self._result = self._model(loads).smooth(self._weights)

    def _model(self, loads: Sequence[float]) -> Any:
        from statsmodels.tsa.exponential_smoothing.ets import ETSModel

        seasonal = {"seasonal": "add", "seasonal_periods": self._season} if self._season else {}
        data = np.asarray(loads, dtype=np.float64)
        return ETSModel(data, error="add", trend="add", damped_trend=True, **seasonal)

    def _ahead(self, steps: int) -> list[float]:
        return [float(mean) for mean in self._result.forecast(steps)]
