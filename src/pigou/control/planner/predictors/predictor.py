"""Load predictors: protocol, bounds from their own errors, and the two simplest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, ClassVar, Protocol

import msgspec

from pigou.config import check_bounds
from pigou.registry import named, read_struct

GROUP = "pigou.predictor"
#: Largest plausible load of one interval, in requests or tokens.
MAX_LOAD = 1e15
#: Largest count in the parameters of a predictor.
MAX_COUNT = 1_000_000
#: Steps ahead at which errors are recorded; others are interpolated.
HORIZONS = (1, 2, 4, 8)


class Forecast(msgspec.Struct, frozen=True):
    """A forecast load, in the unit of the observed values."""

    mean: float  # expected load of the interval
    low: float  # at least 0
    high: float  # at least `mean`


class LoadPredictor(Protocol):
    """Forecasts a series: requests per interval, or mean tokens. Pure and deterministic."""

    Params: ClassVar[type[msgspec.Struct]]  # frozen parameters; the class is called with one

    @property
    def ready(self) -> bool:
        """True after the first value; before, forecasts are 0 and mean nothing."""
        ...

    def observe(self, value: float | None) -> None:
        """Take in one interval's load; None and implausible values are holes, not 0."""
        ...

    def forecast(self, steps: int = 1) -> Forecast:
        """Return the load `steps` intervals ahead; raises ValueError below 1."""
        ...


class PredictorParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of every predictor."""

    coverage: float = 0.9  # share of loads that shall be inside the bounds
    errors: int = 64  # recent forecast errors that the bounds come from

    def __post_init__(self) -> None:
        check_bounds("coverage", self.coverage, gt=0, lt=1)
        check_bounds("errors", self.errors, ge=2, le=MAX_COUNT)


def load(name: str, params: Mapping[str, Any] | None = None) -> LoadPredictor:
    """Return the predictor `name` of `pigou.predictor`; raises ConfigError for bad parameters."""
    kind = named(GROUP, name, "load predictor")
    own = read_struct(f"load predictor {name}", kind.Params, dict(params or {}))
    predictor: LoadPredictor = kind(own)
    return predictor


def as_load(value: float | None) -> float | None:
    """Return a plausible value; None for a hole."""
    if value is None or not 0.0 <= value <= MAX_LOAD:
        return None
    return float(value)


class ErrorQuantiles:
    """Bounds of forecast errors, per horizon of `HORIZONS`.

    An error is sqrt(load) - sqrt(mean), which has the same spread at every level (Anscombe 1948).
    The bounds are the k-th least and greatest of the last n errors, k = floor((n + 1) (1 -
    coverage) / 2), with coverage 1 - 2 k / (n + 1) (conformal prediction, Vovk 2005); where k is 0,
    Student's quantiles times the RMS error.
    """

    def __init__(self, coverage: float, count: int) -> None:
        self._tail = (1.0 - coverage) / 2.0
        self._errors = [deque[float](maxlen=count) for _ in HORIZONS]
        self._means = deque[tuple[float, ...] | None](maxlen=HORIZONS[-1])

    def record(self, means: tuple[float, ...] | None) -> None:
        """Record the current forecasts for `HORIZONS`; None without any."""
        self._means.appendleft(means)

    def compare(self, load: float | None) -> None:
        """Compare an interval's load (None: hole) with its earlier forecasts."""
        if load is None:
            return
        for index, horizon in enumerate(HORIZONS):
            if horizon <= len(self._means):
                means = self._means[horizon - 1]
                if means is not None:
                    error = math.sqrt(load) - math.sqrt(max(means[index], 0.0))
                    self._errors[index].append(error)

    def offsets(self, steps: int) -> tuple[float, float]:
        """Return the lower (at most 0) and upper (at least 0) error bounds `steps` ahead."""
        above = next((i for i, horizon in enumerate(HORIZONS) if horizon >= steps), None)
        if above is None:
            return self._scaled(len(HORIZONS) - 1, math.sqrt(steps / HORIZONS[-1]))
        if HORIZONS[above] == steps:
            return self._scaled(above, 1.0)
        share = math.log2(steps / HORIZONS[above - 1])
        low, high = self._scaled(above - 1, 1.0)
        low2, high2 = self._scaled(above, 1.0)
        return low + share * (low2 - low), high + share * (high2 - high)

    def _scaled(self, index: int, scale: float) -> tuple[float, float]:
        """Return one horizon's bounds; without errors, a random walk's from a shorter one."""
        while not self._errors[index] and index > 0:
            scale *= math.sqrt(HORIZONS[index] / HORIZONS[index - 1])
            index -= 1
        low, high = self._quantiles(self._errors[index])
        return scale * min(low, 0.0), scale * max(high, 0.0)

    def _quantiles(self, errors: deque[float]) -> tuple[float, float]:
        if not errors:
            return 0.0, 0.0
        count = len(errors)
        k = int((count + 1) * self._tail + 1e-9)
        if k < 1:
            width = student(1.0 - self._tail, count) * math.hypot(*errors) / math.sqrt(count)
            return -width, width
        ordered = sorted(errors)
        return ordered[k - 1], ordered[count - k]


def student(probability: float, freedom: int) -> float:
    """Return a quantile (above 0.5) of Student's t (Fisher and Cornish 1960); rough at 1 degree."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / freedom + second / freedom**2


class CalibratedPredictor:
    """Base of mean predictors with bounds from their errors; define `_update`, `_mean`, `_skip`."""

    Params: ClassVar[type[PredictorParams]] = PredictorParams

    def __init__(self, params: PredictorParams | None = None) -> None:
        self.params: Any = params or self.Params()
        self._quantiles = ErrorQuantiles(self.params.coverage, self.params.errors)
        self._ready = False

    @property
    def ready(self) -> bool:
        """True after the first value."""
        return self._ready

    def observe(self, value: float | None) -> None:
        """Take in one interval's load; None is a hole."""
        load = as_load(value)
        self._quantiles.compare(load)
        if load is not None:
            self._ready = True
            self._update(load)
        elif self._ready:
            self._skip()
        means = tuple(self._bounded(steps) for steps in HORIZONS) if self._ready else None
        self._quantiles.record(means)

    def forecast(self, steps: int = 1) -> Forecast:
        """Return the load `steps` (at least 1) intervals ahead."""
        if steps < 1:
            raise ValueError(f"steps is {steps}; it must be at least 1")
        if not self._ready:
            return Forecast(0.0, 0.0, 0.0)
        mean = self._bounded(steps)
        root = math.sqrt(max(mean, 0.0))
        low, high = self._quantiles.offsets(steps)
        bottom, top = max(root + low, 0.0) ** 2, (root + high) ** 2
        positive = max(mean, 0.0)
        return Forecast(mean, min(bottom, positive), min(max(top, positive), MAX_LOAD))

    def _bounded(self, steps: int) -> float:
        return min(max(self._mean(steps), 0.0), MAX_LOAD)

    def _update(self, load: float) -> None:
        raise NotImplementedError

    def _skip(self) -> None:
        """Pass an interval without metrics."""

    def _mean(self, steps: int) -> float:
        raise NotImplementedError


class LastValue(CalibratedPredictor):
    """Persistence: y(t + h) = y(t); `constant` in Dynamo."""

    def __init__(self, params: PredictorParams | None = None) -> None:
        super().__init__(params)
        self._last = 0.0

    def _update(self, load: float) -> None:
        self._last = load

    def _mean(self, steps: int) -> float:  # noqa: ARG002 (the same at every horizon)
        return self._last


class EwmaParams(PredictorParams, frozen=True, kw_only=True):
    """Parameters of `Ewma`."""

    half_life: float = 1.0  # in intervals

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds("half_life", self.half_life, gt=0)


class Ewma(CalibratedPredictor):
    """Exponentially weighted mean, normalised by its weights: w = 0.5^(1 / half_life)."""

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
