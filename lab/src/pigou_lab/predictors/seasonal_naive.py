"""Predictor of what repeats: the load of the same time one season ago."""

from __future__ import annotations

from typing import ClassVar

from pigou.control.planner.predictors.predictor import (
    CalibratedPredictor,
    PredictorParams,
    check_counts,
)


class SeasonalParams(PredictorParams, frozen=True, kw_only=True):
    """Parameters of `SeasonalNaive`."""

    season: int = 480  # intervals of a season; 480 of 180 s are a day

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, 1, "season")


class SeasonalNaive(CalibratedPredictor):
    """The load of one season ago: y(t + h) = y(t + h - season ceil(h / season)).

    Hyndman and Athanasopoulos, "Forecasting: Principles and Practice" (3rd ed.), section 5.2. An
    interval without a value one season ago has the one before; without any, the last value.
    """

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
