"""Rotary embedding: frequencies, and their scaling beyond the trained length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.models import ModelError
from pigou.models.rope_parameters import (
    parameter,
    rope_parameters,
    stated_positions,
    trained_and_factor,
    trained_positions,
)

Frequencies = NDArray[np.float32]

#: Default base (transformers' default for all families here).
_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies of a rotary embedding."""

    frequencies: Frequencies  # radians per position, shape (head_dim / 2,), float32
    # factor on cosines and sines (1 except for YaRN and LongRoPE).
    amplitude: float = 1.0
    # frequencies for engines longer than `trained` positions (LongRoPE).
    long: Frequencies | None = None
    trained: int = 0  # unscaled positions (dynamic, LongRoPE)
    growth: tuple[float, float] | None = None  # base and factor of dynamic scaling

    def angles(self, positions: int) -> Frequencies:
        """Return the angles by position, (positions, head_dim / 2).

        Dynamic scaling treats position p as in length p + 1, so keys do not depend on later tokens.
        """
        at = np.arange(positions, dtype=np.float32)[:, None]
        if self.long is not None and positions > self.trained:
            return at * self.long
        if self.growth is None or positions <= self.trained:
            return at * self.frequencies
        return at * self._grown(positions)

    def _grown(self, positions: int) -> Frequencies:
        assert self.growth is not None
        base, factor = self.growth
        dims = 2 * len(self.frequencies)
        length = np.maximum(np.arange(1, positions + 1), self.trained).astype(np.float64)
        bases = base * (factor * length / self.trained - (factor - 1)) ** (dims / (dims - 2))
        exponents = np.arange(0, dims, 2) / dims
        grown: Frequencies = (1.0 / bases[:, None] ** exponents).astype(np.float32)
        return grown


def read_rope(source: Mapping[str, Any], head_dim: int) -> Rope:
    """Parse a config.json's rotary embedding, old or new style; raises ModelError."""
    given, kind = rope_parameters(source)
    base = float(given.get("rope_theta") or source.get("rope_theta") or _BASE)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (np.float32(1.0) / np.float32(base) ** exponents).astype(np.float32)
    match kind:
        case "linear":
            rope = Rope((frequencies / parameter(given, "factor")).astype(np.float32))
        case "dynamic":
            growth = (base, parameter(given, "factor"))
            rope = Rope(frequencies, trained=stated_positions(source), growth=growth)
        case "llama3":
            rope = Rope(_llama3(frequencies, given, trained_positions(source, given)))
        case "yarn":
            rope = _yarn(frequencies, given, base, trained_and_factor(source, given))
        case "longrope":
            rope = _longrope(frequencies, given, trained_and_factor(source, given))
        case _:
            rope = Rope(frequencies)
    return rope


def _llama3(frequencies: Frequencies, given: Mapping[str, Any], trained: float) -> Frequencies:
    """Slow long waves by `factor`, keep short ones, interpolate between (Llama 3.1)."""
    factor = parameter(given, "factor")
    low, high = parameter(given, "low_freq_factor"), parameter(given, "high_freq_factor")
    turns = trained * frequencies / (2 * math.pi)
    unscaled = np.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: Frequencies = (1 - unscaled) * frequencies / factor + unscaled * frequencies
    return blended.astype(np.float32)


def _yarn(
    frequencies: Frequencies, given: Mapping[str, Any], base: float, factors: tuple[float, float]
) -> Rope:
    """Blend by turns within the trained length (arXiv 2309.00071, section 3.2)."""
    trained, factor = factors
    dims = 2 * len(frequencies)

    def dim_of(turns: float) -> float:
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dim_of(float(given.get("beta_fast") or 32))
    high = dim_of(float(given.get("beta_slow") or 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    span = high - low if high > low else 0.001
    slowed = np.clip((np.arange(len(frequencies)) - low) / span, 0.0, 1.0)
    blended = frequencies / factor * slowed + frequencies * (1 - slowed)
    return Rope(blended.astype(np.float32), _yarn_amplitude(given, factor))


def _yarn_amplitude(given: Mapping[str, Any], factor: float) -> float:
    def amplitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return amplitude(given["mscale"]) / amplitude(given["mscale_all_dim"])
    return amplitude(1.0)


def _longrope(
    frequencies: Frequencies, given: Mapping[str, Any], factors: tuple[float, float]
) -> Rope:
    """Divide each frequency by its own factor (arXiv 2402.13753)."""
    trained, factor = factors
    amplitude = given.get("attention_factor")
    if amplitude is None:
        grown = 1 + math.log(factor) / math.log(trained) if factor > 1 else 1.0
        amplitude = math.sqrt(grown)
    short = _list(given, "short_factor", len(frequencies))
    long = _list(given, "long_factor", len(frequencies))
    return Rope(
        (frequencies / short).astype(np.float32),
        float(amplitude),
        long=(frequencies / long).astype(np.float32),
        trained=int(trained),
    )


def _list(given: Mapping[str, Any], name: str, length: int) -> Frequencies:
    values = given.get(name)
    if not isinstance(values, list) or len(values) != length or not all(
        isinstance(value, (int, float)) and value > 0 for value in values
    ):  # fmt: skip
        raise ModelError(f"rope parameter {name} must be a list of {length} numbers above 0")
    return np.array(values, dtype=np.float32)


def rotary_table(rope: Rope, positions: int, device: torch.device) -> Tensor:
    """Return cosines, then sines, by position, (positions, head_dim), float32."""
    angles = torch.from_numpy(rope.angles(positions))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.amplitude
    return table.to(device)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of (tokens, heads, head_dim), as Hugging Face does."""
    cos, sin = turns.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
