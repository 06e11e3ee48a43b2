"""What a load predictor is told and says, and its entry point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from pigou.config import ConfigError
from pigou.registry import named, read_struct

GROUP = "pigou.predictor"
#: Largest load of one interval that is believed, in requests or tokens.
MAX_LOAD = 1e15


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
    """Check that fields are from `minimum` to a million.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        value = getattr(params, name)
        if not minimum <= value <= 1_000_000:
            raise ConfigError(f"{name} is {value}; it must be from {minimum} to 1000000")


def check_positive(params: msgspec.Struct, *names: str) -> None:
    """Check that fields are above 0 and finite.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        value = getattr(params, name)
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be finite, and above 0")


def load(name: str, params: Mapping[str, Any] | None = None) -> LoadPredictor:
    """Return a new predictor by its name in the entry point group `pigou.predictor`.

    Raises:
        ConfigError: there is none of that name (the message lists those that there are), it has
            no such parameter, a value does not fit, or a library of it is not installed.
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
