"""RoPE parameters of a config.json, and the resulting context length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pigou.models import ModelError

_ORIGINAL = "original_max_position_embeddings"
#: Parameters of each type, besides `COMMON`.
KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor"},
}
_ALIASES = {"su": "longrope"}
#: Valid for every type; `finetuned` appears in old checkpoints.
COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "finetuned",
           _ORIGINAL}  # fmt: skip
#: Types whose `max_position_embeddings` is already scaled, as in vLLM.
_SCALED_ALREADY = {"default", "llama3", "longrope"}


def scaled_context(source: Mapping[str, Any]) -> int:
    """Return the scaled context length as vLLM computes it; raises ModelError if invalid."""
    given, kind = rope_parameters(source)
    if kind in _SCALED_ALREADY:
        return stated_positions(source)
    if kind == "yarn":
        trained, factor = trained_and_factor(source, given)
        return int(trained * factor)
    return int(stated_positions(source) * parameter(given, "factor"))


def rope_parameters(source: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the effective parameters and their type."""
    given = source.get("rope_scaling") or source.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: rope parameters are {given!r}; they must be an object")
    if isinstance(given.get("full_attention"), Mapping):  # per layer type
        if any(other not in (None, given["full_attention"]) for other in given.values()):
            raise ModelError("rope_parameters that differ by type of layer are not supported")
        given = given["full_attention"]
    said = str(given.get("rope_type") or given.get("type") or "default")
    kind = _ALIASES.get(said, said)
    if kind not in KEYS:
        raise ModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(KEYS)}")
    return dict(given), kind


def check_rope(source: Mapping[str, Any]) -> None:
    """Raise ModelError on a rotary embedding that the own implementation does not compute."""
    given, kind = rope_parameters(source)
    for name in given.keys() - (COMMON | KEYS[kind]):
        raise ModelError(f"rope parameter {name!r} of {kind!r} is not supported")
    partial = given.get("partial_rotary_factor", source.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")


def parameter(given: Mapping[str, Any], name: str) -> float:
    """Return a required parameter; raises ModelError unless it is a number above 0."""
    value = given.get(name)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not usable or not 0 < value < math.inf:  # type: ignore[operator]
        raise ModelError(f"rope parameter {name} is {value!r}; it must be a number above 0")
    return float(value)  # type: ignore[arg-type]


def stated_positions(source: Mapping[str, Any]) -> int:
    """Return `max_position_embeddings`."""
    return int(parameter(source, "max_position_embeddings"))


def trained_positions(source: Mapping[str, Any], given: Mapping[str, Any]) -> float:
    """Return the context length before scaling."""
    for parameters in (source, given):
        if parameters.get(_ORIGINAL) is not None:
            return parameter(parameters, _ORIGINAL)
    return float(stated_positions(source))


def trained_and_factor(source: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[float, float]:
    """Return trained positions and the factor, by default that to `max_position_embeddings`."""
    trained = trained_positions(source, given)
    if given.get("factor") is None:
        return trained, stated_positions(source) / trained
    return trained, parameter(given, "factor")
