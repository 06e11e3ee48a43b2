"""Paged attention of a mixed batch (prompt chunks and decodes), on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.config import ConfigError
from pigou.request import Ints
from pigou.runtime.attention.batch import PromptChunk, StepBatch
from pigou.runtime.attention.kv_cache import KEYS, VALUES, KVCache
from pigou.runtime.models.model_config import LayerAttention, ModelConfig
from pigou.runtime.models.rotary_embedding import rotary_table, rotate
from pigou.runtime.tensor_io import upload
from pigou.runtime.token_eviction.entry_stats import AttentionMassTracker


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm over each query and key head; weights are (head_dim,)."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(slots=True)
class Past:
    """Location of the cache entries of some sequences, shared by all layers."""

    blocks: Tensor  # block ids, shape (sequences * blocks,), int64
    sequences: int
    mask: Tensor  # visible entries; broadcasts to (sequences, heads, queries, entries)
    slots: Tensor | None = None  # queries' slots, broadcast as `mask`; needed for windows
    windows: dict[int, Tensor] = field(default_factory=dict)

    def seen(self, window: int) -> Tensor:
        """Return the visible entries in a window; 0 for all."""
        if not window:
            return self.mask
        if window not in self.windows:
            assert self.slots is not None, "entries that moved have no window"
            entries = torch.arange(self.mask.shape[-1], device=self.mask.device)
            self.windows[window] = self.mask & (entries > self.slots - window)
        return self.windows[window]


class PagedAttention:
    """Rotates, stores and attends, layer by layer; masks by slot, so entries may be missing."""

    kernels = "torch's scaled_dot_product_attention, over gathered blocks"
    watch: AttentionMassTracker | None = None  # receives probabilities
    beat: Callable[[], None] | None = None  # called before each layer, as a sign of life

    def __init__(self, config: ModelConfig, cache: KVCache, tables: Ints, context: int) -> None:
        self.config = config
        self.cache = cache
        self.tables = tables
        self.block_size = cache.layout.block_size
        self.device = cache.data.device
        self.turns = self._rotary_table(context, config.head_dim)
        self._same = cache.data.dtype is cache.dtype  # chunks attend to what is stored
        self._standard = all(layer.standard for layer in config.attention)
        self._gathered = torch.empty(0, dtype=cache.data.dtype, device=self.device)
        uniform = all((f.kv_heads, f.head_dim) == (config.kv_heads, config.head_dim)
                      for f in config.attention)  # fmt: skip
        if cache.quantised and not (uniform and cache.layout.parts == 2):
            raise ConfigError(
                f"kv_cache_dtype is {cache.layout.dtype!r}, and heads differ by layer in this "
                "model, or are latents; give auto"
            )

    def begin(self, batch: StepBatch) -> None:
        """Start a step; prepares what its layers share."""
        self.batch = batch
        self._locate(batch)
        first = batch.singles
        self._decodes = self._decode_past(batch) if first else None
        self._pasts = [self._chunk_past(chunk) for chunk in batch.chunks]
        self._cuts = self.watch.cuts(batch) if self.watch is not None else None

    def __call__(self, layer: int, qkv: Tensor, norm: HeadNorm | None) -> Tensor:
        """Attend in one layer, for qkv (tokens, (heads + 2 kv_heads) * head_dim), overwritten."""
        return self.compute(layer, *self._rotated(qkv, norm)).view(self.batch.size, -1)

    def compute(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Store keys and values and attend in one layer; all (tokens, its heads, head_dim).

        Queries and keys are rotated; `sinks` (heads,) are scores without a value.
        """
        batch, form = self.batch, self.config.layer_attention(layer)
        self._store(layer, key, value)
        out = query.new_empty((*query.shape[:2], form.latent or query.shape[2]))
        if self._decodes is not None:
            self._decode(layer, form, query[: batch.singles], sinks, out[: batch.singles])
        for chunk, past in zip(batch.chunks, self._pasts, strict=True):
            tokens = slice(chunk.first, chunk.first + chunk.count)
            if self.watch is not None:
                self._watched_chunk(layer, form, query[tokens], chunk, out[tokens])
                continue
            own = query[tokens], key[tokens], value[tokens]
            self._chunk(layer, form, own, past, sinks, out[tokens])
        return out

    def positions(self) -> Tensor:
        """Return the rotary position of each token of the step, (tokens,), int64."""
        return self._index(self.batch.positions)

    def _rotary_table(self, context: int, head_dim: int) -> Tensor:
        if self.config.rope is not None:
            return rotary_table(self.config.rope, context, self.device)
        turns = torch.ones((context, head_dim), device=self.device)
        turns[:, head_dim // 2 :] = 0.0  # rotates nothing
        return turns

    def _locate(self, batch: StepBatch) -> None:
        blocks, offsets = np.divmod(batch.slots, self.block_size)
        locations = np.stack((self.tables[batch.rows, blocks], offsets, batch.positions))
        self._blocks, self._offsets, positions = self._index(locations).unbind()
        self._turns = self.turns[positions].to(self.cache.dtype).unsqueeze(1)

    def _rotated(self, qkv: Tensor, norm: HeadNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split, normalize and rotate; results are (tokens, heads, head_dim)."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        query, key, value = torch.split(
            heads, [config.heads, config.kv_heads, config.kv_heads], dim=1
        )
        if norm is not None:
            query = F.rms_norm(query, (config.head_dim,), norm.query, norm.eps)
            key = F.rms_norm(key, (config.head_dim,), norm.key, norm.eps)
        return rotate(query, self._turns), rotate(key, self._turns), value

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        heads, width = key.shape[1:]
        if self.cache.quantised:
            both, at = self.cache.data[:, layer], (self._blocks, slice(None), self._offsets)
            (keys, key_scales), (values, value_scales) = map(self.cache.encode, (key, value))
            self.cache.keys(layer)[self._blocks, :, :, self._offsets] = keys
            self.cache.values(layer)[at] = values
            if key_scales is not None and value_scales is not None:
                scales = self.cache.scales(both)
                scales[:, KEYS][at], scales[:, VALUES][at] = key_scales, value_scales
            return
        both = self.cache.data[:, layer].flatten(2)[:, :, : heads * width * self.block_size]
        shape = (len(both), heads, width, self.block_size)
        both[:, KEYS].view(shape)[self._blocks, :, :, self._offsets] = key.to(both.dtype)
        if both.shape[1] == 1:
            return
        shape = (len(both), heads, self.block_size, width)
        both[:, VALUES].view(shape)[self._blocks, :, self._offsets] = value.to(both.dtype)

    def _decode_past(self, batch: StepBatch) -> Past:
        rows, slots = batch.rows[: batch.singles], batch.slots[: batch.singles]
        width = int(slots.max()) // self.block_size + 1
        used = np.arange(width) <= (slots // self.block_size)[:, None]
        blocks = np.where(used, self.tables[rows, :width], 0)
        last = self._index(slots)[:, None, None, None]
        return Past(self._index(blocks.reshape(-1)), len(rows), self._entries(width) <= last, last)

    def _chunk_past(self, chunk: PromptChunk) -> Past | None:
        """Return None for a chunk that attends only to itself, plainly, and is not tracked."""
        if chunk.past == 0 and self.watch is None and self._standard and self._same:
            return None
        last = chunk.past + chunk.count - 1
        width = last // self.block_size + 1
        queries = torch.arange(chunk.past, last + 1, device=self.device)[:, None]
        mask = self._entries(width) <= queries
        return Past(self._index(self.tables[chunk.row, :width]), 1, mask[None, None], queries)

    def _decode(
        self, layer: int, form: LayerAttention, query: Tensor, sinks: Tensor | None, out: Tensor
    ) -> None:
        """Attend with one query per sequence; `query`, `out` are (sequences, heads, head_dim)."""
        assert self._decodes is not None
        keys, values = self._gather(layer, form, self._decodes)
        mask = self._decodes.seen(form.window)
        if self.watch is not None or form.softcap or sinks is not None:
            chances = _chances(form, query.unsqueeze(2), keys, mask, sinks)
            out.copy_((chances @ values.float().unsqueeze(2)).view_as(out))
            if self.watch is not None:
                own = self._index(self.watch.owns[self.batch.rows[: self.batch.singles]])
                slots = torch.arange(chances.shape[-1], device=self.device)
                sums = chances.sum((2, 3)).where((slots >= own[:, None])[:, None], 0.0)
                self.watch.stats.add_all(layer, self._decodes.blocks, sums)
            return
        # Query heads of a group become queries, since masked CUDA kernels do not support groups.
        grouped = query.reshape(len(query), form.kv_heads, -1, form.head_dim)
        result = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=form.scale
        )
        out.copy_(result.view_as(out))

    def _chunk(
        self, layer: int, form: LayerAttention, own: tuple[Tensor, Tensor, Tensor],
        past: Past | None, sinks: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        query, key, value = own
        queries = query.transpose(0, 1).unsqueeze(0)
        group = form.heads // form.kv_heads
        if past is None:
            keys, values = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
            keys, values = _repeat(keys, group), _repeat(values, group)
            result = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=form.scale
            )
        else:
            keys, values = self._gather(layer, form, past)
            mask = past.seen(form.window)
            if form.softcap or sinks is not None:
                chances = _chances(form, queries, keys, mask, sinks)
                result = (chances @ values.float().unsqueeze(2)).flatten(1, 2)
            else:
                keys, values = _repeat(keys, group), _repeat(values, group)
                result = F.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=mask, scale=form.scale
                )
        out.copy_(result.squeeze(0).transpose(0, 1))

    def _watched_chunk(
        self, layer: int, form: LayerAttention, query: Tensor, chunk: PromptChunk, out: Tensor
    ) -> None:
        assert self.watch is not None
        assert self._cuts is not None
        past = self._pasts[self.batch.chunks.index(chunk)]
        assert past is not None
        keys, values = self._gather(layer, form, past)
        chances = _chances(form, query.transpose(0, 1).unsqueeze(0), keys, past.mask)
        result = (chances @ values.float().unsqueeze(2)).flatten(1, 2)
        out.copy_(result[0].transpose(0, 1))
        stop, table = chunk.first + chunk.count, self.tables[chunk.row]
        cuts = self._cuts[(self._cuts >= chunk.first) & (self._cuts < stop)].tolist()
        for start, end in pairwise(sorted({chunk.first, *cuts, stop})):
            if start in cuts:
                self.watch.fold(layer, chunk.row, table, chunk.past + start - chunk.first)
            queries = slice(start - chunk.first, end - chunk.first)
            sums = chances[0, :, :, queries].sum((1, 2))
            self.watch.add(layer, chunk.row, table, chunk.past + end - chunk.first, sums)

    def _gather(self, layer: int, form: LayerAttention, past: Past) -> tuple[Tensor, Tensor]:
        size, blocks = self.block_size, len(past.blocks)
        source = self.cache.data[:, layer]
        count = blocks * source[0].numel()
        if self._gathered.numel() < count:  # allocating costs more than copying
            self._gathered = self._gathered.new_empty(2 * count)
        both = self._gathered[:count].view(blocks, *source.shape[1:])
        torch.index_select(source, 0, past.blocks, out=both)
        heads, width = form.kv_heads, form.head_dim
        shape = (past.sequences, blocks // past.sequences, heads)
        flat = (past.sequences, heads, -1, width)
        scales = self.cache.scales(both)
        if not self.cache.quantised:
            both = both.flatten(2)[:, :, : heads * width * size].unflatten(2, (heads, -1))
        own = both[..., : width * size]
        keys = own[:, KEYS].unflatten(2, (width, size)).unflatten(0, shape[:2])
        if form.latent:
            latents = keys.permute(0, 2, 1, 4, 3).reshape(flat)
            return latents, latents[..., : form.latent]
        values = own[:, VALUES].unflatten(2, (size, width)).unflatten(0, shape[:2])
        parts = keys.permute(0, 2, 1, 4, 3).reshape(flat), values.transpose(1, 2).reshape(flat)
        units: Sequence[Tensor | None] | Tensor = (None, None)
        if len(scales):
            units = scales.unflatten(0, shape[:2]).permute(2, 0, 3, 1, 4).flatten(3).unsqueeze(-1)
        keys, values = map(self.cache.decode, parts, units)
        return keys, values

    def _entries(self, width: int) -> Tensor:
        return torch.arange(width * self.block_size, device=self.device)

    def _index(self, ids: Ints) -> Tensor:
        return upload(ids.astype(np.int64), self.device)


def _chances(
    form: LayerAttention, query: Tensor, keys: Tensor, mask: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Return probabilities, float32, (sequences, kv_heads, group, queries, entries)."""
    shape = (len(query), form.kv_heads, -1, *query.shape[2:])
    grouped = query.reshape(shape).float()
    scores: Tensor = grouped @ keys.float().unsqueeze(2).mT * form.scale
    if form.softcap:
        scores = (scores / form.softcap).tanh_() * form.softcap
    scores.masked_fill_(~mask.unsqueeze(2), float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(form.kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _repeat(part: Tensor, group: int) -> Tensor:
    if part.shape[1] == 1:
        return part.expand(-1, group, -1, -1)
    return part if group == 1 else part.repeat_interleave(group, 1)
