"""Predictors of a level with a trend, by a Kalman filter: ours, and Dynamo's as it ships."""

from __future__ import annotations

import math
from typing import ClassVar

from pigou.config import check_fields
from pigou.control.planner.predictors.predictor import (
    MAX_COUNT,
    MAX_LOAD,
    CalibratedPredictor,
    PredictorParams,
)


class KalmanParams(PredictorParams, frozen=True, kw_only=True):
    """Parameters of `Kalman`; the defaults are Dynamo's."""

    level_variance: float = 1.0  # variance of the level's step in an interval, squared load units
    trend_variance: float = 0.1  # variance of the trend's step
    load_variance: float = 10.0
    floor: bool = True  # whether forecasts below 0 are 0; Dynamo's were not before its issue 14493

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "level_variance", "trend_variance", "load_variance", gt=0)


class LocalLinearTrend:
    """Kalman filter of level and trend, F = [[1, 1], [0, 1]], H = [1, 0], in Joseph's form."""

    def __init__(self, level_variance: float, trend_variance: float, load_variance: float) -> None:
        self._variances = level_variance, trend_variance, load_variance
        self._p = (1000.0, 0.0, 1000.0)
        self.level = 0.0
        self.trend = 0.0

    def start(self, value: float) -> None:
        """Set the first level."""
        self.level = value

    def advance(self) -> None:
        """Let an interval pass: x = F x, P = F P F' + Q."""
        p00, p01, p11 = self._p
        level_variance, trend_variance, _ = self._variances
        self.level += self.trend
        self._p = (p00 + 2.0 * p01 + p11 + level_variance, p01 + p11, p11 + trend_variance)

    def update(self, value: float) -> None:
        """Take in a value: x += K (value - level), P = (I - K H) P (I - K H)' + K R K'."""
        p00, p01, p11 = self._p
        noise = self._variances[2]
        gain = p00 / (p00 + noise)
        slope = p01 / (p00 + noise)
        off = value - self.level
        self.level += gain * off
        self.trend += slope * off
        left = 1.0 - gain
        self._p = (
            left * left * p00 + gain * gain * noise,
            left * (p01 - slope * p00) + gain * slope * noise,
            p11 - 2.0 * slope * p01 + slope * slope * (p00 + noise),
        )


class Kalman(CalibratedPredictor):
    """Local linear trend: y(t + h) = level + h trend (Harvey 1989, section 2.3.1)."""

    Params: ClassVar[type[PredictorParams]] = KalmanParams

    def __init__(self, params: KalmanParams | None = None) -> None:
        super().__init__(params)
        own = self.params
        self._filter = LocalLinearTrend(own.level_variance, own.trend_variance, own.load_variance)
        self._values = 0

    def _update(self, load: float) -> None:
        if self._values:
            self._filter.advance()
            self._filter.update(load)
        else:
            self._filter.start(load)
        self._values += 1

    def _skip(self) -> None:
        self._filter.advance()
        self._filter.trend *= 0.5

    def _mean(self, steps: int) -> float:
        return self._filter.level + steps * self._filter.trend

    def _bounded(self, steps: int) -> float:
        if self.params.floor:
            return super()._bounded(steps)
        return min(max(self._mean(steps), -MAX_LOAD), MAX_LOAD)


class DynamoKalmanParams(KalmanParams, frozen=True, kw_only=True):
    """Parameters of `DynamoKalman`, as in `dynamo.planner` 1.6.1."""

    min_points: int = 5  # values before which the last one is the forecast
    log1p: bool = False  # whether the filter works on log(1 + load)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "min_points", ge=0, le=MAX_COUNT)


class DynamoKalman(Kalman):
    """`KalmanPredictor` of Dynamo 1.6.1; repeats the last value until `min_points` values."""

    Params: ClassVar[type[PredictorParams]] = DynamoKalmanParams

    def __init__(self, params: DynamoKalmanParams | None = None) -> None:
        super().__init__(params)
        self._last = 0.0

    def observe(self, value: float | None) -> None:
        """Take in the load of one interval, None for a hole; a first zero counts as none."""
        super().observe(None if value == 0 and not self._ready else value)

    def _update(self, load: float) -> None:
        self._last = load
        super()._update(math.log1p(load) if self.params.log1p else load)

    def _skip(self) -> None:
        pass

    def _mean(self, steps: int) -> float:
        if self._values < self.params.min_points:
            return self._last
        mean = super()._mean(steps)
        return math.expm1(min(mean, math.log(MAX_LOAD))) if self.params.log1p else mean
