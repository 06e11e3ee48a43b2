"""The flow: how fast tokens come from each worker, and with how many streams beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pigou.request import SECOND

#: A sample needs as much time, in seconds, and as many tokens.
_LEAST_S = 0.25
_LEAST_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """What a worker did since its last sample.

    Attributes:
        row: of the worker.
        streams: that ran on it, a mean over the time in which any flowed.
        itl: seconds between two tokens of one stream.
        steps: that it took.
        prompts: that it computed beside the streams.
        uncached: tokens of those.
    """

    row: int
    streams: float
    itl: float
    steps: float = 1.0
    prompts: float = 0.0
    uncached: float = 0.0


class Flow:
    """Integrals over time, one entry a worker.

    A stream flows from its first token to its end. ITL is the time that streams flowed, summed
    over them, by the tokens that came. Requests whose tokens are not seen count among the streams,
    and not in that sum.
    """

    def __init__(self) -> None:
        self._flowing: list[int] = []
        # Seconds flowing; stream seconds; all streams'; tokens; prompts; their uncached tokens.
        self._sums: list[list[float]] = []
        self._since: list[int] = []

    def up(self) -> None:
        """A worker joined; its row is the last."""
        self._flowing.append(0)
        self._sums.append([0.0] * 6)
        self._since.append(0)

    def down(self, row: int) -> None:
        """A worker left."""
        del self._flowing[row], self._sums[row], self._since[row]

    def advance(self, row: int, streams: int, now: int) -> None:
        """Let time pass on worker `row`, which had so many streams; call before a change of it."""
        flowing = self._flowing[row]
        if flowing:
            seconds = (now - self._since[row]) / SECOND
            sums = self._sums[row]
            sums[0] += seconds
            sums[1] += flowing * seconds
            sums[2] += max(streams, flowing) * seconds
        self._since[row] = now

    def change(self, row: int, by: int) -> None:
        """Streams began (by > 0) or ended to flow; `advance` comes first."""
        self._flowing[row] += by

    def came(self, row: int, tokens: int) -> None:
        """Tokens came, after the first of their streams."""
        self._sums[row][3] += tokens

    def prompt(self, row: int, uncached: int) -> None:
        """A prompt was computed, beside the streams if there are any."""
        if self._flowing[row]:
            sums = self._sums[row]
            sums[4] += 1.0
            sums[5] += uncached

    def harvest(self) -> Iterator[Sample]:
        """Return a sample of each worker that flowed long enough, and begin anew there."""
        for row, sums in enumerate(self._sums):
            seconds, stream_seconds, all_seconds, tokens, *mixed = sums
            if seconds >= _LEAST_S and tokens >= _LEAST_TOKENS:
                self._sums[row] = [0.0] * 6
                itl = stream_seconds / tokens
                yield Sample(row, all_seconds / seconds, itl, seconds / itl, *mixed)
