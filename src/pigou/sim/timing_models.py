"""Timing models by name, and the KV blocks and bytes of a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pigou.config import ConfigError, check_bounds, key_values
from pigou.models.architecture import Architecture
from pigou.models.gpus import gpu as find_gpu
from pigou.models.gpus import kv_blocks
from pigou.models.parallelism import ParallelConfig, parallel_config
from pigou.models.read import architecture
from pigou.registry import read_struct
from pigou.sim.timing import PRESET_WORKERS, PRESETS, Law, LawTiming, RooflineTiming, Timing
from pigou.sim.timing_experts import read_expert_loads
from pigou.sim.timing_measured import MeasuredTiming, read_measured
from pigou.sim.timing_profile import profile


@dataclass(frozen=True, slots=True)
class BuiltTiming:
    """A timing model, and its worker's figures."""

    timing: Timing
    overhead_s: float = 0.0  # seconds from the client to a worker
    kv_tokens: int = 0  # KV tokens of the measured worker; 0 if unknown
    worker: tuple[str, str, int] | None = None  # model, GPU and tp of a preset's worker


def build_timing(
    text: str, model: str, gpu: str, gpus: ParallelConfig | int, kv_dtype: str = "",
    expert_load: str = "", *, eplb: bool = False,
) -> BuiltTiming:  # fmt: skip
    """Build a timing model from text.

    `roofline`; `profile:FOLDER` of layer tables; `law:KEY=VALUE,...` or a preset
    `law:340b,KEY=VALUE`; or a `.json` file of `pigou profile`. `kv_dtype` "" is the model's own.
    """
    split = parallel_config(gpus)
    tp = split.tp
    check_bounds("tp", tp, ge=1)
    if gpu:
        find_gpu(gpu)  # a law ignores it, but a misspelt name is refused
    name, _, rest = text.partition(":")
    if text != "roofline":
        given = {"dp": split.dp > 1, "ep": split.ep, "expert_load": expert_load, "eplb": eplb}
        if wrong := next((key for key, value in given.items() if value), ""):
            raise ConfigError(f"{wrong} is given, and the timing is {text!r}; it needs roofline")
    if name == "law":
        return _law(rest)
    if is_measured(text):
        if kv_dtype:
            raise ConfigError(
                f"kv_dtype is {kv_dtype!r}, and the timing is of a worker that was measured with "
                "its own; leave it out"
            )
        measured = read_measured(Path(text))
        room = measured.blocks * measured.block_size
        return BuiltTiming(MeasuredTiming(measured), measured.overhead, room)
    if name == "roofline" and not rest:
        shape = _model(model, kv_dtype)
        if (expert_load or eplb) and not shape.experts:
            raise ConfigError(f"expert_load or eplb is given, and {shape.name} has no experts")
        if eplb and not split.ep:
            raise ConfigError("eplb is on, and ep off; it places whole experts: also give ep")
        loads = read_expert_loads(expert_load, shape.experts)
        return BuiltTiming(RooflineTiming(shape, find_gpu(gpu), split, loads, eplb=eplb))
    if name == "profile":
        if not rest:
            raise ConfigError("timing profile: name the folder of its tables: profile:FOLDER")
        return BuiltTiming(profile(Path(rest), _model(model, kv_dtype), find_gpu(gpu), tp))
    raise ConfigError(
        f"timing is {text!r}; it must be roofline, profile:FOLDER, law:PRESET, law:KEY=VALUE,..., "
        "or a FILE.json of `pigou profile`"
    )


def is_measured(text: str) -> bool:
    """Whether a timing is a file of `pigou profile`."""
    return ":" not in text and text.endswith(".json")


def capacity(
    built: BuiltTiming, model: str, gpu: str, gpus: ParallelConfig | int,
    *, block_size: int, max_batched_tokens: int, max_seqs: int, kv_dtype: str = "",
) -> int:  # fmt: skip
    """Return the KV blocks of a worker: as measured, or as its engine would count them."""
    if built.kv_tokens:
        return max(1, built.kv_tokens // block_size)
    if built.worker is not None and not model and not gpu:
        model, gpu, gpus = built.worker
    if not model or not gpu:
        raise ConfigError("blocks are not given; say --blocks N, or --model and --gpu")
    return kv_blocks(
        _model(model, kv_dtype), find_gpu(gpu), gpus, block_size=block_size,
        max_batched_tokens=max_batched_tokens, max_seqs=max_seqs,
    )  # fmt: skip


def kv_bytes(model: str, kv_dtype: str = "") -> int:
    """Return KV bytes per token; 0 without a model."""
    return _model(model, kv_dtype).kv_bytes if model else 0


def kv_heads(model: str) -> int:
    """Return the KV heads of a layer; 0 without a model."""
    return _model(model, "").kv_heads if model else 0


def _model(name: str, kv_dtype: str) -> Architecture:
    if not name:
        raise ConfigError("--model is not given; this timing depends on it")
    model = architecture(name)
    return replace(model, kv_dtype=kv_dtype) if kv_dtype else model


def _law(text: str) -> BuiltTiming:
    values: dict[str, object] = {}
    preset, _, rest = text.partition(",")
    worker = None
    if preset and "=" not in preset:
        if preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise ConfigError(f"timing law: {preset!r} is no preset; it must be one of: {known}")
        values, worker, text = msgspec.to_builtins(PRESETS[preset]), PRESET_WORKERS[preset], rest
    law = read_struct("timing law", Law, values | key_values("timing law", text))
    return BuiltTiming(LawTiming(law), law.overhead, worker=worker)
