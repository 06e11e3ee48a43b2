"""Paged attention by compiled kernels on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pigou.request import Ints
from pigou.runtime import kernels
from pigou.runtime.attention import HeadNorm, PagedAttention
from pigou.runtime.batch import Batch, Chunk
from pigou.runtime.cache import KVCache
from pigou.runtime.config import ModelConfig
from pigou.runtime.simd import LANES
from pigou.runtime.spread import spread
from pigou.runtime.stored import stored


class CPUAttention(PagedAttention):
    """Reads keys and values where they lie, so that nothing is gathered."""

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
        numbers = self.config.heads * self.config.head_dim
        self._decoding = 0.08 * numbers * (int(batch.slots[: batch.singles].sum()) + batch.singles)
        self._tiles = _tiles(batch.chunks)
        seen = sum(chunk.count * (2 * chunk.past + chunk.count) // 2 for chunk in batch.chunks)
        self._prefilling = 0.04 * numbers * seen

    def __call__(self, layer: int, qkv: Tensor, norm: HeadNorm | None) -> Tensor:
        """Attend in one layer, as `PagedAttention` does."""
        batch, config, size = self.batch, self.config, self.block_size
        heads = qkv.view(batch.size, -1, config.head_dim)
        out = qkv.new_empty((batch.size, config.heads, config.head_dim))
        array, result, kv = stored(heads), stored(out), self._layers[layer]
        norms, eps = self._no_norm, 0.0
        if norm is not None:
            norms, eps = self._norm(layer, norm), norm.eps
        where = (norms, eps, self._table, batch.places, self.tables, kv, size)
        if batch.singles:
            tasks = (0, batch.singles * config.kv_heads)
            spread(kernels.decode, self._decoding, tasks, array, *where, self._queries, result)
        if batch.chunks:
            tokens = (batch.singles, batch.size)
            spread(kernels.place, 1.0 * heads.numel(), tokens, array, *where)
            tasks, among = (0, len(self._tiles) * config.heads), (self._tiles, self.tables, kv)
            spread(kernels.prefill, self._prefilling, tasks, array, *among, size, result)
        return out.view(batch.size, -1)

    def _norm(self, layer: int, norm: HeadNorm) -> kernels.Stored:
        if layer not in self._norms:
            self._norms[layer] = stored(torch.stack((norm.query, norm.key)))
        return self._norms[layer]


def _padded(group: int) -> int:
    """Round up to 1, 2, 4, or a multiple of 8: the heights of the kernels' products."""
    return next((rows for rows in (1, 2, 4) if group <= rows), -(-group // 8) * 8)


def _tiles(chunks: list[Chunk]) -> Ints:
    """Cut chunks into the tiles of `kernels.prefill`."""
    tiles = [
        (chunk.first + at, min(kernels.TILE, chunk.count - at), chunk.past + at, chunk.row)
        for chunk in chunks
        for at in range(0, chunk.count, kernels.TILE)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)
