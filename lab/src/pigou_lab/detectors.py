"""Detectors to compare with: the paper's, and two of its proposals; each polls a signal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec
import numpy as np

from pigou.config import ConfigError
from pigou.control.saturation.regime import LEVELS, Idle, Regime, TTFTSample
from pigou.request import SECOND


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts of observations at or below each bound."""

    bounds: tuple[float, ...]  # upper ones in rising order, the last one infinite; (buckets,)
    counts: tuple[float, ...]  # at or below each bound, since the process began; (buckets,)

    def __post_init__(self) -> None:
        if len(self.bounds) != len(self.counts):
            raise ValueError(f"{len(self.bounds)} bounds and {len(self.counts)} counts: give equal")
        if not self.bounds or self.bounds[-1] != math.inf:
            raise ValueError("the histogram has no +Inf bucket: scrape all of its buckets")
        if any(a >= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"bounds {self.bounds} do not rise: give each once, in order")

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.counts[-1]

    def since(self, before: Self) -> Histogram:
        """Return the increase since an earlier scrape; a count that fell means a restart."""
        self._same(before)
        if any(a < b for a, b in zip(self.counts, before.counts, strict=True)):
            return Histogram(self.bounds, self.counts)
        return Histogram(
            self.bounds, tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        )

    def quantile(self, share: float) -> float:
        """Return a quantile by the rules of Prometheus's `histogram_quantile`."""
        if math.isnan(share) or len(self.bounds) < 2 or self.count <= 0:
            return math.nan
        if share < 0:
            return -math.inf
        if share > 1:
            return math.inf
        rank = share * self.count
        index = next(i for i, count in enumerate(self.counts) if count >= rank)
        if index == len(self.bounds) - 1:
            return self.bounds[-2]
        end = self.bounds[index]
        if index == 0 and end <= 0:
            return end
        start, below = (self.bounds[index - 1], self.counts[index - 1]) if index else (0.0, 0.0)
        inside = self.counts[index] - below
        return end if inside <= 0 else start + (end - start) * (rank - below) / inside

    def _same(self, other: Self) -> None:
        if self.bounds != other.bounds:
            raise ValueError(
                "the histograms have different buckets: compare one metric with itself"
            )


class Latches:
    """Two thresholds with hysteresis, crossed by `consecutive` signals (Georgiou 2026, 6.2)."""

    def __init__(self, low: float, high: float, consecutive: int, margin: float) -> None:
        self.thresholds = (low, high)
        self._consecutive = consecutive
        self._margin = margin
        self._above = [0, 0]
        self._below = [0, 0]
        self._on = [False, False]

    @property
    def regime(self) -> Regime:
        """The regime as of the last signal."""
        return LEVELS[sum(self._on)]

    def update(self, signal: float) -> Regime:
        """Take in a signal; return the regime."""
        for i, threshold in enumerate(self.thresholds):
            self._above[i] = self._above[i] + 1 if signal >= threshold else 0
            self._below[i] = self._below[i] + 1 if signal < threshold - self._margin else 0
            if self._above[i] >= self._consecutive:
                self._on[i] = True
            elif self._below[i] >= self._consecutive:
                self._on[i] = False
        return self.regime

    def reset(self) -> None:
        """Go back to Below."""
        self._above, self._below, self._on = [0, 0], [0, 0], [False, False]


class PolledConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Polled`; detectors may override the defaults."""

    theta1: float  # signal at which Transition begins, in the signal's unit
    theta2: float  # signal at which Saturated begins
    interval: int = 5 * SECOND  # nanoseconds between polls
    consecutive: int = 1  # polls in a row that cross a threshold
    margin: float = 0.0  # below a threshold that the way back asks for
    idle: int = 30 * SECOND  # nanoseconds without work after which the regime is Below

    def __post_init__(self) -> None:
        if not 0 < self.theta1 < math.inf:
            raise ConfigError(f"theta1 is {self.theta1}; it must be above 0")
        if not self.theta1 < self.theta2 < math.inf:
            raise ConfigError(f"theta2 is {self.theta2}; it must be above theta1 ({self.theta1})")
        if not 0 <= self.margin < self.theta1:
            raise ConfigError(
                f"margin is {self.margin}; it must be from 0 up to, not at, theta1 ({self.theta1})"
            )
        if self.consecutive < 1:
            raise ConfigError(f"consecutive is {self.consecutive}; it must be at least 1")
        for name in ("interval", "idle"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)} ns; it must be at least 1")


class Polled:
    """Turns one signal per poll into a regime; a poll without a signal changes nothing."""

    def __init__(self, config: PolledConfig) -> None:
        self._latches = Latches(config.theta1, config.theta2, config.consecutive, config.margin)
        self._poll = Poll(config.interval)
        self._idle = Idle(config.idle)
        self._signal = math.nan

    @property
    def regime(self) -> Regime:
        """The regime as of the last poll."""
        return self._latches.regime

    @property
    def signal(self) -> float:
        """Last signal."""
        return self._signal

    @property
    def thresholds(self) -> tuple[float, float]:
        """theta1 and theta2."""
        return self._latches.thresholds

    def update(self, now: int, sample: TTFTSample) -> Regime:
        """Take in a first token at `now` (ns); return the regime."""
        self._close(now)
        self._idle.busy(now)
        self._poll.add(sample)
        return self.regime

    def tick(self, now: int, waiting: int) -> Regime:
        """Close a finished window; a fleet idle for long is Below."""
        self._close(now)
        if self._idle.over(now, waiting):
            self._latches.reset()
            self._forget()
            self._signal = math.nan
        return self.regime

    def _close(self, now: int) -> None:
        window = self._poll.close(now)
        if window:
            self._compare(self._of(window))

    def _compare(self, signal: float | None) -> None:
        if signal is not None:
            self._signal = signal
            self._latches.update(signal)

    def _of(self, window: list[TTFTSample]) -> float | None:
        raise NotImplementedError

    def _forget(self) -> None:
        """Reset the state of the signal, beside its window."""


class Poll:
    """Gathers first tokens into back-to-back windows of `interval` ns; skips empty windows."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._due: int | None = None
        self._gathered: list[TTFTSample] = []

    def close(self, now: int) -> list[TTFTSample]:
        """Return the last window's samples if it is over at `now`, else none."""
        if self._due is None:
            self._due = now + self._interval
        if now < self._due:
            return []
        self._due += (now - self._due) // self._interval * self._interval + self._interval
        done, self._gathered = self._gathered, []
        return done

    def add(self, sample: TTFTSample) -> None:
        """Gather a first token; call `close` with its time before."""
        self._gathered.append(sample)


class SecondDifferenceConfig(PolledConfig, frozen=True, kw_only=True):
    """Parameters of `SecondDifference`; thresholds in seconds per squared request in flight."""

    apart: float = 1.0  # least difference of load, in requests, between polls that are compared

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.apart < math.inf:
            raise ConfigError(f"apart is {self.apart}; it must be above 0 requests")


class ConfigVarianceConfig(PolledConfig, frozen=True, kw_only=True):
    """Parameters of `ConfigVariance`; thresholds in squared seconds."""

    window: int = 6  # polls that a setting's mean is taken over

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"window is {self.window} polls; it must be at least 1")


class SecondDifference(Polled):
    """Second divided difference of mean TTFT over load (Georgiou 2026, Proposition 4).

        2 [(y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)] / (x2 - x0)
    Loads x0 < x1 < x2 (mean requests in flight) and mean TTFTs y are those of the last three
    distinct polls. The paper's authors dropped it: at 5 s per poll it is mostly noise.
    """

    Params: ClassVar[type[msgspec.Struct]] = SecondDifferenceConfig

    def __init__(self, config: SecondDifferenceConfig) -> None:
        super().__init__(config)
        self.config = config
        self._points: deque[tuple[float, float]] = deque(maxlen=3)

    def _of(self, window: list[TTFTSample]) -> float | None:
        load = sum(sample.load for sample in window) / len(window)
        ttft = sum(sample.ttft for sample in window) / len(window)
        far = [point for point in self._points if abs(point[0] - load) >= self.config.apart]
        self._points = deque([*far, (load, ttft)], maxlen=3)
        if len(self._points) < 3:
            return None
        (x0, y0), (x1, y1), (x2, y2) = sorted(self._points)
        return 2.0 * ((y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)) / (x2 - x0)

    def _forget(self) -> None:
        self._points.clear()


class ConfigVariance(Polled):
    """Variance of mean TTFT across router settings, over `window` polls (Georgiou 2026, 8.4)."""

    Params: ClassVar[type[msgspec.Struct]] = ConfigVarianceConfig

    def __init__(self, config: ConfigVarianceConfig) -> None:
        super().__init__(config)
        self.config = config
        self._windows: deque[list[TTFTSample]] = deque(maxlen=config.window)

    def _of(self, window: list[TTFTSample]) -> float | None:
        self._windows.append(window)
        by_setting: dict[int, list[float]] = {}
        for sample in (sample for past in self._windows for sample in past):
            by_setting.setdefault(sample.setting, []).append(sample.ttft)
        means = [sum(ttfts) / len(ttfts) for ttfts in by_setting.values()]
        if len(means) < 2:
            return None
        centre = sum(means) / len(means)
        return sum((mean - centre) ** 2 for mean in means) / (len(means) - 1)

    def _forget(self) -> None:
        self._windows.clear()


#: First threshold that the paper advises: 3 to 5 times the P99 of a fleet at rest.
ADVISED_FACTOR = 4.0
#: Second threshold over the first, as for the paper's 70B model.
ADVISED_RATIO = 20.0 / 3.0


class PaperConfig(PolledConfig, frozen=True, kw_only=True):
    """Parameters of `PaperDetector`; the defaults are the paper's for its 70B model."""

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
        """Return the paper's advice for a baseline TTFT P99 (seconds); `factor` is 3 to 5."""
        low = factor * p99
        return cls(theta1=low, theta2=ADVISED_RATIO * low, margin=0.1 * low)


#: The paper's two fleets (Georgiou 2026, section 6.2).
PRESETS: Mapping[str, PaperConfig] = {
    "llama-3.1-70b": PaperConfig(theta1=0.3, theta2=2.0, margin=0.03),
    "nemotron-4-340b": PaperConfig(theta1=1.0, theta2=10.0, margin=0.1),
}


class PaperDetector(Polled):
    """Compares L(t) = alpha P99(t) + (1 - alpha) L(t - interval) with two thresholds (Eq.

    10, 11).
    """

    Params: ClassVar[type[msgspec.Struct]] = PaperConfig

    def __init__(self, config: PaperConfig | None = None) -> None:
        self.config = config or PaperConfig()
        super().__init__(self.config)
        self._scraped: Histogram | None = None
        self._due = 0

    def scrape(self, now: int, histogram: Histogram) -> Regime:
        """Take in a scrape of the TTFT histogram (seconds) at `now` (ns); return the regime."""
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
