"""A decoder layer: attention, then the gated layer, each after a norm and around a residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pigou.runtime.attention import HeadNorm, PagedAttention
from pigou.runtime.config import ModelConfig
from pigou.runtime.linear import Linear
from pigou.runtime.ops import Ops
from pigou.runtime.weights import Weights


@dataclass(slots=True)
class Layer:
    """One layer's weights.

    Attributes:
        index: of the layer.
        eps: of its norms.
        before_attention: weight of the first norm, shape (hidden,).
        before_mlp: weight of the second.
        qkv: queries, keys and values in one product.
        head_norm: norm of query and key heads, or None.
        output: back to the residual stream.
        gate_up: both inputs of the gated layer in one product.
        down: back to the residual stream.
    """

    index: int
    eps: float
    before_attention: Tensor
    before_mlp: Tensor
    qkv: Linear
    head_norm: HeadNorm | None
    output: Linear
    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor, residual: Tensor, attention: PagedAttention, ops: Ops) -> Tensor:
        """Apply the layer.

        Args:
            x: what the layer before yields, not yet added, shape (tokens, hidden).
            residual: the residual stream, shape (tokens, hidden); added to in place.
            attention: after `begin` of this step.
            ops: element-wise operations.

        Returns:
            What is to be added to the residual stream, shape (tokens, hidden).
        """
        return self.feed(self.attend(x, residual, attention, ops), residual, ops)

    def attend(self, x: Tensor, residual: Tensor, attention: PagedAttention, ops: Ops) -> Tensor:
        """Apply the layer up to its attention; the arguments are those of the whole layer.

        Returns:
            Shape (tokens, heads * head_dim).
        """
        normed = ops.add_norm(x, residual, self.before_attention, self.eps)
        return attention(self.index, self.qkv(normed), self.head_norm)

    def feed(self, attended: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        """Apply the rest of the layer to some of the tokens, whose residual stream is given."""
        normed = ops.add_norm(self.output(attended), residual, self.before_mlp, self.eps)
        return self.down(ops.gate(self.gate_up(normed)))


def load_layer(index: int, config: ModelConfig, weights: Weights) -> Layer:
    """Take a layer's tensors, under the names of Hugging Face.

    Raises:
        ModelError: one is missing or has another shape.
    """
    prefix = f"model.layers.{index}."
    loader = _Loader(weights, prefix)
    hidden, width = config.hidden, config.head_dim
    queries, others = config.heads * width, config.kv_heads * width
    attention = {"q_proj": queries, "k_proj": others, "v_proj": others}
    head_norm = None
    if config.qk_norm:
        head_norm = HeadNorm(
            weights.take(f"{prefix}self_attn.q_norm.weight", width),
            weights.take(f"{prefix}self_attn.k_norm.weight", width),
            config.norm_eps,
        )
    return Layer(
        index=index,
        eps=config.norm_eps,
        before_attention=weights.take(f"{prefix}input_layernorm.weight", hidden),
        before_mlp=weights.take(f"{prefix}post_attention_layernorm.weight", hidden),
        qkv=loader.fused("self_attn", attention, hidden, config.qkv_bias),
        head_norm=head_norm,
        output=loader.fused("self_attn", {"o_proj": hidden}, queries, config.output_bias),
        gate_up=loader.fused(
            "mlp", {"gate_proj": config.ffn, "up_proj": config.ffn}, hidden, config.mlp_bias
        ),
        down=loader.fused("mlp", {"down_proj": hidden}, config.ffn, config.mlp_bias),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    weights: Weights
    prefix: str

    def fused(self, part: str, outputs: dict[str, int], inputs: int, biased: bool) -> Linear:
        """Put several products of the same input into one, in the order given."""
        names = {f"{self.prefix}{part}.{name}": size for name, size in outputs.items()}
        weight = [self.weights.take(f"{name}.weight", size, inputs) for name, size in names.items()]
        if not biased:
            return Linear(torch.cat(weight))
        bias = [self.weights.take(f"{name}.bias", size) for name, size in names.items()]
        return Linear(torch.cat(weight), torch.cat(bias))
