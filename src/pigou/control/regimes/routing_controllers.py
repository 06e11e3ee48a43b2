"""Controllers of the router: which temperature and overlap weight requests are routed under."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from pigou.config import tagged
from pigou.control.regimes.bandit import Bandit, BanditConfig
from pigou.control.regimes.parameters import E2ESample, Parameters, RoutingSetting
from pigou.control.saturation.regime import Detector, Regime, TTFTSample


class Controller(Protocol):
    """Says under which parameters requests are routed now; times must not fall."""

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Take in a first token or the end of a request, at `now` (ns)."""
        ...

    def parameters(self, now: int) -> Parameters:
        """Return the parameters of a request that is routed at `now` (ns)."""
        ...


class RegimeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of each regime; the defaults are Table 2 of Georgiou 2026.

    Below exploits cached prefixes, Transition spreads by chance, Saturated spreads and all but
    ignores prefixes. The last row fired in no experiment of the paper.

    Attributes:
        below: while the fleet does not queue.
        transition: once it begins to.
        saturated: when it has more than it can do.
    """

    below: RoutingSetting = RoutingSetting(temperature=0.0, overlap_weight=1.0)
    transition: RoutingSetting = RoutingSetting(temperature=0.7, overlap_weight=1.0)
    saturated: RoutingSetting = RoutingSetting(temperature=0.8, overlap_weight=0.1)

    def setting(self, regime: Regime) -> RoutingSetting:
        """Return the row of a regime."""
        return (self.below, self.transition, self.saturated)[regime.level]


class StaticConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True,
    tag_field="controller", tag="static",
):  # fmt: skip
    """Parameters of `Static`.

    Attributes:
        setting: what all requests are routed under.
    """

    setting: RoutingSetting = RoutingSetting()


class RegimeConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True,
    tag_field="controller", tag="regime",
):  # fmt: skip
    """Parameters of `RegimeController`.

    Attributes:
        table: a row a regime.
    """

    table: RegimeTable = RegimeTable()


class InterpolatedConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True,
    tag_field="controller", tag="interpolated",
):  # fmt: skip
    """Parameters of `Interpolated`.

    Attributes:
        table: what is interpolated.
    """

    table: RegimeTable = RegimeTable()


class Static:
    """The same parameters at all times: what a policy wants that needs no regime.

    The toll policy is one: its prices rise with load by themselves.
    """

    def __init__(self, config: StaticConfig | None = None) -> None:
        self.config = config or StaticConfig()
        self._parameters = Parameters.of(self.config.setting)

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Nothing is learned."""

    def parameters(self, now: int) -> Parameters:  # noqa: ARG002
        """Return the setting."""
        return self._parameters


class RegimeController:
    """The paper's controller: the row of the regime that a detector tells (Table 2).

    `Parameters.setting` is the level of the regime. The detector is fed by its owner.
    """

    def __init__(self, config: RegimeConfig, detector: Detector) -> None:
        self.config = config
        self.detector = detector

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Nothing is learned beside the detector."""

    def parameters(self, now: int) -> Parameters:  # noqa: ARG002
        """Return the row of the regime."""
        regime = self.detector.regime
        return Parameters.of(self.config.table.setting(regime), regime.level)


class Interpolated:
    """The same table without jumps: parameters move with the detector's smoothed signal.

    Between the detector's thresholds, on a logarithmic scale: the Below row up to the first, the
    Saturated row from the second on, the Transition row in the geometric middle, and linear
    between these. (The paper names continuous interpolation as an extension, section 9.)
    """

    def __init__(self, config: InterpolatedConfig, detector: Detector) -> None:
        self.config = config
        self.detector = detector

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Nothing is learned beside the detector."""

    def parameters(self, now: int) -> Parameters:  # noqa: ARG002
        """Return the interpolated row; the Below row before there is a signal."""
        at = self.share()
        table = self.config.table
        rows = (table.below, table.transition, table.saturated)
        return Parameters(
            float(np.interp(at, (0.0, 0.5, 1.0), [row.temperature for row in rows])),
            float(np.interp(at, (0.0, 0.5, 1.0), [row.overlap_weight for row in rows])),
        )

    def share(self) -> float:
        """Return how far the signal is from the first threshold to the second, 0 to 1."""
        low, high = self.detector.thresholds
        signal = self.detector.signal
        if not signal > low:
            return 0.0
        return min(1.0, math.log(signal / low) / math.log(high / low))


ControllerConfig: TypeAlias = StaticConfig | RegimeConfig | InterpolatedConfig | BanditConfig


def controller(
    config: ControllerConfig, detector: Detector, generator: np.random.Generator
) -> Controller:
    """Return a new controller.

    Args:
        config: its parameters.
        detector: that `regime` and `interpolated` follow; its owner feeds it.
        generator: that `bandit` breaks ties with.
    """
    match config:
        case StaticConfig():
            return Static(config)
        case RegimeConfig():
            return RegimeController(config, detector)
        case InterpolatedConfig():
            return Interpolated(config, detector)
        case BanditConfig():
            return Bandit(config, generator)


def controller_config(values: Mapping[str, Any]) -> ControllerConfig:
    """Read parameters: `controller` is the name (`static`, `regime`, ...), the rest its own.

    Raises:
        ConfigError: there is no such controller or parameter, or a value does not fit.
    """
    config: ControllerConfig = tagged("controller", "controller", values, ControllerConfig)
    return config
