"""How long a profile takes: what is left by what was measured, and when to measure no more."""

from __future__ import annotations

import time

#: Share of the time that the decodes of the first round may take.
_FIRST = 0.5


class Pace:
    """Estimates a profile's time in steps of the worker, and keeps it within a budget."""

    def __init__(self, budget_s: float, round_steps: float, rounds: int) -> None:
        """Count rounds of `round_steps` steps within `budget_s` seconds; 0 for no limit."""
        self._budget_s = budget_s
        self._began = time.monotonic()
        self._round_steps = round_steps
        self._rounds = rounds
        self._done = 0.0
        self._round_began = self._began
        self._last_round_s = 0.0
        self.rounds = 0

    def measured(self, steps: float) -> None:
        """A measurement of about so many steps is over."""
        self._done += steps

    def skipped(self, steps: float) -> None:
        """So many steps of each round are left out."""
        self._round_steps -= steps

    def round_over(self) -> None:
        """A whole round is over."""
        now = time.monotonic()
        self._last_round_s, self._round_began = now - self._round_began, now
        self.rounds += 1
        self._done = self.rounds * self._round_steps

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest takes, by what was measured; None before there is anything."""
        if not self._done:
            return None
        whole = self._rounds * self._round_steps
        left = max(0.0, whole - self._done) * self._elapsed_s / self._done
        return min(left, max(0.0, self._budget_s - self._elapsed_s)) if self._budget_s else left

    @property
    def allows_round(self) -> bool:
        """Whether another round fits the budget; the first one always does."""
        if not self._budget_s or not self.rounds:
            return True
        return self._elapsed_s + self._last_round_s <= self._budget_s

    @property
    def allows_decodes(self) -> bool:
        """Whether the first round may measure more streams at once."""
        return not self._budget_s or self._elapsed_s < _FIRST * self._budget_s

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began
