"""Timing measured on a live worker: the file that `pigou profile` writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError, check_fields
from pigou.request import SECOND, Nanos
from pigou.sim.timing import StepKey, StepShape
from pigou.small_file import read_bytes
from pigou.wire.errors import DECODING_ERRORS

#: File format version; changes when a key's meaning does.
FORMAT = 2

TimeCurve = tuple[tuple[int, float], ...]
#: Rows (sequences, figures), with as many figures in each.
VariationTable = tuple[tuple[int, tuple[float, ...]], ...]
#: Last point of a curve that is read at many points at once.
_FAR = 2.0**40
_Array = NDArray[np.float64]


class WorkerProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of a step that decodes n sequences and computes t tokens of k prompts' ends.

        (decodes(n) + cache(K), if n > 0, else alone) + prompts(t) + context A + prompt k
    K: cache entries read by decodes; A: those read by prompt tokens, causally. Curves are piecewise
    linear and extrapolate. Decode-only steps vary by index in the plan (`rhythm`) and by a random
    factor (`scatter`), both interpolated over sequences.
    """

    decodes: TimeCurve  # points (sequences, seconds), the first at 1
    prompts: TimeCurve  # (tokens, seconds), the first at 0: what prompts add to a step
    cache: TimeCurve = ((0, 0.0),)  # (cache entries, seconds), the first at 0, of decodes
    alone: float = 0.0
    context: float = 0.0  # seconds per cache entry read by prompt tokens
    prompt: float = 0.0
    overhead: float = 0.0  # seconds to the first token besides steps
    rhythm: VariationTable = ()  # (sequences, seconds more by step of a plan), sum 0
    scatter: VariationTable = ()  # (sequences, equally likely factors, rising), mean 1
    blocks: int = 0  # KV blocks of the worker; 0 if unknown
    block_size: int = 0  # tokens per block; 0 if unknown
    format: int = FORMAT
    about: dict[str, Any] = {}  # measured worker, and quality of the fit; not read

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"format is {self.format}; this version reads {FORMAT}: profile anew")
        if self.blocks < 0 or self.block_size < 0 or bool(self.blocks) != bool(self.block_size):
            raise ConfigError(
                f"blocks is {self.blocks} and block_size {self.block_size}; give both, above 0, or "
                "none"
            )
        check_fields(self, "alone", "context", "prompt", "overhead", ge=0, unit=" seconds")
        for name, first in (("decodes", 1), ("prompts", 0), ("cache", 0)):
            curve: TimeCurve = getattr(self, name)
            xs = [x for x, _ in curve]
            if not xs or xs[0] != first or xs != sorted(set(xs)):
                raise ConfigError(f"{name} has its points at {xs}; they must rise from {first}")
            seconds = [value for _, value in curve]
            if not math.isfinite(seconds[-1]) or seconds[0] < 0.0 or seconds != sorted(seconds):
                raise ConfigError(
                    f"{name} is {seconds} seconds; it must be at least 0, and not fall"
                )
        if self.decodes[0][1] <= 0.0:
            raise ConfigError("decodes begins with 0 seconds; it must be above 0")
        _check_spread("rhythm", self.rhythm, 0.0, self.decodes[0][1])
        _check_spread("scatter", self.scatter, 1.0, 1.0)
        if any(min(factors) < 0.0 for _, factors in self.scatter):
            raise ConfigError("scatter has a factor below 0; it must be at least 0")


def _check_spread(name: str, table: VariationTable, expected_mean: float, scale: float) -> None:
    """Refuse rows of different lengths, and rows that change the mean of steps."""
    sequences = [n for n, _ in table]
    if sequences != sorted(set(sequences)) or (sequences and sequences[0] < 1):
        raise ConfigError(f"{name} is for {sequences} sequences; they must rise from 1 at least")
    if len({len(figures) for _, figures in table}) > 1 or any(not row for _, row in table):
        raise ConfigError(f"{name} has rows that differ in length; give as many figures in each")
    for n, figures in table:
        mean = sum(figures) / len(figures)
        if not abs(mean - expected_mean) <= 1e-3 * scale:
            raise ConfigError(
                f"{name} for {n} sequences has a mean of {mean}; it must be {expected_mean}"
            )


def read_measured(path: Path) -> WorkerProfile:
    """Read a file of `pigou profile`."""
    try:
        return msgspec.json.decode(read_bytes(path), type=WorkerProfile)
    except OSError as error:
        raise ConfigError(f"timing: {path} cannot be read: {error}") from error
    except DECODING_ERRORS as error:
        raise ConfigError(
            f"timing: {path} is no file of `pigou profile`, or of an older one: {error}"
        ) from error


@dataclass(frozen=True)
class MeasuredTiming:
    """`WorkerProfile` as a timing model."""

    measured: WorkerProfile

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        profile = self.measured
        prompts = batch.counts > 1
        entries = int(np.count_nonzero(prompts))
        n = len(prompts) - entries
        fixed: float | _Array = 0.0 if n else profile.alone
        if entries:
            counts, before = batch.counts[prompts].astype(np.int64), batch.kv_lens[prompts]
            prompt_ends = int(np.count_nonzero(batch.samples[prompts]))
            fixed += seconds_at(profile.prompts, int(counts.sum())) + profile.prompt * prompt_ends
            read = [reads(counts, before + step * counts) for step in range(repeat)]
            fixed = fixed + profile.context * np.array(read)
        kv = 0
        if n:
            fixed = fixed + seconds_at(profile.decodes, n)
            kv = int(batch.kv_lens[~prompts].sum())
        cached = (kv + n * np.arange(repeat, dtype=np.int64)).astype(np.float64)
        seconds = fixed + np.interp(cached, *self._cache)
        if batch.step_key is not None and n and not entries:
            seconds = self._varied(seconds, n, batch.step_key)
        nanos = np.rint(seconds * SECOND)
        durations_ns: Nanos = np.maximum(1, nanos).astype(np.int64)
        return durations_ns

    @property
    def varies(self) -> bool:
        """Whether it has random variation."""
        return bool(self.measured.rhythm or self.measured.scatter)

    def _varied(self, seconds: _Array, n: int, step_key: StepKey) -> _Array:
        """Return the varied seconds of steps by their mean seconds, shape (repeat,)."""
        rhythm, scatter = self._row_at("rhythm", n), self._row_at("scatter", n)
        if len(rhythm):
            seconds = seconds + rhythm[(step_key.age + np.arange(len(seconds))) % len(rhythm)]
        if len(scatter):
            drawn = step_key.uniforms(len(seconds)) * len(scatter)
            seconds = seconds * scatter[drawn.astype(np.int64)]
        return seconds

    def _row_at(self, name: str, n: int) -> _Array:
        known = self._rows.get((name, n))
        if known is None:
            table: VariationTable = getattr(self.measured, name)
            known = self._rows[name, n] = row_between(table, n)
        return known

    @cached_property
    def _rows(self) -> dict[tuple[str, int], _Array]:
        return {}

    @cached_property
    def _cache(self) -> tuple[_Array, _Array]:
        """Cache entries and seconds of the cache's curve, its last line extended."""
        curve = self.measured.cache
        entries = [float(x) for x, _ in curve] + [_FAR]
        seconds = [value for _, value in curve] + [seconds_at(curve, _FAR)]
        return np.array(entries), np.array(seconds)


def reads(counts: NDArray[Any], kv_lens: NDArray[Any]) -> float:
    """Return the cache entries read by all tokens of chunks, causally."""
    entries = counts * kv_lens.astype(np.float64) + counts * (counts + 1) / 2
    return float(entries.sum())


def row_between(table: VariationTable, n: int) -> _Array:
    """Return the row for n sequences, interpolated; empty for none."""
    if not table:
        return np.empty(0)
    sequences = [float(sequences_) for sequences_, _ in table]
    columns = zip(*(figures for _, figures in table), strict=True)
    return np.array([np.interp(float(n), sequences, column) for column in columns])


def seconds_at(curve: TimeCurve, x: float) -> float:
    """Return the seconds of a curve at x."""
    for (left, low), (right, high) in pairwise(curve):
        if x <= right or right == curve[-1][0]:
            return low + (high - low) * (x - left) / (right - left)
    return curve[0][1]
