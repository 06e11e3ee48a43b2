"""The measurements of a profile: few requests each, of designed lengths, repeated."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import aiohttp
import numpy as np

from pigou.request import SECOND
from pigou.wire.metrics_text import RUNNING, WAITING, cache_config, totals
from pigou.workload.bench_config import ProfileConfig
from pigou.workload.endpoint import (
    ApiFlavour,
    EndpointClient,
    EndpointError,
    decoded,
    find_flavour,
    find_model,
    request,
    tokenize,
)
from pigou.workload.profiling.fit import (
    MIN_GAPS,
    MIN_SECONDS,
    Decodes,
    Measurements,
    Prompts,
    StreamGaps,
    arrivals,
    excess,
    gaps_of,
    spreads,
    window,
)
from pigou.workload.prompts import WORDS, PromptJob
from pigou.workload.token_counter import SentRequest, Stream

_TOKENS, _SEQS, _MAX_REQUEST_TOKENS = 2048, 64, 2048
#: Maximum share of time for the first round's decodes.
_FIRST = 0.5
#: Told of each measurement: how many are done, of how many, what is measured, and the seconds that
#: the rest takes (None while unknown).
Watch = Callable[[int, int, str, float | None], None]
#: Tokens of a short prompt.
_SHORT = 16
#: Steps by which streams start apart at most, for each of them; doubled where it is not enough.
_LEAD = 2
#: Seconds that decodes are measured for, where the streams may be so long.
_MIN_DECODE_S = 0.25
#: Retries of a measurement whose streams did not overlap.
_TRIES = 5
#: Tokens of a request whose first one counts: it has to come through while others are computed.
_FOLLOWED = 8
#: Seconds before it, in which the worker has nothing to do, and its processor forgets.
_REST = 0.03
#: Times as often as others are prompts beside a stream measured: it loses little, in much noise.
_OFTEN = 3
#: Tokens after which a stream is known to run, and of which pauses are long.
_PAUSE = MIN_GAPS + 8
#: Prompts that are made ready for one running stream.
_MIXED_PROMPTS = 12


@dataclass(frozen=True)
class Limits:
    """Limits of a worker."""

    tokens: int  # maximum tokens per step
    seqs: int  # maximum concurrent sequences
    max_request_tokens: int  # prompt and output of a request
    room: int  # KV cache capacity in tokens
    block: int  # tokens per block
    repeat: int = 1  # steps planned at once while its sequences stay the same
    blocks: int = 0  # KV blocks; 0 if unknown


@dataclass(frozen=True)
class Target:
    """A worker, and how it is asked."""

    client: EndpointClient
    limits: Limits
    vocabulary: list[int]  # token ids that prompts use
    rng: np.random.Generator

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt with a new prefix."""
        drawn = self.rng.choice(self.vocabulary, size=tokens)
        return [int(token) for token in drawn]

    async def ask(self, prompt: list[int], output: int) -> tuple[SentRequest, Stream]:
        """Send a request; raises `EndpointError`."""
        outcome = await self.client.send(PromptJob(prompt, output), 0)
        if not isinstance(outcome.result, Stream):
            failure = outcome.result
            raise EndpointError(
                f"a prompt of {len(prompt)} tokens with {output} to come failed: "
                f"{failure.reason}: {failure.detail}"
            )
        return outcome, outcome.result

    async def ask_all(
        self, prompts: list[list[int]], output: int
    ) -> list[tuple[SentRequest, Stream]]:
        """Send requests at once."""
        return list(await asyncio.gather(*(self.ask(prompt, output) for prompt in prompts)))


async def find_target(config: ProfileConfig, session: aiohttp.ClientSession) -> Target:
    """Read a worker's limits; raises EndpointError if absent, busy, or without token ids."""
    card = await find_model(session, config.base, config.model)
    client = EndpointClient(session, config.base, card.id, ApiFlavour(), timeout=config.timeout)
    words = await tokenize(session, config.base, card.id, " " + " ".join(WORDS))
    if words is None:
        raise EndpointError(f"{config.base} has no /tokenize: prompts are sent as token ids")
    client = replace(client, flavour=await find_flavour(client, PromptJob(words[:8], 1), True))
    reply = await request(session, "GET", f"{config.base}/server_info")
    about: dict[str, Any] = decoded(reply, dict) or {}
    status, text = await request(session, "GET", f"{config.base}/metrics")
    page = text if status == 200 else b""
    if any(totals(page, (RUNNING, WAITING)).values()):
        raise EndpointError(f"{config.base} is busy; measure it while it has nothing else to do")
    limits = _limits(config, about, cache_config(page), card.max_model_len)
    return Target(client, limits, sorted(set(words)), np.random.default_rng(config.seed))


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _limits(
    config: ProfileConfig, about: dict[str, Any], cache: dict[str, int], max_model_len: int | None
) -> Limits:
    block = _count(about.get("block_size")) or (cache.get("block_size") or 16)
    blocks = _count(about.get("blocks")) or cache.get("num_gpu_blocks", 0)
    max_request_tokens = min(
        limit
        for limit in (config.max_request_tokens, max_model_len or _MAX_REQUEST_TOKENS)
        if limit
    )
    return Limits(
        tokens=config.max_batched_tokens or (_count(about.get("max_batched_tokens")) or _TOKENS),
        seqs=config.max_seqs or min(_SEQS, _count(about.get("max_seqs")) or _SEQS),
        max_request_tokens=max_request_tokens,
        room=blocks * block or max_request_tokens,
        block=block,
        repeat=max(1, _count(about.get("repeat"))),
        blocks=blocks,
    )


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
        """Note a finished measurement of about `steps` steps."""
        self._done += steps

    def skipped(self, steps: float) -> None:
        """Steps of each round that are left out."""
        self._round_steps -= steps

    def round_over(self) -> None:
        """A whole round is over."""
        now = time.monotonic()
        self._last_round_s, self._round_began = now - self._round_began, now
        self.rounds += 1
        self._done = self.rounds * self._round_steps

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left; None before any measurement."""
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


class Measuring:
    """Measures one worker in rounds of all shapes, so that medians leave slow seconds out."""

    def __init__(self, target: Target, config: ProfileConfig, watch: Watch) -> None:
        self._target, self._config, self._watch = target, config, watch
        limits = target.limits
        self._batches = [
            _MeasuredBatch(n, length, config.steps, _LEAD * n + n * length // limits.tokens)
            for n, length in batches(limits, config.steps)
        ]
        self._chunks = [_MeasuredChunk(tokens, kv) for tokens, kv in chunks(limits)]
        self._apart: list[float] = []
        per_round = len(self._batches) + (1 + _OFTEN) * len(self._chunks) + _OFTEN
        self._total = config.repeats * per_round
        self._done = 0
        self.notes: list[str] = []
        rest = sum(1 + chunk.tokens / limits.tokens for chunk in self._chunks) * (1 + _OFTEN)
        round_steps = sum(map(self._steps, self._batches)) + rest
        self.pace = Pace(config.budget, round_steps, config.repeats)

    async def run(self) -> Measurements:
        """Measure everything; raises `EndpointError` if requests fail or drift apart."""
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

    def so_far(self) -> Measurements | None:
        """Return the measurements so far; None before a whole round."""
        if not self.pace.rounds:
            return None
        self.notes.append(f"broken off after {self.pace.rounds} of {self._config.repeats} rounds")
        return self._seen()

    async def _round(self, number: int) -> None:
        for at, batch in enumerate(self._batches):
            if not number and at and not self.pace.allows_decodes:
                self._leave_out(at)
                break
            await self._decode(batch)
        for chunk in self._chunks:
            await self._first(chunk)
        await self._mixed((number + 1) * _OFTEN)
        await self._prefill_alone()
        self.pace.round_over()

    def _leave_out(self, first: int) -> None:
        """Measure fewer streams at once: these, and those after them, would take too long."""
        self.pace.skipped(sum(map(self._steps, self._batches[first:])))
        self._total -= self._config.repeats * (len(self._batches) - first)
        last = self._batches[first - 1]
        self.notes.append(
            f"no more than {last.n} decodes after {last.length} tokens were measured within "
            f"--budget {self._config.budget:g} s"
        )
        del self._batches[first:]

    def _steps(self, batch: _MeasuredBatch) -> float:
        prompts = batch.n * batch.length / self._target.limits.tokens
        return batch.steps + batch.lead + prompts

    def _seen(self) -> Measurements:
        decodes = [
            Decodes(batch.n, median(run.kv for run in batch.decodes),
                    median(run.seconds for run in batch.decodes))
            for batch in self._batches
        ]  # fmt: skip
        gaps = [batch.gaps for batch in self._batches]
        rows, factors = spreads(gaps, decodes, self._target.limits.repeat)
        return Measurements(
            decodes=decodes,
            rhythm=rows,
            scatter=factors,
            prefill_mixed=[chunk.prompts(chunk.added_s) for chunk in self._chunks],
            prefill_alone=[self._whole()],
            first=[chunk.prompts(chunk.first_s) for chunk in self._chunks],
        )

    def _tell(self, what: str) -> None:
        self._done = min(self._done + 1, self._total)
        self._watch(self._done, self._total, what, self.pace.left_s)

    # --- decodes ------------------------------------------------------------------------------

    async def _decode(self, batch: _MeasuredBatch) -> None:
        """Let sequences decode together after prompts of one length."""
        decodes, gaps = await self._decode_once(batch)
        batch.steps = max(batch.steps, math.ceil(_MIN_DECODE_S / decodes.seconds))
        batch.gaps.append(gaps)
        batch.decodes.append(decodes)
        self.pace.measured(self._steps(batch))
        self._tell(f"{batch.n} decodes after {batch.length} tokens")

    async def _decode_once(self, batch: _MeasuredBatch) -> tuple[Decodes, StreamGaps]:
        n, length = batch.n, batch.length
        target, min_steps = self._target, self._config.steps // 2
        room = (
            min(target.limits.max_request_tokens, target.limits.room // n - target.limits.block)
            - length
        )
        for _ in range(_TRIES):
            output = min(batch.steps + batch.lead, room)
            prompts = [target.prompt(length) for _ in range(n)]
            streams = [stream for _, stream in await target.ask_all(prompts, output)]
            steps_window = window(streams)
            if steps_window is not None and steps_window.steps >= min_steps:
                seen = Decodes(n, n * length + steps_window.generated, steps_window.seconds)
                return seen, gaps_of(streams)
            if output == room:
                break
            batch.lead = 2 * batch.lead + batch.steps
        raise EndpointError(
            f"{n} streams of {output} tokens did not run together for {min_steps} steps; "
            f"lower --max-seqs or --steps"
        )

    # --- prompts ------------------------------------------------------------------------------

    async def _first(self, chunk: _MeasuredChunk) -> None:
        """Send a prompt to the worker that has rested, the first `kv` tokens of which it has."""
        max_output = self._target.limits.max_request_tokens - chunk.kv - chunk.tokens
        prompt = await self._warm(chunk)
        await asyncio.sleep(_REST)
        outcome, stream = await self._target.ask(prompt, min(_FOLLOWED, max_output))
        chunk.first_s.append((stream.first - outcome.sent) / SECOND)
        self._tell(f"{chunk.tokens} tokens after {chunk.kv}")

    async def _warm(self, chunk: _MeasuredChunk) -> list[int]:
        front = self._target.prompt(chunk.kv) if chunk.kv else []
        if front:
            await self._target.ask(front, 1)
        return front + self._target.prompt(chunk.tokens)

    async def _mixed(self, often: int) -> None:
        """Send prompts while a stream runs, until each was measured so often."""
        stale = 0
        while any(len(chunk.added_s) < often for chunk in self._chunks):
            measured = await self._mixed_once(often)
            stale = 0 if measured else stale + 1
            if stale == _TRIES:
                raise EndpointError(
                    "a stream of the longest length ends before a prompt beside it does; "
                    "raise the worker's max_model_len"
                )

    async def _mixed_once(self, often: int) -> bool:
        """Run one stream at full length with the missing chunks beside it; False if none miss."""
        target = self._target
        wanted = [chunk for chunk in self._chunks if len(chunk.added_s) < often]
        wanted.sort(key=lambda chunk: len(chunk.added_s))
        ready = [(chunk, await self._warm(chunk)) for chunk in wanted[:_MIXED_PROMPTS]]
        output = target.limits.max_request_tokens - _SHORT
        base = asyncio.create_task(target.ask(target.prompt(_SHORT), output))
        try:
            pause = await self._pause(base)
            sent = []
            for chunk, prompt in ready:
                if base.done():
                    break
                outcome, stream = await target.ask(prompt, 1)
                sent.append((chunk, outcome.sent, stream.last))
                await asyncio.sleep(pause)
            times = arrivals((await base)[1])
        finally:
            base.cancel()
        measured = False
        for chunk, began, ended in sent:
            lost = excess(times, began, ended)
            if lost is not None:
                measured = True
                chunk.added_s.append(lost)
                self._tell(f"{chunk.tokens} tokens after {chunk.kv}, beside a stream")
        return measured

    async def _pause(self, base: asyncio.Task[object]) -> float:
        """Wait until a stream runs; return the seconds of some twenty of its steps."""
        began = time.monotonic()
        probe = self._target.prompt(_SHORT)
        await self._target.ask(probe, _PAUSE)
        pause = max(time.monotonic() - began, 1.5 * MIN_SECONDS)
        if not base.done():
            await asyncio.sleep(pause)
        return pause

    async def _prefill_alone(self) -> None:
        """Send prompts of a whole step each, at once, and see how far apart they end."""
        limits = self._target.limits
        tokens = self._whole_tokens
        count = max(6, -(-6 * limits.tokens // tokens))
        count = max(3, min(count, limits.room // tokens))
        for _ in range(_OFTEN):
            prompts = [self._target.prompt(tokens) for _ in range(count)]
            ended_at = sorted(stream.first for _, stream in await self._target.ask_all(prompts, 1))
            # The first began before the others were there.
            self._apart.append((ended_at[-1] - ended_at[1]) / (len(ended_at) - 2) / SECOND)
            self._tell(f"{count} prompts of {tokens} tokens")

    @property
    def _whole_tokens(self) -> int:
        limits = self._target.limits
        return min(limits.tokens, limits.max_request_tokens - 1)

    def _whole(self) -> Prompts:
        tokens, step = self._whole_tokens, self._target.limits.tokens
        share = step / tokens
        return Prompts(step, share * _reads(tokens, 0), share, median(self._apart) * share)


@dataclass(slots=True)
class _MeasuredBatch:
    """Sequences that decode together after prompts of one length, and their measured times."""

    n: int
    length: int
    steps: int  # steps to measure
    lead: int  # steps before them, in which the streams start
    decodes: list[Decodes] = field(default_factory=list)
    gaps: list[StreamGaps] = field(default_factory=list)


@dataclass(slots=True)
class _MeasuredChunk:
    """A prompt's chunk after cached tokens, and its measured seconds."""

    tokens: int
    kv: int
    first_s: list[float] = field(default_factory=list)  # sending to first token, alone
    added_s: list[float] = field(default_factory=list)  # delay of a running stream

    def prompts(self, seconds: list[float]) -> Prompts:
        """Return the chunk with the median of measurements."""
        reads = _reads(self.tokens, self.kv)
        return Prompts(self.tokens, reads, 1, max(0.0, median(seconds)))


def batches(limits: Limits, steps: int) -> Iterator[tuple[int, int]]:
    """Yield (sequences, tokens before) for decodes, as far as the cache has room."""
    lengths = [_SHORT, limits.max_request_tokens // 4, limits.max_request_tokens * 5 // 8]
    n = 1
    while n <= limits.seqs:
        for length in lengths:
            # With as many again for the steps until the last has begun.
            if length == _SHORT or n * (length + 4 * (steps + n)) <= limits.room:
                yield n, length
        n *= 2


def chunks(limits: Limits) -> Iterator[tuple[int, int]]:
    """Yield (tokens, cached tokens) of a prompt's chunks."""
    max_tokens = min(limits.tokens - 1, limits.max_request_tokens - 1)
    tokens = 32
    while tokens < max_tokens:
        yield tokens, 0
        tokens *= 2
    yield max_tokens, 0
    for kv in (limits.max_request_tokens // 4, limits.max_request_tokens * 5 // 8):
        whole = kv // limits.block * limits.block
        for tokens in (64, 256):
            if tokens <= max_tokens and whole + tokens < limits.max_request_tokens:
                yield tokens, whole


def _reads(tokens: int, kv: int) -> float:
    return tokens * kv + tokens * (tokens + 1) / 2
