"""The decoder-only transformer that all families are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.models import ModelError
from pigou.runtime.attention.paged_attention import HeadNorm, PagedAttention
from pigou.runtime.models.model_config import ModelConfig
from pigou.runtime.models.weights import Weights
from pigou.runtime.ops import Ops

log = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(slots=True)
class Decoder:
    """A model's weights, and how tokens pass through them."""

    config: ModelConfig  # sizes and switches
    embedding: Tensor  # shape (vocab, hidden)
    layers: list[Layer]  # in order
    norm: Tensor  # weight of the last norm, shape (hidden,)
    head: Linear
    ops: Ops  # element-wise operations

    def hidden(self, tokens: Tensor, attention: PagedAttention, wanted: Tensor | None) -> Tensor:
        """Compute hidden states.

        Args:
            tokens: ids, shape (tokens,).
            wanted: which tokens' states are asked for, shape (n,), int64; None for all. Of the
                others, the last layer computes nothing but keys and values.

        Returns:
            Normed hidden states, shape (n, hidden).
        """
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
        """Return logits, shape (n, vocab), for hidden states of shape (n, hidden)."""
        return self.head(hidden)


def load_decoder(config: ModelConfig, weights: Weights, ops: Ops) -> Decoder:
    """Take all of a model's tensors. Raises ModelError: one is missing or has another shape."""
    embedding, head = _embedding_and_head(config, weights)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=[load_layer(index, config, weights) for index in range(config.layers)],
        norm=weights.take("model.norm.weight", config.hidden),
        head=Linear(head),
        ops=ops,
    )


def _embedding_and_head(config: ModelConfig, weights: Weights) -> tuple[Tensor, Tensor]:
    """Take the embedding and the output layer; where both are there, both count."""
    shape = config.vocab, config.hidden
    if config.tied and _EMBEDDING not in weights and _HEAD in weights:
        head = weights.take(_HEAD, *shape)
        return head, head
    embedding = weights.take(_EMBEDDING, *shape)
    if _HEAD not in weights and config.tied:
        return embedding, embedding
    if _HEAD not in weights:
        raise ModelError(
            f"tensor {_HEAD!r} is missing; where the output layer is the embedding, config.json "
            "must have tie_word_embeddings: true"
        )
    head = weights.take(_HEAD, *shape)
    if not config.tied:
        return embedding, head
    if torch.equal(embedding, head):
        return embedding, embedding
    log.warning(
        "%s differs from %s, so it is used, though config.json has tie_word_embeddings: true; "
        "set that to false",
        _HEAD,
        _EMBEDDING,
    )
    return embedding, head


@dataclass(slots=True)
class Layer:
    """One layer's weights."""

    index: int
    eps: float
    before_attention: Tensor  # weight of the first norm, shape (hidden,)
    before_mlp: Tensor  # weight of the second
    qkv: Linear  # queries, keys and values in one product
    head_norm: HeadNorm | None  # norm of query and key heads, or None
    output: Linear  # back to the residual stream
    gate_up: Linear  # both inputs of the gated layer in one product
    down: Linear  # back to the residual stream

    def __call__(self, x: Tensor, residual: Tensor, attention: PagedAttention, ops: Ops) -> Tensor:
        """Apply the layer.

        Args:
            x: what the layer before yields, not yet added, shape (tokens, hidden).
            residual: the residual stream, shape (tokens, hidden); added to in place.

        Returns:
            What is to be added to the residual stream, shape (tokens, hidden).
        """
        return self.feed(self.attention_output(x, residual, attention, ops), residual, ops)

    def attention_output(
        self, x: Tensor, residual: Tensor, attention: PagedAttention, ops: Ops
    ) -> Tensor:
        """Apply the layer up to its attention; the arguments are those of the whole layer.

        Returns shape (tokens, heads * head_dim).
        """
        normed = ops.add_norm(x, residual, self.before_attention, self.eps)
        return attention(self.index, self.qkv(normed), self.head_norm)

    def feed(self, attended: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        """Apply the rest of the layer to some of the tokens, whose residual stream is given."""
        normed = ops.add_norm(self.output(attended), residual, self.before_mlp, self.eps)
        return self.down(ops.gate(self.gate_up(normed)))


def load_layer(index: int, config: ModelConfig, weights: Weights) -> Layer:
    """Take a layer's tensors, under the names of Hugging Face.

    Raises ModelError: one is missing or has another shape.
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


#: Rows are padded to a multiple of so many, where they are more than a few.
_ROWS, _FEW = 8, 32


class Linear:
    """x W^T + b, for inputs of shape (rows, inputs).

    On a CPU in bfloat16 the weight is reordered once for oneDNN, and is 1.3 to 1.7 times faster
    so, with the same bits. Those operations are private to torch, hence the check. For each new
    number of rows oneDNN makes a kernel (0.2 ms, as long as hundreds of rows of a small layer
    take), and keeps 1,024 of them: so rows of prompts are padded to few numbers.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Wrap a weight of shape (outputs, inputs) and a bias of shape (outputs,)."""
        self.bias = bias
        self.weight = weight
        self._product: Callable[..., Tensor] | None = None
        if weight.device.type == "cpu" and _can_pack(weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
            self._product = _packed_product()

    def __call__(self, x: Tensor) -> Tensor:
        """Return shape (rows, outputs)."""
        if self._product is None:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        more = -rows % _ROWS if rows > _FEW else 0
        if more:
            x = F.pad(x, (0, 0, 0, more))
        out = self._product(x, self.weight, self.bias, "none", [], "")
        return out[:rows] if more else out


@cache
def _packed_product() -> Callable[..., Tensor]:
    product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return product


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether a packed product works here, and equals the plain one."""
    if dtype is not torch.bfloat16:
        return False
    weight = torch.arange(64 * 32, dtype=torch.float32).remainder(7).sub(3).view(64, 32).to(dtype)
    x = torch.arange(3 * 32, dtype=torch.float32).remainder(5).sub(2).view(3, 32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        result = _packed_product()(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, TypeError):
        return False
    return torch.equal(result, F.linear(x, weight))
