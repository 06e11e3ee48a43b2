"""Breaker: whether something that failed may be tried again."""

from __future__ import annotations

from enum import StrEnum


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"  #: everything
    OPEN = "open"  #: nothing, until it is time to probe
    TRIAL = "trial"  #: everything, but one failure opens it again


class CircuitBreaker:
    """Opens after some failures in a row; each pause until the next trial is twice the last.

    Times are nanoseconds of one clock, and arguments.
    """

    def __init__(self, failures: int, pause: int, max_pause: int) -> None:
        """Begin closed.

        Args:
            failures: in a row, that open it; at least 1.
            pause: before the first trial.
        """
        self.state = BreakerState.CLOSED
        self.reason = ""
        self._limit = failures
        self._failures = 0
        self._first = pause
        self._pause = pause
        self._max_pause = max_pause
        self._until = 0

    @property
    def allows(self) -> bool:
        """Whether to try."""
        return self.state is not BreakerState.OPEN

    def wait(self, now: int) -> int:
        """Nanoseconds until it is time to probe; 0 is now. Of meaning while it is open."""
        return max(0, self._until - now)

    def failed(self, now: int, reason: str) -> bool:
        """Note a failure; returns whether it opened just now."""
        self._failures += 1
        self.reason = reason
        if self.state is BreakerState.CLOSED and self._failures < self._limit:
            return False
        if self.state is BreakerState.OPEN:  # a probe, or work that was under way
            return False
        self.state = BreakerState.OPEN
        self._until = now + self._pause
        self._pause = min(2 * self._pause, self._max_pause)
        return True

    def probed(self, now: int, alive: bool) -> None:
        """Note what a probe found: a sign of life lets work through on trial."""
        if alive:
            self.state = BreakerState.TRIAL
        else:
            self._until = now + self._pause
            self._pause = min(2 * self._pause, self._max_pause)

    def succeeded(self) -> bool:
        """Note a success; returns whether it closed just now."""
        closed = self.state is not BreakerState.CLOSED
        self.state = BreakerState.CLOSED
        self.reason = ""
        self._failures = 0
        self._pause = self._first
        return closed
