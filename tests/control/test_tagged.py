"""Whoever names a controller, detector, order or policy that there is not is told the names."""

from __future__ import annotations

from typing import Any

import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.plane import ControlPlane


@pytest.mark.parametrize(
    ("values", "known"),
    [
        (
            {"controller": {"controller": "x"}},
            "bandit, interpolated, operating-points, regime, static",
        ),
        ({"controller": {}}, "bandit, interpolated, operating-points, regime, static"),
        ({"saturation": {"detector": "x"}}, "config-variance, cusum, paper, second-difference"),
        (
            {"admission": {"order": "x"}},
            "drf, edf, fair, fcfs, karma, market, priority",
        ),
        ({"policy": "x"}, "lmetric, mooncake, power-of-two"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known(values: dict[str, Any], known: str) -> None:
    with pytest.raises(ConfigError, match="must be one of") as raised:
        ControlPlane(ControlConfig(**values))
    assert known in str(raised.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"saturation": {"detector": "cusum", "x": 1}}, "saturation cusum: .* unknown field `x`"),
        ({"controller": {"controller": "regime", "x": 1}}, "controller regime: .* field `x`; its"),
        ({"saturation": {"detector": "second-difference"}}, "field `theta1`; its keys are: theta1"),
        ({"saturation": {"detector": "paper", "alpha": "x"}}, "paper: alpha is 'x': expected"),
        ({"saturation": {"detector": "paper", "alpha": 3.0}}, "paper: alpha is 3.0; it must be"),
        ({"policy": "toll", "params": {"toll": "x"}}, "parameters: toll is 'x': expected `float`"),
    ],
)
def test_a_wrong_parameter_is_told_with_its_name_its_value_and_the_known(
    values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        ControlPlane(ControlConfig(**values))
