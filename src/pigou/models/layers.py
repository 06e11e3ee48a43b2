"""Builds decoder layers: attention, linear attention, feed-forward layers, experts.

Shapes follow transformers 5 (`modeling_*.py`). Module names are the checkpoints', since
quantisation excludes modules by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pigou.config import ConfigError
from pigou.models.architecture import Cache, LayerKind, Matrix
from pigou.models.hf_config import HfConfig
from pigou.models.quantisation import Quantisation

#: Leaf names of a gated feed-forward layer, and Mixtral's.
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
#: Config keys of mixture-of-experts sizes.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts",
        "moe_topk", "moe_top_k", "moe_k")  # fmt: skip
_SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                 "share_expert_dim", "shared_intermediate_size")  # fmt: skip
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
                 "num_shared_expert")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults that a family's `config.json` leaves implicit."""

    gated: bool = True  # gated feed-forward (three matrices, not two)
    qk_norm: str = ""  # norm of queries and keys per "head", or over "all" heads
    norms: int = 2  # per layer, of residual stream width
    norm_bias: bool = False
    qkv_bias: bool | str = "attention_bias"  # always, never, or the config key
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    window: str = ""  # "all" layers slide if `sliding_window` is set; "switch": if enabled
    pattern: int = 0  # one layer in each group of this size has full attention
    mlp: tuple[str, ...] = ("mlp",)
    attention: tuple[str, ...] = ("self_attn",)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # in transformers' config class
    layer: Callable[[LayerBuilder], None] | None = None  # unless a standard decoder layer
    # block kinds of hybrid models; with a prefix, of the prediction layers.
    blocks: Callable[[HfConfig, str], list[str]] | None = None
    served: bool = False  # supported by Pigou's workers
    architecture: str = ""  # name in `architectures` without its suffix, if different
    scaled: bool = False  # `max_position_embeddings` is already scaled


class LayerBuilder:
    """Collects the parts of one layer."""

    def __init__(self, config: HfConfig, family: Family, quant: Quantisation, index: int) -> None:
        self.config, self.family, self.quant, self.index = config, family, quant, index
        self.hidden = config.count("hidden_size")
        self.matrices: list[Matrix] = []
        self.caches: list[Cache] = []
        self.vectors = family.norms * self.hidden * (2 if family.norm_bias else 1)
        self.state, self.token_flops, self.sums, self.wide, self.qkv_width = 0, 0.0, 2, 0, 0

    def add(
        self, part: str, inner: int, outer: int, holders: tuple[str, ...], leaves: tuple[str, ...],
        **options: Any,
    ) -> None:  # fmt: skip
        """Add a matrix, in the quantised format of its module."""
        expert = options.get("copies", 1) > 1
        holders = tuple(f"{h}.experts.0".lstrip(".") for h in holders) if expert else holders
        names = [f"layers.{self.index}.{holder}.{leaf}" for holder in holders for leaf in leaves]
        format_ = self.quant.format_of(names, linear=part != "router", expert=expert)
        self.matrices.append(Matrix(part, inner, outer, format_, **options))

    def kind(self) -> LayerKind:
        """Return the finished layer."""
        return LayerKind(
            1, tuple(self.matrices), self.vectors, tuple(self.caches), self.state,
            self.token_flops, self.sums, self.wide, self.qkv_width,
        )  # fmt: skip

    def has(self, option: bool | str) -> bool:
        """True if a family option is set, always or by its config key."""
        return self.config.flag(option) if isinstance(option, str) else option


# --- attention ------------------------------------------------------------------------------------


def grouped(
    layer: LayerBuilder, heads: int, kv_heads: int, head_dim: int, window: int = 0,
    value_dim: int = 0, gate: int = 0, *, shared_values: bool = False,
) -> None:  # fmt: skip
    """Add grouped-query attention; `window` is the max visible tokens, 0 for all."""
    names, hidden, value_dim = layer.family.attention, layer.hidden, value_dim or head_dim
    queries, keys, values = heads * head_dim, kv_heads * head_dim, kv_heads * value_dim
    layer.add("attention", hidden, queries, names, ("q_proj", "qkv_proj"))
    layer.add("attention", hidden, keys, names, ("k_proj", "qkv_proj"), shards=kv_heads, fused=True)
    if not shared_values:
        layer.add(
            "attention", hidden, values, names, ("v_proj", "qkv_proj"), shards=kv_heads, fused=True
        )
    if gate:
        layer.add("attention", hidden, gate, names, ("g_proj", "q_proj"), fused=True)
    layer.add("attention", heads * value_dim, hidden, names, ("o_proj", "dense"), rows=True)
    if layer.has(layer.family.qkv_bias):
        layer.vectors += queries + keys + values
    if layer.has(layer.family.output_bias):
        layer.vectors += hidden
    norm = layer.family.qk_norm
    layer.vectors += 2 * head_dim if norm == "head" else queries + keys if norm == "all" else 0
    layer.qkv_width = queries + keys + values
    pair = 2.0 * heads * (head_dim + value_dim)
    layer.caches.append(Cache(kv_heads, head_dim + value_dim, pair, pair, window))


def latent(layer: LayerBuilder, *, gate: bool = False) -> None:
    """Add multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); decode reads the latent."""
    config, hidden, names = layer.config, layer.hidden, layer.family.attention
    heads, rank = config.count("num_attention_heads"), config.count("q_lora_rank", default=0)
    latent_width, rotary = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    unrotated, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    queries = heads * (unrotated + rotary)
    config.get("num_key_value_heads", "head_dim", "qk_head_dim")
    if rank:
        layer.add("attention", hidden, rank, names, ("q_a_proj",), shards=1)
    down = ("kv_a_proj_with_mqa",)
    layer.add("attention", hidden, latent_width + rotary, names, down, shards=1, fused=bool(rank))
    layer.add("attention", rank or hidden, queries, names, ("q_b_proj", "q_proj"))
    layer.add("attention", latent_width, heads * (unrotated + value), names, ("kv_b_proj",))
    if gate:
        layer.add("attention", hidden, heads * value, names, ("g_proj",))
    layer.add("attention", heads * value, hidden, names, ("o_proj",), rows=True)
    layer.vectors += latent_width + rank
    layer.qkv_width = queries + latent_width + rotary
    selected = _indexer(layer, rank)
    layer.caches.append(
        Cache(
            1, latent_width + rotary, 2.0 * heads * (unrotated + rotary + value),
            2.0 * heads * (2 * latent_width + rotary), selected=selected, latent=True,
        )
    )  # fmt: skip


def _indexer(layer: LayerBuilder, rank: int) -> int:
    """Add DeepSeek's indexer (V3.2); return the tokens that it selects, 0 for none."""
    config, hidden = layer.config, layer.hidden
    selected = config.count("index_topk", default=0)
    if not selected:
        return 0
    heads, dim = config.count("index_n_heads"), config.count("index_head_dim")
    types = config.get("indexer_types")
    if types and layer.index < len(types) and types[layer.index] == "shared":
        return selected
    names = tuple(f"{name}.indexer" for name in layer.family.attention)
    layer.add("attention", rank or hidden, heads * dim, names, ("wq_b",), shards=1)
    layer.add("attention", hidden, dim, names, ("wk",), shards=1)
    layer.add("attention", hidden, heads, names, ("weights_proj",), shards=1)
    layer.vectors += 2 * dim
    layer.caches.append(index_cache(heads, dim))
    return selected


def index_cache(heads: int, dim: int, stride: int = 1) -> Cache:
    """Return an indexer's FP8 key cache, with a float32 scale per token."""
    pair = 2.0 * heads * dim / stride
    return Cache(1, dim + 4, pair, pair, stride=stride, latent=True, dtype="fp8")


def _recurrent(layer: LayerBuilder, heads: int, key: int, value: int, convolved: int) -> None:
    """Add the float32 state of linear attention, and of its convolution."""
    kernel = layer.config.count(
        "linear_conv_kernel_dim", "conv_kernel", "short_conv_kernel_size", default=4
    )
    layer.vectors += convolved * kernel
    layer.state = heads * key * value * 4 + convolved * (kernel - 1) * 2
    layer.token_flops = 6.0 * heads * key * value


def gated_delta_net(layer: LayerBuilder) -> None:
    """Add Qwen3-Next's and Qwen3.5's linear attention."""
    config, hidden, names = layer.config, layer.hidden, ("linear_attn",)
    heads, value = (config.count(f"linear_{key}") for key in ("num_value_heads", "value_head_dim"))
    key_heads, key = (config.count(f"linear_{key}") for key in ("num_key_heads", "key_head_dim"))
    keys, values = key_heads * key, heads * value
    layer.add("attention", hidden, 2 * keys + values, names, ("in_proj_qkv", "in_proj_qkvz"))
    layer.add("attention", hidden, values, names, ("in_proj_z", "in_proj_qkvz"), fused=True)
    layer.add("attention", hidden, 2 * heads, names, ("in_proj_b", "in_proj_ba"))
    layer.add("attention", values, hidden, names, ("out_proj",), rows=True)
    layer.vectors += 2 * heads + value
    _recurrent(layer, heads, key, value, 2 * keys + values)
    layer.qkv_width = 2 * keys + values


def kimi_delta_attention(layer: LayerBuilder) -> None:
    """Add Kimi Linear's (arXiv 2510.26692) and Kimi K3's linear attention."""
    linear, hidden, names = layer.config.get("linear_attn_config"), layer.hidden, ("self_attn",)
    linear = linear or {}
    heads = int(linear.get("num_heads") or layer.config.count("linear_num_heads"))
    dim = int(linear.get("head_dim") or layer.config.count("linear_head_dim"))
    width = heads * dim
    layer.add("attention", hidden, width, names, ("q_proj",))
    layer.add("attention", hidden, width, names, ("k_proj",), fused=True)
    layer.add("attention", hidden, width, names, ("v_proj",), fused=True)
    layer.add("attention", hidden, heads, names, ("b_proj",))
    full = bool(linear.get("use_full_rank_gate"))
    for gate in ("f",) if full else ("f", "g"):
        layer.add("attention", hidden, dim, names, (f"{gate}_a_proj",), shards=1)
        layer.add("attention", dim, width, names, (f"{gate}_b_proj",))
    if full:
        layer.add("attention", hidden, width, names, ("g_proj",))
    layer.add("attention", width, hidden, names, ("o_proj",), rows=True)
    layer.vectors += heads + width + dim
    _recurrent(layer, heads, dim, dim, 3 * width)
    layer.qkv_width = 3 * width


def state_space(layer: LayerBuilder) -> None:
    """Add a Mamba-2 layer (arXiv 2405.21060) as in Nemotron-H."""
    config, hidden, names = layer.config, layer.hidden, layer.family.attention
    heads, dim = config.count("mamba_num_heads"), config.count("mamba_head_dim")
    width, states = heads * dim, config.count("ssm_state_size")
    convolved = width + 2 * config.count("n_groups") * states
    layer.add("attention", hidden, width + convolved + heads, names, ("in_proj",))
    layer.add("attention", width, hidden, names, ("out_proj",), rows=True)
    layer.vectors += 3 * heads + width
    layer.vectors += convolved if config.flag("use_conv_bias", default=True) else 0
    _recurrent(layer, heads, dim, states, convolved)
    layer.qkv_width = convolved


# --- feed-forward ---------------------------------------------------------------------------------


def feed_forward(
    layer: LayerBuilder, part: str, width: int, holders: tuple[str, ...], inner: int = 0,
    **options: Any,
) -> None:  # fmt: skip
    """Add a feed-forward layer, or experts."""
    inner, options = inner or layer.hidden, {"active": 1, **options}
    gated = layer.family.gated
    if gated:
        layer.add(part, inner, width, holders, _GATE, **options)
    layer.add(part, inner, width, holders, _UP, fused=gated, **options)
    layer.add(part, width, inner, holders, _DOWN, rows=True, **options)
    layer.wide += (3 if gated else 2) * width * options["active"]
    if layer.has(layer.family.mlp_bias):
        layer.vectors += ((2 if gated else 1) * width + inner) * options.get("copies", 1)


def experts(layer: LayerBuilder) -> None:
    """Add routed experts, their router, and shared experts."""
    config, names, hidden = layer.config, layer.family.mlp, layer.hidden
    count, top = config.count(*EXPERTS), config.count(*TOP)
    if not 0 < top <= count:
        raise config.error(TOP[0], f"it must be 1 to the {count} experts")
    width = config.count("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    inner = config.count("moe_latent_size", "routed_expert_hidden_size", default=0)
    if inner:
        layer.add("experts", hidden, inner, names, ("fc1_latent_proj",), shards=1)
        layer.add("experts", inner, hidden, names, ("fc2_latent_proj",), shards=1)
    feed_forward(layer, "experts", width, names, inner, copies=count, active=top)
    layer.add("router", hidden, count, names, ("gate", "router"), shards=1)
    shared, shares = (config.count(*keys, default=0) for keys in (_SHARED_WIDTH, _SHARED_COUNT))
    shared = shared or shares * width
    if shared:
        holders = tuple(
            f"{name}.{leaf}" for name in names for leaf in ("shared_experts", "shared_expert")
        )
        feed_forward(layer, "shared experts", shared, holders)


def has_experts(config: HfConfig, index: int, layers: int) -> bool:
    """True if a layer has experts, by any family's keys."""
    step = config.count(
        "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1
    )
    if not step:
        raise config.error("decoder_sparse_step", "the step between layers with experts is above 0")
    types, listed = config.items("mlp_layer_types", layers), config.get("moe_layers_enum")
    listed = config.get("moe_layers") or [int(i) for i in (listed or "").split(",") if i]
    frequency = config.get("moe_layer_freq")
    first = config.count("first_k_dense_replace", "moe_layer_start_index", default=0)
    if not config.count(*EXPERTS, default=0):
        return False
    if types is not None:
        return bool(types[index] != "dense")
    if listed:
        return index in listed
    if isinstance(frequency, list):
        return bool((config.items("moe_layer_freq", layers) or [])[index])
    dense = index < first or index in (config.get("mlp_only_layers") or ())
    return not dense and (index + 1) % max(step, frequency or 1) == 0


def window_of(config: HfConfig, family: Family, index: int, layers: int) -> int | None:
    """Return a layer's max visible tokens, 0 for all, None for linear attention."""
    window = config.count("sliding_window", "sliding_window_size", default=0)
    pattern = config.count("sliding_window_pattern", "_sliding_window_pattern", default=0)
    types = config.items("layer_types", layers)
    if types is None and config.get("full_attention_interval"):
        interval = config.count("full_attention_interval")
        return 0 if (index + 1) % interval == 0 else None
    if types is not None:
        known = {
            "full_attention": 0, "sliding_attention": window, "chunked_attention": 0,
            "linear_attention": None, "deepseek_sparse_attention": 0, "indexed_attention": 0,
        }  # fmt: skip
        if types[index] not in known:
            raise ConfigError(f"{config.path}: layer_types has {types[index]!r}, not described")
        if types[index] == "chunked_attention":
            return config.size("attention_chunk_size")
        if types[index] == "sliding_attention" and not window:
            raise config.error("sliding_window", "layer_types has layers that need it")
        return known[types[index]]
    pattern = pattern or family.pattern
    if window and pattern:
        return 0 if (index + 1) % pattern == 0 else window
    used = config.flag("use_sliding_window", default=family.window == "all")
    if not used or not family.window:
        return 0
    first = config.count("max_window_layers", default=0) if family.window == "switch" else 0
    return window if index >= first else 0


# --- layers ---------------------------------------------------------------------------------------


def decoder_layer(layer: LayerBuilder) -> None:
    """Add a standard decoder layer: attention, and feed-forward or experts."""
    config, family = layer.config, layer.family
    layers = config.count("num_hidden_layers")
    window = window_of(config, family, min(layer.index, layers - 1), layers)
    if config.get("kv_lora_rank"):
        if window is None or window:
            raise config.error("layer_types", "latent attention is described over all tokens")
        latent(layer)
    elif window is None:
        gated_delta_net(layer)
    else:
        grouped_layer(layer, window)
    feed_forward_layer(layer, layers)


def grouped_layer(layer: LayerBuilder, window: int) -> None:
    """Add grouped-query attention from the usual keys."""
    config = layer.config
    heads = config.count("num_attention_heads")
    gate = heads * head_dim_of(config, heads) if config.flag("attn_output_gate") else 0
    grouped(
        layer, heads, config.count("num_key_value_heads", default=heads),
        head_dim_of(config, heads), window, gate=gate,
    )  # fmt: skip


def head_dim_of(config: HfConfig, heads: int) -> int:
    """Return the head width, by default hidden size / heads."""
    equal = config.count("hidden_size") // heads if heads else None
    return config.count("head_dim", "attention_head_dim", default=equal)


def feed_forward_layer(layer: LayerBuilder, layers: int) -> None:
    """Add a feed-forward layer or experts; `layers` counts the decoder's."""
    config = layer.config
    width = config.count(
        "dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", default=0
    )
    if has_experts(config, min(layer.index, layers - 1), layers):
        experts(layer)
        if layer.config.values.get("shared_expert_intermediate_size"):
            layer.vectors += layer.hidden  # Qwen's gate of the shared expert
    else:
        if not width:
            raise config.error("intermediate_size", "it must be a whole number above 0")
        feed_forward(layer, "feed-forward", width, layer.family.mlp)
