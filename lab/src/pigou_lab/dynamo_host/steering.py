"""Detector and controller, fed with requests as a router or a proxy sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pigou.control.routing_controller import Controller, E2ESample, Parameters
from pigou.control.routing_controller import load as load_controller
from pigou.control.saturation.regime import Detector, Regime, TTFTSample
from pigou.control.saturation.regime import load as load_detector
from pigou.request import SECOND
from pigou_lab.detectors import PaperDetector
from pigou_lab.routing_controllers import RegimeConfig, RegimeController


class Steering:
    """Chooses routing parameters, and learns from first tokens and ends; times in ns."""

    def __init__(self, detector: Detector, controller: Controller) -> None:
        self.waiting = 0  # requests that have no first token yet
        self._detector = detector
        self._controller = controller

    @classmethod
    def paper(cls) -> Steering:
        """Return the paper's detector and its table of regimes (Georgiou 2026, 6.2 and Table 2)."""
        signal = PaperDetector()
        return cls(signal, RegimeController(RegimeConfig(), signal))

    @classmethod
    def of(
        cls, controlled: Mapping[str, Any], detected: Mapping[str, Any], seed: int = 0
    ) -> Steering:
        """Build a controller and a detector by name; raises ConfigError."""
        signal = load_detector(detected)
        return cls(signal, load_controller(controlled, signal, np.random.default_rng(seed)))

    @property
    def regime(self) -> Regime:
        """The detector's regime."""
        return self._detector.regime

    @property
    def signal(self) -> float:
        """The detector's signal; NaN before there is one."""
        return self._detector.signal

    def parameters(self, now: int) -> Parameters:
        """Return the parameters for a request routed now."""
        self._detector.tick(now, self.waiting)
        return self._controller.parameters(now)

    def arrive(self, now: int) -> SteeredRequest:
        """Count an arrival; the caller reports its fate to the run."""
        run = SteeredRequest(self, self.parameters(now), now, self.waiting + 1)
        self.waiting += 1
        return run

    def first_token(self, now: int, sample: TTFTSample) -> None:
        """Take in a first token."""
        self.waiting -= 1
        self._detector.update(now, sample)
        self._controller.observe(now, sample)

    def end(self, now: int, finish: E2ESample | None) -> None:
        """Record an end; None without a first token."""
        if finish is None:
            self.waiting -= 1
            self._detector.tick(now, self.waiting)
        else:
            self._controller.observe(now, finish)


class SteeredRequest:
    """One request from arrival to end; reports each event once, even if the caller repeats it."""

    def __init__(self, steering: Steering, parameters: Parameters, began: int, load: int) -> None:
        self.parameters = parameters
        self._steering = steering
        self._began = began
        self._load = load
        self._awaits_first_token = True
        self._over = False

    def first_token(self, now: int) -> None:
        """It has its first token."""
        if not self._awaits_first_token or self._over:
            return
        self._awaits_first_token = False
        ttft = (now - self._began) / SECOND
        sample = TTFTSample(ttft=ttft, load=self._load, setting=self.parameters.setting)
        self._steering.first_token(now, sample)

    def end(self, now: int) -> None:
        """It is over."""
        if self._over:
            return
        self._over = True
        seconds = (now - self._began) / SECOND
        finish = E2ESample(seconds=seconds, setting=self.parameters.setting)
        self._steering.end(now, None if self._awaits_first_token else finish)


def distance(one: Parameters, other: Parameters) -> float:
    """Return how far apart two settings are: the sum of both differences."""
    return abs(one.temperature - other.temperature) + abs(one.overlap_weight - other.overlap_weight)


def shown(parameters: Parameters) -> dict[str, float]:
    """Return a setting, ready for JSON."""
    return {
        "temperature": parameters.temperature,
        "overlap_weight": parameters.overlap_weight,
    }
