"""Reads a model's architecture from a `config.json`, a preset's name, or a Hugging Face id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pigou.config import ConfigError
from pigou.models import ModelError
from pigou.models.architecture import Architecture, Extra, LayerKind
from pigou.models.families import FAMILIES
from pigou.models.hf_config import HfConfig, quantisation_of, read_config
from pigou.models.layers import Family, LayerBuilder, decoder_layer
from pigou.models.quantisation import DTYPE_BYTES, Quantisation, served_quantisation
from pigou.models.rope_parameters import check_rope, rope_parameters, scaled_context

#: Keys that imply layers or tensors; refused unless the family reads them.
_SIZES = re.compile(
    r"(^|_)(num|n|dim|dims|size|rank|heads?|experts?|layers?|width|ratio|ratios|pattern|mult|kernel"
    r"|state|types?|configs?|memory|recurrent|lru|ssm|mamba|conv|adapter)(_|$)"
)
#: Size keys that affect neither weights nor cache.
_HARMLESS = {
    "model_type", "rope_type", "num_hidden_layers", "rms_norm_type", "ep_size", "moe_layer_freq",
    "num_logits_to_keep", "chunk_size", "n_group", "num_expert_group", "qk_norm_type",
    "attn_type_list", "hybrid_layer_types", "intermediate_size", "num_key_value_heads",
    "rotary_dim", "max_window_layers", "quantization_config", "compression_config", "vision_config",
    "audio_config", "text_config", "llm_config", "language_config", "problem_type", "num_beams",
    "num_beam_groups", "num_return_sequences", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "output_gate_type", "mamba_ssm_dtype", "mamba_ssm_cache_dtype", "mamba_hidden_act",
    "mamba_proj_bias", "use_mamba_kernels", "use_conv_bias", "num_hash_layers",
    "index_topk_pattern", "indexer_types", "attn_res_block_size", "projector_hidden_size",
    "vocab_size_per_layer_input", "num_mtp_modules", "mtp_transformer_layers",
    "mtp_num_hidden_layers", "num_reward_heads", "num_nextn_predict_layers",
    "mtp_hybrid_override_pattern", "mtp_layers_block_type", "type_vocab_size",
    "sliding_window_size", "layer_norm_epsilon", "moe_shared_expert_overlap", "rope_head_dim",
    "num_labels", "head_dtype", "img_token_compression_config", "layers_block_type",
    "no_rope_layers", "expert_dtype", "hidden_size_per_layer_input", "num_kv_shared_layers",
    "time_step_rank", "no_rope_layer_interval", "vision_feature_layer",
}  # fmt: skip
_MAX_LAYERS = 4096
#: Number of multi-token prediction layers.
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
#: Owner prefixes ignored in names.
_PREFIXES = ("meta-", "nvidia-")
#: Suffixes of a preset's name that change no shape.
_VARIANTS = {
    "instruct", "base", "chat", "hf", "it", "thinking", "2507", "dynamic", "block", "quantized",
    "bf16",
}  # fmt: skip
_INT8 = {"weights": {"type": "int", "num_bits": 8}, "input_activations": {"num_bits": 8}}
#: Suffixes for a weight format -> quantisation of such a checkpoint.
_FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "w8a8": {"quant_method": "compressed-tensors", "config_groups": {"group_0": _INT8}},
    "int8": {"quant_method": "gptq", "bits": 8}, "w8a16": {"quant_method": "gptq", "bits": 8},
    "int4": {"quant_method": "gptq", "bits": 4}, "w4a16": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4}, "gptq": {"quant_method": "gptq", "bits": 4},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "modelopt", "quant_algo": "MXFP4"},
}  # fmt: skip
#: Quantisation methods whose format another suffix may give.
_METHODS = ("awq", "gptq")
#: Timeout of the hub, in seconds.
_HUB_S = 5.0


def read_architecture(path: Path, dtype: str = "") -> Architecture:
    """Read a model folder or `config.json`; raises ConfigError if not fully described."""
    path = path / "config.json" if path.is_dir() else path
    source = read_config(path)
    if dtype:
        source["torch_dtype"] = dtype
    name = str(source.get("_name_or_path") or path.resolve().parent.name)
    return parse_architecture(path, source, name)


def parse_architecture(path: Path, source: Mapping[str, Any], name: str) -> Architecture:
    """Parse a `config.json`'s contents; raises ConfigError if not fully described."""
    try:
        return _parse(HfConfig(path, source), source, name)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, re.error) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: a key has a form that is not understood ({what})") from error


def _parse(config: HfConfig, source: Mapping[str, Any], name: str) -> Architecture:
    family, path = family_of(config), config.path
    dtype = str(config.get("torch_dtype", "dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        key = next(key for key in ("torch_dtype", "dtype") if config.values.get(key))
        raise config.error(key, f"it must be one of {', '.join(DTYPE_BYTES)}")
    quant = Quantisation(str(path), _quantisation(config, family, source), dtype)
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    heads = config.size("num_attention_heads")
    layers = len(family.blocks(config, "")) if family.blocks else config.size("num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise config.error("num_hidden_layers", f"it must be at most {_MAX_LAYERS}")
    decoder = [_layer(config, family, quant, index) for index in range(layers)]
    extras = (*_vision(config), *_prediction(config, family, quant, layers))
    _refuse_unknown(config)
    _check_heads(config, heads, decoder)
    embedding = quant.format_of(["embed_tokens", "embeddings", "embed"], linear=False)
    head = quant.format_of(["lm_head", "head", "output"], linear=False)
    return Architecture(
        name=name, hidden=hidden, vocab=vocab, heads=heads, kinds=_kinds(decoder),
        embedding=embedding, head=head, main=quant.main, extras=extras,
        tied=config.flag("tie_word_embeddings"),
        kv_dtype=quant.kv_dtype or (dtype if dtype in ("float16", "float32") else "bfloat16"),
        context=_context(config, family),
    )  # fmt: skip


def family_of(config: HfConfig) -> Family:
    """Return a model's family, by `model_type` or `architectures`; raises ConfigError."""
    inner, outer = str(config.values.get("model_type") or ""), config.outer_type
    names = [str(name) for name in config.values.get("architectures") or ()]
    family = next(filter(None, map(family_named, (inner, outer, *names))), "")
    if not family:
        said = inner or outer or ", ".join(names)
        raise ConfigError(
            f"{config.path}: model_type is {said!r}, whose layers are not described; known are "
            f"{', '.join(FAMILIES)}"
        )
    config.values = {**FAMILIES[family].defaults, **config.values, "model_type": family}
    return FAMILIES[family]


def served_family(config: HfConfig) -> Family:
    """Return a family that workers run; raises ConfigError or ModelError otherwise."""
    described = family_of(config)
    family, names = str(config.values["model_type"]), config.get("architectures") or []
    if not described.served or (names and family not in map(family_named, names)):
        served = ", ".join(name for name, other in FAMILIES.items() if other.served)
        raise ModelError(
            f"architectures {names} of model_type {family!r} are not supported; supported: {served}"
        )
    served_quantisation(str(config.path), quantisation_of(config.values))
    check_rope(config.values)
    activation = config.values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    return described


def choose_implementation(config: HfConfig, wanted: str) -> str:
    """Return who computes a model: "pigou", or "transformers"; `wanted` may be "auto".

    Raises ConfigError or ModelError if neither can.
    """
    keys = quantisation_of(config.values)
    served_quantisation(str(config.path), keys)
    for name in map(str, config.get("architectures") or ()):
        if name.endswith("Classification"):
            raise ModelError(f"architectures has {name}, whose classification head is not run: "
                             "serve a decoder, which scores by its embeddings")  # fmt: skip
    if wanted != "transformers":
        try:
            served_family(config)
        except (ConfigError, ModelError) as error:
            if wanted == "pigou":
                raise
            reason = f"{error}; "
        else:
            return "pigou"
    if keys and keys.get("quant_method") != "mxfp4":
        raise ModelError(
            "quantization_config: of quantized weights transformers' models have MXFP4 alone; use "
            "bf16 ones"
        )
    if find_spec("transformers") is None:
        reason = "" if wanted == "transformers" else reason
        raise ModelError(f"{reason}install pigou[transformers], which runs most decoders")
    return "transformers"


def family_named(name: str) -> str:
    """Return the family of a `model_type` or architecture name; "" if unknown."""
    name = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", name)
    named = [key for key, family in FAMILIES.items() if family.architecture == name]
    if name and named:
        return named[0]
    while name:
        plainly = re.sub(r"[^a-z0-9]", "", name.lower())
        for key in FAMILIES:
            if key.replace("_", "") == plainly:
                return key
        shorter = re.sub(r"(_text|_vl|Sparse|Text|Flash)$", "", name)
        name = shorter if shorter != name else ""
    return ""


def _quantisation(
    config: HfConfig, family: Family, source: Mapping[str, Any]
) -> dict[str, Any] | None:
    keys = quantisation_of(source)
    experts = config.get("expert_dtype")
    if keys and experts and not keys.get("quantized_layers"):
        if experts != "fp4":
            raise config.error("expert_dtype", "known is fp4")
        named = {f"layers.{i}.ffn.experts": {"quant_algo": "MXFP4"}
                 for i in range(config.count("num_hidden_layers") + 8)}  # fmt: skip
        keys = {**keys, "quantized_layers": named}
    excluded = any(key in (keys or ()) for key in ("exclude_modules", "ignore", "config_groups"))
    if keys and family.blocks and not excluded:
        raise ConfigError(
            f"{config.path}: quant_algo is {keys.get('quant_algo')!r} without exclude_modules, and "
            "hybrid models keep some layers in other formats; give the hf_quant_config.json of "
            "the checkpoint"
        )
    return keys


def _layer(config: HfConfig, family: Family, quant: Quantisation, index: int) -> LayerKind:
    builder = LayerBuilder(config, family, quant, index)
    (family.layer or decoder_layer)(builder)
    return builder.kind()


def _kinds(decoder: list[LayerKind]) -> tuple[LayerKind, ...]:
    counts: dict[LayerKind, int] = {}
    for layer in decoder:
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(
        LayerKind(count, *(getattr(kind, name) for name in LayerKind.__slots__[1:]))
        for kind, count in counts.items()
    )


def _check_heads(config: HfConfig, heads: int, decoder: list[LayerKind]) -> None:
    for kind in decoder:
        for cache_ in kind.caches:
            if cache_.heads < 1 or (not cache_.latent and heads % cache_.heads):
                raise config.error("num_key_value_heads", f"kv_heads must divide the {heads} heads")


def _refuse_unknown(config: HfConfig) -> None:
    """Refuse size keys that nothing has read, which imply layers not described."""
    for key in config.model_keys:
        value = config.values.get(key)
        if key in config.used or key in _HARMLESS or not value or isinstance(value, (bool, str)):
            continue
        if _SIZES.search(key) and not key.endswith(("_id", "_ids", "_index", "_eps", "_coef")):
            raise config.error(
                key, f"a {config.values['model_type']} model with it is not described"
            )


def _context(config: HfConfig, family: Family) -> int:
    """Return the max sequence length, with RoPE scaling, as workers compute it."""
    source = {**config.values, "max_position_embeddings": config.count(
        "max_position_embeddings", "model_max_length", "max_seq_len", "n_positions", default=131_072
    )}  # fmt: skip
    if family.scaled:
        return int(source["max_position_embeddings"])
    try:
        rope_parameters(source)
    except ModelError:  # a type that workers do not run: use the stated context
        return int(source["max_position_embeddings"])
    try:
        return scaled_context(source)
    except ModelError as error:
        raise ConfigError(f"{config.path}: {error}") from None


def _vision(config: HfConfig) -> tuple[Extra, ...]:
    """Return the vision tower and projector at 16 bits, within a few percent of their size."""
    given = config.get("vision_config")
    if not isinstance(given, Mapping) or not given:
        return ()
    vision = HfConfig(Path(f"{config.path}: vision_config"), given)
    hidden = vision.count("hidden_size", "vt_hidden_size", "embed_dim")
    width = vision.count("qkv_hidden_size", default=hidden)
    inner = vision.count("intermediate_size", "vt_intermediate_size", default=4 * hidden)
    layers = vision.count("depth", "num_hidden_layers", "vt_num_hidden_layers", "num_layers")
    gates = 3 if config.outer_type.startswith(("gemma4", "qwen2_5")) else 2
    total = layers * (4 * hidden * width + gates * hidden * inner + inner + 9 * hidden)
    patch = vision.count("patch_size", "spatial_patch_size", default=14)
    total += 3 * patch * patch * hidden * vision.count("temporal_patch_size", default=1)
    total += hidden * vision.count("num_position_embeddings", "position_embedding_size", default=0)
    kernel = vision.get("merge_kernel_size")
    merge = int(kernel[0]) if kernel else vision.count("spatial_merge_size", default=1)
    merged, text = hidden * merge * merge, config.count("hidden_size")
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    total += mergers * (merged * merged + merged * text) if merge > 1 else hidden * text
    return (Extra("vision", total, 2 * total),)


def _prediction(
    config: HfConfig, family: Family, quant: Quantisation, layers: int
) -> tuple[Extra, ...]:
    """Return the multi-token prediction layers, loaded only for speculative decoding."""
    count = config.count(*_PREDICTION, default=0)
    if not count:
        return ()
    depth = len(family.blocks(config, "mtp_")) if family.blocks else 1
    blocks = [_layer(config, family, quant, layers + index) for index in range(depth)]
    hidden = config.count("hidden_size")
    parameters = 2 * hidden * hidden
    size = 2.0 * parameters
    for kind in blocks:
        parameters += sum(matrix.parameters for matrix in kind.matrices) + kind.vectors
        size += sum(matrix.size for matrix in kind.matrices) + 2 * kind.vectors
    return (Extra("multi-token prediction", count * parameters, round(count * size), loaded=False),)


# --- names ----------------------------------------------------------------------------------------


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return each preset's `config.json`, by name."""
    loaded: dict[str, dict[str, Any]] = json.loads(
        files("pigou.models").joinpath("presets.json").read_text(encoding="utf-8")
    )
    return loaded


def normalized(name: str) -> str:
    """Normalize a model's name for comparison: no owner, lower case, alphanumeric."""
    return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum())


def shape_name(name: str) -> str:
    """Strip the parts of a name that change neither shapes nor layers."""
    parts = re.split(r"[^a-z0-9]+", name.rsplit("/", 1)[-1].lower())
    return "".join(part for part in parts if part not in _VARIANTS and part not in _FORMATS)


def architecture(model: str) -> Architecture:
    """Find an architecture by preset name, folder, or Hugging Face id; raises ConfigError.

    A preset's name may end in a variant of equal shape ("-Instruct") or a weight format ("-FP8",
    "-AWQ").
    """
    path = Path(model)
    if path.is_dir() or path.is_file():
        return read_architecture(path)
    by_name, refusal = _candidates(model), ""
    if by_name and not (refusal := _refusal(model, *by_name[0])):
        return _preset(*by_name[0])
    is_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if is_id and (folder := _from_hub(model)):
        return read_architecture(folder)
    if refusal:
        raise ConfigError(refusal)
    hint = "; the hub cannot be reached, or has no such model" if is_id else ""
    raise ConfigError(
        f"model is {model!r}; it must be one of {', '.join(presets())}, a Hugging Face id, or a "
        f"path to a config.json{hint}"
    )


def _candidates(model: str) -> list[tuple[str, tuple[str, ...]]]:
    name = model.rsplit("/", 1)[-1].lower()
    matches = []
    for start in ("", *_PREFIXES):
        if not name.startswith(start):
            continue
        for key, source in presets().items():
            for spelt in (key, *source.get("aliases", ())):
                rest = _after(name[len(start) :], normalized(spelt))
                if rest is not None:
                    parts = tuple(part for part in re.split(r"[^a-z0-9]+", rest) if part)
                    matches.append((len(normalized(spelt)), key, parts))
    return [(key, parts) for _, key, parts in sorted(matches, key=lambda match: -match[0])]


def _after(name: str, start: str) -> str | None:
    matched = 0
    for index, character in enumerate(name):
        if matched == len(start):
            return None if character.isalnum() else name[index:]
        if character.isalnum():
            if character != start[matched]:
                return None
            matched += 1
    return "" if matched == len(start) else None


def _refusal(model: str, key: str, parts: tuple[str, ...]) -> str:
    """Return why a name is not a variant of a preset; "" if it is."""
    for part in parts:
        if part not in _VARIANTS and part not in _FORMATS:
            known = ", ".join(sorted(_VARIANTS | set(_FORMATS)))
            return (
                f"model is {model!r}: {part!r} is no known variant of {presets()[key]['name']}; "
                f"known are {known}; or give a path to the config.json of the model"
            )
    formats = [part for part in parts if part in _FORMATS]
    precise = [part for part in formats if part not in _METHODS] or formats
    floats = len(precise) < len(formats) and any("fp" in part for part in precise)
    if floats or len({json.dumps(_FORMATS[part]) for part in precise}) > 1:
        return f"model is {model!r}, which names two number formats; give one"
    if precise and quantisation_of(presets()[key]):
        return f"model is {model!r}, and {key} is quantised already; give a path to the config.json"
    return ""


@cache
def _preset(key: str, parts: tuple[str, ...]) -> Architecture:
    source = {k: v for k, v in presets()[key].items() if k not in ("name", "aliases")}
    formats = [part for part in parts if part in _FORMATS]
    precise = [part for part in formats if part not in _METHODS] or formats
    if precise:
        source["quantization_config"] = _FORMATS[precise[0]]
    return parse_architecture(Path(key), source, presets()[key]["name"])


def _from_hub(model: str) -> Path | None:
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    files = ["config.json", "hf_quant_config.json"]
    for offline in (True, False):
        try:
            if not offline:
                if constants.HF_HUB_OFFLINE:
                    return None
                socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
            folder = Path(
                snapshot_download(
                    model, allow_patterns=files, local_files_only=offline, etag_timeout=_HUB_S
                )
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError):
            continue
        if (folder / "config.json").is_file():
            return folder
    return None
