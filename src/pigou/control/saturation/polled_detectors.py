"""Polled detectors: a signal at each poll, two thresholds with hysteresis; two of their kind."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from pigou.config import ConfigError
from pigou.control.saturation.regime import Idle, Latches, Regime, TTFTSample
from pigou.request import SECOND


class PolledConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Polled`; a detector may give them defaults of its own."""

    theta1: float  # of the signal, in its unit, at which Transition begins
    theta2: float  # the same for Saturated
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
    """Polls, a signal a poll, two thresholds with hysteresis. Subclasses have the signal.

    A poll that has no signal changes nothing.
    """

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
        """The signal of the last poll that had one."""
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
        """Close the window if it is over; a fleet that has been idle for long is Below."""
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
        """Take in the signal of a poll; None where it had none."""
        if signal is not None:
            self._signal = signal
            self._latches.update(signal)

    def _of(self, window: list[TTFTSample]) -> float | None:
        """Return the signal of a window with at least one first token."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Forget what the next signal would have been made of, beside its window."""


class Poll:
    """Gathers first tokens, and hands out those of a window once it is over.

    Windows are `interval` nanoseconds long and follow one another from the first call on. One
    that nothing was gathered in is passed over.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._due: int | None = None
        self._gathered: list[TTFTSample] = []

    def close(self, now: int) -> list[TTFTSample]:
        """Return what was gathered in the last window if it is over at `now`; empty otherwise."""
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


class SecondDifferenceConfig(
    PolledConfig, frozen=True, kw_only=True, tag_field="detector", tag="second-difference"
):
    """Parameters of `SecondDifference`. The thresholds depend on the fleet: there is no default.

    Attributes:
        theta1: seconds per squared request in flight at which Transition begins.
        theta2: the same for Saturated.
    """

    apart: float = 1.0  # least difference of load, in requests, between polls that are compared

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.apart < math.inf:
            raise ConfigError(f"apart is {self.apart}; it must be above 0 requests")


class ConfigVarianceConfig(
    PolledConfig, frozen=True, kw_only=True, tag_field="detector", tag="config-variance"
):
    """Parameters of `ConfigVariance`. The thresholds depend on the fleet: there is no default.

    Attributes:
        theta1: squared seconds at which Transition begins.
        theta2: the same for Saturated.
    """

    window: int = 6  # polls that a setting's mean is taken over

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"window is {self.window} polls; it must be at least 1")


class SecondDifference(Polled):
    """Second divided difference of mean TTFT over load (Georgiou 2026, Proposition 4).

    Of the last three polls whose loads (mean requests in flight) lie apart, at x0 < x1 < x2 with
    mean TTFTs y:  2 [(y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)] / (x2 - x0).  The paper's
    authors gave it up: at 5 s a poll it is mostly noise. A poll whose load lies near that of one
    of the last two takes its place.
    """

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
    """Variance of the mean TTFT across settings of the router (Georgiou 2026, section 8.4).

    It needs a fleet that tries several settings at once (`TTFTSample.setting`): each one's mean is
    taken over the last `window` polls, and the signal is the variance of these means. With one
    setting there is no signal, and the regime stays Below.
    """

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
