"""The flow: how fast tokens come from each worker, and with how many streams beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND

#: A sample needs as much time, in seconds, and as many tokens.
_LEAST_S = 0.25
_LEAST_TOKENS = 4
#: Samples of one worker that may wait for the end of a prompt; the oldest is given up.
_MOST_OPEN = 1024


@dataclass(slots=True)
class Sample:
    """What a worker did in some time.

    Attributes:
        row: of the worker.
        streams: that ran on it, a mean over the time in which any flowed.
        context: tokens that they held, prompts and outputs; likewise.
        itl: seconds between two tokens of one stream.
        steps: that it took.
        prompts: that it computed beside the streams.
        work: tokens of those that were uncached, pairs counted as tokens.
        mixed: seconds of it that belong to a prompt whose end is to come.
    """

    row: int
    streams: float
    context: float
    itl: float
    steps: float = 1.0
    prompts: float = 0.0
    work: float = 0.0
    mixed: float = 0.0


@dataclass(slots=True)
class _Sums:
    """What one worker did since its last sample, in seconds; `Flow.tokens` has its tokens."""

    seconds: float = 0.0
    streams: float = 0.0
    everybody: float = 0.0
    context: float = 0.0
    prompts: float = 0.0
    work: float = 0.0
    mixed: float = 0.0


class Flow:
    """Integrals over time, one entry a worker.

    A stream flows from its first token to its end. ITL is the time that streams flowed, summed
    over them, by the tokens that came. Requests whose tokens are not seen count among the streams,
    and not in that sum.

    A prompt counts in the samples of the time in which it was computed, by their share of it. So
    a sample waits for the end of a prompt that was under way in it: a long one makes streams slow
    long before it ends, and who counts it at its end takes the worker for a slow one till then.

    Attributes:
        tokens: that came since the last sample, after the first of their streams, (workers,).
    """

    def __init__(self) -> None:
        self._flowing: list[int] = []
        self._sums: list[_Sums] = []
        self.tokens: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._open: list[list[Sample]] = []
        self._since: list[int] = []
        self._computes: list[bool] = []

    def up(self) -> None:
        """A worker joined; its row is the last."""
        self._flowing.append(0)
        self._sums.append(_Sums())
        self.tokens = np.append(self.tokens, 0)
        self._open.append([])
        self._since.append(0)
        self._computes.append(False)

    def down(self, row: int) -> None:
        """A worker left."""
        del self._flowing[row], self._sums[row], self._open[row]
        del self._since[row], self._computes[row]
        self.tokens = np.delete(self.tokens, row)

    def advance(self, row: int, streams: int, context: int, prompts: int, now: int) -> None:
        """Let time pass on worker `row`; call before a change of what it does.

        Args:
            row: of the worker.
            streams: that it had.
            context: tokens that these held.
            prompts: that it had to compute.
            now: nanoseconds.
        """
        flowing = self._flowing[row]
        if flowing:
            seconds = (now - self._since[row]) / SECOND
            sums = self._sums[row]
            sums.seconds += seconds
            sums.streams += flowing * seconds
            sums.everybody += max(streams, flowing) * seconds
            sums.context += context * seconds
            if prompts:
                sums.mixed += seconds
        self._computes[row] = prompts > 0
        self._since[row] = now

    def advance_all(
        self, streams: list[int], contexts: list[int], prompts: list[int], now: int
    ) -> None:
        """As `advance` on each worker."""
        for row, flowing in enumerate(self._flowing):
            if flowing:
                self.advance(row, streams[row], contexts[row], prompts[row], now)
            else:
                self._computes[row] = prompts[row] > 0
                self._since[row] = now

    def change(self, row: int, by: int) -> None:
        """Streams began (by > 0) or ended to flow; `advance` comes first."""
        self._flowing[row] += by

    def came(self, row: int, tokens: int) -> None:
        """Tokens came, after the first of their streams."""
        self.tokens[row] += tokens

    def prompt(self, row: int, work: float, seconds: float) -> None:
        """A prompt was computed in so much time, beside the streams if there were any."""
        under: list[Sample | _Sums] = [*self._open[row], self._sums[row]]
        for each in under:
            if each.mixed:
                share = min(1.0, each.mixed / max(seconds, 1e-9))
                each.prompts += share
                each.work += share * work
                each.mixed = 0.0

    def harvest(self) -> Iterator[Sample]:
        """Return the samples of workers that flowed long enough, and begin anew there."""
        for row, sums in enumerate(self._sums):
            waiting = self._open[row]
            tokens = self.tokens.item(row)
            if sums.seconds >= _LEAST_S and tokens >= _LEAST_TOKENS:
                self._sums[row] = _Sums()
                self.tokens[row] = 0
                waiting.append(_sample(sums, tokens))
            if not waiting:
                continue
            ready = next((i for i, each in enumerate(waiting) if each.mixed), len(waiting))
            if not self._computes[row]:  # a prompt was given up: nobody can explain its samples
                waiting[:] = [each for each in waiting if not each.mixed]
                ready = len(waiting)
            for each in waiting[:ready]:
                each.row = row  # workers may have left since
                yield each
            del waiting[: max(ready, len(waiting) - _MOST_OPEN)]


def _sample(sums: _Sums, tokens: int) -> Sample:
    itl, streams = sums.streams / tokens, sums.everybody / sums.seconds
    context, steps = sums.context / sums.seconds, sums.seconds / itl
    return Sample(-1, streams, context, itl, steps, sums.prompts, sums.work, sums.mixed)
