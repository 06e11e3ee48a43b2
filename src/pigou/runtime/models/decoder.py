"""The decoder-only transformer shared by all families."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.models import ModelError
from pigou.runtime.attention.paged_attention import HeadNorm, PagedAttention
from pigou.runtime.models.experts import ExpertLoads, Experts, ExpertsConfig, MoE, load_products
from pigou.runtime.models.linear import Linear, Product, WeightMatrix, concatenate
from pigou.runtime.models.model_config import ModelConfig
from pigou.runtime.models.weights import WeightSource
from pigou.runtime.ops import Ops

log = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class DecoderModel(Protocol):
    """A decoder that computes a step's row of ragged tokens over `PagedAttention`."""

    config: ModelConfig
    ops: Ops
    loads: ExpertLoads | None  # None without experts of ours

    def hidden(self, tokens: Tensor, attention: PagedAttention, wanted: Tensor | None) -> Tensor:
        """Return normalized hidden states of tokens (tokens,), only the `wanted` (n,) or all.

        `attention` has begun the step: it holds its positions, and each layer calls it once.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (n, vocab) of hidden states (n, hidden)."""

    def rotary_table(self, attention: PagedAttention) -> Tensor:
        """Return cosines, then sines, of keys by position; raises ModelError if they differ."""


@dataclass(slots=True)
class Decoder:
    """A model's weights and forward pass."""

    config: ModelConfig
    embedding: Tensor  # shape (vocab, hidden)
    layers: list[Layer]
    norm: Tensor  # final norm weight, shape (hidden,)
    head: Linear
    ops: Ops
    loads: ExpertLoads | None = None  # None without experts

    def hidden(self, tokens: Tensor, attention: PagedAttention, wanted: Tensor | None) -> Tensor:
        """Return normalized hidden states of tokens (tokens,), only the `wanted` (n,) or all."""
        if self.loads is not None:
            self.loads.begin_step()
        x = F.embedding(tokens, self.embedding)
        residual = torch.zeros_like(x)
        beat = attention.beat
        for layer in self.layers[:-1]:
            x = layer(x, residual, attention, self.ops)
            if beat is not None:
                beat()
        attended = self.layers[-1].attention_output(x, residual, attention, self.ops)
        if wanted is not None:
            attended, residual = attended[wanted], residual[wanted]
        if not len(attended):
            return residual
        x = self.layers[-1].feed(attended, residual, self.ops)
        return self.ops.add_norm(x, residual, self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (n, vocab) of hidden states (n, hidden)."""
        return self.head(hidden)

    def rotary_table(self, attention: PagedAttention) -> Tensor:
        """Return cosines, then sines, by position, (positions, head_dim); raises ModelError."""
        if any(not form.standard for form in attention.config.attention):
            raise ModelError("eviction: the model has windows; give max_model_len within them")
        return attention.turns


def load_decoder(
    config: ModelConfig,
    weights: WeightSource,
    ops: Ops,
    make_loads: Callable[[list[int], int, torch.device], ExpertLoads] = ExpertLoads,
) -> Decoder:
    """Load a model's tensors; raises ModelError if one is missing or has another shape."""
    embedding, head = _embedding_and_head(config, weights)
    loads = None
    if config.experts is not None:
        layers = sorted(config.experts.layers)
        loads = make_loads(layers, config.experts.count, embedding.device)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=[load_layer(index, config, weights, ops, loads) for index in range(config.layers)],
        norm=weights.take("model.norm.weight", config.hidden),
        head=weights.linear(WeightMatrix(head), head=True),
        ops=ops,
        loads=loads,
    )


def _embedding_and_head(config: ModelConfig, weights: WeightSource) -> tuple[Tensor, Tensor]:
    """Load embedding and output layer; if both exist, both are used."""
    shape = config.vocab, config.hidden
    stored = [name for name in (_EMBEDDING, _HEAD) if name in weights]
    if config.tied and len(stored) == 1:
        embedding = weights.take(stored[0], *shape)
        return embedding, embedding
    embedding = weights.take(_EMBEDDING, *shape)
    if _HEAD not in weights:
        raise ModelError(
            f"tensor {_HEAD!r} is missing; where the output layer is the embedding, config.json "
            "must have tie_word_embeddings: true"
        )
    head = weights.take(_HEAD, *shape)
    if config.tied and torch.equal(embedding, head):
        return embedding, embedding
    if config.tied:
        log.warning("%s differs from %s, so it is used, though config.json has "
                    "tie_word_embeddings: true; set that to false", _HEAD, _EMBEDDING)  # fmt: skip
    return embedding, head


@dataclass(slots=True)
class Layer:
    """Weights of one layer."""

    index: int
    eps: float
    before_attention: Tensor  # norm weight, shape (hidden,)
    before_mlp: Tensor  # norm weight, shape (hidden,)
    qkv: Product
    head_norm: HeadNorm | None
    output: Product
    mlp: Product  # (tokens, hidden) to (tokens, hidden)

    def __call__(self, x: Tensor, residual: Tensor, attention: PagedAttention, ops: Ops) -> Tensor:
        """Add x (tokens, hidden) to `residual` in place; return the layer's own output."""
        return self.feed(self.attention_output(x, residual, attention, ops), residual, ops)

    def attention_output(
        self, x: Tensor, residual: Tensor, attention: PagedAttention, ops: Ops
    ) -> Tensor:
        """Run the layer up to attention; return (tokens, heads * head_dim)."""
        normed = ops.add_norm(x, residual, self.before_attention, self.eps)
        return attention(self.index, self.qkv(normed), self.head_norm)

    def feed(self, attended: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        """Run the rest of the layer on tokens whose residual stream is given."""
        normed = ops.add_norm(self.output(attended), residual, self.before_mlp, self.eps)
        return self.mlp(normed)


@dataclass(slots=True)
class GatedMLP:
    """Down projection of silu(gate) * up."""

    gate_up: Product
    down: Product
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Return shape (rows, hidden) for x (rows, hidden)."""
        return self.down(self.ops.gate(self.gate_up(x)))


def load_layer(
    index: int, config: ModelConfig, weights: WeightSource, ops: Ops, loads: ExpertLoads | None
) -> Layer:
    """Load a layer's tensors, by Hugging Face names; raises ModelError on a mismatch."""
    prefix = f"model.layers.{index}"
    hidden, width = config.hidden, config.head_dim
    queries, others = config.heads * width, config.kv_heads * width
    attention, qkv = f"{prefix}.self_attn", {"q_proj": queries, "k_proj": others, "v_proj": others}
    head_norm = None
    if config.qk_norm:
        q, k = (weights.take(f"{attention}.{name}_norm.weight", width) for name in "qk")
        head_norm = HeadNorm(q, k, config.norm_eps)
    mlp: Product
    if loads is not None and config.experts is not None and index in config.experts.layers:
        mlp = _load_experts(weights, prefix, config.experts, hidden, ops, loads.add(index))
    else:
        mlp = _load_mlp(weights, f"{prefix}.mlp", hidden, config.ffn, ops, biased=config.mlp_bias)
    return Layer(
        index=index,
        eps=config.norm_eps,
        before_attention=weights.take(f"{prefix}.input_layernorm.weight", hidden),
        before_mlp=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        qkv=_fused(weights, attention, qkv, hidden, biased=config.qkv_bias),
        head_norm=head_norm,
        output=_fused(weights, attention, {"o_proj": hidden}, queries, biased=config.output_bias),
        mlp=mlp,
    )


def _load_experts(
    weights: WeightSource, layer: str, config: ExpertsConfig, hidden: int, ops: Ops,
    experts: Experts,
) -> MoE:  # fmt: skip
    """Load this rank's experts into `experts`, one at a time, with router and shared expert."""
    block, width = f"{layer}.{config.block}", config.width
    gate, up, down = config.leaves

    def load(expert: int) -> tuple[Linear, Linear]:
        module = f"{block}.experts.{expert}"
        gate_up = _fused(weights, module, {gate: width, up: width}, hidden, biased=False)
        return gate_up, _fused(weights, module, {down: hidden}, width, biased=False)

    router = weights.take(f"{block}.gate.weight", config.count, hidden)
    experts.products = load_products(experts.held, load, ops.gate)
    for other in set(range(config.count)).difference(experts.held):
        weights.skip(f"{block}.experts.{other}.")
    moe = MoE(Linear(router.float()), config.routing, experts)
    if config.shared_width:
        shared = f"{block}.shared_expert"
        moe.shared = _load_mlp(weights, shared, hidden, config.shared_width, ops, biased=False)
        moe.shared_gate = Linear(weights.take(f"{block}.shared_expert_gate.weight", 1, hidden))
    return moe


def _load_mlp(
    weights: WeightSource, module: str, hidden: int, width: int, ops: Ops, *, biased: bool
) -> GatedMLP:
    gate_up = {"gate_proj": width, "up_proj": width}
    return GatedMLP(
        _fused(weights, module, gate_up, hidden, biased=biased),
        _fused(weights, module, {"down_proj": hidden}, width, biased=biased),
        ops,
    )


def _fused(
    weights: WeightSource, module: str, outputs: dict[str, int], inputs: int, *, biased: bool
) -> Linear:
    """Concatenate projections of the same input into one, in the given order."""
    names = {f"{module}.{name}": size for name, size in outputs.items()}
    matrix = concatenate([weights.matrix(name, size, inputs) for name, size in names.items()])
    if not biased:
        return weights.linear(matrix)
    bias = [weights.take(f"{name}.bias", size) for name, size in names.items()]
    return weights.linear(matrix, torch.cat(bias))
