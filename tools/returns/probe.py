"""A model run with dense attention under a mask for each layer and KV head, and everything seen.

Stands in for the runtime's paged attention, so that whatever model the runtime loads can be
probed. Slots are positions: an entry that was given up is masked, and its slot stays empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.runtime.attention.paged_attention import HeadNorm, PagedAttention
from pigou.runtime.models.decoder import Decoder, GatedMLP
from pigou.runtime.models.load import load
from pigou.runtime.models.rotary_embedding import rotary_table, rotate
from pigou.runtime.ops import TorchOps
from pigou.runtime.token_eviction.predictor import SCALES

WINDOW = 32  # queries whose attention SnapKV looks at


def open_model(folder: Path) -> Decoder:
    """The decoder of a Hugging Face folder, in float32 and with torch's own operations."""
    decoder = load(folder, "fp32").decoder
    assert isinstance(decoder, Decoder), "returns are learnt on Pigou's own decoders"
    decoder.ops = TorchOps()
    for layer in decoder.layers:
        assert isinstance(layer.mlp, GatedMLP)
        layer.mlp.ops = decoder.ops
    return decoder


class Probe:
    """The cache of sequences of equal length, and what their attention left behind.

    With L layers, B sequences, H KV heads of G query heads each, N slots, width D:

    Attributes:
        keys: before rotation, shape (L, B, H, N, D).
        turned: after rotation.
        values: the same shape.
        alive: whether a slot may be attended to, shape (L, B, H, N).
        masses: attention received at each time scale of `SCALES`, shape (L, B, H, N, scales).
        window: attention received from the last `WINDOW` queries, shape (L, B, H, N).
        last: attention received from the last query, shape (L, B, H, N).
        own: attention that each slot's own query paid to it, shape (L, B, H, N).
        queries: of all tokens, before rotation, shape (L, B, H, G, N, D).
        logits: of all tokens, call by call, each of shape (B, n, vocab).
        length: slots filled.
        kept_probs: of the last call where `keep` is set, per layer, shape (B, H, G, n, slots).
        outputs: of the same call, per layer, before the output product, (B, H, G, n, D).
    """

    beat = None  # nobody watches the layers

    def __init__(self, decoder: Decoder, batch: int, slots: int) -> None:
        config = decoder.config
        self.decoder, self.config, self.batch, self.slots = decoder, config, batch, slots
        shape = (config.layers, batch, config.kv_heads, slots)
        self.keys = torch.zeros(*shape, config.head_dim)
        self.turned, self.values = torch.zeros_like(self.keys), torch.zeros_like(self.keys)
        self.alive = torch.zeros(shape, dtype=torch.bool)
        self.masses = torch.zeros(*shape, len(SCALES))
        self.window, self.last, self.own = (torch.zeros(shape) for _ in range(3))
        self.queries = torch.zeros(*shape[:3], config.group, slots, config.head_dim)
        assert config.rope is not None
        self.turns = rotary_table(config.rope, slots, torch.device("cpu"))
        self.logits: list[Tensor] = []
        self.length = 0
        self.keep = False
        self.kept_probs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    @torch.inference_mode()
    def feed(self, ids: Tensor) -> Tensor:
        """Append tokens, shape (B, n); returns their logits, shape (B, n, vocab)."""
        count = ids.shape[1]
        self._start, self._end = self.length, self.length + count
        self.alive[..., self._start : self._end] = True
        self._weights = _weights(count)
        if self.keep:
            self.kept_probs, self.outputs = [], []
        hidden = self.decoder.hidden(ids.flatten(), cast(PagedAttention, self), None)
        self.length = self._end
        self.logits.append(self.decoder.logits(hidden).view(self.batch, count, -1))
        return self.logits[-1]

    def __call__(self, layer: int, qkv: Tensor, norm: HeadNorm | None) -> Tensor:
        """Attend in one layer, as `PagedAttention` does, and take note."""
        config, start, end = self.config, self._start, self._end
        heads = qkv.view(self.batch * (end - start), -1, config.head_dim)
        query, key, value = heads.split([config.heads, config.kv_heads, config.kv_heads], dim=1)
        if norm is not None:
            query = F.rms_norm(query, (config.head_dim,), norm.query, norm.eps)
            key = F.rms_norm(key, (config.head_dim,), norm.key, norm.eps)
        turns = self.turns[start:end].repeat(self.batch, 1).unsqueeze(1)
        self.keys[layer, :, :, start:end] = self._by_head(key)
        self.turned[layer, :, :, start:end] = self._by_head(rotate(key, turns))
        self.values[layer, :, :, start:end] = self._by_head(value)
        grouped = (self.batch, config.kv_heads, config.group, end - start, config.head_dim)
        self.queries[layer, :, :, :, start:end] = self._by_head(query).reshape(grouped)
        return self._attend(layer, self._by_head(rotate(query, turns)).reshape(grouped))

    def _attend(self, layer: int, query: Tensor) -> Tensor:
        start, end = self._start, self._end
        keys, values = self.turned[layer, :, :, :end], self.values[layer, :, :, :end]
        scores = (query * self.config.head_dim**-0.5) @ keys.unsqueeze(2).transpose(-1, -2)
        later = torch.arange(end) > torch.arange(start, end)[:, None]
        hidden = later | ~self.alive[layer, :, :, None, None, :end]
        probs = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        out: Tensor = probs @ values.unsqueeze(2)
        self._note(layer, probs)
        if self.keep:
            self.kept_probs.append(probs)
            self.outputs.append(out)
        return out.permute(0, 3, 1, 2, 4).reshape(self.batch * (end - start), -1)

    def _note(self, layer: int, probs: Tensor) -> None:
        """Add attention, summed over the query heads of each KV head, to the sums."""
        end, received = self._end, probs.sum(2)
        fade = torch.tensor([_fade(self._end - self._start, scale) for scale in SCALES])
        sums = self.masses[layer, :, :, :end]
        sums.mul_(fade).add_(torch.einsum("bhij,is->bhjs", received, self._weights))
        if received.shape[2] < WINDOW:
            self.window[layer] *= 1 - received.shape[2] / WINDOW
        else:
            self.window[layer] = 0
        self.window[layer, :, :, :end] += received[:, :, -WINDOW:].sum(2)
        self.last[layer, :, :, :end] = received[:, :, -1]
        start = self._start
        self.own[layer, :, :, start:end] = received[..., start:].diagonal(dim1=-2, dim2=-1)

    def _by_head(self, x: Tensor) -> Tensor:
        """(B * n, heads, D) as (B, heads, n, D)."""
        return x.view(self.batch, -1, *x.shape[1:]).transpose(1, 2)


def _fade(tokens: int, scale: float) -> float:
    left: float = 2.718281828459045 ** (-tokens / scale)
    return left


def _weights(count: int) -> Tensor:
    """What a query counts in each sum once the chunk is over, shape (count, scales).

    As the runtime folds its sums: `WINDOW` queries fade together.
    """
    ages = torch.arange(count - 1, -1, -1)[:, None] // WINDOW * float(WINDOW)
    return torch.exp(-ages / torch.tensor(SCALES))
