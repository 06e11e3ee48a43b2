"""Decode speed of a model at so many streams, and what it makes of the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.plan import Plan
from pigou.runtime.config import ModelConfig
from pigou.runtime.engine import LocalEngine
from pigou.runtime.gpu.device import Peaks
from pigou.runtime.load import LoadedModel
from pigou.sampling import SamplingParams

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast streams were decoded.

    Attributes:
        streams: decoded together.
        tokens_per_s: of all streams.
        step_s: seconds of a step, scheduling included.
        mbu: share of the measured copy bandwidth that weights and KV cache take.
        mfu: share of the measured product's operations that the model takes.
    """

    streams: int
    tokens_per_s: float
    step_s: float
    mbu: float
    mfu: float


def parameters(config: ModelConfig) -> int:
    """Count the weights that a decoded token meets: all but the input embedding."""
    width = config.head_dim
    attention = (2 * config.heads + 2 * config.kv_heads) * width * config.hidden
    return config.layers * (attention + 3 * config.ffn * config.hidden) + (
        config.vocab * config.hidden
    )


def make_engine(model: LoadedModel, streams: int, longest: int) -> LocalEngine:
    """Make an engine with room for so many streams of so many tokens."""
    blocks = streams * (-(-longest // BLOCK) + 1)
    config = EngineConfig(
        blocks=blocks,
        block_size=BLOCK,
        max_seqs=streams,
        max_model_len=longest,
        max_batched_tokens=2048,
        prefix_caching=False,
    )
    return LocalEngine(model, config)


def measure_speed(
    model: LoadedModel, peaks: Peaks, streams: int, *, prompt: int = 64, output: int = 128
) -> Speed:
    """Decode streams together; only plans in which all of them decode are counted.

    Args:
        model: to decode with.
        peaks: of its device.
        streams: at once.
        prompt: tokens of each prompt.
        output: tokens of each output.
    """
    engine = make_engine(model, streams, prompt + output)
    plans: list[Plan] = []
    engine.on_plan = plans.append
    rng = np.random.default_rng(streams)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    outputs = [
        engine.add(rng.integers(3, model.config.vocab, size=prompt), params) for _ in range(streams)
    ]
    steps, seconds = 0, 0.0
    while any(each.reason is None for each in outputs):
        began = time.perf_counter()
        result = engine.step()
        plan = plans.pop()
        if len(plan.rows) == streams and (plan.counts == 1).all():
            steps += result.steps
            seconds += time.perf_counter() - began
    step_s = seconds / max(steps, 1)
    weights = parameters(model.config)
    layout = engine.cache.layout
    kv_bytes = streams * (prompt + output / 2) * layout.block_bytes / layout.block_size
    moved = weights * model.dtype.itemsize + kv_bytes
    return Speed(
        streams=streams,
        tokens_per_s=streams * steps / max(seconds, 1e-9),
        step_s=step_s,
        mbu=moved / max(step_s, 1e-9) / peaks.bandwidth,
        mfu=2 * weights * streams / max(step_s, 1e-9) / peaks.flops,
    )
