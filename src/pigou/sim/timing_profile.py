"""Profile timing: a step takes what its layers took when they were measured.

    step = once(tokens) + layers * (dense(tokens) + attention(batch)) + heads(sequences)

The tables hold GPU time only. What lies between them and a step is what vLLM documents:

- Decodes and small mixed batches run in CUDA graphs, whose dense layers compute the next captured
  number of tokens (1, 2, 4, multiples of 8 to 256, multiples of 16 to 512).
- The output layer and the sampler compute a row for every sequence of the batch, also for a
  prompt chunk that yields no token.
- With asynchronous scheduling the CPU prepares a step while the GPU computes the one before, so
  that no CPU time is added.
- With tensor parallelism each layer sums its activations over the GPUs twice.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pigou.config import ConfigError
from pigou.request import Nanos
from pigou.sim.architecture import Architecture
from pigou.sim.gpus import Gpu
from pigou.sim.timing import Batch, Timing
from pigou.sim.timing_profile_kernels import profile_durations
from pigou.sim.timing_profile_tables import Curve, Floats, Tables, find_tables, read_tables

#: Batch sizes that vLLM captures as CUDA graphs by default (`cudagraph_capture_sizes`, up to 512).
CAPTURED: list[int] = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
#: Tokens, and sequences, up to which times are tabulated; beyond, they grow in proportion.
MOST_TOKENS, MOST_SEQUENCES = 16_384, 1024
#: Layers that run once a step, and how often the others run in one decoder layer.
ONCE = {"embedding", "final_layernorm"}
EACH = {
    "layernorm": 2.0, "qkv_proj": 1.0, "qk_norm": 1.0, "rotary_emb": 1.0, "o_proj": 1.0,
    "gate_up_proj": 1.0, "up_proj": 1.0, "act_fn": 1.0, "down_proj": 1.0,
}  # fmt: skip
#: Layers per sequence.
HEADS = ("lm_head", "sampler")


class ProfileTiming:
    """Times of steps out of layer tables."""

    def __init__(
        self, tables: Tables, architecture: Architecture, gpu: Gpu, tp: int, graphs: bool = True
    ) -> None:
        """Sum the tables of layers that depend on the same number.

        Args:
            tables: as read.
            architecture: of the model; its number of layers multiplies the tables.
            gpu: whose links carry the sums of tensor parallelism.
            tp: GPUs that share the model.
            graphs: whether small batches run in CUDA graphs.

        Raises:
            ConfigError: a table that the architecture needs is missing, or one is not known.
        """
        _check(tables, architecture)
        gpu.check_tp(tp)
        self._layers = float(architecture.layers)
        self._tables = tables
        self._dense = _dense(tables, architecture, gpu, tp, graphs)
        self._heads = _heads(tables.sequences, architecture, gpu, tp)

    def durations(self, batch: Batch, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        grid = self._tables.attention
        return profile_durations(
            batch.counts, batch.kv_lens, repeat, self._dense, self._heads, self._layers,
            self._tables.skew, grid.chunks, grid.keys, grid.decodes, grid.kvs, grid.ns,
        )  # fmt: skip


def profile(folder: Path, architecture: Architecture, gpu: Gpu, tp: int = 1) -> Timing:
    """Make a timing out of a profile folder.

    Args:
        folder: with the tables, or above them (`find_tables`).
        architecture: of the model.
        gpu: that it was profiled on.
        tp: GPUs that share the model.

    Raises:
        ConfigError: there are no such tables, or they do not suit the model.
    """
    found = find_tables(folder, architecture.name, gpu.name, tp, architecture.dtype)
    return ProfileTiming(read_tables(found, tp), architecture, gpu, tp)


def _check(tables: Tables, architecture: Architecture) -> None:
    unknown = set(tables.dense) - ONCE - set(EACH)
    unknown |= set(tables.sequences) - set(HEADS)
    if unknown:
        raise ConfigError(
            f"{tables.folder}: layer {min(unknown)!r} is not known; it must be one of "
            f"{', '.join([*sorted(ONCE), *EACH, *HEADS])}"
        )
    if bool(tables.moe) != bool(architecture.experts):
        has = "has" if tables.moe else "has no"
        raise ConfigError(
            f"{tables.folder}: it {has} moe.csv, and model {architecture.name!r} has "
            f"{architecture.experts} experts; give the profile of this model"
        )


def _dense(tables: Tables, architecture: Architecture, gpu: Gpu, tp: int, graphs: bool) -> Floats:
    """Time of a whole step without attention and heads, by tokens, shape (MOST_TOKENS + 1,)."""
    total = np.zeros(MOST_TOKENS + 1)
    for name, curve in tables.dense.items():
        times = 1.0 if name in ONCE else architecture.layers * EACH[name]
        total += times * curve.table(MOST_TOKENS)
    if tables.moe is not None:
        total += architecture.layers * _experts(tables.moe, architecture, tables.shards)
    tokens = np.arange(MOST_TOKENS + 1)
    if tp > 1:
        width = architecture.hidden * 2.0
        sums = np.array([gpu.all_reduce(count * width, tp) for count in tokens.tolist()])
        total += (2 * architecture.layers + 1) * sums * 1e9
    if graphs:
        total = total[[_captured(count) for count in tokens.tolist()]]
    return total


def _captured(tokens: int) -> int:
    """Return the tokens that are computed for a batch of `tokens`."""
    if not 0 < tokens <= CAPTURED[-1]:
        return tokens
    return CAPTURED[bisect.bisect_left(CAPTURED, tokens)]


def _experts(moe: tuple[Floats, list[Curve]], architecture: Architecture, shards: int) -> Floats:
    """Time of one layer's experts, by tokens, with as many active as uniform choices leave."""
    at, curves = moe
    numbers = np.unique(np.concatenate([np.arange(513.0), at, [float(MOST_TOKENS)]]))
    times = []
    for tokens in numbers:
        active = architecture.expected_experts(float(tokens)) / shards
        rows = np.array([_line(curve, active) for curve in curves])
        times.append(float(_line(Curve(at, rows), float(tokens))))
    return np.interp(np.arange(MOST_TOKENS + 1), numbers, times)


def _line(curve: Curve, at: float) -> float:
    """Read a curve; beyond its ends along its last two points, and never below its least."""
    if len(curve.at) == 1 or curve.at[0] <= at <= curve.at[-1]:
        return float(np.interp(at, curve.at, curve.ns))
    a, b = (0, 1) if at < curve.at[0] else (-2, -1)
    slope = (curve.ns[b] - curve.ns[a]) / (curve.at[b] - curve.at[a])
    return float(max(curve.ns[b] + slope * (at - curve.at[b]), curve.ns.min()))


def _heads(curves: Mapping[str, Curve], architecture: Architecture, gpu: Gpu, tp: int) -> Floats:
    """Time of the output layer and the sampler, by sequences, shape (MOST_SEQUENCES + 1,)."""
    total = np.zeros(MOST_SEQUENCES + 1)
    for curve in curves.values():
        total += curve.table(MOST_SEQUENCES)
    if tp > 1:
        width = architecture.vocab * 2.0
        gathers = [gpu.all_gather(count * width, tp) for count in range(MOST_SEQUENCES + 1)]
        total += np.array(gathers) * 1e9
    return total
