"""ModelConfig: sizes and switches of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pigou.config import ConfigError
from pigou.models import ModelError
from pigou.models.hf_config import HfConfig
from pigou.models.hf_config import read_config as read_source
from pigou.models.layers import EXPERTS, TOP, Family, has_experts, head_dim_of, window_of
from pigou.models.read import served_family
from pigou.models.rope_parameters import scaled_context
from pigou.runtime.models.experts import ExpertsConfig, Routing
from pigou.runtime.models.rotary_embedding import Rope, read_rope
from pigou.text.model_files import read_end_tokens


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Shapes of one layer's attention, and what changes its scores."""

    heads: int
    kv_heads: int  # divides `heads`
    head_dim: int  # width of cached heads; narrower queries, keys and values are padded
    scale: float  # on the product of query and key
    window: int = 0  # entries that a token attends to, its own included; 0 for all
    softcap: float = 0.0  # c in c * tanh(score / c); 0 for none
    sinks: bool = False  # a learned score per query head takes part in the softmax
    latent: int = 0  # first numbers of a key that are its value (MLA); 0 for values of their own

    @property
    def standard(self) -> bool:
        """True without window, soft cap, sinks and latents."""
        return not (self.window or self.softcap or self.sinks or self.latent)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder-only transformer, and switches of the own implementation."""

    family: str  # model_type
    layers: int
    hidden: int  # width of the residual stream
    heads: int
    kv_heads: int  # divides `heads`
    head_dim: int
    ffn: int  # feed-forward width of dense layers
    vocab: int  # rows of the embedding
    context: int  # max sequence length
    norm_eps: float
    rope: Rope | None  # None where the model rotates queries and keys itself
    tied: bool = False  # output layer shares the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention output
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head, before RoPE
    experts: ExpertsConfig | None = None
    dtype: str = "bfloat16"  # dtype of the published weights ("float32", "bfloat16", ...)
    eos: frozenset[int] = frozenset()  # end token ids, from generation_config.json if present
    # by layer, where layers differ or scores are changed; empty for plain attention.
    attention: tuple[LayerAttention, ...] = ()

    def layer_attention(self, layer: int) -> LayerAttention:
        """Return a layer's attention."""
        if self.attention:
            return self.attention[layer]
        return LayerAttention(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def within(self, context: int) -> ModelConfig:
        """Return the model without windows that sequences of `context` tokens never leave."""
        forms = (replace(f, window=f.window * (f.window < context)) for f in self.attention)
        return replace(self, attention=tuple(forms))


def read_config(folder: Path) -> ModelConfig:
    """Read a model folder's config.json and end tokens; raises ModelError if unsupported."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder / 'config.json'} is missing; a model is a Hugging Face folder")
    try:
        config = parse_config(read_source(folder))
        return replace(config, eos=read_end_tokens(folder, config.vocab))
    except ValueError as error:
        raise ModelError(str(error)) from None


def parse_config(source: Mapping[str, Any]) -> ModelConfig:
    """Parse a config.json's contents; raises ModelError if invalid or unsupported."""
    try:
        return _parse(HfConfig(Path("config.json"), source))
    except ConfigError as error:
        raise ModelError(str(error)) from None


def _parse(config: HfConfig) -> ModelConfig:
    described = served_family(config)
    family = str(config.values["model_type"])
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is no multiple of kv heads {kv_heads}")
    head_dim = head_dim_of(config, heads)
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; rotary embedding needs an even number")
    biases = (described.qkv_bias, described.output_bias, described.mlp_bias)
    qkv_bias, output_bias, mlp_bias = (
        config.flag(bias) if isinstance(bias, str) else bias for bias in biases
    )
    layers = config.size("num_hidden_layers")
    windows = [window_of(config, described, index, layers) or 0 for index in range(layers)]
    config.size("max_position_embeddings")
    return ModelConfig(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        context=scaled_context(config.values),
        norm_eps=_epsilon(config.values),
        rope=read_rope(config.values, head_dim),
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=bool(described.qk_norm),
        experts=_experts(config, described),
        dtype=str(config.get("dtype", "torch_dtype") or "float32"),
        attention=tuple(
            LayerAttention(heads, kv_heads, head_dim, head_dim**-0.5, window)
            for window in windows * any(windows)
        ),
    )


def _experts(config: HfConfig, family: Family) -> ExpertsConfig | None:
    layers, count = config.size("num_hidden_layers"), config.count(*EXPERTS, default=0)
    sparse = frozenset(index for index in range(layers) if has_experts(config, index, layers))
    if not sparse:
        return None
    top = config.size(*TOP)
    if top > count:
        raise config.error(TOP[0], f"it must be 1 to the {count} experts")
    mixtral = family.mlp[0] == "block_sparse_moe"
    return ExpertsConfig(
        count=count,
        width=config.size("moe_intermediate_size", "intermediate_size"),
        routing=Routing(top, normalise=config.flag("norm_topk_prob")),
        layers=sparse,
        shared_width=config.count("shared_expert_intermediate_size", default=0),
        block=family.mlp[0],
        leaves=("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj"),
    )


def _epsilon(source: Mapping[str, Any]) -> float:
    value = source.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ModelError(f"config.json: rms_norm_eps is {value!r}; it must be a number in [0, 1)")
    return float(value)
