"""Saturation regimes: the protocol of detectors, their samples, and thresholds with hysteresis."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec


class Regime(StrEnum):
    """How loaded a fleet is (Georgiou 2026, Eq. 11)."""

    BELOW = "below"
    TRANSITION = "transition"
    SATURATED = "saturated"

    @property
    def level(self) -> int:
        """0, 1 or 2: the value of the gauge `pigou_game_saturation_state`."""
        return LEVELS.index(self)


LEVELS = (Regime.BELOW, Regime.TRANSITION, Regime.SATURATED)


class TTFTSample(msgspec.Struct, frozen=True):
    """The first token of a request."""

    ttft: float  # seconds from its arrival to now
    tokens: int = 0
    load: int = 1  # requests in flight in the fleet when it came, itself counted
    # prompts that were queued or being computed where its own was sent; None where that is not
    # known.
    ahead: int | None = None
    setting: int = 0  # index of the routing parameters that it was routed under


class Detector(Protocol):
    """Tells the regime from first tokens as they come; times must not fall.

    `signal` is what it compares, in its own unit, NaN before there is one; `thresholds` are where
    Transition and Saturated begin, in the same unit.
    """

    @property
    def regime(self) -> Regime:
        """The regime as of the last call."""
        ...

    @property
    def signal(self) -> float:
        """The smoothed signal."""
        ...

    @property
    def thresholds(self) -> tuple[float, float]:
        """Where Transition and Saturated begin."""
        ...

    def update(self, now: int, sample: TTFTSample) -> Regime:
        """Take in a first token at `now` (ns); return the regime."""
        ...

    def tick(self, now: int, waiting: int) -> Regime:
        """Let time pass up to `now` (ns), with `waiting` requests that have no first token yet.

        A fleet that has been idle for long (nobody waits, no first token) is Below again.
        """
        ...


class Idle:
    """Notices that a fleet has had nothing to do for `after` nanoseconds."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._since: int | None = None

    def busy(self, now: int) -> None:
        """Something happened."""
        self._since = now

    def over(self, now: int, waiting: int) -> bool:
        """Return whether nothing has happened for so long, and nobody waits."""
        if waiting > 0 or self._since is None:
            self._since = now
            return False
        return now - self._since >= self._after


class Latches:
    """Two thresholds with hysteresis: which regime a signal has been in for long enough.

    A threshold is crossed upwards after `consecutive` signals in a row at or above it, downwards
    after as many below it by more than `margin` (Georgiou 2026, section 6.2).
    """

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
