"""The measurements of a profile: few requests each, of designed lengths, repeated."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from pigou.request import SECOND
from pigou.workload.endpoint import EndpointError
from pigou.workload.profiling.config import ProfileConfig
from pigou.workload.profiling.pace import Pace
from pigou.workload.profiling.seen import Decodes, Prompts, Seen
from pigou.workload.profiling.spread import Gaps, gaps_of, spreads
from pigou.workload.profiling.stream import (
    LEAST_GAPS,
    LEAST_SECONDS,
    arrivals,
    excess,
    window,
)
from pigou.workload.profiling.target import Limits, Target

#: Told of each measurement: how many are done, of how many, what is measured, and the seconds that
#: the rest takes (None while unknown).
Watch = Callable[[int, int, str, float | None], None]
#: Tokens of a prompt whose length does not matter.
_SHORT = 16
#: Steps by which streams start apart at most, for each of them; doubled where it is not enough.
_LEAD = 2
#: Seconds that decodes are measured for, where the streams may be so long.
_LEAST = 0.25
#: Times that a measurement is tried again because the streams did not overlap.
_TRIES = 5


class Measuring:
    """Measures one worker.

    Everything is measured in rounds, each of which holds all shapes: a machine that is slower for
    some seconds is so for all of them, and medians leave it out.
    """

    def __init__(self, target: Target, config: ProfileConfig, watch: Watch) -> None:
        """Plan the measurements."""
        self._target, self._config, self._watch = target, config, watch
        limits = target.limits
        self._batches = list(batches(limits, config.steps))
        self._chunks = list(chunks(limits))
        self._paces = [
            _Pace(config.steps, _LEAD * n + n * length // limits.tokens)
            for n, length in self._batches
        ]
        self._decodes: list[list[Decodes]] = [[] for _ in self._batches]
        self._gaps: list[list[Gaps]] = [[] for _ in self._batches]
        self._firsts: list[list[float]] = [[] for _ in self._chunks]
        self._losses: list[list[float]] = [[] for _ in self._chunks]
        self._apart: list[float] = []
        per_round = len(self._batches) + (1 + _OFTEN) * len(self._chunks) + _OFTEN
        self._per_round = per_round
        self._total = config.repeats * per_round
        self._done = 0
        self.notes: list[str] = []
        rest = sum(1 + tokens / limits.tokens for tokens, _ in self._chunks) * (1 + _OFTEN)
        round_steps = sum(map(self._steps, range(len(self._batches)))) + rest
        self.pace = Pace(config.budget, round_steps, config.repeats)

    async def run(self) -> Seen:
        """Measure everything.

        Raises:
            EndpointError: a request failed, or streams could not be had at once.
        """
        await self._target.ask(self._target.prompt(_SHORT), 4)  # wakes what sleeps
        for number in range(self._config.repeats):
            if not self.pace.allows_round:
                self.notes.append(
                    f"{number} of {self._config.repeats} rounds were measured within --budget "
                    f"{self._config.budget:g} s"
                )
                break
            await self._round(number)
        return self._seen()

    def so_far(self) -> Seen | None:
        """Return what was measured until it was broken off; None before a round was whole."""
        if not self.pace.rounds:
            return None
        self.notes.append(f"broken off after {self.pace.rounds} of {self._config.repeats} rounds")
        return self._seen()

    async def _round(self, number: int) -> None:
        for at in range(len(self._batches)):
            if not number and at and not self.pace.allows_decodes:
                self._leave_out(at)
                break
            await self._decode(at)
        for at in range(len(self._chunks)):
            await self._first(at)
        await self._beside((number + 1) * _OFTEN)
        await self._alone()
        self.pace.round_over()

    def _leave_out(self, first: int) -> None:
        """Measure fewer streams at once: these, and those after them, would take too long."""
        self.pace.skipped(sum(self._steps(at) for at in range(first, len(self._batches))))
        left = len(self._batches) - first
        self._per_round -= left
        self._total -= self._config.repeats * left
        most, length = self._batches[first - 1]
        self.notes.append(
            f"no more than {most} decodes after {length} tokens were measured within --budget "
            f"{self._config.budget:g} s"
        )
        for each in (self._batches, self._paces, self._decodes, self._gaps):
            del each[first:]

    def _steps(self, at: int) -> float:
        """Return about how many steps of the worker a measurement of decodes takes."""
        n, length = self._batches[at]
        return (
            self._paces[at].steps + self._paces[at].lead + n * length / self._target.limits.tokens
        )

    def _seen(self) -> Seen:
        decodes = [
            Decodes(n, median(d.kv for d in found), median(d.seconds for d in found))
            for (n, _), found in zip(self._batches, self._decodes, strict=True)
        ]
        rows, factors = spreads(self._gaps, decodes, self._target.limits.repeat)
        return Seen(
            decodes=decodes,
            rhythm=rows,
            scatter=factors,
            beside=self._prompts(self._losses),
            alone=[self._whole()],
            first=self._prompts(self._firsts),
        )

    def _prompts(self, seconds: list[list[float]]) -> list[Prompts]:
        return [
            Prompts(tokens, _reads(tokens, kv), 1, max(0.0, median(each)))
            for (tokens, kv), each in zip(self._chunks, seconds, strict=True)
        ]

    def _tell(self, what: str) -> None:
        self._done = min(self._done + 1, self._total)
        self._watch(self._done, self._total, what, self.pace.left_s)

    # --- decodes ------------------------------------------------------------------------------

    async def _decode(self, at: int) -> None:
        """Let `n` sequences decode together after prompts of this length."""
        n, length = self._batches[at]
        pace = self._paces[at]
        found, gaps = await self._decode_once(n, length, pace)
        pace.steps = max(pace.steps, math.ceil(_LEAST / found.seconds))
        self._gaps[at].append(gaps)
        self._decodes[at].append(found)
        self.pace.measured(self._steps(at))
        self._tell(f"{n} decodes after {length} tokens")

    async def _decode_once(self, n: int, length: int, pace: _Pace) -> tuple[Decodes, Gaps]:
        target, least = self._target, self._config.steps // 2
        room = min(target.limits.longest, target.limits.room // n - target.limits.block) - length
        for _ in range(_TRIES):
            output = min(pace.steps + pace.lead, room)
            prompts = [target.prompt(length) for _ in range(n)]
            streams = [stream for _, stream in await target.ask_all(prompts, output)]
            found = window(streams)
            if found is not None and found.steps >= least:
                seen = Decodes(n, n * length + found.generated, found.seconds)
                return seen, gaps_of(streams)
            if output == room:
                break
            pace.lead = 2 * pace.lead + pace.steps
        raise EndpointError(
            f"{n} streams of {output} tokens did not run together for {least} steps; "
            f"lower --max-seqs or --steps"
        )

    # --- prompts ------------------------------------------------------------------------------

    async def _first(self, at: int) -> None:
        """Send a prompt to the worker that has rested, the first `kv` tokens of which it has."""
        tokens, kv = self._chunks[at]
        output = min(_FOLLOWED, self._target.limits.longest - kv - tokens)
        prompt = await self._warm(tokens, kv)
        await asyncio.sleep(_REST)
        outcome, stream = await self._target.ask(prompt, output)
        self._firsts[at].append((stream.first - outcome.sent) / SECOND)
        self._tell(f"{tokens} tokens after {kv}")

    async def _warm(self, tokens: int, kv: int) -> list[int]:
        front = self._target.prompt(kv) if kv else []
        if kv:
            await self._target.ask(front, 1)
        return front + self._target.prompt(tokens)

    async def _beside(self, often: int) -> None:
        """Send prompts while a stream runs, until each was measured so often.

        What the stream loses is what they take.
        """
        stale = 0
        while any(len(each) < often for each in self._losses):
            before = sum(map(len, self._losses))
            await self._beside_once(often)
            stale = stale + 1 if sum(map(len, self._losses)) == before else 0
            if stale == _TRIES:
                raise EndpointError(
                    "a stream of the longest length ends before a prompt beside it does; "
                    "raise the worker's max_model_len"
                )

    async def _beside_once(self, often: int) -> None:
        """Run one stream as long as may be, and send beside it what is still missing."""
        target, losses = self._target, self._losses
        wanted = [at for at, each in enumerate(losses) if len(each) < often]
        wanted.sort(key=lambda at: len(losses[at]))
        ready = [(at, await self._warm(*self._chunks[at])) for at in wanted[:_BESIDE]]
        output = target.limits.longest - _SHORT
        base = asyncio.create_task(target.ask(target.prompt(_SHORT), output))
        try:
            pause = await self._pause(base)
            sent = []
            for at, prompt in ready:
                if base.done():
                    break
                outcome, stream = await target.ask(prompt, 1)
                sent.append((at, outcome.sent, stream.last))
                await asyncio.sleep(pause)
            times = arrivals((await base)[1])
        finally:
            base.cancel()
        for at, began, ended in sent:
            lost = excess(times, began, ended)
            if lost is not None:
                losses[at].append(lost)
                tokens, kv = self._chunks[at]
                self._tell(f"{tokens} tokens after {kv}, beside a stream")

    async def _pause(self, base: asyncio.Task[object]) -> float:
        """Wait until a stream runs; return the seconds of some twenty of its steps."""
        began = time.monotonic()
        probe = self._target.prompt(_SHORT)
        await self._target.ask(probe, _PAUSE)
        pause = max(time.monotonic() - began, 1.5 * LEAST_SECONDS)
        if not base.done():
            await asyncio.sleep(pause)
        return pause

    async def _alone(self) -> None:
        """Send prompts of a whole step each, at once, and see how far apart they end."""
        limits = self._target.limits
        tokens = self._whole_tokens
        count = max(6, -(-6 * limits.tokens // tokens))
        count = max(3, min(count, limits.room // tokens))
        for _ in range(_OFTEN):
            prompts = [self._target.prompt(tokens) for _ in range(count)]
            ends = sorted(stream.first for _, stream in await self._target.ask_all(prompts, 1))
            # The first began before the others were there.
            self._apart.append((ends[-1] - ends[1]) / (len(ends) - 2) / SECOND)
            self._tell(f"{count} prompts of {tokens} tokens")

    @property
    def _whole_tokens(self) -> int:
        limits = self._target.limits
        return min(limits.tokens, limits.longest - 1)

    def _whole(self) -> Prompts:
        tokens, step = self._whole_tokens, self._target.limits.tokens
        share = step / tokens
        return Prompts(step, share * _reads(tokens, 0), share, median(self._apart) * share)


@dataclass
class _Pace:
    """How streams are measured: for so many steps, after so many in which they start."""

    steps: int
    lead: int


#: Tokens of a request whose first one counts: it has to come through while others are computed.
_FOLLOWED = 8
#: Seconds before it, in which the worker has nothing to do, and its processor forgets.
_REST = 0.03
#: Times as often as others are prompts beside a stream measured: it loses little, in much noise.
_OFTEN = 3
#: Tokens after which a stream is known to run, and of which pauses are long.
_PAUSE = LEAST_GAPS + 8
#: Prompts that are made ready for one running stream.
_BESIDE = 12


def batches(limits: Limits, steps: int) -> Iterator[tuple[int, int]]:
    """Yield (sequences, tokens before) for decodes, as far as the cache has room."""
    lengths = [_SHORT, limits.longest // 4, limits.longest * 5 // 8]
    n = 1
    while n <= limits.seqs:
        for length in lengths:
            # With as many again for the steps until the last has begun.
            if length == _SHORT or n * (length + 4 * (steps + n)) <= limits.room:
                yield n, length
        n *= 2


def chunks(limits: Limits) -> Iterator[tuple[int, int]]:
    """Yield (tokens, tokens that are cached before them) for prompts of one step."""
    most = min(limits.tokens - 1, limits.longest - 1)
    tokens = 32
    while tokens < most:
        yield tokens, 0
        tokens *= 2
    yield most, 0
    for kv in (limits.longest // 4, limits.longest * 5 // 8):
        whole = kv // limits.block * limits.block
        for tokens in (64, 256):
            if tokens <= most and whole + tokens < limits.longest:
                yield tokens, whole


def _reads(tokens: int, kv: int) -> float:
    return tokens * kv + tokens * (tokens + 1) / 2
