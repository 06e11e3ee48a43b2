"""Decode speed of a model by number of streams, and its share of the device's peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pigou.config import EngineConfig
from pigou.engine.plan import Plan
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.models.model_config import ModelConfig

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast streams were decoded."""

    streams: int  # decoded together
    tokens_per_s: float
    step_s: float  # seconds of a step, scheduling included
    mbu: float  # share of the measured copy bandwidth that weights and KV cache take
    mfu: float  # share of the measured product's operations that the model takes


def parameters(config: ModelConfig) -> int:
    """Count the weights used by a decoded token: all but the input embedding."""
    width = config.head_dim
    attention = (2 * config.heads + 2 * config.kv_heads) * width * config.hidden
    return config.layers * (attention + 3 * config.ffn * config.hidden) + (
        config.vocab * config.hidden
    )


def make_engine(
    model: LoadedModel, streams: int, max_tokens: int, *, eager: bool = False
) -> LocalEngine:
    """Make an engine for `streams` streams of `max_tokens` tokens; `eager` without CUDA graphs."""
    blocks = streams * (-(-max_tokens // BLOCK) + 1)
    config = EngineConfig(
        blocks=blocks,
        block_size=BLOCK,
        max_seqs=streams,
        max_model_len=max_tokens,
        max_batched_tokens=2048,
        prefix_caching=False,
    )
    return LocalEngine(model, config, enforce_eager=eager)


def measure_speed(
    model: LoadedModel, peaks: Peaks, streams: int, *, prompt: int = 64, output: int = 128,
    eager: bool = False,
) -> Speed:  # fmt: skip
    """Decode streams together; counts plans in which all decode."""
    engine = make_engine(model, streams, prompt + output, eager=eager)
    plans: list[Plan] = []
    engine.on_plan = plans.append
    rng = np.random.default_rng(streams)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    outputs = [
        engine.add(rng.integers(3, model.config.vocab, size=prompt), params) for _ in range(streams)
    ]
    steps, seconds = 0, 0.0
    while any(output.reason is None for output in outputs):
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


_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of simple operations on this device."""

    bandwidth: float  # bytes a second, read and written, of a large copy
    flops: float  # floating-point operations a second of a large product in bf16


def describe(name: str) -> str | None:
    """Describe a device in a line; None where torch finds none of this kind."""
    device = torch.device(name)
    if device.type != "cuda":
        return f"{name}, torch {torch.__version__}"
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} "
        f"multiprocessors; torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


def synchronize(device: torch.device) -> None:
    """Synchronize a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_peaks(device: torch.device, copy_bytes: int = 2**30, width: int = 8192) -> Peaks:
    """Time a large copy and a large product."""
    with torch.inference_mode():
        both = torch.zeros((2, copy_bytes), dtype=torch.uint8, device=device)
        copy_s = _seconds(device, lambda: both[0].copy_(both[1]))
        matrix = torch.ones((width, width), dtype=torch.bfloat16, device=device)
        product_s = _seconds(device, lambda: matrix @ matrix)
    return Peaks(2 * copy_bytes / copy_s, 2 * width**3 / product_s)


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    synchronize(device)
    return max((time.perf_counter() - began) / _REPEATS, 1e-9)
