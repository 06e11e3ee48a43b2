"""Memory shapes out of a Hugging Face `config.json`, or by a model's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pigou.capacity.memory_shape import KvLayers, MemoryShape, WeightPart, embeddings, shape_of
from pigou.config import ConfigError
from pigou.sim.architecture import PRESETS
from pigou.sim.model_config import (
    architecture,
    config_source,
    context_tokens,
    normalized,
    weight_formats,
    whole_number,
)

#: Keys of layers whose state is no KV cache.
_FOREIGN = {
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state space layers",
    "ssm_state_size": "state space layers",
    "lru_width": "recurrent layers",
    "index_topk": "an indexer with a cache of its own",
}
#: `config.json` of models that the timing models do not describe, without what memory ignores.
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201_088,
    "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131_072,
    "attention_bias": True,
    "quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router"],
    },
}  # fmt: skip
_HALVES = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 18_432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "vocab_size": 129_280, "max_position_embeddings": 163_840,
        "quantization_config": {"quant_method": "fp8"},
    },
    "gpt-oss-20b": {
        **_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32, "layer_types": _HALVES * 12,
    },
    "gpt-oss-120b": {
        **_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": _HALVES * 18,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000,
        "max_position_embeddings": 32_768,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "vocab_size": 151_936, "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
    },
}  # fmt: skip
#: Other names of the same shapes.
_ALIASES = {
    "deepseekr1": "deepseek-v3", "deepseekv30324": "deepseek-v3", "deepseekv31": "deepseek-v3",
    "mixtral8x7bv01": "mixtral-8x7b", "mixtral8x7binstructv01": "mixtral-8x7b",
}  # fmt: skip


def memory_shape(model: str) -> MemoryShape:
    """Return the memory shape of a model.

    Args:
        model: a name that `pigou simulate` knows, one of `CONFIGS`, or a folder with a
            `config.json`, or its path.

    Raises:
        ConfigError: nothing is known by that name, or it has layers that are not described here.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        source = config_source(path)
        return read_shape(path, source, str(source.get("_name_or_path") or path.parent.name))
    name = normalized(model)
    key = _ALIASES.get(name) or next((key for key in CONFIGS if normalized(key) == name), None)
    if key is not None:
        return read_shape(Path(key), CONFIGS[key], key)
    try:
        return shape_of(architecture(model))
    except ConfigError as error:
        if model in PRESETS or "must be one of" not in str(error):
            raise
        known = ", ".join(sorted([*PRESETS, *CONFIGS]))
        raise ConfigError(
            f"model is {model!r}; it must be one of {known}, or a path to a config.json"
        ) from None


def read_shape(path: Path, source: Mapping[str, Any], name: str) -> MemoryShape:
    """Return the memory shape that the keys of a `config.json` describe.

    Args:
        path: where they are from, for errors.
        source: the keys.
        name: of the model.

    Raises:
        ConfigError: a key is missing, or means layers that are not described here.
    """
    for key, meaning in _FOREIGN.items():
        if source.get(key):
            raise ConfigError(f"{path}: {key} is {source[key]!r}: the memory of {meaning} is not "
                              "described")  # fmt: skip
    layers = whole_number(path, source, "num_hidden_layers")
    hidden = whole_number(path, source, "hidden_size")
    vocab = whole_number(path, source, "vocab_size")
    dtype, _ = weight_formats(path, source)
    unconverted = (source.get("quantization_config") or {}).get("modules_to_not_convert") or ()
    attention_dtype = "bfloat16" if any("self_attn" in str(m) for m in unconverted) else dtype
    attention, kv, query_width = _attention(path, source, layers, hidden, attention_dtype)
    feed_forward, active_ffn, wide, ffn = _feed_forward(path, source, layers, hidden, dtype)
    tied = bool(source.get("tie_word_embeddings", False))
    norms = WeightPart("norms", layers * (2 * hidden + _head_norms(source)), "bfloat16", 1)
    weights = [*attention, *feed_forward, norms, *embeddings(vocab, hidden, dtype, tied=tied)]
    attention_parameters = sum(part.parameters for part in attention)
    return MemoryShape(
        name=name,
        weights=tuple(weights),
        kv=kv,
        kv_dtype=dtype if dtype in ("float16", "float32") else "bfloat16",
        hidden=hidden,
        wide=wide,
        vocab=vocab,
        ffn=ffn,
        query_width=query_width,
        active_parameters=attention_parameters + active_ffn + vocab * hidden,
        context=context_tokens(path, source),
    )


def _attention(
    path: Path, source: Mapping[str, Any], layers: int, hidden: int, dtype: str
) -> tuple[list[WeightPart], tuple[KvLayers, ...], int]:
    """Return weights, cache and query width (0 for a latent cache) of the attention layers."""
    heads = whole_number(path, source, "num_attention_heads")
    if source.get("kv_lora_rank"):
        return *_latent(path, source, layers, hidden, dtype), 0
    kv_heads = whole_number(path, source, "num_key_value_heads", heads)
    head_dim = whole_number(path, source, "head_dim", hidden // max(heads, 1))
    biases = 1 if source.get("attention_bias") else 0
    queries, keys = heads * head_dim, 2 * kv_heads * head_dim
    weights = [
        WeightPart("queries and output", layers * (queries * (2 * hidden + biases)
                   + biases * hidden), dtype),
        WeightPart("keys and values", layers * keys * (hidden + biases), dtype, kv_heads),
    ]  # fmt: skip
    windows = _windows(path, source, layers)
    kinds = sorted(set(windows))
    kv = tuple(KvLayers(windows.count(window), kv_heads, 2 * head_dim, window) for window in kinds)
    return weights, kv, queries


def _head_norms(source: Mapping[str, Any]) -> int:
    """Return the parameters of a layer's norms of queries and keys, and of its sinks."""
    kind = str(source.get("model_type") or "")
    if kind == "gpt_oss":
        return int(source["num_attention_heads"])
    return 2 * int(source.get("head_dim") or 0) if kind.startswith("qwen3") else 0


def _latent(
    path: Path, source: Mapping[str, Any], layers: int, hidden: int, dtype: str
) -> tuple[list[WeightPart], tuple[KvLayers, ...]]:
    """Multi-head latent attention: projections to the latents are on every GPU."""
    heads = whole_number(path, source, "num_attention_heads")
    latent = whole_number(path, source, "kv_lora_rank")
    rotary = whole_number(path, source, "qk_rope_head_dim")
    unrotated = whole_number(path, source, "qk_nope_head_dim")
    value = whole_number(path, source, "v_head_dim")
    rank = whole_number(path, source, "q_lora_rank", 0)
    queries = heads * (unrotated + rotary)
    down = hidden * (latent + rotary) + hidden * rank + latent + rank
    split = (
        (rank or hidden) * queries + latent * heads * (unrotated + value) + heads * value * hidden
    )
    weights = [
        WeightPart("latent projections", layers * down, dtype, 1),
        WeightPart("attention", layers * split, dtype),
    ]
    return weights, (KvLayers(layers, 1, latent + rotary, latent=True),)


def _windows(path: Path, source: Mapping[str, Any], layers: int) -> list[int]:
    """Return the window of each layer in tokens, 0 where it sees all."""
    chunk = source.get("attention_chunk_size")
    window = source.get("sliding_window") or chunk
    kinds = source.get("layer_types")
    if kinds is not None:
        known = {"full_attention": 0, "sliding_attention": window, "chunked_attention": chunk}
        for kind in kinds:
            if known.get(kind) is None:
                raise ConfigError(
                    f"{path}: layer_types has {kind!r}, whose memory is not described"
                )
        if len(kinds) != layers:
            raise ConfigError(f"{path}: layer_types has {len(kinds)} layers of {layers}")
        return [int(known[kind] or 0) for kind in kinds]
    kind = str(source.get("model_type") or "")
    if chunk and source.get("no_rope_layers"):  # Llama 4: layers without rotation see all
        return [chunk if rotated else 0 for rotated in source["no_rope_layers"]]
    if chunk:
        raise ConfigError(f"{path}: attention_chunk_size is {chunk} without no_rope_layers")
    pattern = source.get("sliding_window_pattern") or (2 if kind == "gemma2" else None)
    if window and pattern:
        return [0 if (layer + 1) % pattern == 0 else window for layer in range(layers)]
    used = source.get("use_sliding_window", kind in ("mistral", "mixtral", "phi3"))
    return [window if window and used else 0] * layers


def _feed_forward(
    path: Path, source: Mapping[str, Any], layers: int, hidden: int, dtype: str
) -> tuple[list[WeightPart], int, int, int]:
    """Return weights, active parameters, widest moment and dense width of feed-forward layers."""
    experts = 0
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = experts or whole_number(path, source, key, 0)
    gates = 2 if source.get("hidden_act") in ("relu2", "relu", "gelu") else 3
    dense_width = whole_number(path, source, "intermediate_size")
    llama4 = source.get("model_type") == "llama4_text" or "interleave_moe_layer_step" in source
    if llama4:
        dense_width = whole_number(path, source, "intermediate_size_mlp", dense_width)
    dense = gates * hidden * dense_width
    if not experts:
        width = dense_width if gates == 3 else 0
        part = WeightPart("feed-forward", layers * dense, dtype)
        return [part], layers * dense, gates * dense_width, width
    sparse = _sparse_layers(path, source, layers)
    width = whole_number(path, source, "intermediate_size") if llama4 else whole_number(
        path, source, "moe_intermediate_size", dense_width
    )  # fmt: skip
    top = whole_number(path, source, "num_experts_per_tok")
    biased = source.get("model_type") == "gpt_oss"
    expert = gates * hidden * width + (2 * width + hidden if biased else 0)
    shared_width = whole_number(path, source, "shared_expert_intermediate_size", 0)
    shared_width = shared_width or whole_number(path, source, "n_shared_experts", 0) * width
    if llama4:
        shared_width = width
    shared, router = gates * hidden * shared_width, experts * (hidden + (1 if biased else 0))
    candidates = [
        WeightPart("experts", sparse * experts * expert, dtype),
        WeightPart("shared experts", sparse * shared, dtype),
        WeightPart("feed-forward", (layers - sparse) * dense, dtype),
        WeightPart("router", sparse * router, "bfloat16", 1),
    ]
    active = sparse * (top * expert + shared + router) + (layers - sparse) * dense
    wide = 3 * max(width * top + shared_width, dense_width if sparse < layers else 0)
    return [part for part in candidates if part.parameters], active, wide, 0


def _sparse_layers(path: Path, source: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers with experts."""
    if source.get("moe_layers"):
        return len(source["moe_layers"])
    step = whole_number(path, source, "decoder_sparse_step", 1)
    step = whole_number(path, source, "interleave_moe_layer_step", step)
    if step < 1:
        raise ConfigError(f"{path}: the step between layers with experts is {step}; at least 1")
    first = whole_number(path, source, "first_k_dense_replace", 0)
    dense = set(source.get("mlp_only_layers") or ())
    return sum(
        1 for layer in range(first, layers) if (layer + 1) % step == 0 and layer not in dense
    )
