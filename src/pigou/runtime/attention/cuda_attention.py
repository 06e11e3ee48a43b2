"""Attention on CUDA: Triton kernels over block tables, with a step's layout uploaded at once."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pigou.request import Ints
from pigou.runtime.attention.batch import StepBatch
from pigou.runtime.attention.kv_cache import KEYS, VALUES, KVCache
from pigou.runtime.attention.paged_attention import HeadNorm, PagedAttention
from pigou.runtime.models.model_config import LayerAttention, ModelConfig
from pigou.runtime.tensor_io import upload

#: Rows of a prompt's tile; tensor cores need 16 or more.
_TILE_ROWS, _MIN_ROWS = 64, 16
#: Cache entries of an iteration.
_ENTRIES = 64
#: Programs that fill an H100's 132 multiprocessors twice; maximum of a context's splits.
_PROGRAMS, _MAX_SPLITS = 264, 32


@dataclass(slots=True)
class DeviceStep:
    """A step's layout on the device."""

    slots: Tensor  # block * block_size + offset of each token's entry, -1 for padding
    positions: Tensor  # rotary positions, shape (tokens,)
    tables: Tensor  # block tables of the step's sequences, shape (sequences, blocks)
    decodes: Tensor  # tiles of single tokens, as in `paged_attention`, shape (singles, 4)
    chunks: dict[int, Tensor]  # tiles of prompt chunks, by tokens a tile


class CUDAAttention(PagedAttention):
    """Paged attention by Triton kernels; token eviction's probabilities come from `torch`.

    One kernel stores, another attends; a context is split where few streams decode. Nothing waits
    for the device, and no shape depends on numbers, so a decode step can be a CUDA graph.
    """

    kernels = "Triton kernels"

    @staticmethod
    def supports(config: ModelConfig, cache: KVCache) -> bool:  # noqa: ARG004
        """True on CUDA with Triton, where keys and values lie in the cache as per_head heads."""
        # Neither quantised nor narrower, and no latents.
        per_head = cache.data.dtype is cache.dtype and cache.layout.parts == 2
        size = cache.layout.block_size
        whole = size & (size - 1) == 0 and size <= _ENTRIES
        cuda = cache.data.device.type == "cuda"
        return cuda and per_head and whole and importlib.util.find_spec("triton") is not None

    def __init__(self, config: ModelConfig, cache: KVCache, tables: Ints, context: int) -> None:
        """Bind a cache; arguments as in `PagedAttention`."""
        super().__init__(config, cache, tables, context)
        from pigou.runtime.attention import triton_kernels

        self._kernels: Any = triton_kernels
        self._exact = cache.data.dtype is torch.float32
        self._norms: dict[int, Tensor] = {}
        self._static: DeviceStep | None = None
        groups = {form.heads // form.kv_heads for form in map(config.layer_attention, self._all())}
        self._tile_tokens = {group: max(1, _TILE_ROWS // _power(group)) for group in groups}
        self._step: DeviceStep | None = None

    def begin(self, batch: StepBatch) -> None:
        """Start a step; prepares what its layers share."""
        if self.watch is not None:
            self._step = None
            super().begin(batch)
            return
        self.batch = batch
        self._step = self._upload(batch)

    def __call__(self, layer: int, qkv: Tensor, norm: HeadNorm | None) -> Tensor:
        """Attend in one layer (see `PagedAttention`)."""
        step, form = self._step, self.config.layer_attention(layer)
        if step is None:
            return super().__call__(layer, qkv, norm)
        tokens, width = len(qkv), form.head_dim
        heads = qkv.view(tokens, -1, width).split([form.heads, form.kv_heads, form.kv_heads], 1)
        query = torch.empty((tokens, form.heads, width), dtype=qkv.dtype, device=qkv.device)
        self._save(layer, form, heads, query, norm)
        return self._score_and_sum(layer, form, query, None).view(tokens, -1)

    def compute(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Store keys and values and attend in one layer (see `PagedAttention`)."""
        if self._step is None:
            return super().compute(layer, query, key, value, sinks)
        form, query = self.config.layer_attention(layer), query.contiguous()
        self._save(layer, form, (query, key.contiguous(), value.contiguous()), None, None)
        return self._score_and_sum(layer, form, query, sinks)

    def positions(self) -> Tensor:
        """Return the rotary position of each token of the step, (tokens,), int64."""
        return super().positions() if self._step is None else self._step.positions.long()

    def begin_padding(self, size: int) -> None:
        """Start a step of `size` padding tokens, over the buffers that graphs read."""
        if self._static is None:
            rows = len(self.tables)
            self._static = DeviceStep(
                self._filled(-1, rows), self._filled(0, rows), self._filled(0, *self.tables.shape),
                self._filled(0, rows, 4), {},
            )  # fmt: skip
        static = self._static
        static.slots.fill_(-1)
        static.decodes.zero_()
        self._step = replace(
            static, slots=static.slots[:size], positions=static.positions[:size],
            decodes=static.decodes[:size],
        )  # fmt: skip
        nothing = np.zeros((3, size), dtype=np.int32)
        none = np.empty(0, dtype=np.int64)
        self.batch = StepBatch(self._step.positions, nothing, size, [], none, none)

    def enter_graph(self, size: int) -> bool:
        """Copy a step of single tokens to the buffers of graphs; False if none can run it."""
        step, static = self._step, self._static
        if step is None or static is None:
            return False
        count = len(step.slots)
        static.slots[:count].copy_(step.slots)
        static.positions[:count].copy_(step.positions)
        static.decodes[:count].copy_(step.decodes)
        static.tables[:count, : step.tables.shape[1]].copy_(step.tables)
        static.slots[count:size].fill_(-1)
        static.decodes[count:size].zero_()
        return True

    def _all(self) -> range:
        return range(self.config.layers)

    def _filled(self, value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    def _upload(self, batch: StepBatch) -> DeviceStep:
        rows, slots, singles = batch.rows, batch.slots, batch.singles
        blocks = slots // self.block_size
        order = [*rows[:singles].tolist(), *(chunk.row for chunk in batch.chunks)]
        width = int(blocks.max()) + 1
        decodes = np.zeros((singles, 4), dtype=np.int32)
        decodes[:, 0] = decodes[:, 1] = np.arange(singles)
        decodes[:, 2], decodes[:, 3] = 1, slots[:singles]
        chunks = {tokens: _tiles(batch, tokens) for tokens in set(self._tile_tokens.values())}
        targets = self.tables[rows, blocks] * self.block_size + slots % self.block_size
        parts = [targets, batch.positions, self.tables[order, :width], decodes, *chunks.values()]
        flat = np.concatenate([part.ravel() for part in parts]).astype(np.int32, copy=False)
        pieces = upload(flat, self.device).split([part.size for part in parts])
        shaped = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        return DeviceStep(
            shaped[0], shaped[1], shaped[2], shaped[3], dict(zip(chunks, shaped[4:], strict=True))
        )

    def _save(
        self, layer: int, form: LayerAttention, heads: tuple[Tensor, ...] | list[Tensor],
        query: Tensor | None, norm: HeadNorm | None,
    ) -> None:  # fmt: skip
        """Store keys and values; with `query`, rotate first, and write queries to it."""
        assert self._step is not None
        step, data, count = self._step, self.cache.data, 2 * form.kv_heads
        if query is not None:
            count += form.heads
        half = form.head_dim // 2
        offsets = self._starts(layer)
        self._kernels.store_rotated[(len(step.slots), count)](
            *heads, self._norm(layer, norm), self.turns, step.positions, step.slots,
            heads[0] if query is None else query, data, *(part.stride(0) for part in heads),
            data.stride(0), *offsets, 0.0 if norm is None else norm.eps, HEADS=form.heads,
            KV_HEADS=form.kv_heads, D=form.head_dim, HP=_power(half), BS=self.block_size,
            NORM=norm is not None, ROTATE=query is not None,
        )  # fmt: skip

    def _score_and_sum(
        self, layer: int, form: LayerAttention, query: Tensor, sinks: Tensor | None
    ) -> Tensor:
        assert self._step is not None
        step, out, group = self._step, torch.empty_like(query), form.heads // form.kv_heads
        if len(step.decodes):
            wanted = -(-_PROGRAMS // (len(step.decodes) * form.kv_heads))
            splits = min(_MAX_SPLITS, _power(wanted))
            padded = max(_power(group), _MIN_ROWS)
            self._run(layer, form, query, sinks, out, step.decodes, (1, padded, splits))
        tokens = self._tile_tokens[group]
        tiles = step.chunks.get(tokens)
        if tiles is not None and len(tiles):
            padded = max(_power(group), _MIN_ROWS // tokens)
            self._run(layer, form, query, sinks, out, tiles, (tokens, padded, 1))
        return out

    def _run(
        self, layer: int, form: LayerAttention, query: Tensor, sinks: Tensor | None, out: Tensor,
        tiles: Tensor, sizes: tuple[int, int, int],
    ) -> None:  # fmt: skip
        """Attend for `tiles`; `sizes` are tokens a tile, padded group and splits."""
        assert self._step is not None
        tokens, padded, splits = sizes
        data, tables, width = self.cache.data, self._step.tables, form.head_dim
        parts = out
        if splits > 1:
            shape = (len(tiles), form.heads, splits, width + 2)
            parts = torch.empty(shape, dtype=torch.float32, device=out.device)
        self._kernels.paged_attention[(len(tiles), form.kv_heads, splits)](
            query, data, tables, tiles, out if sinks is None else sinks, out, parts,
            data.stride(0), *self._starts(layer), tables.stride(0), form.scale, form.window,
            form.softcap, HEADS=form.heads, KV_HEADS=form.kv_heads, GP=padded, D=width,
            DP=max(_power(width), 16), BS=self.block_size, BQ=tokens, N=_ENTRIES, SPLITS=splits,
            SINKS=sinks is not None, EXACT=self._exact,
        )  # fmt: skip
        if splits > 1:
            self._kernels.combine[(len(tiles) * form.heads,)](
                parts, out, tiles, HEADS=form.heads, D=width, DP=max(_power(width), 16),
                SPLITS=splits,
            )  # fmt: skip

    def _starts(self, layer: int) -> tuple[int, int]:
        """Return where a layer's keys and values begin in a block, in numbers."""
        stride = self.cache.data.stride()
        first = stride[1] * layer
        return first + KEYS * stride[2], first + VALUES * stride[2]

    def _norm(self, layer: int, norm: HeadNorm | None) -> Tensor:
        if norm is None:
            return self.turns
        if layer not in self._norms:
            self._norms[layer] = torch.stack((norm.query, norm.key))
        return self._norms[layer]


def _power(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _tiles(batch: StepBatch, tokens: int) -> Ints:
    """Cut chunks into tiles of at most `tokens` tokens, shape (tiles, 4)."""
    tiles = [
        (batch.singles + index, chunk.first + at, min(tokens, chunk.count - at), chunk.past + at)
        for index, chunk in enumerate(batch.chunks)
        for at in range(0, chunk.count, tokens)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)
