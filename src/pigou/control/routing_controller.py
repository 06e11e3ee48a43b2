"""Routing controllers: set parameters of the router, and limits of engines, as load changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

import msgspec
import numpy as np

from pigou.config import check_bounds, check_fields
from pigou.control.saturation.regime import Detector, Regime, TTFTSample
from pigou.registry import named, read_struct
from pigou.request import EngineLimits

GROUP = "pigou.controller"


class RoutingSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of the choice among candidates."""

    temperature: float = 0.0  # softmax temperature over costs; 0 takes the cheapest
    # omega of Eq. 1 (Georgiou 2026): weight of the blocks that a worker would have to prefill, net
    # of cached ones, against the blocks that it has in use.
    overlap_weight: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "temperature", "overlap_weight", ge=0)


class OperatingPoint(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Settings of router and engines under a load; what is None or left out stays as started."""

    temperature: float | None = None
    params: dict[str, float] = {}  # parameters of the routing policy
    max_seqs: int | None = None  # most running requests per worker
    max_batched_tokens: int | None = None  # most tokens per step

    def __post_init__(self) -> None:
        for name, low in (("temperature", 0), ("max_seqs", 1), ("max_batched_tokens", 1)):
            if (value := getattr(self, name)) is not None:
                check_bounds(name, value, ge=low)

    @property
    def limits(self) -> EngineLimits:
        """Limits of the engines."""
        return EngineLimits(self.max_seqs, self.max_batched_tokens)


class Parameters(RoutingSetting, frozen=True):
    """Parameters that a request is routed with."""

    # index of this choice of the controller's; the outcome of the request carries it back
    # (`TTFTSample.setting`, `E2ESample.setting`).
    setting: int = 0
    point: OperatingPoint | None = None  # in place of temperature and overlap weight

    @classmethod
    def of(cls, setting: RoutingSetting, index: int = 0) -> Self:
        """Return a setting with its index."""
        return cls(setting.temperature, setting.overlap_weight, index)


class E2ESample(msgspec.Struct, frozen=True):
    """End-to-end latency of a request."""

    seconds: float  # from its arrival to its last token
    # seconds that it would take with the fleet to itself, as far as known: what its latency is
    # compared with.
    unloaded: float = 1.0
    setting: int = 0  # index of the parameters that it was routed under


class Controller(Protocol):
    """Sets routing parameters; built as `Controller(params, detector, generator)`."""

    Params: ClassVar[type[msgspec.Struct]]

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Record a first token or the end of a request, at `now` (ns)."""
        ...

    def parameters(self, now: int) -> Parameters:
        """Return the parameters of a request routed at `now` (ns)."""
        ...


class StaticConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Static`."""

    setting: RoutingSetting = RoutingSetting()


class Static:
    """Constant parameters, as for the toll policy, whose prices follow load by themselves."""

    Params: ClassVar[type[msgspec.Struct]] = StaticConfig

    def __init__(
        self, config: StaticConfig | None = None, detector: object = None, generator: object = None
    ) -> None:
        self.config = config or StaticConfig()
        self._parameters = Parameters.of(self.config.setting)

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Learn nothing."""

    def parameters(self, now: int) -> Parameters:
        """Return the setting."""
        return self._parameters


class OperatingPointsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `OperatingPoints`: a point for each load, as `pigou frontier` finds them."""

    light: OperatingPoint = OperatingPoint()  # while the regime is Below
    heavy: OperatingPoint = OperatingPoint()  # in Transition, and while Saturated


class OperatingPoints:
    """Applies the operating point of the detector's regime."""

    Params: ClassVar[type[msgspec.Struct]] = OperatingPointsConfig

    def __init__(
        self, config: OperatingPointsConfig, detector: Detector, generator: object = None
    ) -> None:
        self.config = config
        self._detector = detector
        self._parameters = tuple(
            Parameters(setting=index, point=point)
            for index, point in enumerate((config.light, config.heavy))
        )

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Learn nothing beside the detector."""

    def parameters(self, now: int) -> Parameters:
        """Return the point of the regime."""
        return self._parameters[self._detector.regime is not Regime.BELOW]


def load(
    values: Mapping[str, Any], detector: Detector, generator: np.random.Generator
) -> Controller:
    """Build the controller named `controller` in `pigou.controller`; raises ConfigError."""
    own = dict(values)
    name = own.pop("controller", None)
    kind = named(GROUP, name, "controller")
    params = read_struct(f"controller {name}", kind.Params, own)
    controller: Controller = kind(params, detector, generator)
    return controller
