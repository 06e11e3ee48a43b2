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
from pigou.sim.timing import Batch

#: Of the file; changes when a key changes its meaning.
FORMAT = 2

Curve = tuple[tuple[int, float], ...]
#: Where a curve that is read for many places at once ends.
_FAR = 2.0**40


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of a step that decodes n sequences and computes t tokens of k prompts' ends.

        (decodes(n) + cache(K), if n > 0, else alone) + prompts(t) + context A + prompt k

    K is the cache entries that the decodes read, A the same for all tokens of prompts together,
    causally. Between the points of a curve lie straight lines; beyond its last point its last
    line goes on.

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
    format: int = FORMAT
    about: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Refuse figures by which time runs backwards."""
        if self.format != FORMAT:
            raise ConfigError(f"format is {self.format}; this version reads {FORMAT}: profile anew")
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
        fixed = 0.0 if n else of.alone
        if entries:
            counts = batch.counts[prompts].astype(np.int64)
            ends = int(np.count_nonzero(batch.samples[prompts]))
            fixed += at(of.prompts, int(counts.sum())) + of.prompt * ends
            fixed += of.context * reads(counts, batch.kv_lens[prompts])
        kv = 0
        if n:
            fixed += at(of.decodes, n)
            kv = int(batch.kv_lens[~prompts].sum())
        read = (kv + n * np.arange(repeat, dtype=np.int64)).astype(np.float64)
        nanos = np.rint((fixed + np.interp(read, *self._cache)) * SECOND)
        found: Nanos = np.maximum(1, nanos).astype(np.int64)
        return found

    @cached_property
    def _cache(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Places and seconds of the cache's curve, its last line drawn out."""
        curve = self.measured.cache
        places = [float(place) for place, _ in curve] + [_FAR]
        seconds = [value for _, value in curve] + [at(curve, _FAR)]
        return np.array(places), np.array(seconds)


def reads(counts: NDArray[Any], kv_lens: NDArray[Any]) -> float:
    """Return the cache entries that all tokens of chunks read together, themselves included."""
    each = counts * kv_lens.astype(np.float64) + counts * (counts + 1) / 2
    return float(each.sum())


def at(curve: Curve, place: float) -> float:
    """Return the seconds of a curve at a place."""
    for (left, low), (right, high) in pairwise(curve):
        if place <= right or right == curve[-1][0]:
            return low + (high - low) * (place - left) / (right - left)
    return curve[0][1]
