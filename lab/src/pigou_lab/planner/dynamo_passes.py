"""Forward passes: what Dynamo's planner (1.x) sees of its engines, made of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pigou.performance.model import PerformanceModel
from pigou.request import Role
from pigou.windows.planner_window import WorkerWindow

#: Points of a profile: prompts, and streams by contexts.
_PROMPTS, _GRID = 16, 6
_MIN_TOKENS = 64
#: Most tokens of a cache that are profiled.
_MAX_TOKENS = 4e6
#: Largest discount for cached tokens.
MAX_HIT_RATE = 0.95


class ForwardPass(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an engine and its queue, in tokens (`ForwardPassMetrics` of Dynamo 1.6.1)."""

    worker: str = ""  # id
    prompts: int = 0
    prompt_tokens: int = 0
    prompt_kv_tokens: int = 0  # cached tokens that these read
    streams: int = 0
    stream_tokens: int = 0
    queued_prompts: int = 0
    queued_prompt_tokens: int = 0
    queued_streams: int = 0
    queued_stream_tokens: int = 0
    seconds: float = 0.0  # step time; 0 for an idle engine

    @property
    def tokens(self) -> float:
        """Tokens through the feed-forward layers."""
        return float(self.prompt_tokens + self.streams)

    @property
    def attention(self) -> float:
        """Tokens that attention reads; a prompt of n tokens reads n (n + 1) / 2."""
        pairs = 0.0
        if self.prompts:
            tokens, cached = (n / self.prompts for n in (self.prompt_tokens, self.prompt_kv_tokens))
            pairs = self.prompt_tokens * (0.5 * (tokens + 1.0) + cached)
        return pairs + self.prompt_kv_tokens + self.stream_tokens


def hit_discount(hit_rate: float | None) -> float:
    """Return the computed share of prompt tokens."""
    return 1.0 - min(max(hit_rate or 0.0, 0.0), MAX_HIT_RATE)


def forward_pass(
    worker: WorkerWindow, role: Role, seconds: float, chunk_tokens: int,
    context: float, hit_rate: float | None,
) -> ForwardPass:  # fmt: skip
    """Return a mean step of the window, and the queue at its end, in uncached tokens."""
    idle = ForwardPass(worker=worker.id)
    waiting = worker.waiting or 0
    if role.prefills:
        queued = math.ceil((worker.queued_prefill_tokens or 0.0) / hit_discount(hit_rate))
        prompts = min(max(waiting, 1), queued)
        idle = replace(idle, queued_prompts=prompts, queued_prompt_tokens=queued)
    else:
        held = math.ceil(waiting * context)
        idle = replace(idle, queued_streams=waiting, queued_stream_tokens=held)
    if role.decodes:
        return _with_streams(idle, worker, role, seconds, chunk_tokens)
    count, tokens = worker.computed_prompts, worker.computed_tokens
    if not (count and tokens and worker.prefill_s):
        return idle
    passes = count * math.ceil(tokens / count / chunk_tokens)
    return replace(
        idle,
        prompts=1,
        prompt_tokens=max(round(tokens / passes), 1),
        seconds=worker.prefill_s / passes,
    )


def _with_streams(
    idle: ForwardPass, worker: WorkerWindow, role: Role, seconds: float, chunk_tokens: int
) -> ForwardPass:
    """Return a decode worker's mean step, with prompts for role both."""
    if not (worker.mean_running and worker.itl_s):
        return idle
    mixed = 0
    if role.prefills:
        busy_s = seconds * (1.0 if worker.cpu_usage is None else worker.cpu_usage)
        steps = max(busy_s / worker.itl_s, 1.0)
        mixed = min(round((worker.computed_tokens or 0.0) / steps), chunk_tokens)
    return replace(
        idle,
        prompts=int(mixed > 0),
        prompt_tokens=mixed,
        streams=max(round(worker.mean_running), 1),
        stream_tokens=round(worker.mean_held_tokens or 0.0),
        seconds=worker.itl_s,
    )


def profile_passes(performance: PerformanceModel, role: Role) -> list[ForwardPass]:
    """Return the passes of a profile: 16 of prompts, up to 36 of streams, up to 12 mixed."""
    passes = []
    if role.prefills:
        for tokens in _spread(_MIN_TOKENS, performance.chunk_tokens, _PROMPTS):
            seconds = performance.prefill.seconds(float(tokens), float(tokens))
            passes.append(ForwardPass(prompts=1, prompt_tokens=tokens, seconds=seconds))
    if role.decodes:
        kv_tokens = min(performance.kv_tokens, _MAX_TOKENS)
        for streams in _spread(1, performance.max_seqs, _GRID):
            for context in _spread(_MIN_TOKENS, max(int(kv_tokens / streams), 1), _GRID):
                seconds = performance.decode.itl_s(float(streams), float(context))
                passes.append(
                    ForwardPass(streams=streams, stream_tokens=streams * context, seconds=seconds)
                )
    if role is Role.BOTH:
        for tokens in _spread(_MIN_TOKENS, performance.chunk_tokens, 3):
            for streams in _spread(1, performance.max_seqs, 4):
                context = max(min(4 * _MIN_TOKENS, int(kv_tokens / streams)), 1)
                seconds = performance.prefill.seconds(float(tokens), float(tokens))
                seconds += performance.decode.itl_s(float(streams), float(context))
                step = ForwardPass(streams=streams, stream_tokens=streams * context)
                passes.append(replace(step, prompts=1, prompt_tokens=tokens, seconds=seconds))
    return passes


def _spread(low: int, high: int, count: int) -> Sequence[int]:
    if high <= low:
        return [max(high, 1)]
    ratio = (high / low) ** (1.0 / (count - 1))
    return sorted({round(low * ratio**step) for step in range(count)})
