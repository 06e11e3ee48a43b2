"""What detectors with polls and two thresholds share: parameters, and how they go."""

from __future__ import annotations

import math

import msgspec

from pigou.config import ConfigError
from pigou.control.saturation.detector import Idle, Latches, Regime, Sample
from pigou.control.saturation.poll import Poll
from pigou.request import SECOND


class PolledConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Polled`; a detector may give them defaults of its own.

    Attributes:
        theta1: of the signal, in its unit, at which Transition begins.
        theta2: the same for Saturated.
        interval: nanoseconds between polls.
        consecutive: polls in a row that cross a threshold.
        margin: below a threshold that the way back asks for.
        idle: nanoseconds without work after which the regime is Below.
    """

    theta1: float
    theta2: float
    interval: int = 5 * SECOND
    consecutive: int = 1
    margin: float = 0.0
    idle: int = 30 * SECOND

    def __post_init__(self) -> None:
        """Refuse thresholds that do not rise, margins that reach 0, and polls of no length."""
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
    """Polls, a signal a poll, two thresholds with hysteresis. Which signal, a detector says.

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

    def update(self, now: int, sample: Sample) -> Regime:
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

    def _of(self, window: list[Sample]) -> float | None:
        """Return the signal of a window with at least one first token."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Forget what the next signal would have been made of, beside its window."""
