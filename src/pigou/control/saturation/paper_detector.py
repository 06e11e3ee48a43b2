"""Saturation: the paper's detector, and how any detector is made from its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from pigou.config import ConfigError
from pigou.control.saturation.cusum_detector import CusumConfig, CusumDetector
from pigou.control.saturation.histogram import Histogram
from pigou.control.saturation.polled_detectors import (
    ConfigVariance,
    ConfigVarianceConfig,
    Polled,
    PolledConfig,
    SecondDifference,
    SecondDifferenceConfig,
)
from pigou.control.saturation.regime import Detector, Regime, TTFTSample
from pigou.struct_values import tagged

#: What the paper advises for the first threshold: 3 to 5 times the P99 of a fleet at rest.
ADVISED_FACTOR = 4.0
#: Its second threshold over its first, as for the 70B model.
ADVISED_RATIO = 20.0 / 3.0


class PaperConfig(PolledConfig, frozen=True, kw_only=True, tag_field="detector", tag="paper"):
    """Parameters of `PaperDetector`; the defaults are the paper's for its 70B model.

    The paper leaves `consecutive` and `margin` open. Three polls of 5 s agree with the 15 s that
    it reports.
    """

    theta1: float = 0.3  # seconds of smoothed P99 at which Transition begins
    theta2: float = 2.0  # seconds at which Saturated begins
    alpha: float = 0.3  # weight of the newest P99
    consecutive: int = 3
    margin: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be above 0, and at most 1")

    @classmethod
    def of_baseline(cls, p99: float, factor: float = ADVISED_FACTOR) -> PaperConfig:
        """Return the parameters that the paper advises for a fleet whose TTFT P99 at rest is known.

        Args:
            p99: seconds, above 0.
            factor: of the first threshold over it; the paper says 3 to 5.
        """
        low = factor * p99
        return cls(theta1=low, theta2=ADVISED_RATIO * low, margin=0.1 * low)


#: The paper's two fleets (Georgiou 2026, section 6.2).
PRESETS: Mapping[str, PaperConfig] = {
    "llama-3.1-70b": PaperConfig(theta1=0.3, theta2=2.0, margin=0.03),
    "nemotron-4-340b": PaperConfig(theta1=1.0, theta2=10.0, margin=0.1),
}


class PaperDetector(Polled):
    """Smoothed TTFT P99 against two thresholds (Georgiou 2026, Eq. 10 and 11).

    L(t) = alpha P99(t) + (1 - alpha) L(t - interval) at every poll, the first P99 being the first
    L. It is fed either with first tokens (`update`; the P99 is that of the window between polls)
    or with scrapes of a histogram (`scrape`). A poll that saw no first token changes nothing.
    """

    def __init__(self, config: PaperConfig | None = None) -> None:
        self.config = config or PaperConfig()
        super().__init__(self.config)
        self._scraped: Histogram | None = None
        self._due = 0

    def scrape(self, now: int, histogram: Histogram) -> Regime:
        """Take in a scrape of the TTFT histogram (seconds) at `now` (ns); return the regime.

        Scrapes that come before a poll is due are passed over, and the first one only begins the
        first window. A histogram with other buckets than the one before begins anew.
        """
        if self._scraped is not None and now < self._due:
            return self.regime
        before, self._scraped = self._scraped, histogram
        self._due = now + self.config.interval
        if before is not None and before.bounds == histogram.bounds:
            fresh = histogram.since(before)
            if fresh.count > 0:
                self._idle.busy(now)
                self._compare(self._smoothed(fresh.quantile(0.99)))
        return self.regime

    def _of(self, window: list[TTFTSample]) -> float:
        return self._smoothed(float(np.quantile([sample.ttft for sample in window], 0.99)))

    def _smoothed(self, p99: float) -> float:
        alpha, before = self.config.alpha, self.signal
        return p99 if math.isnan(before) else alpha * p99 + (1 - alpha) * before


DetectorConfig: TypeAlias = (
    CusumConfig | PaperConfig | SecondDifferenceConfig | ConfigVarianceConfig
)


def detector(config: DetectorConfig) -> Detector:
    """Return a new detector with these parameters."""
    match config:
        case CusumConfig():
            return CusumDetector(config)
        case PaperConfig():
            return PaperDetector(config)
        case SecondDifferenceConfig():
            return SecondDifference(config)
        case ConfigVarianceConfig():
            return ConfigVariance(config)


def detector_config(values: Mapping[str, Any]) -> DetectorConfig:
    """Read parameters: `detector` is the name (`cusum`, `paper`, ...), the rest its own.

    Raises:
        ConfigError: there is no such detector or parameter, or a value does not fit.
    """
    config: DetectorConfig = tagged("saturation", "detector", values, DetectorConfig)
    return config
