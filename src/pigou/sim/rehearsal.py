"""The rehearsal of a simulated worker: what a real one would measure before it is ready."""

from __future__ import annotations

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.startup_profiling import (
    CONTEXT_TOKENS,
    DECODE_STEPS,
    ProfiledLoad,
    profiled_loads,
)
from pigou.request import SECOND, Rehearsed
from pigou.sim.timing import Batch, Timing


def rehearse(timing: Timing, config: EngineConfig) -> tuple[Rehearsed, ...]:
    """Return what the steps of each scene take, by the worker's timing."""
    return tuple(_measure(scene, timing, config) for scene in profiled_loads(config))


def _measure(scene: ProfiledLoad, timing: Timing, config: EngineConfig) -> Rehearsed:
    done, steps, nanos = 0, 0, 0
    least = 1 if scene.tokens else DECODE_STEPS
    while done < scene.tokens or steps < least:
        chunk = min(scene.tokens - done, config.max_batched_tokens - scene.streams)
        nanos += _step(timing, chunk, done, done + chunk == scene.tokens, scene.streams, steps)
        done, steps = done + chunk, steps + 1
    return Rehearsed(scene.tokens, scene.streams, steps, nanos / SECOND)


def _step(timing: Timing, chunk: int, done: int, last: bool, streams: int, age: int) -> int:
    """Return the nanoseconds of a step: some streams, and a chunk of a prompt if there is any."""
    prompt = int(chunk > 0)
    counts, kv_lens = (
        np.ones(streams + prompt, np.int32),
        np.full(streams + prompt, CONTEXT_TOKENS + age, np.int32),
    )
    samples = np.ones(streams + prompt, np.bool_)
    if prompt:
        counts[-1], kv_lens[-1], samples[-1] = chunk, done, last
    return int(timing.durations(Batch(counts, kv_lens, samples), 1)[0])
