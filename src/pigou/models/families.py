"""Model families: layers and defaults that their `config.json` leaves implicit.

Shapes follow transformers 5, and the model cards of gpt-oss, DeepSeek and Kimi K3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pigou.models.architecture import Cache
from pigou.models.hf_config import HfConfig
from pigou.models.layers import (
    EXPERTS,
    TOP,
    Family,
    LayerBuilder,
    decoder_layer,
    experts,
    feed_forward,
    feed_forward_layer,
    grouped,
    grouped_layer,
    has_experts,
    head_dim_of,
    index_cache,
    kimi_delta_attention,
    latent,
    state_space,
    window_of,
)  # fmt: skip

_LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_MISTRAL_SIZES = _LLAMA_SIZES | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "sliding_window": 4096,
}  # fmt: skip
_QWEN2_SIZES = _LLAMA_SIZES | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_QWEN3 = Family(qk_norm="head", window="switch", defaults=_QWEN2_SIZES | {"head_dim": 128})
_QWEN2 = Family(qkv_bias=True, output_bias=False, window="switch", defaults=_QWEN2_SIZES)
_QWEN_MOE_SIZES = _QWEN2_SIZES | {
    "hidden_size": 2048, "num_hidden_layers": 24, "sliding_window": None, "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}  # fmt: skip
_QWEN2_MOE = replace(_QWEN2, qkv_bias="qkv_bias", served=True, defaults=_QWEN_MOE_SIZES | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4, EXPERTS[-1]: 60, "qkv_bias": True,
})  # fmt: skip
_QWEN3_MOE = replace(_QWEN3, served=True, defaults=_QWEN_MOE_SIZES | {
    "intermediate_size": 6144, "num_key_value_heads": 4, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, EXPERTS[-1]: 128,  # read after all keys of a config.json
})  # fmt: skip
_QWEN_NEXT = replace(_QWEN3, defaults={"head_dim": 256, "attn_output_gate": True})
_GEMMA = Family(defaults={"tie_word_embeddings": True, "head_dim": 256})
_GEMMA3_SIZES: dict[str, Any] = {
    "tie_word_embeddings": True, "vocab_size": 262_208, "head_dim": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "sliding_window": 4096,
}  # fmt: skip
_DEEPSEEK = Family(qkv_bias=False, output_bias=False)
_MIXTRAL_SIZES = _MISTRAL_SIZES | {
    "sliding_window": None, EXPERTS[-1]: 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6,
}  # fmt: skip
_MIXTRAL = Family(mlp=("block_sparse_moe", "mlp"), qkv_bias=False, output_bias=False, window="all",
                  defaults=_MIXTRAL_SIZES, served=True)  # fmt: skip
_TIED = {"tie_word_embeddings": True}
_LAYER_NORM = Family(gated=False, norm_bias=True)


def gpt_oss(layer: LayerBuilder) -> None:
    """Add a gpt-oss layer: a sink per query head, and biases everywhere."""
    decoder_layer(layer)
    layer.vectors += layer.config.count("num_attention_heads") + layer.config.count(*EXPERTS)


def llama4(layer: LayerBuilder) -> None:
    """Add a Llama 4 layer: one in four has full attention without RoPE, the rest chunked."""
    config, index = layer.config, layer.index
    layers = config.count("num_hidden_layers")
    chunk = config.count("attention_chunk_size", default=0)
    types = config.items("layer_types", layers)
    rotated = config.get("no_rope_layers")
    if types is not None:
        chunked = types[index] == "chunked_attention"
    elif rotated:
        chunked = bool((config.items("no_rope_layers", layers) or [])[index])
    else:
        chunked = (index + 1) % config.count("no_rope_layer_interval", default=4) != 0
    grouped_layer(layer, chunk if chunked else 0)
    width, dense = (config.count(f"intermediate_size{end}") for end in ("", "_mlp"))
    if has_experts(config, index, layers):
        count, top = config.count(*EXPERTS), config.count(*TOP)
        feed_forward(layer, "experts", width, layer.family.mlp, copies=count, active=top)
        layer.add("router", layer.hidden, count, layer.family.mlp, ("router",), shards=1)
        feed_forward(layer, "shared experts", width, ("feed_forward.shared_expert",))
    else:
        feed_forward(layer, "feed-forward", dense, layer.family.mlp)


def gemma4(layer: LayerBuilder) -> None:
    """Add a Gemma 4 layer; full and sliding layers have different heads."""
    config = layer.config
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp"):
        if config.get(key):
            raise config.error(key, "such layers are not described")
    layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    window = window_of(config, layer.family, layer.index, layers) or 0
    kv_heads, head_dim = config.count("num_key_value_heads"), config.count("head_dim")
    shared = False
    if not window:
        kv_heads = config.count("num_global_key_value_heads", default=kv_heads)
        head_dim = config.count("global_head_dim", default=head_dim)
        shared = config.flag("attention_k_eq_v")
    grouped(layer, heads, kv_heads, head_dim, window, shared_values=shared)
    feed_forward(layer, "feed-forward", config.count("intermediate_size"), ("mlp",))
    if config.flag("enable_moe_block"):
        count, top = config.count(*EXPERTS), config.count(*TOP)
        width = config.count("moe_intermediate_size")
        feed_forward(layer, "experts", width, ("",), copies=count, active=top)
        layer.add("router", layer.hidden, count, ("router",), ("proj",), shards=1)
        layer.vectors += 4 * layer.hidden + count


def mimo_v2(layer: LayerBuilder) -> None:
    """Add a MiMo-V2 layer; full and sliding layers have different heads."""
    config, layers = layer.config, layer.config.count("num_hidden_layers")
    index = min(layer.index, layers - 1)
    pattern = config.items("hybrid_layer_pattern", layers)
    slides = bool(pattern[index] if pattern else window_of(config, layer.family, index, layers))
    swa = "swa_" if slides else ""
    heads, kv_heads, dim = (
        config.count(f"{swa}{key}", key)
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    value = config.count(f"{swa}v_head_dim", "v_head_dim", default=dim)
    for kind in ("", "swa_"):  # read both, so that neither counts as unknown
        config.get(*(f"{kind}{key}" for key in ("num_attention_heads", "num_key_value_heads",
                                                "head_dim", "v_head_dim")))  # fmt: skip
    config.get("attention_chunk_size")
    window = config.count("sliding_window", "sliding_window_size") if slides else 0
    grouped(layer, heads, kv_heads, dim, window, value)
    sinks = config.flag("add_swa_attention_sink_bias", default=True)
    layer.vectors += heads if sinks and slides else 0
    feed_forward_layer(layer, layers)


def step3(layer: LayerBuilder) -> None:
    """Add a Step 3.5 or 3.7 layer, with a gate per head."""
    config, layers = layer.config, layer.config.count("num_hidden_layers")
    index, heads = min(layer.index, layers - 1), config.count("num_attention_heads")
    window = window_of(config, layer.family, index, layers) or 0
    kv_heads = config.count("num_key_value_heads", "num_attention_groups")
    other = config.get("attention_other_setting")
    if other and window:
        heads = int(other["num_attention_heads"])
        kv_heads = int(other["num_attention_groups"])
    grouped(layer, heads, kv_heads, config.count("head_dim"), window, gate=heads)
    if layer.index >= layers:  # multi-token prediction layers
        feed_forward(layer, "feed-forward", config.count("intermediate_size"), layer.family.mlp)
    else:
        feed_forward_layer(layer, layers)


def minimax_m3(layer: LayerBuilder) -> None:
    """Add a MiniMax-M3 layer; an indexer selects context blocks in most layers."""
    config, layers = layer.config, layer.config.count("num_hidden_layers")
    index = min(layer.index, layers - 1)
    heads = config.count("num_attention_heads")
    grouped(layer, heads, config.count("num_key_value_heads"), head_dim_of(config, heads))
    sparse = config.get("sparse_attention_config") or {}
    if sparse.get("use_sparse_attention") and sparse["sparse_attention_freq"][index]:
        count, dim = int(sparse["sparse_num_index_heads"]), int(sparse["sparse_index_dim"])
        names = ("self_attn.indexer",)
        layer.add("attention", layer.hidden, count * dim, names, ("q_proj",), shards=1)
        layer.add("attention", layer.hidden, dim, names, ("k_proj",), shards=1)
        layer.vectors += 2 * dim
        selected = int(sparse["sparse_topk_blocks"]) * int(sparse["sparse_block_size"])
        layer.caches[-1] = replace(layer.caches[-1], selected=selected)
        pair = 2.0 * count * dim
        layer.caches.append(Cache(1, 2 * dim, pair, pair, latent=True, dtype="fp8"))  # 16 bits
    feed_forward_layer(layer, layers)


def nemotron_h(layer: LayerBuilder) -> None:
    """Add a Nemotron-H block: state space, attention, feed-forward or experts."""
    config = layer.config
    block = [*nemotron_blocks(config, ""), *nemotron_blocks(config, "mtp_")][layer.index]
    layer.sums = 1
    if block == "mamba":
        state_space(layer)
    elif block == "attention":
        grouped_layer(layer, 0)
    elif block == "mlp":
        feed_forward(layer, "feed-forward", config.count("intermediate_size"), ("mixer",))
    else:
        config.get("intermediate_size")
        experts(layer)


def nemotron_blocks(config: HfConfig, prefix: str) -> list[str]:
    """Return the block kinds, of either spelling; "mtp_" for the prediction blocks."""
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    spelt = {**letters, "linear_attention": "mamba", "full_attention": "attention"}
    pattern = config.get(f"{prefix}hybrid_override_pattern")
    blocks = config.get(f"{prefix}layers_block_type", f"{prefix}layer_types") or pattern or ""
    blocks = [spelt.get(block, block) for block in blocks]
    unknown = set(blocks) - set(letters.values())
    if unknown or not (blocks or prefix):
        key = "hybrid_override_pattern" if pattern else "layers_block_type"
        raise config.error(key, f"blocks are {', '.join(letters.values())}")
    return list(blocks)


def nemotron_nas(layer: LayerBuilder) -> None:
    """Add a layer of a pruned Llama (DeciLM); heads and width vary by layer or are absent."""
    config = layer.config
    blocks = config.items("block_configs", config.count("num_hidden_layers"))
    if blocks is None:
        raise config.error("block_configs", "it must describe each layer")
    attention, ffn = blocks[layer.index]["attention"], blocks[layer.index]["ffn"]
    for block in (attention, ffn):
        if block.get("replace_with_linear") or block.get("sparsify"):
            raise config.error("block_configs", "linear and sparse replacements are not described")
    heads = config.count("num_attention_heads")
    if not attention["no_op"]:
        kv_heads = heads // int(attention["n_heads_in_group"])
        window = int(attention.get("window_length") or 0)
        grouped(layer, heads, kv_heads, head_dim_of(config, heads), window)
    if not ffn["no_op"]:
        width = int(2 * float(ffn["ffn_mult"]) * layer.hidden / 3)
        feed_forward(layer, "feed-forward", -(-width // 256) * 256, ("mlp",))
    layer.sums = 2 - bool(attention["no_op"]) - bool(ffn["no_op"])


def kimi_linear(layer: LayerBuilder) -> None:
    """Add a Kimi Linear or Kimi K3 layer: delta attention, or latent attention without RoPE."""
    config, layers = layer.config, layer.config.count("num_hidden_layers")
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(linear.get("kda_layers"), list):
        recurrent = layer.index + 1 in linear["kda_layers"]
    elif config.get("layer_types"):
        recurrent = window_of(config, layer.family, layer.index, layers) is None
    else:
        raise config.error("linear_attn_config", "it must name kda_layers")
    if recurrent:
        kimi_delta_attention(layer)
    else:
        latent(layer, gate=config.flag("mla_use_output_gate"))
    feed_forward_layer(layer, layers)


def deepseek_v4(layer: LayerBuilder) -> None:
    """Add a DeepSeek-V4 layer: a window, and entries compressed 4 or 128 to one."""
    config, hidden, names = layer.config, layer.hidden, layer.family.attention
    heads, dim = config.count("num_attention_heads"), config.count("head_dim")
    rank, groups = config.count("q_lora_rank"), config.count("o_groups")
    low = groups * config.count("o_lora_rank")
    config.get("num_key_value_heads", "qk_rope_head_dim")
    layer.add("attention", hidden, rank, names, ("wq_a", "q_a_proj"), shards=1)
    layer.add("attention", hidden, dim, names, ("wkv", "kv_proj"), shards=1, fused=True)
    layer.add("attention", rank, heads * dim, names, ("wq_b", "q_b_proj"))
    layer.add("attention", heads * dim // groups, low, names, ("wo_a", "o_a_proj"))
    layer.add("attention", low, hidden, names, ("wo_b", "o_b_proj"), rows=True)
    layer.vectors += heads + rank + dim
    layer.qkv_width = heads * dim + dim
    pair = 4.0 * heads * dim
    window = config.count("sliding_window")
    layer.caches.append(Cache(1, dim, pair, pair, window, latent=True))
    ratios, types = config.get("compress_ratios"), config.get("layer_types")
    if ratios is None and types:
        rates = config.get("compress_rates") or {}
        ratios = [rates.get(kind, 0) for kind in types]
    if not isinstance(ratios, list) or len(ratios) < config.count("num_hidden_layers"):
        raise config.error("compress_ratios", "it must have a ratio for each layer")
    ratio = int(ratios[min(layer.index, len(ratios) - 1)])
    if ratio:
        _compressor(layer, ratio, heads, dim, rank)
    streams = config.count("hc_mult", default=1)
    mixes = (2 + streams) * streams
    config.get("mlp_layer_types")  # all have experts, by hash or router
    layer.vectors += 2 * (mixes * (streams * hidden + 1) + 3)
    experts(layer)


def _compressor(layer: LayerBuilder, ratio: int, heads: int, dim: int, rank: int) -> None:
    """Add a compressor of `ratio` tokens per entry; at ratio 4, an indexer selects entries."""
    config, hidden = layer.config, layer.hidden
    indexed = ratio < 16
    width = dim * (2 if indexed else 1)
    names = tuple(f"{name}.compressor" for name in layer.family.attention)
    layer.add("attention", hidden, width, names, ("wkv", "kv_proj"), shards=1)
    layer.add("attention", hidden, width, names, ("wgate", "gate_proj"), shards=1, fused=True)
    layer.vectors += ratio * width + dim
    pair, selected = 4.0 * heads * dim / ratio, 0
    index_heads, index_dim = config.count("index_n_heads"), config.count("index_head_dim")
    top = config.count("index_topk")
    if indexed:
        names = tuple(f"{name}.indexer" for name in layer.family.attention)
        layer.add("attention", hidden, 4 * index_dim, names, ("compressor.wkv",), shards=1)
        layer.add("attention", rank, index_heads * index_dim, names, ("wq_b",), shards=1)
        layer.add("attention", hidden, index_heads, names, ("weights_proj",), shards=1)
        layer.vectors += ratio * 2 * index_dim + index_dim
        layer.caches.append(index_cache(index_heads, index_dim, ratio))
        selected = top * ratio
    layer.caches.append(Cache(1, dim, pair, pair, selected=selected, stride=ratio, latent=True))


# --- families -------------------------------------------------------------------------------------

_DEEPSEEK_V4 = Family(
    mlp=("ffn", "mlp"), attention=("attn", "self_attn"), qkv_bias=False, layer=deepseek_v4
)

FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias", defaults=_LLAMA_SIZES, served=True),
    "mistral": Family(qkv_bias=False, output_bias=False, window="all", defaults=_MISTRAL_SIZES,
                      served=True),
    "ministral": Family(qkv_bias=False, output_bias=False, window="all"),
    "ministral3": Family(qkv_bias=False, output_bias=False, window="all"),
    "mixtral": _MIXTRAL,
    "qwen2": replace(_QWEN2, served=True),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3": replace(_QWEN3, served=True),
    "qwen3_vl": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe": replace(_QWEN3, defaults={"head_dim": 128}),
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5": _QWEN_NEXT,
    "qwen3_5_moe": _QWEN_NEXT,
    "mimo": Family(qkv_bias="attention_bias", output_bias=False, window="switch"),
    "mimo_v2_flash": Family(layer=mimo_v2),
    "olmo": Family(norms=0),
    "olmo2": Family(qk_norm="all"),
    "olmo3": Family(qk_norm="all", defaults={"sliding_window": 4096}, pattern=4),
    "olmoe": Family(qk_norm="all"),
    "granite": Family(mlp_bias="mlp_bias"),
    "granitemoe": Family(mlp=("block_sparse_moe",)),
    "granitemoeshared": Family(mlp=("block_sparse_moe",)),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4, pattern=2),
    "gemma3": replace(_GEMMA, norms=4, qk_norm="head", pattern=6, defaults=_GEMMA3_SIZES,
                      scaled=True),
    "gemma4": replace(_GEMMA, norms=4, qk_norm="head", pattern=6, layer=gemma4),
    "phi3": Family(qkv_bias=False, output_bias=False, window="all"),
    "phi": replace(_LAYER_NORM, norms=1, qkv_bias=True, output_bias=True, mlp_bias=True),
    "phimoe": Family(norm_bias=True, mlp=("block_sparse_moe",), window="all"),
    "stablelm": Family(norm_bias=True, qkv_bias="use_qkv_bias", output_bias=False),
    "internlm2": Family(qkv_bias=False, output_bias=False),
    "internlm3": Family(qkv_bias="qkv_bias", output_bias="bias", mlp_bias="bias"),
    "smollm3": Family(defaults={"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "glm": Family(output_bias=False, defaults={"attention_bias": True, "head_dim": 128}),
    "glm4": Family(norms=4, output_bias=False, defaults={"attention_bias": True, "head_dim": 128}),
    "glm4_moe": Family(output_bias=False),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "seed_oss": Family(output_bias="attention_out_bias", defaults={"attention_bias": True,
                       "head_dim": 128}),
    "cohere": Family(norms=1, defaults=_TIED),
    "cohere2": Family(norms=1, pattern=4, defaults=_TIED),
    "exaone4": Family(qk_norm="head", pattern=4),
    "nemotron": replace(_LAYER_NORM, mlp_bias="mlp_bias"),
    "nemotron_h": Family(gated=False, norms=1, attention=("mixer",), mlp=("mixer",),
                         layer=nemotron_h, blocks=nemotron_blocks, defaults={"head_dim": 128}),
    "nemotron_nas": Family(layer=nemotron_nas, architecture="DeciLM"),
    "starcoder2": replace(_LAYER_NORM, qkv_bias="use_bias", output_bias="use_bias",
                          mlp_bias="use_bias", defaults={"use_bias": True, **_TIED}),
    "arcee": Family(gated=False, mlp_bias="mlp_bias"),
    "gpt_neox": replace(_LAYER_NORM, qkv_bias=True, output_bias=True, mlp_bias=True,
                        attention=("attention",)),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_ref": _DEEPSEEK_V4,
    "llama4": Family(mlp=("feed_forward",), layer=llama4),
    "gpt_oss": Family(qkv_bias=True, output_bias=True, mlp_bias=True, pattern=2, layer=gpt_oss,
                      defaults={"head_dim": 64}),
    "minimax_m2": Family(qk_norm="all", mlp=("block_sparse_moe", "mlp")),
    "minimax_m3": Family(qk_norm="head", mlp=("block_sparse_moe", "mlp"), layer=minimax_m3),
    "step3p5": Family(qk_norm="head", mlp=("mlp", "moe"), layer=step3),
    "step3p7": Family(qk_norm="head", mlp=("mlp", "moe"), layer=step3),
    "kimi_linear": Family(mlp=("mlp", "block_sparse_moe"), layer=kimi_linear),
    "ernie4_5": Family(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias",
                       defaults={**_TIED, "head_dim": 128}),
    "ernie4_5_moe": Family(qkv_bias="use_bias", output_bias="use_bias", defaults=_TIED),
    "hunyuan_v1_dense": Family(qk_norm="head"),
    "dots1": Family(qk_norm="head"),
}  # fmt: skip
