"""Rotary embedding's parameters: base, and how the frequencies are scaled beyond training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.runtime.errors import ModelError

_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "original_max_position_embeddings",
        "truncate",
    },
}
_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies of a rotary embedding.

    Attributes:
        frequencies: radians per position, shape (head_dim / 2,), float32.
        amplitude: that cosines and sines are multiplied by (1 except for YaRN).
    """

    frequencies: NDArray[np.float32]
    amplitude: float = 1.0


def read_rope(source: Mapping[str, Any], head_dim: int) -> Rope:
    """Read the rotary embedding of a config.json, old (`rope_scaling`) or new style.

    Raises:
        ModelError: the type is not supported, or a parameter is missing or unknown.
    """
    given = dict(source.get("rope_parameters") or source.get("rope_scaling") or {})
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in _KEYS:
        raise ModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(_KEYS)}")
    known = {"factor"} | _COMMON | _KEYS[kind]
    for name in given.keys() - known:
        raise ModelError(f"rope parameter {name!r} of {kind!r} is not supported")
    partial = given.get("partial_rotary_factor", source.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    base = float(given.get("rope_theta") or source.get("rope_theta") or 10_000.0)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (np.float32(1.0) / np.float32(base) ** exponents).astype(np.float32)
    if kind == "linear":
        return Rope((frequencies / _number(given, "factor")).astype(np.float32))
    if kind == "llama3":
        return Rope(_llama3(frequencies, given))
    if kind == "yarn":
        trained = given.get("original_max_position_embeddings") or source.get(
            "max_position_embeddings", 0
        )
        return _yarn(frequencies, given, base, float(trained))
    return Rope(frequencies)


def _number(given: Mapping[str, Any], name: str) -> float:
    value = given.get(name)
    if not isinstance(value, (int, float)) or value <= 0:
        raise ModelError(f"rope parameter {name} is {value!r}; it must be a number above 0")
    return float(value)


def _llama3(frequencies: NDArray[np.float32], given: Mapping[str, Any]) -> NDArray[np.float32]:
    """Slow down long waves by `factor`, leave short ones, blend between (Llama 3.1)."""
    factor = _number(given, "factor")
    low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
    turns = _number(given, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: NDArray[np.float32] = (1 - kept) * frequencies / factor + kept * frequencies
    return blended.astype(np.float32)


def _yarn(
    frequencies: NDArray[np.float32], given: Mapping[str, Any], base: float, trained: float
) -> Rope:
    """Blend by the number of turns within the trained length (arXiv 2309.00071, section 3.2)."""
    factor = _number(given, "factor")
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
    amplitude = given.get("attention_factor")
    if amplitude is None:
        amplitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(blended.astype(np.float32), float(amplitude))
