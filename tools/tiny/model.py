"""The Llama architecture, small and only for training: names and maths are those of Hugging
Face's LlamaForCausalLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHORT = 512  # tokens: up to here a CPU computes attention by plain products
COPY = 0.04  # how strongly a fresh induction head writes what it reads
MATCH = 1.5  # and how sharply it matches


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model, under the field names of a Hugging Face `config.json`."""

    vocab_size: int = 2560
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0

    def config(self, bos: int, eos: int) -> dict[str, Any]:
        """The whole `config.json` for these sizes; `bos` and `eos` are token ids."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def rotary(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embedding, each of shape (length, head_dim), float32; halves
    repeated as Llama does.
    """
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (batch, heads, length, head_dim) by its positions; `cos` and `sin` are (length,
    head_dim).
    """
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in products only: the backward of `F.rms_norm` spends its
    time in `pow` on a CPU.
    """
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def attention(q: Tensor, k: Tensor, v: Tensor, above: Tensor) -> Tensor:
    """Causal attention; all of shape (batch, heads, length, head_dim), `above` the additive
    causal mask (length, length).

    Short sequences on a CPU skip the fused kernel, whose backward is slower there than plain
    products.
    """
    if q.device.type == "cpu" and q.shape[2] <= SHORT:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + above
        return torch.softmax(scores, dim=-1, dtype=q.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    """One decoder layer; query/key/value and gate/up are fused, and split again when saved."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, width = shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.qkv = nn.Linear(d, (self.heads + 2 * self.kv_heads) * width, bias=False)
        self.o = nn.Linear(self.heads * width, d, bias=False)
        self.gate_up = nn.Linear(d, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, d, bias=False)
        self.dropout = 0.0
        self.norm1 = nn.Parameter(torch.ones(d))
        self.norm2 = nn.Parameter(torch.ones(d))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, above: Tensor) -> Tensor:
        """Causal attention over (batch, length, hidden)."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
        turned = rotate(qkv[:, : self.heads + self.kv_heads], cos, sin)
        q, k = turned.split((self.heads, self.kv_heads), dim=1)
        v = qkv[:, self.heads + self.kv_heads :]
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = attention(q, k, v, above)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, above: Tensor) -> Tensor:
        """Residual stream (batch, length, hidden) in, the same shape out."""
        eps = self.shape.rms_norm_eps
        x = x + F.dropout(
            self.attend(norm(x, self.norm1, eps), cos, sin, above), self.dropout, self.training
        )
        gate, up = self.gate_up(norm(x, self.norm2, eps)).chunk(2, dim=-1)
        return x + F.dropout(self.down(F.silu(gate) * up), self.dropout, self.training)


class Tiny(nn.Module):
    """A Llama decoder with tied embeddings."""

    layers: Sequence[Layer]
    cos: Tensor
    sin: Tensor
    above: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.layers = cast("Sequence[Layer]", layers)
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        cos, sin = rotary(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer(
            "above", torch.full((SHORT, SHORT), float("-inf")).triu(1), persistent=False
        )
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Draws the weights: normal, std 1/sqrt(hidden), zero where a layer writes; then draws in
        induction heads.

        Recall composes a head that looks back with one that matches what that head wrote and
        copies what follows. From independent draws neither has a use before the other is there,
        and training stays on that plateau for a million tokens and more; so the first two layers
        begin with such heads, for one and for two tokens back.
        """
        shape = self.shape
        plain = shape.hidden_size**-0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                writes = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(
                    weight, std=0.02 if name.startswith("embed") else 0.0 if writes else plain
                )
        shared = torch.randn(shape.hidden_size)
        shared /= shared.norm()
        self.embed.weight += 0.2 * shared
        for back in range(1, shape.num_key_value_heads + 1):
            self._draw_induction(shared, back)

    def _draw_induction(self, shared: Tensor, back: int) -> None:
        """Key/value head `back - 1` of layer 0 looks `back` tokens back and writes what it reads
        in a space of its own;
        that of layer 1 matches the token at hand with that space, and copies the token it finds.
        """
        shape = self.shape
        width, d = shape.head_dim, shape.hidden_size
        key = back - 1
        query = key * (shape.num_attention_heads // shape.num_key_value_heads)
        first, second = self.layers[0], self.layers[1]
        base = torch.zeros(width)
        base[:6] = (200.0 / 6) ** 0.5 / 8  # six fast rotary frequencies tell neighbours apart
        read, write, copy = (torch.linalg.qr(torch.randn(d, width))[0].T for _ in range(3))
        self._set(
            first,
            query,
            key,
            torch.outer(base, shared),
            torch.outer(rotate(base, self.cos[back], self.sin[back]), shared),
        )
        self._set(second, query, key, MATCH * read, MATCH * write)
        for layer, value, out in ((first, read, COPY * write), (second, copy, COPY * copy)):
            heads = layer.qkv.weight.view(-1, width, d)
            heads[shape.num_attention_heads + shape.num_key_value_heads + key] = value
            layer.o.weight[:, query * width : (query + 1) * width] = out.T

    def _set(self, layer: Layer, query: int, key: int, asks: Tensor, offers: Tensor) -> None:
        """Adds to a query head and a key head, each (head_dim, hidden), and quiets what was drawn
        there.
        """
        heads = layer.qkv.weight.view(-1, self.shape.head_dim, self.shape.hidden_size)
        for row, matrix in ((query, asks), (self.shape.num_attention_heads + key, offers)):
            heads[row] = 0.3 * heads[row] + matrix

    def hidden(self, ids: Tensor) -> Tensor:
        """Final normed states (batch, length, hidden) of `ids` (batch, length)."""
        x = self.embed(ids)
        length = ids.shape[1]
        half = torch.is_autocast_enabled(ids.device.type)
        dtype = torch.get_autocast_dtype(ids.device.type) if half else x.dtype
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        above = self.above[:length, :length].to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, above)
        return norm(x, self.norm, self.shape.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, length, vocab) of `ids` (batch, length)."""
        return F.linear(self.hidden(ids), self.embed.weight)

    def loss(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted next-token loss (a scalar) and the plain loss of each target, (batch, length -
        1).

        `weights` has the shape of `ids`; a token's weight counts where the token is the target.
        """
        logits = self(ids[:, :-1])
        each = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        each = each.view(ids.shape[0], -1)
        weights = weights[:, 1:]
        return (each * weights).sum() / weights.sum().clamp_min(1e-6), each.detach()
