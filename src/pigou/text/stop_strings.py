"""Stop strings: where text ends, and what must be held back until that is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed."""

    text: str  # final text: up to the stop string, or with it if included
    stop: str


class Stops:
    """Watches a growing text for stop strings; holds back a prefix. To resume, replay tokens."""

    __slots__ = ("_held", "_include", "_max_length", "_min_tokens", "_stops", "_tokens")

    def __init__(self, stops: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        """`include` shows the stop string; one that ends within `min_tokens` does not count."""
        self._stops = tuple(stops)
        self._max_length = max(map(len, stops), default=0)
        self._include = include
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Feed one token's text; return the text to show, or the match."""
        self._tokens += 1
        if not text:
            return ""
        old = len(self._held)
        seen = self._held + text
        if self._tokens > self._min_tokens and (match := self._find(seen, old)):
            return match
        keep = begun(seen, self._stops, self._max_length)
        self._held = seen[len(seen) - keep :]
        # Included strings are shown at once: what is held only recognizes one that spans tokens.
        return text if self._include else seen[: len(seen) - keep]

    def flush(self) -> str:
        """End the text without a match; return held text."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _find(self, seen: str, old: int) -> StopMatch | None:
        """Return the match that begins first among those that end beyond the first `old`."""
        places = ((seen.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stops)
        matches = [(at, len(stop), stop) for at, stop in places if at >= 0]
        if not matches:
            return None
        at, length, stop = min(matches)
        if self._include:
            return StopMatch(seen[old : at + length], stop)
        return StopMatch(seen[:at], stop)


def begun(text: str, marks: Collection[str], max_length: int) -> int:
    """Return the length of the text's longest suffix that is a proper prefix of a mark."""
    for length in range(min(len(text), max_length - 1), 0, -1):
        end = text[len(text) - length :]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
