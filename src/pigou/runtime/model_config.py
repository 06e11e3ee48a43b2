"""The sizes and switches of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pigou.models import ModelError
from pigou.models.rope_parameters import scaled_context
from pigou.runtime.rotary_embedding import Rope, read_rope
from pigou.text.end_tokens import read_end_tokens

#: Architectures that can be run -> name of the family.
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
#: What transformers fills in where a family's config.json lacks a key; None: worked out.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with grouped attention, RMS norm and a gated SiLU layer.

    Attributes:
        family: "llama", "mistral", "qwen2" or "qwen3".
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: width of a head.
        ffn: width of the gated layer.
        vocab: rows of the embedding.
        context: most tokens of a sequence; where the model slides a window over its past, the
            window, within which that changes nothing.
        norm_eps: epsilon of the RMS norms.
        rope: rotary embedding.
        tied: the output layer is the embedding.
        qkv_bias: biases on queries, keys and values.
        output_bias: bias on the attention's output.
        mlp_bias: biases on the gated layer.
        qk_norm: RMS norm over each query head and key head, before the rotation.
        dtype: that the weights were published in ("float32", "bfloat16", ...).
        eos: ids of the end tokens, from generation_config.json when there is one.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    norm_eps: float
    rope: Rope
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"
    eos: frozenset[int] = frozenset()

    @property
    def group(self) -> int:
        """Query heads that share a key and value head."""
        return self.heads // self.kv_heads


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, and the end tokens that any file names, of a model's folder.

    Raises:
        ModelError: a file is missing or not JSON, or asks for what this runtime does not do.
    """
    config = parse_config(_read_json(folder / "config.json"))
    try:
        return replace(config, eos=read_end_tokens(folder, config.vocab))
    except ValueError as error:
        raise ModelError(str(error)) from None


def parse_config(source: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json that is already a mapping.

    Args:
        source: the mapping.

    Raises:
        ModelError: the architecture or one of its switches is not supported, or a size is
            missing or impossible.
    """
    family = _family(source)
    source = {**DEFAULTS[family], **source}
    _refuse(source)
    heads = _size(source, "num_attention_heads")
    hidden = _size(source, "hidden_size")
    kv_heads = _size(source, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is no multiple of kv heads {kv_heads}")
    head_dim = _size(source, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; rotary embedding needs an even number")
    biased = bool(source.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        layers=_size(source, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_size(source, "intermediate_size"),
        vocab=_size(source, "vocab_size"),
        context=_context(source, family),
        norm_eps=_epsilon(source),
        rope=read_rope(source, head_dim),
        tied=bool(source.get("tie_word_embeddings", False)),
        qkv_bias=biased or family == "qwen2",
        output_bias=biased,
        mlp_bias=bool(source.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        dtype=str(source.get("dtype") or source.get("torch_dtype") or "float32"),
        eos=_tokens(source.get("eos_token_id")),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model is a Hugging Face folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _family(source: Mapping[str, Any]) -> str:
    names = source.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if not names and source.get("model_type") in FAMILIES.values():
        return str(source["model_type"])
    raise ModelError(f"architectures {names} are not supported; supported: {', '.join(FAMILIES)}")


def _refuse(source: Mapping[str, Any]) -> None:
    """Refuse switches that would change the result if they were ignored."""
    for name in ("quantization_config", "compression_config"):
        if source.get(name):
            raise ModelError(f"{name}: quantized weights are not supported; use bf16 ones")
    activation = source.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; supported: 'silu'")


def _size(source: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = source.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}; it must be a whole number above 0")
    return value


def _epsilon(source: Mapping[str, Any]) -> float:
    value = source["rms_norm_eps"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ModelError(f"config.json: rms_norm_eps is {value!r}; it must be a number in [0, 1)")
    return float(value)


def _context(source: Mapping[str, Any], family: str) -> int:
    """Return the longest sequence, bounded by a window where one slides in any layer."""
    _size(source, "max_position_embeddings")
    context = scaled_context(source)
    if family == "llama" or source["sliding_window"] is None:
        return context
    if family != "mistral" and not _slides(source):
        return context
    return min(context, _size(source, "sliding_window"))


def _slides(source: Mapping[str, Any]) -> bool:
    """Whether a window slides in any of Qwen's layers: those from `max_window_layers` on."""
    if not source["use_sliding_window"]:
        return False
    if source.get("layer_types") is not None:
        return "sliding_attention" in source["layer_types"]
    whole: int = source["max_window_layers"]
    return whole < _size(source, "num_hidden_layers")


def _tokens(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in values):
        raise ModelError(f"eos_token_id is {value!r}; it must be a token id or a list of them")
    return frozenset(values)
