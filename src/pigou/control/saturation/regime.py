"""Saturation regimes: detectors, their samples, and loading them by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import msgspec

from pigou.registry import named, read_struct

GROUP = "pigou.detector"


class Regime(StrEnum):
    """Load regime of a fleet (Georgiou 2026, Eq. 11)."""

    BELOW = "below"
    TRANSITION = "transition"
    SATURATED = "saturated"

    @property
    def level(self) -> int:
        """0, 1 or 2: the gauge `pigou_game_saturation_state`."""
        return LEVELS.index(self)


LEVELS = (Regime.BELOW, Regime.TRANSITION, Regime.SATURATED)


class TTFTSample(msgspec.Struct, frozen=True):
    """The first token of a request."""

    ttft: float  # seconds since arrival
    tokens: int = 0
    load: int = 1  # requests in flight at its arrival, itself counted
    # prompts queued or in prefill on its worker at arrival; None if unknown
    ahead: int | None = None
    setting: int = 0  # index of its routing parameters


class Detector(Protocol):
    """Classifies the regime from first tokens; times must not fall. Made as `Detector(params)`."""

    Params: ClassVar[type[msgspec.Struct]]

    @property
    def regime(self) -> Regime:
        """The regime as of the last call."""
        ...

    @property
    def signal(self) -> float:
        """The smoothed signal, in the detector's unit; NaN before the first."""
        ...

    @property
    def thresholds(self) -> tuple[float, float]:
        """Where Transition and Saturated begin, in the signal's unit."""
        ...

    def update(self, now: int, sample: TTFTSample) -> Regime:
        """Take in a first token at `now` (ns); return the regime."""
        ...

    def tick(self, now: int, waiting: int) -> Regime:
        """Advance to `now` (ns); `waiting` requests have no first token. Long idle is Below."""
        ...


class Idle:
    """Detects that a fleet was idle for `after` nanoseconds."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._since: int | None = None

    def busy(self, now: int) -> None:
        """Mark activity."""
        self._since = now

    def over(self, now: int, waiting: int) -> bool:
        """Return whether the idle time is over and nobody waits."""
        if waiting > 0 or self._since is None:
            self._since = now
            return False
        return now - self._since >= self._after


def load(values: Mapping[str, Any]) -> Detector:
    """Return the detector named by `detector`; raises ConfigError for a bad name or parameter."""
    own = dict(values)
    name = own.pop("detector", None)
    kind = named(GROUP, name, "detector")
    detector: Detector = kind(read_struct(f"saturation {name}", kind.Params, own))
    return detector
