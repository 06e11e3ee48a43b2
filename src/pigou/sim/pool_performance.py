"""Performance of a pool at a load, measured on its timing model for planners."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from pigou.config import EngineConfig
from pigou.engine.startup_profiling import (
    CONTEXT_TOKENS,
    DECODE_STEPS,
    ProfiledLoad,
    profiled_loads,
)
from pigou.kv.resharding import split_of
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import doubling
from pigou.request import SECOND, Rehearsed, Role
from pigou.sim.fleet_config import FleetConfig
from pigou.sim.timing import RooflineTiming, Timing, step_nanos
from pigou.sim.worker_spec import WorkerSpec

#: Fewest tokens of a measured prompt, or of a measured context.
_MIN_TOKENS = 64
#: Points of prompts; streams and contexts double from one to the next.
_PROMPT_POINTS = 16


def measure_performance(spec: WorkerSpec, role: Role, fleet: FleetConfig) -> PerformanceModel:
    """Return a pool's performance model, measured on one worker; TTFT includes legs and KV."""
    engine, timing = spec.engine, spec.timing
    max_tokens = max(engine.max_model_len, _MIN_TOKENS + 1)
    prompts = np.unique(np.geomspace(_MIN_TOKENS, max_tokens, _PROMPT_POINTS).round().astype(int))
    one, limits = timing, engine
    if spec.dp > 1 and isinstance(timing, RooflineTiming):
        one = timing.of_rank()
        tokens = engine.max_batched_tokens // spec.dp
        limits = msgspec.structs.replace(engine, max_batched_tokens=tokens)
    seconds = [measure_load(ProfiledLoad(n, 0), one, limits).seconds for n in prompts.tolist()]
    # Ranks compute prompts side by side: the worker's rate is that of all, a prompt's TTFT of one.
    prefill = [(float(n), s / spec.dp) for n, s in zip(prompts, seconds, strict=True)]
    rest = [s - s / spec.dp for s in seconds]
    slope, base = np.polyfit(prompts, rest, 1) if spec.dp > 1 else (0.0, 0.0)
    contexts = doubling(_MIN_TOKENS, max_tokens)
    kv_tokens = engine.blocks * engine.block_size
    decode = [
        (float(streams), float(context), _step_s(timing, streams, context))
        for context in contexts
        for streams in doubling(1, engine.max_seqs)
    ]
    model = PerformanceModel.from_points(prefill, decode, float(kv_tokens), engine.max_seqs)
    link, legs = fleet.link, 2 if role is Role.PREFILL else 1
    overhead_s = ((fleet.overhead_ms or 0.0) + legs * fleet.leg_ms) / 1000
    transfer_token_s = 0.0
    if role is Role.PREFILL:
        overhead_s += link.latency_us * 1e-6 + _step_s(timing, 1, _MIN_TOKENS)
        transfer_token_s = spec.kv_bytes * link.nanos_per_byte / SECOND
        if link.per == "gpu" and spec.kv_heads:  # the decode pool's TP is not known here
            tp = spec.gpus // spec.dp
            transfer_token_s *= split_of(spec.kv_heads, tp, tp).source_share
    return replace(
        model,
        chunk_tokens=engine.max_batched_tokens,
        overhead_s=overhead_s + max(float(base), 0.0),
        transfer_token_s=transfer_token_s + max(float(slope), 0.0),
    )


def _step_s(timing: Timing, streams: int, context: int) -> float:
    return step_nanos(timing, 0, 0, False, streams, context) / SECOND


def measure_speeds(timing: Timing, config: EngineConfig) -> tuple[Rehearsed, ...]:
    """Return the seconds of startup profiling's loads, by the worker's timing."""
    return tuple(measure_load(load, timing, config) for load in profiled_loads(config))


def measure_load(load: ProfiledLoad, timing: Timing, config: EngineConfig) -> Rehearsed:
    """Return the seconds of a load, by the worker's timing."""
    done, steps, nanos = 0, 0, 0
    min_steps = 1 if load.tokens else DECODE_STEPS
    while done < load.tokens or steps < min_steps:
        chunk = min(load.tokens - done, config.max_batched_tokens - load.streams)
        nanos += step_nanos(
            timing, chunk, done, done + chunk == load.tokens, load.streams, CONTEXT_TOKENS + steps
        )
        done, steps = done + chunk, steps + 1
    return Rehearsed(load.tokens, load.streams, steps, nanos / SECOND)
