"""Architectures out of a Hugging Face `config.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pigou.config import ConfigError
from pigou.models import ModelError
from pigou.models.rope_parameters import rope_parameters, scaled_context
from pigou.sim.architecture import DTYPE_BYTES, PRESETS, QUANTISED, Architecture

#: Model types whose layers the formulas describe, and whether their feed-forward has a gate.
_TYPES = {
    "llama": True, "mistral": True, "mixtral": True, "qwen2": True, "qwen3": True,
    "qwen3_moe": True, "olmo": True, "olmo2": True, "olmoe": True, "granite": True,
    "gemma": True, "phi3": True, "stablelm": True, "internlm2": True, "smollm3": True,
    "glm": True, "glm4": True, "seed_oss": True, "cohere": True, "exaone4": True,
    "nemotron": False, "starcoder2": False, "arcee": False, "phi": False, "gpt_neox": False,
}  # fmt: skip
#: Activations whose layer has no gate, where a file does not tell its type.
_UNGATED = {"relu2", "relu", "gelu", "gelu_new"}
_QK_NORM = ("qwen3", "olmo2", "olmoe", "exaone4")
#: Keys that mean a layer which these formulas do not describe.
_FOREIGN = {
    "kv_lora_rank": "multi-head latent attention",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state space layers",
    "attention_chunk_size": "chunked attention",
    "interleave_moe_layer_step": "experts in some layers, and a shared one",
}


def read_architecture(path: Path) -> Architecture:
    """Read a Hugging Face `config.json`.

    Raises:
        ConfigError: a key is missing, or asks for layers that the formulas do not describe.
    """
    source = config_source(path)
    kind = str(source.get("model_type") or "")
    if kind and kind not in _TYPES:
        raise ConfigError(
            f"{path}: model_type is {kind!r}: its layers cannot be timed; known are "
            f"{', '.join(_TYPES)}"
        )
    for key, meaning in _FOREIGN.items():
        if source.get(key):
            raise ConfigError(f"{path}: {key} is {source[key]!r}: {meaning} cannot be timed")
    if source.get("mlp_only_layers") or source.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(f"{path}: only some layers have experts: that cannot be timed")
    _refuse_windows(path, source)
    heads = whole_number(path, source, "num_attention_heads")
    hidden = whole_number(path, source, "hidden_size")
    experts = whole_number(path, source, "num_experts", 0)
    experts = experts or whole_number(path, source, "num_local_experts", 0)
    sparse = bool(source.get("moe_intermediate_size")) and experts > 0
    dtype, compute = weight_formats(path, source)
    return Architecture(
        name=str(source.get("_name_or_path") or path.resolve().parent.name),
        layers=whole_number(path, source, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=whole_number(path, source, "num_key_value_heads", heads),
        head_dim=whole_number(path, source, "head_dim", hidden // max(heads, 1)),
        ffn=whole_number(path, source, "moe_intermediate_size" if sparse else "intermediate_size"),
        vocab=whole_number(path, source, "vocab_size"),
        tied=bool(source.get("tie_word_embeddings", False)),
        gated=_TYPES.get(kind, source.get("hidden_act", "silu") not in _UNGATED),
        qk_norm=kind.startswith(_QK_NORM),
        experts=experts,
        active=whole_number(path, source, "num_experts_per_tok", 0) if experts else 0,
        dtype=dtype,
        compute=compute,
        kv_dtype="bfloat16" if dtype in QUANTISED else dtype,
        context=context_tokens(path, source),
    )


def context_tokens(path: Path, source: Mapping[str, Any]) -> int:
    """Return the tokens that a sequence may have: with what scales the positions, as workers do."""
    context = whole_number(path, source, "max_position_embeddings", 131_072)
    try:
        rope_parameters(source)
    except ModelError:  # a type that no worker of Pigou's runs: what it states is its context
        return context
    try:
        return scaled_context({**source, "max_position_embeddings": context})
    except ModelError as error:
        raise ConfigError(f"{path}: {error}") from None


def _refuse_windows(path: Path, source: Mapping[str, Any]) -> None:
    """Refuse layers that see a part of the context only."""
    for kind in source.get("layer_types") or ():
        if kind != "full_attention":
            raise ConfigError(f"{path}: layer_types has {kind}: that cannot be timed")
    window, context = source.get("sliding_window"), source.get("max_position_embeddings")
    used = source.get("use_sliding_window", str(source.get("model_type")) in ("mistral", "mixtral"))
    if used and isinstance(window, int) and isinstance(context, int) and window < context:
        raise ConfigError(f"{path}: sliding_window is {window}: that cannot be timed")


def config_source(path: Path) -> dict[str, Any]:
    """Return what a file says of the model, or of the part of it that is of text."""
    try:
        source = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; give the config.json of a model") from None
    text = source.get("text_config") or {} if isinstance(source, dict) else None
    if not isinstance(text, dict):
        raise ConfigError(f"{path}: it is no object of keys; give the config.json of a model")
    return {**source, **text}


def whole_number(
    path: Path, source: Mapping[str, Any], key: str, default: int | None = None
) -> int:
    """Return a whole number; `default`, where there is one, stands for none and for null."""
    value = source.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int):
        raise ConfigError(f"{path}: {key} is {value!r}; it must be a whole number")
    return value


def weight_formats(path: Path, source: Mapping[str, Any]) -> tuple[str, str]:
    """Number formats of the weights, and of products where it is another."""
    quantised = source.get("quantization_config") or {}
    if not isinstance(quantised, dict):
        raise ConfigError(f"{path}: quantization_config is {quantised!r}; it must have keys")
    if quantised:
        return _quantised(path, quantised)
    dtype = str(source.get("torch_dtype") or source.get("dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{path}: dtype is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    return dtype, ""


def _quantised(path: Path, keys: Mapping[str, Any]) -> tuple[str, str]:  # noqa: PLR0911
    """Formats by `quant_method`; weights of 4 or 8 bits alone are computed in bfloat16."""
    method = str(keys.get("quant_method") or "")
    bits = keys.get("bits", keys.get("w_bit", 4))
    match method:
        case "fp8" | "fbgemm_fp8":
            return "fp8", ""
        case "mxfp4":
            return "mxfp4", ""
        case "awq" | "gptq" if bits == 4:
            return "int4", ""
        case "awq" | "gptq" if bits == 8:
            return "int8", "bfloat16"
        case "bitsandbytes" if keys.get("load_in_4bit") or keys.get("load_in_8bit"):
            return ("int4", "") if keys.get("load_in_4bit") else ("int8", "bfloat16")
        case "modelopt" | "modelopt_fp4":
            algorithm = str(keys.get("quant_algo") or "").upper()
            if algorithm in ("FP8", "NVFP4"):
                return algorithm.lower(), ""
            raise ConfigError(f"{path}: quant_algo is {algorithm!r}; known: FP8, NVFP4")
        case "compressed-tensors":
            return _compressed(path, keys)
    raise ConfigError(
        f"{path}: quant_method is {method!r} with {bits} bits; known: fp8, fbgemm_fp8, mxfp4, "
        "modelopt, compressed-tensors, bitsandbytes, and awq and gptq with 4 or 8 bits"
    )


def _compressed(path: Path, keys: Mapping[str, Any]) -> tuple[str, str]:
    """Formats of a compressed-tensors checkpoint, all of whose groups must be alike."""
    groups = keys.get("config_groups")
    seen = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
        seen.add((weights.get("type"), weights.get("num_bits"), inputs.get("num_bits")))
    known: dict[tuple[Any, Any, Any], tuple[str, str]] = {
        ("float", 8, 8): ("fp8", ""), ("float", 8, None): ("fp8", "bfloat16"),
        ("int", 8, 8): ("int8", ""), ("int", 8, None): ("int8", "bfloat16"),
        ("int", 4, None): ("int4", ""), ("float", 4, 4): ("nvfp4", ""),
        ("float", 4, None): ("nvfp4", "bfloat16"),
    }  # fmt: skip
    formats = known.get(next(iter(seen))) if len(seen) == 1 else None
    if formats is None:
        raise ConfigError(
            f"{path}: config_groups has (type, bits, bits of activations) {sorted(map(str, seen))};"
            f" one of {', '.join(map(str, known))} can be timed"
        )
    return formats


#: Owners' prefixes of names that mean the preset without them.
_PREFIXES = ("meta-", "nvidia-")
#: Parts of a name after the preset's that change no shape.
_VARIANTS = {
    "instruct", "base", "chat", "hf", "it", "thinking", "2507", "dynamic", "block", "quantized",
    "bf16",
}  # fmt: skip
#: Parts that name the weights' format, and the one that products are computed in.
_FORMATS = {
    "fp8": ("fp8", ""), "w8a8": ("int8", ""), "int8": ("int8", "bfloat16"),
    "w8a16": ("int8", "bfloat16"), "int4": ("int4", ""), "w4a16": ("int4", ""),
    "awq": ("int4", ""), "gptq": ("int4", ""), "nvfp4": ("nvfp4", ""), "fp4": ("nvfp4", ""),
    "mxfp4": ("mxfp4", ""),
}  # fmt: skip
#: Quantisation methods, whose format another part of the name may say.
_METHODS = ("awq", "gptq")


def normalized(name: str) -> str:
    """Return a model's name for comparisons: no owner, lower case, letters and digits only."""
    return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum())


def shape_name(name: str) -> str:
    """Return a plain name without the parts that change neither shapes nor layers."""
    parts = re.split(r"[^a-z0-9]+", name.rsplit("/", 1)[-1].lower())
    return "".join(part for part in parts if part not in _VARIANTS and part not in _FORMATS)


def architecture(model: str) -> Architecture:
    """Find the architecture of a preset's name, a Hugging Face id of one, or a `config.json`.

    Args:
        model: "llama-3.1-8b", "Qwen/Qwen3-32B-FP8", a folder with a `config.json`, or its path.
            What follows a preset's name must be known: a variant of equal shape ("-Instruct"),
            or the number format of its weights ("-FP8", "-AWQ", "-GPTQ-Int8", "-NVFP4").

    Raises:
        ConfigError: nothing is known by that name, or the file describes another kind of model.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_architecture(path)
    for preset, rest in _candidates(model):
        return _variant(model, preset, rest)
    known = ", ".join(PRESETS)
    raise ConfigError(f"model is {model!r}; it must be one of {known}, or a path to a config.json")


def _candidates(model: str) -> list[tuple[Architecture, str]]:
    """Return presets that a name begins with, the longest first, and what follows."""
    name = model.rsplit("/", 1)[-1].lower()
    matches = []
    for start in ("", *_PREFIXES):
        if not name.startswith(start):
            continue
        short = name[len(start) :]
        for key, preset in PRESETS.items():
            rest = _after(short, normalized(key))
            if rest is not None:
                matches.append((len(normalized(key)), preset, rest))
    return [(preset, rest) for _, preset, rest in sorted(matches, key=lambda match: -match[0])]


def _after(name: str, start: str) -> str | None:
    """Return what follows `start` in a name, punctuation aside; None where it is another name."""
    matched = 0
    for index, character in enumerate(name):
        if matched == len(start):
            return None if character.isalnum() else name[index:]
        if character.isalnum():
            if character != start[matched]:
                return None
            matched += 1
    return "" if matched == len(start) else None


def _variant(model: str, preset: Architecture, rest: str) -> Architecture:
    parts = [part for part in re.split(r"[^a-z0-9]+", rest) if part]
    formats = [part for part in parts if part in _FORMATS]
    for part in parts:
        if part not in _VARIANTS and part not in _FORMATS:
            known = ", ".join(sorted(_VARIANTS | set(_FORMATS)))
            raise ConfigError(
                f"model is {model!r}: {part!r} is no known variant of {preset.name}; known are "
                f"{known}; or give a path to the config.json of the model"
            )
    precise = [part for part in formats if part not in _METHODS] or formats
    floats = len(precise) < len(formats) and any("fp" in part for part in precise)
    if floats or len({_FORMATS[part] for part in precise}) > 1:
        raise ConfigError(f"model is {model!r}, which names two number formats; give one")
    return preset.cast(*_FORMATS[precise[0]]) if precise else preset
