"""A clock for what sleeps, which no machine makes late."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.request import SECOND


@dataclass
class Clock:
    """Time that passes by sleeping, and as a test says; in the place of the module `time`."""

    now: int = SECOND

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


@dataclass
class TickingClock(Clock):
    """Time that also passes by a millisecond at each look: a budget of it is one of looks."""

    def monotonic_ns(self) -> int:
        self.now += SECOND // 1000
        return self.now
