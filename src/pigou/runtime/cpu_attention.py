"""Paged attention by compiled kernels on the CPU; chunks of prompts still go through torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pigou.request import Ints
from pigou.runtime import kernels
from pigou.runtime.attention import HeadNorm, PagedAttention
from pigou.runtime.batch import Batch
from pigou.runtime.cache import KVCache
from pigou.runtime.config import ModelConfig
from pigou.runtime.simd import LANES
from pigou.runtime.spread import spread
from pigou.runtime.stored import stored


class CPUAttention(PagedAttention):
    """Reads keys and values where they lie, so that a decode gathers nothing."""

    @staticmethod
    def supports(config: ModelConfig, cache: KVCache) -> bool:
        """Whether the kernels can work on this cache."""
        sizes = (config.head_dim, cache.layout.block_size)
        return cache.data.device.type == "cpu" and not any(size % LANES for size in sizes)

    def __init__(self, config: ModelConfig, cache: KVCache, tables: Ints, context: int) -> None:
        """Bind a cache; the arguments are those of `PagedAttention`."""
        super().__init__(config, cache, tables, context)
        self._layers = [stored(cache.data[:, layer]) for layer in range(config.layers)]
        self._table = self.turns.numpy()
        self._no_norm = np.empty((2, 0), dtype=self._layers[0].dtype)
        self._norms: dict[int, kernels.Stored] = {}
        self._queries = _padded(config.group)

    def begin(self, batch: Batch) -> None:
        """Take up a step."""
        self.batch = batch
        entries = int(batch.slots[: batch.singles].sum()) + batch.singles
        self._work = 0.08 * entries * self.config.heads * self.config.head_dim
        self._pasts = [self._chunk_past(chunk) for chunk in batch.chunks]

    def __call__(self, layer: int, qkv: Tensor, norm: HeadNorm | None) -> Tensor:
        """Attend in one layer, as `PagedAttention` does."""
        batch, config, size = self.batch, self.config, self.block_size
        heads = qkv.view(batch.size, -1, config.head_dim)
        out = qkv.new_empty((batch.size, config.heads, config.head_dim))
        array, kv = stored(heads), self._layers[layer]
        norms, eps = self._no_norm, 0.0
        if norm is not None:
            norms, eps = self._norm(layer, norm), norm.eps
        where = (norms, eps, self._table, batch.places, self.tables, kv, size)
        if batch.singles:
            tasks = (0, batch.singles * config.kv_heads)
            spread(kernels.decode, self._work, tasks, array, *where, self._queries, stored(out))
        if batch.chunks:
            tokens = (batch.singles, batch.size)
            spread(kernels.place, 1.0 * heads.numel(), tokens, array, *where)
            query, key, value = torch.split(
                heads, [config.heads, config.kv_heads, config.kv_heads], dim=1
            )
            for chunk, past in zip(batch.chunks, self._pasts, strict=True):
                here = slice(chunk.first, chunk.first + chunk.count)
                self._chunk(layer, (query[here], key[here], value[here]), past, out[here])
        return out.view(batch.size, -1)

    def _norm(self, layer: int, norm: HeadNorm) -> kernels.Stored:
        if layer not in self._norms:
            self._norms[layer] = stored(torch.stack((norm.query, norm.key)))
        return self._norms[layer]


def _padded(group: int) -> int:
    """Round up to 1, 2, 4, or a multiple of 8: the heights of the kernels' products."""
    return next((rows for rows in (1, 2, 4) if group <= rows), -(-group // 8) * 8)
