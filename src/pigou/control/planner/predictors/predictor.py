"""Load predictors: their protocol, bounds out of their own errors, and the two simplest ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, ClassVar, Protocol

import msgspec

from pigou.config import ConfigError
from pigou.registry import named, read_struct

GROUP = "pigou.predictor"
#: Largest load of one interval that is believed, in requests or tokens.
MAX_LOAD = 1e15
#: Steps ahead at which errors are recorded; those between are interpolated.
HORIZONS = (1, 2, 4, 8)


class Forecast(msgspec.Struct, frozen=True):
    """A load to come, in the unit of the values observed."""

    mean: float  # expected load of the interval
    low: float  # lower bound of its interval, at least 0
    high: float  # upper bound, at least `mean`


class LoadPredictor(Protocol):
    """Forecasts one series of loads: requests of an interval, or their mean length in tokens.

    It is pure: no clock, no randomness, and equal histories give equal forecasts.
    """

    # its parameters, a frozen `msgspec.Struct`; the class is called with one.
    Params: ClassVar[type[msgspec.Struct]]

    @property
    def ready(self) -> bool:
        """Whether a value was observed; until then forecasts are 0 and mean nothing."""
        ...

    def observe(self, value: float | None) -> None:
        """Take in the load of one interval.

        None is a hole in the metrics, and so is what no load can be: NaN, infinity, a negative
        number, or one above `MAX_LOAD`. A hole is never 0.
        """
        ...

    def forecast(self, steps: int = 1) -> Forecast:
        """Return the load `steps` intervals after the last one observed.

        Raises:
            ValueError: `steps` is below 1.
        """
        ...


class PredictorParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of every predictor."""

    coverage: float = 0.9  # share of intervals whose load is to be inside the forecast's bounds
    errors: int = 64  # last errors of the predictor itself that the bounds come from

    def __post_init__(self) -> None:
        if not 0.0 < self.coverage < 1.0:
            raise ConfigError(f"coverage is {self.coverage}; it must be above 0 and below 1")
        check_counts(self, 2, "errors")


def check_counts(params: msgspec.Struct, minimum: int, *names: str) -> None:
    """Refuse fields that are not from `minimum` to a million, with a ConfigError."""
    for name in names:
        value = getattr(params, name)
        if not minimum <= value <= 1_000_000:
            raise ConfigError(f"{name} is {value}; it must be from {minimum} to 1000000")


def check_positive(params: msgspec.Struct, *names: str) -> None:
    """Refuse fields that are not finite and above 0, with a ConfigError."""
    for name in names:
        value = getattr(params, name)
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be finite, and above 0")


def load(name: str, params: Mapping[str, Any] | None = None) -> LoadPredictor:
    """Return a new predictor by its name in the entry point group `pigou.predictor`.

    Raises:
        ConfigError: there is none of that name, it has no such parameter, a value does not fit, or
            a library that it needs is not installed.
    """
    kind = named(GROUP, name, "load predictor")
    own = read_struct(f"load predictor {name}", kind.Params, dict(params or {}))
    predictor: LoadPredictor = kind(own)
    return predictor


def as_load(value: float | None) -> float | None:
    """Return a value as it is believed, or None for a hole."""
    if value is None or not 0.0 <= value <= MAX_LOAD:
        return None
    return float(value)


class ErrorQuantiles:
    """Where errors of forecasts lie, for each of `HORIZONS`.

    An error is sqrt(load) - sqrt(mean): the square roots of counts spread alike at every level
    (Anscombe 1948), so the errors of a busy hour serve a quiet one. The bounds are the k-th least
    and k-th greatest of the last n errors, k = floor((n + 1) (1 - coverage) / 2): an exchangeable
    next error is between them with probability 1 - 2 k / (n + 1) (Vovk 2005, conformal prediction).
    Where k is 0 they are Student's quantiles times the root mean square error.
    """

    def __init__(self, coverage: float, count: int) -> None:
        self._tail = (1.0 - coverage) / 2.0
        self._errors = [deque[float](maxlen=count) for _ in HORIZONS]
        self._means = deque[tuple[float, ...] | None](maxlen=HORIZONS[-1])

    def record(self, means: tuple[float, ...] | None) -> None:
        """Note the means now forecast for `HORIZONS`, None where there are none."""
        self._means.appendleft(means)

    def compare(self, load: float | None) -> None:
        """Compare the load of a new interval, None for a hole, with earlier forecasts of it."""
        if load is None:
            return
        for index, horizon in enumerate(HORIZONS):
            if horizon <= len(self._means):
                means = self._means[horizon - 1]
                if means is not None:
                    error = math.sqrt(load) - math.sqrt(max(means[index], 0.0))
                    self._errors[index].append(error)

    def offsets(self, steps: int) -> tuple[float, float]:
        """Return the lower bound (at most 0) and the upper (at least 0) of the error in `steps`."""
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
        """Return the bounds at one horizon; without errors, a random walk's from one below."""
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
    """Return a quantile of Student's t, by the expansion of Fisher and Cornish (1960).

    Args:
        probability: above 0.5.
        freedom: degrees of freedom, at least 1; at 1 the result is 20% to 30% low at 95%.
    """
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / freedom + second / freedom**2


class CalibratedPredictor:
    """A predictor of means, whose bounds come from its own errors.

    A subclass gives `_update`, `_mean`, and `_skip` where a hole changes something. Before the
    second value an error was never seen: both bounds are the mean.
    """

    Params: ClassVar[type[PredictorParams]] = PredictorParams

    def __init__(self, params: PredictorParams | None = None) -> None:
        self.params: Any = params or self.Params()
        self._quantiles = ErrorQuantiles(self.params.coverage, self.params.errors)
        self._ready = False

    @property
    def ready(self) -> bool:
        """Whether a value was observed."""
        return self._ready

    def observe(self, value: float | None) -> None:
        """Take in the load of one interval, None for a hole."""
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
        """Return the load `steps` intervals ahead, at least 1."""
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
        """An interval passed without metrics."""

    def _mean(self, steps: int) -> float:
        raise NotImplementedError


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
