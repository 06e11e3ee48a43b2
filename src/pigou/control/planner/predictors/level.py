"""Predictors of a level that stays: the last value, and an exponentially weighted mean."""

from __future__ import annotations

from typing import ClassVar

from pigou.control.planner.predictors.calibrated import CalibratedPredictor
from pigou.control.planner.predictors.predictor import PredictorParams, check_positive


class LastValue(CalibratedPredictor):
    """The load stays what it was: y(t + h) = y(t). Dynamo calls it `constant`."""

    def __init__(self, params: PredictorParams | None = None) -> None:
        super().__init__(params)
        self._last = 0.0

    def _update(self, load: float) -> None:
        self._last = load

    def _mean(self, steps: int) -> float:  # noqa: ARG002 (the same at every horizon)
        return self._last


class EwmaParams(PredictorParams, frozen=True, kw_only=True):
    """Parameters of `Ewma`."""

    half_life: float = 1.0  # intervals after which a value counts half

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "half_life")


class Ewma(CalibratedPredictor):
    """Exponentially weighted mean: sum of w^k y(t - k) / sum of w^k, w = 0.5^(1 / half_life).

    The sum of weights is carried along, so the first value counts fully (Holt 1957 has a start
    value instead). In a hole all weights age, so the next value counts for more.
    """

    Params: ClassVar[type[PredictorParams]] = EwmaParams

    def __init__(self, params: EwmaParams | None = None) -> None:
        super().__init__(params)
        self._keep = 0.5 ** (1.0 / self.params.half_life)
        self._weight = 0.0
        self._level = 0.0

    def _update(self, load: float) -> None:
        self._weight = self._weight * self._keep + 1.0
        self._level += (load - self._level) / self._weight

    def _skip(self) -> None:
        self._weight *= self._keep

    def _mean(self, steps: int) -> float:  # noqa: ARG002 (the same at every horizon)
        return self._level
