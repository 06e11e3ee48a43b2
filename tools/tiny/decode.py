"""Greedy decoding of the training model, with a cache, for a batch of prompts of one length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny.model import Layer, Tiny, norm, rotate


@torch.no_grad()
def greedy(model: Tiny, prompts: Tensor, count: int, stop: int | None = None) -> Tensor:
    """The `count` tokens that follow `prompts` (batch, length), greedily: (batch, count) ids.

    Ends early, with fewer, once every row has drawn `stop`. Prompts and continuations must fit
    the model's context.
    """
    batch, length = prompts.shape
    cache = [_empty(layer, batch, length + count, prompts.device) for layer in model.layers]
    ids, new = prompts, []
    ended = torch.zeros(batch, dtype=torch.bool, device=prompts.device)
    for start in [0, *range(length, length + count - 1)]:
        x = model.embed(ids)
        cos, sin = (t[start : start + ids.shape[1]] for t in (model.cos, model.sin))
        for layer, past in zip(model.layers, cache, strict=True):
            x = _layer(layer, x, cos, sin, past, start)
        last = norm(x[:, -1], model.norm, model.shape.rms_norm_eps)
        ids = (last @ model.embed.weight.T).argmax(-1, keepdim=True)
        new.append(ids)
        ended |= ids[:, 0] == stop
        if ended.all():
            break
    return torch.cat(new, dim=1)


def _empty(layer: Layer, batch: int, length: int, device: torch.device) -> Tensor:
    return torch.empty(2, batch, layer.kv_heads, length, layer.shape.head_dim, device=device)


def _layer(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor, start: int) -> Tensor:
    """One layer over new tokens (batch, new, hidden), `past` holding the keys and values before."""
    batch, new, _ = x.shape
    eps, width = layer.shape.rms_norm_eps, layer.shape.head_dim
    qkv = layer.qkv(norm(x, layer.norm1, eps)).view(batch, new, -1, width).transpose(1, 2)
    q, k, v = qkv.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
    past[0, :, :, start : start + new] = rotate(k, cos, sin)
    past[1, :, :, start : start + new] = v
    keys, values = past[:, :, :, : start + new].repeat_interleave(layer.heads // layer.kv_heads, 2)
    out = F.scaled_dot_product_attention(rotate(q, cos, sin), keys, values, is_causal=new > 1)
    x = x + layer.o(out.transpose(1, 2).reshape(batch, new, -1))
    gate, up = layer.gate_up(norm(x, layer.norm2, eps)).chunk(2, dim=-1)
    return x + layer.down(F.silu(gate) * up)  # type: ignore[no-any-return]
