"""Polls: first tokens gathered into windows of equal length."""

from __future__ import annotations

from pigou.control.saturation.detector import Sample


class Poll:
    """Gathers first tokens, and hands out those of a window once it is over.

    Windows are `interval` nanoseconds long and follow one another from the first call on. One
    that nothing was gathered in is passed over.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._due: int | None = None
        self._gathered: list[Sample] = []

    def close(self, now: int) -> list[Sample]:
        """Return what was gathered in the last window if it is over at `now`; empty otherwise."""
        if self._due is None:
            self._due = now + self._interval
        if now < self._due:
            return []
        self._due += (now - self._due) // self._interval * self._interval + self._interval
        done, self._gathered = self._gathered, []
        return done

    def add(self, sample: Sample) -> None:
        """Gather a first token; call `close` with its time before."""
        self._gathered.append(sample)
