"""Profile timing: a step takes the measured times of its layers.

    step = once(tokens) + layers * (dense(tokens) + attention(batch)) + heads(sequences)
Tables of LLMServingSim's profiler (`dense.csv`, `attention.csv`, `per_sequence.csv`, `moe.csv`; us
per layer). As in vLLM, small batches pad to CUDA graph sizes, every sequence samples, CPU time is
hidden by asynchronous scheduling, and tensor parallelism sums activations twice a layer. What
tables of eager, even batches cannot tell: graphs save launches; the longest sequence ends last.
"""

from __future__ import annotations

import bisect
import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import inlined, kernel
from pigou.config import ConfigError
from pigou.models.architecture import Architecture
from pigou.models.gpus import Gpu
from pigou.models.read import normalized, shape_name
from pigou.request import Ints, Nanos
from pigou.sim.timing import StepShape, Timing
from pigou.small_file import read_text, read_yaml

Floats = NDArray[np.float64]
#: Nanoseconds in a microsecond.
MICRO = 1000.0
#: Number formats as folders of tables name them.
_VARIANTS = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8", "int8": "int8",
    "int4": "int4", "nvfp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip
#: Columns of `attention.csv`; the first four are the axes of the grid.
_ATTENTION = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
_N_DECODE, _KV_DECODE, _TIME_US = 2, 3, 4
_AXES = 4
#: Batch sizes that vLLM captures as CUDA graphs by default (`cudagraph_capture_sizes`, up to 512).
CAPTURED: list[int] = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
CAPTURED_MAX = CAPTURED[-1]
#: Nanoseconds by which replay in a CUDA graph shortens a kernel that was profiled eagerly:
#: LLMServingSim's step sweep on an RTX PRO 6000, 589 us of a full graph of 324 kernels.
REPLAY_SAVES_NS = 1800.0
#: A layer's kernels in graphs of every step, and those of attention, in graphs of decodes alone.
DENSE_KERNELS, ATTENTION_KERNELS = 8, 2
#: Blocks of FlashAttention 2 per processor, below which it splits sequences: 0.8 of two.
UNSPLIT = 1.6
#: Share of the excess of the longest decode that lengthens a batch: 0.73 in the mean (0.4 to 0.95)
#: of list schedules of its blocks, in order of arrival, at lengths of ShareGPT.
TAIL_SHARE = 0.7
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


@dataclass(frozen=True, slots=True)
class LayerCurve:
    """A measured time by a whole number, piecewise linear."""

    numbers: Floats  # the numbers, rising, shape (n,)
    ns: Floats  # nanoseconds, shape (n,)

    def table(self, max_number: int) -> Floats:
        """Return the times of 0 to `max_number`, (max_number + 1,), extrapolated."""
        numbers = np.arange(max_number + 1, dtype=np.float64)
        times = np.interp(numbers, self.numbers, self.ns)
        if max_number > self.numbers[-1] and len(self.numbers) > 1:
            half = int(np.argmin(np.abs(self.numbers[:-1] - self.numbers[-1] / 2)))
            slope = (self.ns[-1] - self.ns[half]) / (self.numbers[-1] - self.numbers[half])
            past_end = numbers > self.numbers[-1]
            times[past_end] = self.ns[-1] + max(slope, 0.0) * (numbers[past_end] - self.numbers[-1])
        return times


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention kernels against what they read, on a grid without holes."""

    chunks: Floats  # tokens of prompts, rising, first 0, shape (c,)
    keys: Floats  # cached tokens before a chunk, rising, first 0, shape (k,)
    decodes: Floats  # sequences that decode, rising, first 0, shape (n,)
    kvs: Floats  # cached tokens of each, rising, shape (v,)
    # nanoseconds, shape (c, k, n, v). Without prompts only [0, 0] is filled, without decodes only
    # [:, :, 0, 0].
    ns: Floats


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of one model on one kind of GPU at one degree of tensor parallelism."""

    folder: Path
    dense: Mapping[str, LayerCurve]  # layers against tokens of the step, by name
    sequences: Mapping[str, LayerCurve]  # `lm_head` and `sampler` against sequences of the step
    attention: Attention
    moe: tuple[Floats, list[LayerCurve]] | None  # experts' time by tokens and activated experts
    shards: int  # GPUs that share the experts of `moe`: 1 where it was measured at this degree


def find_tables(folder: Path, model: str, gpu: str, tp: int, dtype: str) -> Path:
    """Find the folder of a model's tables, at or below `folder` (GPU/owner/model/dtype/tpN)."""
    if (folder / "dense.csv").is_file():
        name = folder.resolve().name
        if re.fullmatch(r"tp\d+", name) and name != f"tp{tp}":
            raise ConfigError(
                f"profile is {str(folder)!r}, of {name}, and tp is {tp}; give both the same"
            )
        _check_named(folder, model, gpu, dtype)
        return folder
    folders = sorted(path.parent for path in folder.rglob("dense.csv"))
    matches = [path for path in folders if _matches(path, folder, model, gpu, tp, dtype)]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(str(path.relative_to(folder)) for path in matches or folders) or "nothing"
    problem = "more than one fit" if matches else "none fits"
    raise ConfigError(
        f"profile is {str(folder)!r}: {problem} model {model!r}, gpu {gpu!r}, tp {tp}, {dtype} "
        f"weights; there is: {names}; name one of these folders"
    )


def _check_named(folder: Path, model: str, gpu: str, dtype: str) -> None:
    """Refuse a folder whose name or meta.yaml tells of another model, GPU or format."""
    meta = _meta(folder)
    names = {
        "model": (shape_name(str(meta.get("model") or "")), shape_name(model)),
        "gpu": (normalized(str(meta.get("hardware") or "")), normalized(gpu)),
        "weights": (_VARIANTS.get(folder.resolve().parent.name, ""), dtype),
    }
    for name, (theirs, asked_for) in names.items():
        if theirs and theirs != asked_for:
            raise ConfigError(
                f"profile is {str(folder)!r}, of {name} {theirs}, and asked for is {asked_for}; "
                "give tables of the same"
            )


def _matches(path: Path, root: Path, model: str, gpu: str, tp: int, dtype: str) -> bool:
    """Whether a folder's names, as far as it has them below the root, are those asked for."""
    parts = path.relative_to(root).parts
    if parts and parts[-1].startswith("tp") and parts[-1] != f"tp{tp}":
        return False
    if len(parts) >= 2 and _VARIANTS.get(parts[-2], dtype) != dtype:
        return False
    if len(parts) >= 3 and shape_name(parts[-3]) != shape_name(model):
        return False
    return len(parts) < 5 or normalized(parts[0]) == normalized(gpu)


def read_tables(folder: Path, tp: int = 1) -> Tables:
    """Read all tables; experts measured on one GPU alone are divided among `tp`."""
    meta, moe, shards = _meta(folder), folder / "moe.csv", 1
    if not moe.is_file() and tp > 1:
        moe, shards = folder.parent / "tp1" / "moe.csv", tp
    return Tables(
        folder=folder,
        dense=_curves(folder / "dense.csv", "tokens"),
        sequences=_curves(folder / "per_sequence.csv", "sequences"),
        attention=_read_attention(folder / "attention.csv", meta),
        moe=_read_experts(moe) if moe.is_file() else None,
        shards=shards,
    )


def _columns(path: Path, names: list[str]) -> list[list[str]]:
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}; a profile folder must have it") from None
    if not rows:
        raise ConfigError(f"{path}: it has no rows; profile again")
    missing = [name for name in names if rows[0].get(name) is None]
    if missing:
        raise ConfigError(f"{path}: no column {missing[0]!r}; it must have {', '.join(names)}")
    return [[row[name] for name in names] for row in rows]


def _curves(path: Path, axis: str) -> dict[str, LayerCurve]:
    points: dict[str, dict[float, float]] = {}
    for layer, at, micros in _columns(path, ["layer", axis, "time_us"]):
        points.setdefault(layer, {})[float(at)] = float(micros) * MICRO
    return {layer: _curve(known) for layer, known in points.items()}


def _curve(points: Mapping[float, float]) -> LayerCurve:
    at = sorted(points)
    return LayerCurve(np.array(at, dtype=float), np.array([points[x] for x in at], dtype=float))


def _read_experts(path: Path) -> tuple[Floats, list[LayerCurve]]:
    rows: dict[float, dict[float, float]] = {}
    for tokens, experts, micros in _columns(path, ["tokens", "activated_experts", "time_us"]):
        rows.setdefault(float(tokens), {})[float(experts)] = float(micros) * MICRO
    tokens_at = sorted(rows)
    return np.array(tokens_at, dtype=float), [_curve(rows[x]) for x in tokens_at]


def _meta(folder: Path) -> Mapping[str, Any]:
    path = folder.parent / "meta.yaml"
    if not path.is_file():
        return {}
    meta = read_yaml(path)
    return meta if isinstance(meta, dict) else {}


def _read_attention(path: Path, meta: Mapping[str, Any]) -> Attention:
    rows = np.array(_columns(path, _ATTENTION), dtype=np.float64)
    chunks, keys, decodes, kvs = _axes(rows, meta)
    grid = np.full((len(chunks), len(keys), len(decodes), len(kvs)), np.nan)
    axis_indices = []
    for column, axis in zip(range(_AXES), (chunks, keys, decodes, kvs), strict=True):
        indices = np.minimum(np.searchsorted(axis, rows[:, column]), len(axis) - 1)
        axis_indices.append(np.where(axis[indices] == rows[:, column], indices, -1))
    no_decodes = rows[:, _N_DECODE] == 0
    axis_indices[_KV_DECODE] = np.where(no_decodes, 0, axis_indices[_KV_DECODE])
    inside = np.all(np.stack(axis_indices) >= 0, axis=0)
    cells = tuple(indices[inside] for indices in axis_indices)
    grid[cells] = rows[inside, _TIME_US] * MICRO
    if np.isnan(grid).all():
        raise ConfigError(f"{path}: no rows; profile again")
    _fill(grid, chunks, keys, decodes, kvs)
    return Attention(chunks, keys, decodes, kvs, grid)


def _axes(rows: Floats, meta: Mapping[str, Any]) -> list[Floats]:
    """Return the grid's axes: those that meta.yaml tells of, else every value that occurs."""
    grid = meta.get("attention_grid") or {}
    axes = []
    for column, name in enumerate(("chunks", "kv", "n_decode", "kv")):
        values = np.unique(rows[:, column])
        sweep = _sweep(str(grid.get(name, "")))
        axis = values[np.isin(values, sweep)] if sweep else values
        axes.append(axis[axis > 0] if column == _KV_DECODE else np.union1d([0.0], axis))
    if not len(axes[_KV_DECODE]):
        axes[_KV_DECODE] = np.array([1.0])
    return axes


def _sweep(text: str) -> list[float]:
    """Read "0, 16-2048 x2" as 0, 16, 32, ..., 2048; nothing else is understood."""
    match = re.fullmatch(r"(?:0, *)?(\d+)-(\d+) x(\d+(?:\.\d+)?)", text.strip())
    if not match or float(match[3]) <= 1.0:
        return []
    value, end, factor = float(match[1]), float(match[2]), float(match[3])
    values = [0.0]
    while value <= end:
        values.append(float(int(value)))
        value *= factor
    return values


def _fill(grid: Floats, chunks: Floats, keys: Floats, decodes: Floats, kvs: Floats) -> None:
    """Extrapolate cells that could not be measured (too little memory) from measured ones."""
    for c in range(len(chunks)):
        for k in range(len(keys)):
            if c == 0 and k > 0:
                continue
            for n in range(1, len(decodes)):
                _extend(grid[c, k, n], kvs)
            for v in range(len(kvs)):
                _extend(grid[c, k, 1:, v], decodes[1:])
        for n in range(len(decodes)):
            for v in range(len(kvs) if n else 1):
                if c:
                    _extend(grid[c, :, n, v], keys)
    for k in range(len(keys)):
        for n in range(len(decodes)):
            for v in range(len(kvs) if n else 1):
                _extend(grid[1:, k, n, v], chunks[1:])
    grid[0, 0, 0, :] = 0.0
    np.nan_to_num(grid, copy=False)


def _extend(line: Floats, axis: Floats) -> None:
    """Fill the holes of a line: between points straight, beyond the last by its last slope."""
    known = np.flatnonzero(~np.isnan(line))
    if len(known) == 0 or len(known) == len(line):
        return
    holes = np.flatnonzero(np.isnan(line))
    line[holes] = np.interp(axis[holes], axis[known], line[known])
    if len(known) > 1:
        last, before = known[-1], known[-2]
        slope = max((line[last] - line[before]) / (axis[last] - axis[before]), 0.0)
        past_end = holes[holes > last]
        line[past_end] = line[last] + slope * (axis[past_end] - axis[last])


class ProfileTiming:
    """Times of steps out of layer tables."""

    def __init__(
        self, tables: Tables, architecture: Architecture, gpu: Gpu, tp: int, graphs: bool = True
    ) -> None:
        _check(tables, architecture)
        gpu.check_tp(tp)
        self._layers = float(architecture.layers)
        self._attention = _replayed(tables.attention) if graphs else tables.attention
        self._dense = _dense(tables, architecture, gpu, tp, graphs)
        self._heads = _heads(tables.sequences, architecture, gpu, tp)
        self._tails = _tails(tables.attention, architecture, gpu, tp)

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        grid = self._attention
        return profile_durations(
            batch.counts, batch.kv_lens, repeat, self._dense, self._heads, self._layers,
            self._tails, grid.chunks, grid.keys, grid.decodes, grid.kvs, grid.ns,
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
        total[: CAPTURED_MAX + 1] -= architecture.layers * DENSE_KERNELS * REPLAY_SAVES_NS
        total = np.maximum(total, 0.0)[[_captured(count) for count in tokens.tolist()]]
    return total


def _replayed(attention: Attention) -> Attention:
    """Shorten attention of decodes without prompts as a full graph does."""
    ns = attention.ns.copy()
    ns[0, 0, 1:] = np.maximum(ns[0, 0, 1:] - ATTENTION_KERNELS * REPLAY_SAVES_NS, 0.0)
    return replace(attention, ns=ns)


def _tails(attention: Attention, architecture: Architecture, gpu: Gpu, tp: int) -> Floats:
    """Nanoseconds for each token that the longest sequence exceeds others, by `decodes`.

    The block of the longest sequence ends last, and alone. Steps with prompts (index 0) never
    split a sequence; decodes are split, and even out, while their blocks fill few processors.
    """
    kvs, tails = attention.kvs, np.zeros(len(attention.decodes))
    if not gpu.processors or len(kvs) < 2 or len(attention.chunks) < 2 or len(tails) < 2:
        return tails
    single = attention.ns[1, 0, 1]
    half = int(np.argmin(np.abs(kvs[:-1] - kvs[-1] / 2)))
    slope = float(single[-1] - single[half]) / (kvs[-1] - kvs[half])
    blocks = attention.decodes * max(architecture.kv_heads // tp, 1)
    tails[blocks >= UNSPLIT * gpu.processors] = TAIL_SHARE * max(slope, 0.0)
    tails[0] = TAIL_SHARE * max(slope, 0.0)
    return tails


def _captured(tokens: int) -> int:
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
    """Find i >= `first` with `value` in axis[i] to axis[i + 1], or at the nearest end."""
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

    Short prompts read less than one of c tokens: the line from k = 0 to k = c continues below, down
    to the time of the shortest chunk.
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
    counts: Ints, kv_lens: Ints, repeat: int, dense: Floats, heads: Floats, layers: float,
    tails: Floats, chunks: Floats, keys: Floats, decodes: Floats, kvs: Floats, grid: Floats,
) -> Nanos:  # fmt: skip
    """Return the nanoseconds of each of `repeat` steps, shape (repeat,).

    `dense` by tokens, `heads` by entries; `tails` of `_tails`; `chunks`, `keys`, `decodes`,
    `kvs` are axes 0 to 3 of `grid`, one layer's attention.
    """
    count, total, max_kv, prompt, squares, twice, max_read = 0, 0, 0, 0, 0, 0, 0
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
            max_read = max(max_read, kv + tokens)
    fixed = _ahead(dense, prompt + count) + _ahead(heads, counts.shape[0])
    tail = tails[0]
    if prompt == 0 and count:
        low = _bracket(decodes, 1, float(count))
        part = min(_share(decodes, low, float(count)), 1.0)
        tail = tails[low] * (1.0 - part) + tails[min(low + 1, tails.shape[0] - 1)] * part
    durations = np.empty(repeat, dtype=np.int64)
    for step in range(repeat):
        mean = (total + count * step) / count if count else 0.0
        mean_reads = (twice + 2 * squares * step) / (2 * prompt) if prompt else 0.0
        time = _attention(
            grid, chunks, keys, decodes, kvs, float(prompt), mean_reads, float(count), mean
        )
        max_len = float(max_kv + step)
        excess = max_len - max(mean, float(max_read))
        if tail > 0.0 and excess > 0.0:
            worst = _attention(
                grid, chunks, keys, decodes, kvs, float(prompt), mean_reads, float(count), max_len
            )
            time += min(tail * excess, max(worst - time, 0.0))
        durations[step] = max(int(fixed + layers * time + 0.5), 1)
    return durations
