"""Controllers: the paper's table, its interpolation, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ConfigError, ControlConfig
from pigou.control.messages import SetEngineLimits
from pigou.control.plane import ControlPlane
from pigou.control.routing_controller import (
    E2ESample,
    OperatingPoint,
    Parameters,
    RoutingSetting,
    Static,
    StaticConfig,
    load,
)
from pigou.control.saturation.cusum_detector import CusumDetector
from pigou.control.saturation.regime import Regime, TTFTSample
from pigou.request import EngineLimits
from pigou_lab.routing_controllers import (
    Bandit,
    Interpolated,
    InterpolatedConfig,
    RegimeConfig,
    RegimeController,
    RegimeTable,
)


class Fixed:
    """A detector that says what it is told to."""

    def __init__(self, regime: Regime = Regime.BELOW, signal: float = float("nan")) -> None:
        self.regime = regime
        self.signal = signal
        self.thresholds = (0.3, 2.7)

    def update(self, now: int, sample: TTFTSample) -> Regime:
        return self.regime

    def tick(self, now: int, waiting: int) -> Regime:
        return self.regime


@pytest.mark.parametrize(
    ("regime", "temperature", "weight"),
    [(Regime.BELOW, 0.0, 1.0), (Regime.TRANSITION, 0.7, 1.0), (Regime.SATURATED, 0.8, 0.1)],
)
def test_the_table_is_the_papers(regime: Regime, temperature: float, weight: float) -> None:
    one = RegimeController(RegimeConfig(), Fixed(regime))
    assert one.parameters(0) == Parameters(temperature, weight, regime.level)


def test_interpolation_meets_the_table_at_three_points() -> None:
    table = RegimeTable()
    for signal, row in [
        (0.01, table.below), (0.3, table.below), (0.9, table.transition),
        (2.7, table.saturated), (100.0, table.saturated), (float("nan"), table.below),
    ]:  # fmt: skip
        found = Interpolated(InterpolatedConfig(), Fixed(signal=signal)).parameters(0)
        assert found.temperature == pytest.approx(row.temperature)
        assert found.overlap_weight == pytest.approx(row.overlap_weight)


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1.05))
def test_interpolation_is_continuous_and_monotone(signal: float, factor: float) -> None:
    a = Interpolated(InterpolatedConfig(), Fixed(signal=signal)).parameters(0)
    b = Interpolated(InterpolatedConfig(), Fixed(signal=signal * factor)).parameters(0)
    assert 0 <= b.temperature - a.temperature <= 0.04
    assert 0 <= a.overlap_weight - b.overlap_weight <= 0.05


def test_static_says_the_same_whatever_happens() -> None:
    one = Static(StaticConfig(setting=RoutingSetting(temperature=0.5, overlap_weight=2.0)))
    one.observe(0, E2ESample(3.0))
    one.observe(0, TTFTSample(3.0))
    assert one.parameters(0) == one.parameters(10**12) == Parameters(0.5, 2.0)


def test_controllers_are_found_by_name() -> None:
    rng = np.random.default_rng(0)
    kinds = {
        "static": Static, "regime": RegimeController,
        "interpolated": Interpolated, "bandit": Bandit,
    }  # fmt: skip
    for name, kind in kinds.items():
        one = load({"controller": name}, CusumDetector(), rng)
        assert isinstance(one, kind)
        assert one.parameters(0).temperature >= 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"controller": "static", "setting": {"temperature": -1}}, "temperature is -1"),
        ({"controller": "regime", "table": {"above": {}}}, "above"),
        ({"controller": "bandit", "discount": 1.0}, "discount is 1.0"),
        ({"controller": "bandit", "temperatures": []}, "temperatures is"),
        ({"controller": "bandit", "temperatures": [0.5, 0.5]}, "each once"),
        ({"controller": "bandit", "overlap_weights": [-1.0]}, "overlap_weight is -1"),
        ({"controller": "bandit", "epoch": 0}, "epoch is 0"),
        ({"controller": "bandit", "reward": "rps"}, "rps"),
        ({"controller": "regimes"}, "regimes"),
    ],
)
def test_bad_parameters_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(values, CusumDetector(), np.random.default_rng(0))


def pointed(light: dict[str, object], heavy: dict[str, object], **settings: object) -> ControlPlane:
    points = {"light": light, "heavy": heavy}
    return ControlPlane(ControlConfig(operating_points=points, **settings))


def test_a_regime_s_operating_point_is_in_force_and_what_it_leaves_out_is_as_started() -> None:
    plane = pointed(
        {"params": {"urgency": 4.0}},
        {"temperature": 0.5, "params": {"toll": 0.25}, "max_seqs": 8},
        temperature=0.1, params={"toll": 2.0},
    )  # fmt: skip
    fixed = Fixed()
    plane.tracker.controller._detector = fixed
    assert plane.tick(1) == []  # it sets no limits, and none were set
    status = plane.status(1)
    assert (status.controller, status.temperature) == ("operating-points", 0.1)
    assert (status.parameters["urgency"], status.parameters["toll"]) == (4.0, 2.0)
    for regime in (Regime.TRANSITION, Regime.SATURATED):
        fixed.regime = regime
        limits = [action for action in plane.tick(2) if isinstance(action, SetEngineLimits)]
        expected = [SetEngineLimits(EngineLimits(8))] if regime is Regime.TRANSITION else []
        assert limits == expected  # once
        status = plane.status(2)
        assert status.point == OperatingPoint(temperature=0.5, params={"toll": 0.25}, max_seqs=8)
        assert status.temperature == 0.5
        assert (status.parameters["urgency"], status.parameters["toll"]) == (2.0, 0.25)
    fixed.regime = Regime.BELOW
    assert SetEngineLimits(EngineLimits()) in plane.tick(3)
    assert plane.status(3).parameters["urgency"] == 4.0


def test_operating_points_that_nothing_honours_are_refused() -> None:
    with pytest.raises(ConfigError, match="urge is no parameter of the routing policy"):
        pointed({"params": {"urge": 1.0}}, {})
    with pytest.raises(ConfigError, match="max_seqs is 0; it must be at least 1"):
        pointed({}, {"max_seqs": 0})
    with pytest.raises(ConfigError, match="unknown field `night`"):
        ControlPlane(ControlConfig(operating_points={"night": {}}))
    with pytest.raises(ConfigError, match="controller is 'operating-points', and operating_points"):
        pointed({}, {"max_seqs": 1}, controller={"controller": "operating-points"})
