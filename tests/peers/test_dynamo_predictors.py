"""`dynamo-kalman` and `dynamo-arima` give what Dynamo's own classes give, value for value.

PIGOU_PEER_DYNAMO names a venv with the package `ai-dynamo`. Its planner imports filterpy, prophet
and pmdarima, which it does not bring: a matrix filter stands in for the first, nothing for the
second, and without `pigou-lab[forecast]` all is skipped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pigou.control.planner.predictors.predictor import load

pytestmark = pytest.mark.dynamo

SOURCE = "lib/python*/site-packages/dynamo/planner/core/load/predictors.py"
CONFIG = SimpleNamespace(
    load_predictor_log1p=False,
    kalman_q_level=1.0, kalman_q_trend=0.1, kalman_r=10.0, kalman_min_points=5,
)  # fmt: skip


class MatrixFilter:
    """What filterpy's KalmanFilter computes, by its documented equations."""

    def __init__(self, dim_x: int, dim_z: int) -> None:
        self.x, self.P = np.zeros((dim_x, 1)), np.eye(dim_x)
        self.F, self.H = np.eye(dim_x), np.eye(dim_z, dim_x)
        self.Q, self.R = np.eye(dim_x), np.eye(dim_z)

    def predict(self) -> None:
        self.x = self.F @ self.x
        self.P = self.F @ self.P @ self.F.T + self.Q

    def update(self, z: Any) -> None:
        gain = self.P @ self.H.T @ np.linalg.inv(self.H @ self.P @ self.H.T + self.R)
        self.x = self.x + gain @ (z - self.H @ self.x)
        rest = np.eye(len(self.x)) - gain @ self.H
        self.P = rest @ self.P @ rest.T + gain @ self.R @ gain.T


def stub(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Dynamo's predictors by name."""
    home = os.environ.get("PIGOU_PEER_DYNAMO")
    source = next(Path(home).glob(SOURCE), None) if home else None
    if source is None:
        pytest.skip("PIGOU_PEER_DYNAMO names no venv with ai-dynamo")
    for module in ("pandas", "pmdarima"):
        pytest.importorskip(module)
    stubs = (
        stub("filterpy"), stub("filterpy.kalman", KalmanFilter=MatrixFilter),
        stub("prophet", Prophet=None), stub("dynamo"), stub("dynamo.planner"),
        stub("dynamo.planner.config"),
        stub("dynamo.planner.config.planner_config", PlannerConfig=object),
        stub("dynamo.runtime"),
        stub("dynamo.runtime.logging", configure_dynamo_logging=lambda: None),
        stub("dynamo_predictors"),
    )  # fmt: skip
    for module in stubs:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(stubs[-1])
    exec(compile(source.read_text(), str(source), "exec"), names)
    predictors: dict[str, Any] = names["LOAD_PREDICTORS"]
    return predictors


@pytest.mark.parametrize("family", ["constant", "kalman", "arima"])
@pytest.mark.parametrize("seed", range(8))
def test_every_forecast_is_dynamos(peer: dict[str, Any], family: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    wave = 1 + 0.8 * np.sin(np.arange(40) / rng.uniform(2, 9))
    loads = [0.0] * int(rng.integers(0, 3)) + list(rng.poisson(rng.choice([0.5, 5, 100]) * wave))
    dynamo = peer[family](CONFIG)
    ours = load("last-value" if family == "constant" else f"dynamo-{family}")
    for value in loads:
        dynamo.add_data_point(float(value))
        ours.observe(float(value))
        assert ours.forecast().mean == pytest.approx(dynamo.predict_next(), rel=1e-9, abs=1e-9)
