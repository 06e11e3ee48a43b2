"""Whoever names a controller, detector, order or policy that there is not is told the names."""

from __future__ import annotations

from typing import Any

import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.plane import ControlPlane


@pytest.mark.parametrize(
    ("values", "known"),
    [
        ({"controller": {"controller": "x"}}, "bandit, interpolated, regime, static"),
        ({"controller": {}}, "bandit, interpolated, regime, static"),
        ({"saturation": {"detector": "x"}}, "config-variance, cusum, paper, second-difference"),
        ({"admission": {"order": "x"}}, "edf, fair, fcfs, priority, priority-fair, shortest"),
        ({"policy": "x"}, "lmetric, mooncake, power-of-two"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known(values: dict[str, Any], known: str) -> None:
    with pytest.raises(ConfigError, match="must be one of") as raised:
        ControlPlane(ControlConfig(**values))
    assert known in str(raised.value)


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown field `x`"):
        ControlPlane(ControlConfig(saturation={"detector": "cusum", "x": 1}))
