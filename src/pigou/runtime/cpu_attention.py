"""Paged attention by compiled kernels on the CPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pigou.request import Ints
from pigou.runtime import kernels
from pigou.runtime.attention import HeadNorm, PagedAttention
from pigou.runtime.batch import PromptChunk, StepBatch
from pigou.runtime.kv_cache import KVCache
from pigou.runtime.model_config import ModelConfig
from pigou.runtime.simd import LANES
from pigou.runtime.spread import spread
from pigou.runtime.tensor_io import stored

#: Sums of probabilities, by tile, head and entry, that are held at once.
_SUMS = 2**20


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

    def begin(self, batch: StepBatch) -> None:
        """Take up a step."""
        self.batch = batch
        numbers = self.config.heads * self.config.head_dim
        self._decoding = 0.08 * numbers * (int(batch.slots[: batch.singles].sum()) + batch.singles)
        self._tiles = self._cut(batch)
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
            watch = None if self.watch is None else (*self.watch.target(layer), self.watch.owns)
            arguments = (array, *where, self._queries, result, watch)
            spread(kernels.decode, self._decoding, tasks, *arguments)
        if batch.chunks:
            tokens = (batch.singles, batch.size)
            spread(kernels.place, 1.0 * heads.numel(), tokens, array, *where)
            self._prefill(layer, array, kv, result)
        return out.view(batch.size, -1)

    def _prefill(
        self, layer: int, qkv: kernels.Stored, kv: kernels.Stored, out: kernels.Stored
    ) -> None:
        """Attend with the chunks, whose queries, keys and values are placed."""
        heads, size, tables = self.config.heads, self.block_size, self.tables
        if self.watch is None:
            tasks = (0, len(self._tiles) * heads)
            arguments = (qkv, self._tiles, tables, kv, size, out, None)
            spread(kernels.prefill, self._prefilling, tasks, *arguments)
            return
        width = -(-int((self._tiles[:, 1] + self._tiles[:, 2]).max()) // size) * size
        most = max(1, _SUMS // (heads * width))
        for at in range(0, len(self._tiles), most):
            tiles = self._tiles[at : at + most]
            sums = np.empty((len(tiles), heads, width), dtype=np.float32)
            work = self._prefilling * len(tiles) / len(self._tiles)
            tasks = (0, len(tiles) * heads)
            spread(kernels.prefill, work, tasks, qkv, tiles, tables, kv, size, out, sums)
            self.watch.absorb(layer, sums, tiles, self._folds[at : at + most], tables)

    def _cut(self, batch: StepBatch) -> Ints:
        """Cut the chunks into tiles; where they are watched, no fold falls within one."""
        if self.watch is None or not batch.chunks:
            return _tiles(batch.chunks)
        ends = self.watch.cuts(batch)
        tiles = _tiles(batch.chunks, ends)
        self._folds = np.isin(tiles[:, 0], ends)
        return tiles

    def _norm(self, layer: int, norm: HeadNorm) -> kernels.Stored:
        if layer not in self._norms:
            self._norms[layer] = stored(torch.stack((norm.query, norm.key)))
        return self._norms[layer]


def _padded(group: int) -> int:
    """Round up to 1, 2, 4, or a multiple of 8: the heights of the kernels' products."""
    return next((rows for rows in (1, 2, 4) if group <= rows), -(-group // 8) * 8)


def _tiles(chunks: list[PromptChunk], cuts: Ints | None = None) -> Ints:
    """Cut chunks into the tiles of `kernels.prefill`, and before the tokens `cuts` of the step."""
    tiles = []
    for chunk in chunks:
        stop = chunk.first + chunk.count
        within = [] if cuts is None else cuts[(cuts > chunk.first) & (cuts < stop)].tolist()
        for start, end in pairwise((chunk.first, *within, stop)):
            for at in range(start, end, kernels.TILE):
                slot = chunk.past + at - chunk.first
                tiles.append((at, min(kernels.TILE, end - at), slot, chunk.row))
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)
