"""Layer tables of a profile folder: read, checked, and made ready for the kernel.

The tables are those of LLMServingSim's profiler (`dense.csv`, `attention.csv`,
`per_sequence.csv`, `moe.csv`; microseconds of GPU work in one layer).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError
from pigou.models.read import normalized, shape_name
from pigou.small_file import read_text
from pigou.yaml_file import read_yaml

Floats = NDArray[np.float64]
#: Nanoseconds in a microsecond.
MICRO = 1000.0
#: Number formats as folders of tables name them.
_VARIANTS = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8", "int8": "int8",
    "int4": "int4", "nvfp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerCurve:
    """A time against a whole number, linear between the points that were measured."""

    numbers: Floats  # the numbers, rising, shape (n,)
    ns: Floats  # nanoseconds, shape (n,)

    def table(self, max_number: int) -> Floats:
        """Return the times of 0 to `max_number`, shape (most + 1,).

        Beyond the last point the line between the last measured number and the one nearest to
        half of it goes on: neighbouring points are too close together for a slope.
        """
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
    # time of the experts against tokens (axis 0) and activated experts, or None.
    moe: tuple[Floats, list[LayerCurve]] | None
    shards: int  # GPUs that share the experts of `moe`: 1 where it was measured at this degree
    # how much of the way from the mean to the longest decode's time a batch of uneven lengths
    # takes, 0 to 1, as the profiler measured it (`alpha_default`).
    skew: float


def find_tables(folder: Path, model: str, gpu: str, tp: int, dtype: str) -> Path:
    """Find the folder with the tables of a model, a GPU and a degree of tensor parallelism.

    Args:
        folder: that folder itself, or any above it in GPU/owner/model/dtype/tpN.
        model: name of the model; the folder's may differ by a variant of equal shape.
        dtype: number format of the weights; a folder that names another is refused.
    """
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
    """Read all tables of a folder.

    Experts that were measured on one GPU only are shared out: each of `tp` GPUs holds, and
    activates, its part of them.
    """
    meta, moe, shards = _meta(folder), folder / "moe.csv", 1
    if not moe.is_file() and tp > 1:
        moe, shards = folder.parent / "tp1" / "moe.csv", tp
    return Tables(
        folder=folder,
        dense=_curves(folder / "dense.csv", "tokens"),
        sequences=_curves(folder / "per_sequence.csv", "sequences"),
        attention=_attention(folder / "attention.csv", meta),
        moe=_experts(moe) if moe.is_file() else None,
        shards=shards,
        skew=_skew(meta, tp),
    )


def _columns(path: Path, names: list[str]) -> list[list[str]]:
    """Read columns of a CSV file by their names."""
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


def _experts(path: Path) -> tuple[Floats, list[LayerCurve]]:
    rows: dict[float, dict[float, float]] = {}
    for tokens, experts, micros in _columns(path, ["tokens", "activated_experts", "time_us"]):
        rows.setdefault(float(tokens), {})[float(experts)] = float(micros) * MICRO
    tokens_at = sorted(rows)
    return np.array(tokens_at, dtype=float), [_curve(rows[x]) for x in tokens_at]


def _meta(folder: Path) -> Mapping[str, Any]:
    """Read the meta.yaml beside a folder of tables; empty where there is none."""
    path = folder.parent / "meta.yaml"
    if not path.is_file():
        return {}
    meta = read_yaml(path)
    return meta if isinstance(meta, dict) else {}


def _skew(meta: Mapping[str, Any], tp: int) -> float:
    """Return `skew_fit: per_tp: N: alpha_default`; 0 where skew was not measured."""
    fits = (meta.get("skew_fit") or {}).get("per_tp") or {}
    fit = fits.get(tp) or fits.get(str(tp)) or {}
    return min(max(float(fit.get("alpha_default", 0.0)), 0.0), 1.0)


#: Columns of `attention.csv`; the first four are the axes of the grid.
_ATTENTION = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
_N_DECODE, _KV_DECODE, _TIME_US = 2, 3, 4
_AXES = 4


def _attention(path: Path, meta: Mapping[str, Any]) -> Attention:
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
    """Fill what could not be measured (too little memory), along lines from what was."""
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
