"""Paged attention by compiled kernels on the CPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pigou.request import Ints
from pigou.runtime import attention_kernels as kernels
from pigou.runtime.attention import HeadNorm, PagedAttention
from pigou.runtime.batch import PromptChunk, StepBatch
from pigou.runtime.kv_cache import KVCache
from pigou.runtime.model_config import ModelConfig
from pigou.runtime.simd import LANES
from pigou.runtime.tensor_io import stored

#: Sums of probabilities, by tile, head and entry, that are held at once.
_MAX_SUMS = 2**20
#: Columns of the tiles of `kernels.prefill`.
_TILE_FIRST, _TILE_COUNT, _TILE_SLOT, _TILE_ROW = range(4)
#: Nanoseconds of one thread for each head's dimension and entry.
_DECODE_NS, _PREFILL_NS = 0.08, 0.04


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
        entries = int(batch.slots[: batch.singles].sum()) + batch.singles
        self._decode_ns = _DECODE_NS * numbers * entries
        self._tiles = self._cut(batch)
        seen = sum(chunk.count * (2 * chunk.past + chunk.count) // 2 for chunk in batch.chunks)
        self._prefill_ns = _PREFILL_NS * numbers * seen

    def __call__(self, layer: int, qkv: Tensor, norm: HeadNorm | None) -> Tensor:
        """Attend in one layer, as `PagedAttention` does."""
        batch, config, size = self.batch, self.config, self.block_size
        heads = qkv.view(batch.size, -1, config.head_dim)
        out = qkv.new_empty((batch.size, config.heads, config.head_dim))
        array, result, kv = stored(heads), stored(out), self._layers[layer]
        norms, eps = self._no_norm, 0.0
        if norm is not None:
            norms, eps = self._norm(layer, norm), norm.eps
        rotation = (norms, eps, self._table)
        cached = (batch.locations, self.tables, kv, size)
        if batch.singles:
            tasks = (0, batch.singles * config.kv_heads)
            mass = None if self.watch is None else self.watch.target(layer)
            arguments = (array, rotation, cached, self._queries, result, mass)
            kernels.DECODE(self._decode_ns, tasks, *arguments)
        if batch.chunks:
            tokens = (batch.singles, batch.size)
            kernels.ROTATE_AND_STORE(1.0 * heads.numel(), tokens, array, rotation, cached)
            self._prefill(layer, array, cached, result)
        return out.view(batch.size, -1)

    def _prefill(
        self, layer: int, qkv: kernels.Stored, cached: kernels.PagedLayer, out: kernels.Stored
    ) -> None:
        """Attend with the chunks, whose queries, keys and values are rotated and stored."""
        heads, size = self.config.heads, self.block_size
        if self.watch is None:
            tasks = (0, len(self._tiles) * heads)
            kernels.PREFILL(self._prefill_ns, tasks, qkv, self._tiles, cached, out, None)
            return
        entries = self._tiles[:, _TILE_COUNT] + self._tiles[:, _TILE_SLOT]
        width = -(-int(entries.max()) // size) * size
        step = max(1, _MAX_SUMS // (heads * width))
        for at in range(0, len(self._tiles), step):
            tiles = self._tiles[at : at + step]
            sums = np.empty((len(tiles), heads, width), dtype=np.float32)
            work_ns = self._prefill_ns * len(tiles) / len(self._tiles)
            kernels.PREFILL(work_ns, (0, len(tiles) * heads), qkv, tiles, cached, out, sums)
            self.watch.absorb(layer, sums, tiles, self._folds[at : at + step], self.tables)

    def _cut(self, batch: StepBatch) -> Ints:
        """Cut the chunks into tiles; where they are watched, no fold falls within one."""
        if self.watch is None or not batch.chunks:
            return _tiles(batch.chunks)
        cuts = self.watch.cuts(batch)
        tiles = _tiles(batch.chunks, cuts)
        self._folds = np.isin(tiles[:, _TILE_FIRST], cuts)
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
