"""Predictors by automatic ARIMA: ours, and Dynamo's as it ships; fitted by pmdarima."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from pigou.control.planner.predictors.predictor import MAX_LOAD, PredictorParams
from pigou_lab.predictors.fitted import FittedParams, FittedPredictor


class AutoArima(FittedPredictor):
    """ARIMA(p, d, q) of least AIC, by the stepwise search of Hyndman and Khandakar (2008)."""

    Params: ClassVar[type[PredictorParams]] = FittedParams

    def __init__(self, params: FittedParams | None = None) -> None:
        super().__init__(params)
        self._model: Any = None

    @property
    def order(self) -> tuple[int, int, int] | None:
        """p, d and q as fitted; None before."""
        return None if self._model is None else self._model.order

    def _fit(self, loads: Sequence[float]) -> None:
        self._model = self._search([self._scaled(load) for load in loads])

    @staticmethod
    def _search(data: Sequence[float]) -> Any:
        import pmdarima

        array = np.asarray(data, dtype=np.float64)
        return pmdarima.auto_arima(array, suppress_warnings=True, error_action="ignore")

    def _append(self, loads: Sequence[float]) -> None:
        self._model.update(np.array([self._scaled(loads[-1])]))

    def _ahead(self, steps: int) -> list[float]:
        return [self._unscaled(float(mean)) for mean in self._model.predict(n_periods=steps)]

    def _scaled(self, load: float) -> float:
        return load

    def _unscaled(self, mean: float) -> float:
        return mean


class DynamoArimaParams(FittedParams, frozen=True, kw_only=True):
    """Parameters of `DynamoArima`, as in `dynamo.planner` 1.6.1."""

    min_points: int = 5  # values before which the last one is the forecast
    history: int = 1_000_000  # last values that the model is fitted to
    refit: int = 0  # intervals after which it is fitted anew; Dynamo never does
    log1p: bool = False  # whether the model is one of log(1 + load) from the start


class DynamoArima(AutoArima):
    """`ARIMAPredictor` of Dynamo 1.6.1, its default: searches the order once, on five values."""

    Params: ClassVar[type[PredictorParams]] = DynamoArimaParams

    params: DynamoArimaParams

    def __init__(self, params: DynamoArimaParams | None = None) -> None:
        super().__init__(params)
        self._log = self.params.log1p

    def observe(self, value: float | None) -> None:
        """Take in the load of one interval, None for a hole; a first zero counts as none."""
        super().observe(None if value == 0 and not self._ready else value)

    def _skip(self) -> None:
        pass

    def _fit(self, loads: Sequence[float]) -> None:
        self._log = self.params.log1p
        super()._fit(loads)
        p, _, q = self._model.order
        if p == 0 and q == 0 and not self._log:
            self._log = True
            super()._fit(loads)

    def _scaled(self, load: float) -> float:
        return math.log1p(load) if self._log else load

    def _unscaled(self, mean: float) -> float:
        return math.expm1(min(mean, math.log(MAX_LOAD))) if self._log else mean
