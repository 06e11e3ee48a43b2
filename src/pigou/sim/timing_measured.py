"""Timing of what was measured on a live worker: the file that `pigou profile` writes."""

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

from pigou.config import ConfigError
from pigou.request import SECOND, Nanos
from pigou.sim.timing import Batch, Moment

#: Of the file; changes when a key changes its meaning.
FORMAT = 2

Curve = tuple[tuple[int, float], ...]
#: For numbers of sequences, as many figures each.
Spread = tuple[tuple[int, tuple[float, ...]], ...]
#: Where a curve that is read for many places at once ends.
_FAR = 2.0**40
_Array = NDArray[np.float64]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of a step that decodes n sequences and computes t tokens of k prompts' ends.

        (decodes(n) + cache(K), if n > 0, else alone) + prompts(t) + context A + prompt k

    K is the cache entries that the decodes read, A the same for all tokens of prompts together,
    causally. Between the points of a curve lie straight lines; beyond its last point its last
    line goes on.

    That is the mean. A step in which nothing but decodes is done takes more or less by its place
    in the engine's plan, which begins anew where the sequences change and every few steps
    (`rhythm`), and that times a factor which is drawn for each step (`scatter`). Both lie on
    straight lines between the numbers of sequences that are given, and stay beyond.

    Attributes:
        decodes: points (sequences, seconds), the first at 1.
        cache: points (cache entries, seconds), the first at 0: what decodes take for reading them,
            which is more an entry where they fill the caches of the processor.
        alone: of a step in which nobody decodes, besides its prompts.
        prompts: points (tokens, seconds), the first at 0: what tokens of prompts add to a step.
        context: of each cache entry that a token of a prompt reads.
        prompt: of each prompt that ends in the step.
        overhead: from the client's send to its first token, besides steps, with nobody else
            there; nobody waits for anybody in it.
        rhythm: (sequences, seconds more for each step of a plan); a plan's add up to 0.
        scatter: (sequences, factors that are equally likely, rising); their mean is 1.
        blocks: of the worker's KV cache; 0 where it did not say.
        block_size: tokens in each; 0 where it did not say.
        format: of the file.
        about: what was measured, and how well these figures fit: not read.
    """

    decodes: Curve
    prompts: Curve
    cache: Curve = ((0, 0.0),)
    alone: float = 0.0
    context: float = 0.0
    prompt: float = 0.0
    overhead: float = 0.0
    rhythm: Spread = ()
    scatter: Spread = ()
    blocks: int = 0
    block_size: int = 0
    format: int = FORMAT
    about: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Refuse figures by which time runs backwards."""
        if self.format != FORMAT:
            raise ConfigError(f"format is {self.format}; this version reads {FORMAT}: profile anew")
        if self.blocks < 0 or self.block_size < 0 or bool(self.blocks) != bool(self.block_size):
            raise ConfigError(
                f"blocks is {self.blocks} and block_size {self.block_size}; give both, above 0, or "
                "none"
            )
        for name in ("alone", "context", "prompt", "overhead"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0 seconds")
        for name, first in (("decodes", 1), ("prompts", 0), ("cache", 0)):
            curve: Curve = getattr(self, name)
            places = [at for at, _ in curve]
            if not places or places[0] != first or places != sorted(set(places)):
                raise ConfigError(f"{name} has its points at {places}; they must rise from {first}")
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


def _check_spread(name: str, spread: Spread, mean: float, scale: float) -> None:
    """Refuse figures that are not as many for each number, or change the mean of steps."""
    places = [n for n, _ in spread]
    if places != sorted(set(places)) or (places and places[0] < 1):
        raise ConfigError(f"{name} is for {places} sequences; they must rise from 1 at least")
    if len({len(figures) for _, figures in spread}) > 1 or any(not each for _, each in spread):
        raise ConfigError(f"{name} has rows that differ in length; give as many figures in each")
    for n, figures in spread:
        found = sum(figures) / len(figures)
        if not abs(found - mean) <= 1e-3 * scale:
            raise ConfigError(f"{name} for {n} sequences has a mean of {found}; it must be {mean}")


def read_measured(path: Path) -> Measured:
    """Read a file of `pigou profile`.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except OSError as error:
        raise ConfigError(f"timing: {path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"timing: {path} is no file of `pigou profile`, or of an older one: {error}"
        ) from error


@dataclass(frozen=True)
class MeasuredTiming:
    """`Measured` as a timing model."""

    measured: Measured

    def durations(self, batch: Batch, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        of = self.measured
        prompts = batch.counts > 1
        entries = int(np.count_nonzero(prompts))
        n = len(prompts) - entries
        fixed: float | _Array = 0.0 if n else of.alone
        if entries:
            counts, before = batch.counts[prompts].astype(np.int64), batch.kv_lens[prompts]
            ends = int(np.count_nonzero(batch.samples[prompts]))
            fixed += at(of.prompts, int(counts.sum())) + of.prompt * ends
            read = [reads(counts, before + step * counts) for step in range(repeat)]
            fixed = fixed + of.context * np.array(read)
        kv = 0
        if n:
            fixed = fixed + at(of.decodes, n)
            kv = int(batch.kv_lens[~prompts].sum())
        cached = (kv + n * np.arange(repeat, dtype=np.int64)).astype(np.float64)
        seconds = fixed + np.interp(cached, *self._cache)
        if batch.moment is not None and n and not entries:
            seconds = self._varied(seconds, n, batch.moment)
        nanos = np.rint(seconds * SECOND)
        found: Nanos = np.maximum(1, nanos).astype(np.int64)
        return found

    @property
    def varies(self) -> bool:
        """Whether alike steps differ."""
        return bool(self.measured.rhythm or self.measured.scatter)

    def _varied(self, seconds: _Array, n: int, moment: Moment) -> _Array:
        """Return what steps take that take so many seconds in the mean, shape (repeat,)."""
        rhythm, scatter = self._spread("rhythm", n), self._spread("scatter", n)
        if len(rhythm):
            seconds = seconds + rhythm[(moment.age + np.arange(len(seconds))) % len(rhythm)]
        if len(scatter):
            drawn = moment.uniforms(len(seconds)) * len(scatter)
            seconds = seconds * scatter[drawn.astype(np.int64)]
        return seconds

    def _spread(self, name: str, n: int) -> _Array:
        """Return a row of `rhythm` or `scatter`; empty where there is none."""
        known = self._rows.get((name, n))
        if known is None:
            spread: Spread = getattr(self.measured, name)
            known = self._rows[name, n] = between(spread, n)
        return known

    @cached_property
    def _rows(self) -> dict[tuple[str, int], _Array]:
        """Rows of `rhythm` and `scatter` that were asked for."""
        return {}

    @cached_property
    def _cache(self) -> tuple[_Array, _Array]:
        """Places and seconds of the cache's curve, its last line drawn out."""
        curve = self.measured.cache
        places = [float(place) for place, _ in curve] + [_FAR]
        seconds = [value for _, value in curve] + [at(curve, _FAR)]
        return np.array(places), np.array(seconds)


def reads(counts: NDArray[Any], kv_lens: NDArray[Any]) -> float:
    """Return the cache entries that all tokens of chunks read together, themselves included."""
    each = counts * kv_lens.astype(np.float64) + counts * (counts + 1) / 2
    return float(each.sum())


def between(spread: Spread, n: int) -> _Array:
    """Return the figures for n sequences, between those that are given; empty for none."""
    if not spread:
        return np.empty(0)
    places = [float(place) for place, _ in spread]
    columns = zip(*(figures for _, figures in spread), strict=True)
    return np.array([np.interp(float(n), places, column) for column in columns])


def at(curve: Curve, place: float) -> float:
    """Return the seconds of a curve at a place."""
    for (left, low), (right, high) in pairwise(curve):
        if place <= right or right == curve[-1][0]:
            return low + (high - low) * (place - left) / (right - left)
    return curve[0][1]
