"""MockBackend: a backend without a model that sleeps by a timing model and makes up tokens."""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pigou.config import ConfigError
from pigou.engine.plan import Finish, Plan, Result
from pigou.kv.hashing import chain
from pigou.models import ModelError
from pigou.registry import read_keys
from pigou.request import (
    SECOND,
    BlockHashes,
    FinishReason,
    Grammar,
    Nanos,
    SamplingParams,
    no_hashes,
)
from pigou.runtime.step_output import RankedLogprobs, StepOutput
from pigou.sim.network import LinkConfig
from pigou.sim.timing import StepKeys, StepShape, Timing, varies
from pigou.sim.timing_models import build_timing, is_measured, kv_bytes
from pigou.small_file import read_bytes
from pigou.worker.engine_thread.commands import OnStep

if TYPE_CHECKING:
    from pigou.runtime.structured_output import GrammarState

_log = logging.getLogger(__name__)
#: Nanoseconds that a step may start in the past, to hide bookkeeping. Longer delays are kept.
CATCH_UP = 20_000_000
#: Nanoseconds between beats.
_BEAT_NS = SECOND // 2


@dataclass(frozen=True, slots=True)
class TimingLaw:
    """Step time: `base + per_sequence * sampling entries + prompt tokens / rate`."""

    base: int = 2_000_000  # nanoseconds per step
    per_sequence: int = 100_000  # nanoseconds per decoding sequence
    prefill_rate: float = 100_000.0  # prompt tokens per second

    def __post_init__(self) -> None:
        if self.base < 0 or self.per_sequence < 0 or self.prefill_rate <= 0:
            raise ConfigError(
                f"timing law is {self}; base and per_sequence must be at least 0, the rate above 0"
            )

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        prompts = batch.counts > 1
        decodes = len(prompts) - int(np.count_nonzero(prompts))
        prefill = round((batch.tokens - decodes) / self.prefill_rate * SECOND)
        step = self.base + self.per_sequence * decodes + prefill
        return np.full(repeat, step, dtype=np.int64)


@dataclass(slots=True)
class _MockSequence:
    tokens: list[int]
    params: SamplingParams
    prompt: int
    seed: bytes
    last: BlockHashes
    known: int
    reported: bool = False


class MockBackend:
    """Generates tokens that depend only on the sequence so far, on any worker.

    It keeps the timing model's clock: while busy, a step starts when the previous one ended, so
    bookkeeping overlaps with it, as on a GPU. A busy machine does not change the times while it
    keeps up.
    """

    def __init__(
        self, timing: Timing, block_size: int, vocab: int, eos: frozenset[int], first: int = 0
    ) -> None:
        self._timing = timing
        self._moments, self._steps = StepKeys(0, 0), 0
        self._ended = 0  # end of the last step by the timing model; 0 when idle
        self._block_size = block_size
        self._choices = [token for token in range(first, vocab) if token not in eos]
        self._sequences: dict[str, _MockSequence] = {}
        self._rows: dict[int, str] = {}
        self._beat: Callable[[], None] = lambda: None

    def set_beat(self, beat: Callable[[], None]) -> None:
        """Call `beat` every half second of a step."""
        self._beat = beat

    def add(
        self, request: str, tokens: list[int], params: SamplingParams, *, seed: bytes,
        resume: int = 0, hashes: BlockHashes | None = None,
        grammar: GrammarState | None = None,  # noqa: ARG002
        adapter: str = "",  # noqa: ARG002
    ) -> None:  # fmt: skip
        """Add a request; grammars are not supported."""
        if params.grammar is not None:
            self.refuse(params.grammar)
        known = hashes
        if known is None:
            known = chain(tokens, self._block_size, seed) if seed else no_hashes()
        self._sequences[request] = _MockSequence(
            list(tokens), params, len(tokens) - resume, seed, known[-1:], len(known)
        )

    def refuse(self, grammar: Grammar) -> None:
        """Raise ValueError: grammars need a model."""
        raise ValueError(f"a {grammar.kind} needs a model, and this worker only sleeps")

    def drop(self, request: str) -> None:
        """Drop a request."""
        self._sequences.pop(request, None)

    def drafts(self) -> None:
        """Offer no draft tokens."""

    def rest(self) -> None:
        """Mark the backend idle; the next step starts when requested."""
        self._ended = 0

    def execute(self, plan: Plan, on_step: OnStep | None = None) -> Result:
        """Sleep through the plan's steps."""
        for started in plan.started:
            self._rows[started.row] = started.request
        if not plan:
            return Result()
        begin = self._begin()
        finished: list[Finish] = []
        moment = self._moments.of(plan, self._steps) if varies(self._timing) else None
        batch = StepShape(plan.counts, plan.kv_lens, plan.samples, moment)
        durations = self._timing.durations(batch, plan.repeat)
        step_ends_ns = (begin + np.cumsum(durations)).tolist()
        steps = 0
        while True:
            steps += 1
            _sleep_until(step_ends_ns[steps - 1], self._beat)
            out = self._sample(plan, steps, finished)
            going = on_step is None or on_step(out)
            late = time.monotonic_ns() >= plan.horizon
            if not going or late or finished or steps == plan.repeat:
                break
        self._ended = step_ends_ns[steps - 1]
        self._steps += steps
        sealed = self._cache_full_blocks(plan, steps)
        return Result(
            steps=steps, finished=finished, full_block_hashes=sealed, durations=durations[:steps]
        )

    def _begin(self) -> int:
        now = time.monotonic_ns()
        return self._ended if now - self._ended < CATCH_UP else now

    def _sample(self, plan: Plan, step: int, finished: list[Finish]) -> StepOutput:
        size = len(plan.rows)
        out = StepOutput(np.full(size, -1, dtype=np.int32), np.zeros(size, dtype=np.bool_))
        for entry in np.flatnonzero(plan.samples).tolist():
            seq = self._sequences[self._rows[int(plan.rows[entry])]]
            self._report_prompt(entry, seq, out)
            token = self._next(seq)
            seq.tokens.append(token)
            out.tokens[entry] = token
            if (count := seq.params.logprobs) is not None:
                out.logprobs[entry] = self._explain(token, count)
            generated = len(seq.tokens) - seq.prompt
            if token in seq.params.stop_token_ids and generated > seq.params.min_tokens:
                out.finished[entry] = True
                finished.append(Finish(entry, FinishReason.STOP, step))
        return out

    def _report_prompt(self, entry: int, seq: _MockSequence, out: StepOutput) -> None:
        count = seq.params.prompt_logprobs
        if count is not None and not seq.reported:
            seq.reported = True
            explained = [self._explain(token, count) for token in seq.tokens[1 : seq.prompt]]
            out.prompt_logprobs[entry] = [None, *explained]

    def _next(self, seq: _MockSequence) -> int:
        at = (seq.tokens[-1] * 31 + len(seq.tokens) * 17 + 7) % len(self._choices)
        return self._choices[at]

    def _explain(self, token: int, count: int) -> RankedLogprobs:
        others = [other for other in self._choices[: count + 1] if other != token]
        top = np.array([token, *others][:count], dtype=np.int64)
        logprobs = np.array([-0.5, *(-2.0 - at for at in range(len(others)))], dtype=np.float32)
        return RankedLogprobs(token, -0.5, 1, top, logprobs[:count])

    def _cache_full_blocks(self, plan: Plan, steps: int) -> dict[int, BlockHashes]:
        """Return hashes of blocks that became full, after those of the prompt."""
        size = self._block_size
        sealed: dict[int, BlockHashes] = {}
        for entry, row in enumerate(plan.rows.tolist()):
            seq = self._sequences[self._rows[row]]
            computed = int(plan.starts[entry]) + int(plan.counts[entry]) * steps
            full, known = computed // size, seq.known
            if full > known and seq.seed:
                tokens = seq.tokens[known * size : full * size]
                sealed[row] = chain(tokens, size, seq.seed, seq.last)
                seq.known, seq.last = full, sealed[row][-1:]
        return sealed


def _sleep_until(when: int, beat: Callable[[], None]) -> None:
    """Sleep until a monotonic time in nanoseconds, calling `beat`."""
    while (left := when - time.monotonic_ns()) > _BEAT_NS:
        time.sleep(_BEAT_NS / SECOND)
        beat()
    if left > 0:
        time.sleep(left / SECOND)


class _LinkKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys of a link, see `read_link`."""

    gbps: float = 400.0
    latency_us: float = 200.0


def timed(
    spec: str, model: str, gpu: str, tp: int, link: str, block_size: int
) -> tuple[Timing, SimulatedLink | None]:
    """Build a worker's timing, and its link for incoming blocks; None takes no time.

    Raises ConfigError if a value is invalid.
    """
    built = build_timing(spec, model, gpu, tp)
    if built.overhead_s and not is_measured(spec):  # measured workers include their own overhead
        raise ConfigError(
            f"timing is {spec!r}, which has an overhead of {built.overhead_s} s between the client "
            "and the worker; a worker cannot add that: give overhead=0"
        )
    if not link:
        return built.timing, None
    config = read_link(link)
    block_bytes = kv_bytes(model) * block_size if config.gbps else 0
    return built.timing, SimulatedLink(config, block_bytes)


def read_mock_adapter(nanoseconds: int, folder: Path) -> SimpleNamespace:
    """Take the time to read an adapter; its digest is that of its configuration."""
    try:
        text = read_bytes(folder / "adapter_config.json")
    except OSError as error:
        raise ModelError(f"{folder} has no adapter_config.json: {error.strerror}") from None
    time.sleep(nanoseconds / SECOND)
    return SimpleNamespace(
        digest=blake2b(text, digest_size=16).hexdigest(), bytes=max(1, len(text))
    )


def read_link(text: str) -> LinkConfig:
    """Parse `gbps=..,latency_us=..`; raises ConfigError on a bad key or value."""
    keys = read_keys("timing_link", _LinkKeys, text)
    return LinkConfig(gbps=keys.gbps, latency_us=keys.latency_us, sharing="fifo", ends="receiver")


class SimulatedLink:
    """A worker's receiving link: loads arrive in sequence, each after the link's latency.

    Only the receiver's end is shared (`LinkConfig` with `sharing` fifo, `ends` receiver); senders
    are not slowed.
    """

    def __init__(self, config: LinkConfig, block_bytes: int) -> None:
        self._nanos_per_block = block_bytes * config.nanos_per_byte
        self._latency = round(config.latency_us * 1000)
        self._free = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._change = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def send(self, blocks: int, now: int) -> int:
        """Return when the last of `blocks` blocks arrives, in monotonic nanoseconds."""
        with self._change:
            self._free = max(now, self._free) + math.ceil(blocks * self._nanos_per_block)
            return self._free + self._latency

    def at(self, when: int, action: Callable[[], None]) -> None:
        """Run `action` on the link's thread at time `when`, or now if past."""
        with self._change:
            self._count += 1
            heapq.heappush(self._due, (when, self._count, action))
            self._change.notify()

    def close(self) -> None:
        """Stop the thread; pending arrivals happen at once."""
        with self._change:
            self._closed = True
            self._change.notify()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception:
                _log.exception("the arrival of blocks could not be reported")

    def _next(self) -> Callable[[], None] | None:
        with self._change:
            while True:
                left = self._due[0][0] - time.monotonic_ns() if self._due else None
                if left is not None and (left <= 0 or self._closed):
                    return heapq.heappop(self._due)[2]
                if self._closed:
                    return None
                self._change.wait(None if left is None else left / SECOND)
