"""Predictors that a library fits: when, on what history, and what serves when it fails."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

from pigou.config import ConfigError, check_fields
from pigou.control.planner.predictors.predictor import (
    HORIZONS,
    MAX_COUNT,
    MAX_LOAD,
    CalibratedPredictor,
    PredictorParams,
)

_LIBRARIES = ("pmdarima", "statsmodels")
#: Errors that the libraries raise for unsuitable numbers.
_FAILURES = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


class FittedParams(PredictorParams, frozen=True, kw_only=True):
    """Parameters of predictors with a fitted model."""

    min_points: int = 12  # values before which the last one is the forecast
    history: int = 240  # last values that a model is fitted to
    refit: int = 24  # intervals after which it is fitted anew; 0 for never

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "min_points", "history", ge=5, le=MAX_COUNT)
        check_fields(self, "refit", ge=0, le=MAX_COUNT)


class FittedPredictor(CalibratedPredictor):
    """Base class: refits a model now and then; repeats the last value if the fit fails."""

    params: FittedParams

    def __init__(self, params: FittedParams | None = None) -> None:
        missing = [library for library in _LIBRARIES if find_spec(library) is None]
        if missing:
            raise ConfigError(
                f"load predictor {type(self).__name__} needs {', '.join(missing)}; "
                "pip install './lab[forecast]' in a checkout of Pigou"
            )
        super().__init__(params)
        self.failures = 0
        self._loads: list[float] = []
        self._age = -1
        self._path: list[float] = []

    def _update(self, load: float) -> None:
        self._loads.append(load)
        self._refresh()

    def _skip(self) -> None:
        self._loads.append(self._mean(1))
        self._refresh()

    def _refresh(self) -> None:
        self._path = []
        if len(self._loads) < self.params.min_points or len(set(self._loads)) == 1:
            self._age = -1
            return
        stale = self._age < 0 or 0 < self.params.refit <= self._age
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if stale:
                    del self._loads[: -self.params.history]
                    self._fit(self._loads)
                    self._age = 0
                else:
                    self._append(self._loads)
                self._age += 1
            except _FAILURES:
                self.failures += 1
                self._age = -1
                return
        self._path = self._bounded_path(HORIZONS[-1])

    def _bounded_path(self, steps: int) -> list[float]:
        """Return the means of the next `steps` intervals; none where one is no number."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                path = self._ahead(steps)
            except _FAILURES:
                path = [math.nan]
        if not all(math.isfinite(mean) for mean in path):
            self.failures += 1
            return []
        return [min(max(mean, 0.0), MAX_LOAD) for mean in path]

    def _mean(self, steps: int) -> float:
        if steps > len(self._path) > 0:
            path = self._bounded_path(steps) or self._path
            return path[-1]
        return self._path[steps - 1] if self._path else self._loads[-1]

    def _fit(self, loads: Sequence[float]) -> None:
        raise NotImplementedError

    def _append(self, loads: Sequence[float]) -> None:
        raise NotImplementedError

    def _ahead(self, steps: int) -> list[float]:
        raise NotImplementedError
