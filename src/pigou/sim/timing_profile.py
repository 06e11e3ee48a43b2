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

from pigou.compiled import inlined, kernel
from pigou.config import ConfigError
from pigou.models.architecture import Architecture
from pigou.request import Ints, Nanos
from pigou.sim.gpus import Gpu
from pigou.sim.timing import StepShape, Timing
from pigou.sim.timing_profile_tables import Floats, LayerCurve, Tables, find_tables, read_tables

#: Batch sizes that vLLM captures as CUDA graphs by default (`cudagraph_capture_sizes`, up to 512).
CAPTURED: list[int] = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
#: Tokens, and sequences, up to which times are tabulated; beyond, they grow in proportion.
MAX_TOKENS, MAX_SEQUENCES = 16_384, 1024
#: Layers that run once a step, and how often the others run in one decoder layer.
ONCE = {"embedding", "final_layernorm"}
PER_LAYER = {
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
        _check(tables, architecture)
        gpu.check_tp(tp)
        self._layers = float(architecture.layers)
        self._tables = tables
        self._dense = _dense(tables, architecture, gpu, tp, graphs)
        self._heads = _heads(tables.sequences, architecture, gpu, tp)

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        grid = self._tables.attention
        return profile_durations(
            batch.counts, batch.kv_lens, repeat, self._dense, self._heads, self._layers,
            self._tables.skew, grid.chunks, grid.keys, grid.decodes, grid.kvs, grid.ns,
        )  # fmt: skip


def profile(folder: Path, architecture: Architecture, gpu: Gpu, tp: int = 1) -> Timing:
    """Make a timing out of a profile folder."""
    tables_folder = find_tables(folder, architecture.name, gpu.name, tp, architecture.main.dtype)
    return ProfileTiming(read_tables(tables_folder, tp), architecture, gpu, tp)


def _check(tables: Tables, architecture: Architecture) -> None:
    if len(architecture.kinds) > 1 or any(c.latent or c.window for c, _ in architecture.caches):
        raise ConfigError(
            f"{tables.folder}: tables describe decoder layers that are alike, and those of "
            f"{architecture.name!r} are not; give the timing roofline"
        )
    unknown = set(tables.dense) - ONCE - set(PER_LAYER)
    unknown |= set(tables.sequences) - set(HEADS)
    if unknown:
        raise ConfigError(
            f"{tables.folder}: layer {min(unknown)!r} is not known; it must be one of "
            f"{', '.join([*sorted(ONCE), *PER_LAYER, *HEADS])}"
        )
    if bool(tables.moe) != bool(architecture.experts):
        has = "has" if tables.moe else "has no"
        raise ConfigError(
            f"{tables.folder}: it {has} moe.csv, and model {architecture.name!r} has "
            f"{architecture.experts} experts; give the profile of this model"
        )


def _dense(tables: Tables, architecture: Architecture, gpu: Gpu, tp: int, graphs: bool) -> Floats:
    """Time of a whole step without attention and heads, by tokens, shape (MOST_TOKENS + 1,)."""
    total = np.zeros(MAX_TOKENS + 1)
    for name, curve in tables.dense.items():
        times = 1.0 if name in ONCE else architecture.layers * PER_LAYER[name]
        total += times * curve.table(MAX_TOKENS)
    if tables.moe is not None:
        total += architecture.layers * _experts(tables.moe, architecture, tables.shards)
    tokens = np.arange(MAX_TOKENS + 1)
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


def _experts(
    moe: tuple[Floats, list[LayerCurve]], architecture: Architecture, shards: int
) -> Floats:
    """Time of one layer's experts, by tokens, with as many active as uniform choices leave."""
    at, curves = moe
    numbers = np.unique(np.concatenate([np.arange(513.0), at, [float(MAX_TOKENS)]]))
    times = []
    for tokens in numbers:
        active = architecture.expected_experts(float(tokens)) / shards
        rows = np.array([_line(curve, active) for curve in curves])
        times.append(float(_line(LayerCurve(at, rows), float(tokens))))
    return np.interp(np.arange(MAX_TOKENS + 1), numbers, times)


def _line(curve: LayerCurve, at: float) -> float:
    """Read a curve; beyond its ends along its last two points, and never below its least."""
    if len(curve.numbers) == 1 or curve.numbers[0] <= at <= curve.numbers[-1]:
        return float(np.interp(at, curve.numbers, curve.ns))
    a, b = (0, 1) if at < curve.numbers[0] else (-2, -1)
    slope = (curve.ns[b] - curve.ns[a]) / (curve.numbers[b] - curve.numbers[a])
    return float(max(curve.ns[b] + slope * (at - curve.numbers[b]), curve.ns.min()))


def _heads(
    curves: Mapping[str, LayerCurve], architecture: Architecture, gpu: Gpu, tp: int
) -> Floats:
    """Time of the output layer and the sampler, by sequences, shape (MOST_SEQUENCES + 1,)."""
    total = np.zeros(MAX_SEQUENCES + 1)
    for curve in curves.values():
        total += curve.table(MAX_SEQUENCES)
    if tp > 1:
        width = architecture.vocab * 2.0
        gathers = [gpu.all_gather(count * width, tp) for count in range(MAX_SEQUENCES + 1)]
        total += np.array(gathers) * 1e9
    return total


@inlined
def _bracket(axis: Floats, first: int, value: float) -> int:
    """Find i, at least `first`, such that `value` is between axis[i] and axis[i + 1].

    Outside the axis it is the first, or the last, pair; with a single point it is that point.
    """
    low, high = first, axis.shape[0] - 2
    while low < high:
        middle = (low + high + 1) // 2
        if axis[middle] <= value:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def _share(axis: Floats, at: int, value: float) -> float:
    """How far `value` is from axis[at] to axis[at + 1]; below the first 0, beyond the last > 1."""
    if at + 1 >= axis.shape[0] or value <= axis[at]:
        return 0.0
    return float((value - axis[at]) / (axis[at + 1] - axis[at]))


@inlined
def _decodes(
    grid: Floats, chunk: int, key: int, decodes: Floats, kvs: Floats, count: float, kv: float
) -> float:
    """Time at a point of the first two axes, linear in the number of decodes and their length."""
    if count == 0.0:
        return float(grid[chunk, key, 0, 0])
    at = _bracket(kvs, 0, kv)
    share = _share(kvs, at, kv)
    after = min(at + 1, kvs.shape[0] - 1)
    low = _bracket(decodes, 1, count)
    part = _share(decodes, low, count)
    high = min(low + 1, decodes.shape[0] - 1)
    less = grid[chunk, key, low, at] * (1.0 - share) + grid[chunk, key, low, after] * share
    more = grid[chunk, key, high, at] * (1.0 - share) + grid[chunk, key, high, after] * share
    return float(less * (1.0 - part) + more * part)


@inlined
def _chunk(
    grid: Floats, chunk: int, chunks: Floats, keys: Floats, decodes: Floats, kvs: Floats,
    mean_reads: float, count: float, kv: float,
) -> float:  # fmt: skip
    """Time at a measured chunk length whose tokens read `mean_reads` entries on average.

    A chunk of c tokens after k cached ones reads k + c/2 on average. Several short prompts read
    less than one of their length: the line from k = 0 to k = c goes on below, down to the time
    of the shortest chunk.
    """
    history = mean_reads - chunks[chunk] / 2.0
    if history >= 0.0:
        at = _bracket(keys, 0, history)
        share = _share(keys, at, history)
        after = min(at + 1, keys.shape[0] - 1)
        near = _decodes(grid, chunk, at, decodes, kvs, count, kv)
        far = _decodes(grid, chunk, after, decodes, kvs, count, kv)
        return near * (1.0 - share) + far * share
    base = _decodes(grid, chunk, 0, decodes, kvs, count, kv)
    index = 0
    while index + 1 < keys.shape[0] and keys[index] < chunks[chunk]:
        index += 1
    if index == 0:
        return base
    slope = (_decodes(grid, chunk, index, decodes, kvs, count, kv) - base) / keys[index]
    floor = min(base, _decodes(grid, 1, 0, decodes, kvs, count, kv))
    return float(max(base + max(slope, 0.0) * history, floor))


@inlined
def _attention(
    grid: Floats, chunks: Floats, keys: Floats, decodes: Floats, kvs: Floats,
    tokens: float, mean_reads: float, count: float, kv: float,
) -> float:  # fmt: skip
    """Time of one layer's attention: `tokens` of prompts, and `count` decodes of length `kv`."""
    if tokens == 0.0:
        return _decodes(grid, 0, 0, decodes, kvs, count, kv)
    at = _bracket(chunks, 1, tokens)
    share = _share(chunks, at, tokens)
    after = min(at + 1, chunks.shape[0] - 1)
    less = _chunk(grid, at, chunks, keys, decodes, kvs, mean_reads, count, kv)
    if share == 0.0:
        return less
    more = _chunk(grid, after, chunks, keys, decodes, kvs, mean_reads, count, kv)
    return less * (1.0 - share) + more * share


@inlined
def _ahead(table: Floats, at: int) -> float:
    """Read a table of whole numbers; beyond its end in proportion."""
    last = table.shape[0] - 1
    return float(table[at]) if at <= last else float(table[last] * (at / last))


@kernel
def profile_durations(
    counts: Ints,
    kv_lens: Ints,
    repeat: int,
    dense: Floats,
    heads: Floats,
    layers: float,
    skew: float,
    chunks: Floats,
    keys: Floats,
    decodes: Floats,
    kvs: Floats,
    grid: Floats,
) -> Nanos:
    """Return the nanoseconds of each of `repeat` steps, shape (repeat,).

    Args:
        counts: tokens that each entry computes.
        kv_lens: cache entries of each before the first step.
        repeat: steps; in each, entries have as many more cached tokens as they computed before.
        dense: time of all layers but attention, by tokens of the step.
        heads: time of the output layer and the sampler, by entries of the step.
        skew: weight of the longest decode against the mean one, 0 to 1.
        chunks: axis 0 of `grid`, and so on.
        keys: axis 1.
        decodes: axis 2.
        kvs: axis 3.
        grid: time of one layer's attention.
    """
    count, total, max_kv, prompt, squares, twice = 0, 0, 0, 0, 0, 0
    for i in range(counts.shape[0]):
        tokens, kv = int(counts[i]), int(kv_lens[i])
        if tokens == 1:
            count += 1
            total += kv
            max_kv = max(max_kv, kv)
        else:
            prompt += tokens
            squares += tokens * tokens
            twice += tokens * (2 * kv + tokens)
    fixed = _ahead(dense, prompt + count) + _ahead(heads, counts.shape[0])
    durations = np.empty(repeat, dtype=np.int64)
    for step in range(repeat):
        mean = (total + count * step) / count if count else 0.0
        mean_reads = (twice + 2 * squares * step) / (2 * prompt) if prompt else 0.0
        time = _attention(
            grid, chunks, keys, decodes, kvs, float(prompt), mean_reads, float(count), mean
        )
        max_len = float(max_kv + step)
        if skew > 0.0 and max_len > mean:
            worst = _attention(
                grid, chunks, keys, decodes, kvs, float(prompt), mean_reads, float(count), max_len
            )
            time += skew * max(worst - time, 0.0)
        durations[step] = max(int(fixed + layers * time + 0.5), 1)
    return durations
