"""Paged attention by compiled kernels on the CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.request import Ints
from pigou.runtime.attention.batch import POSITION, ROW, SLOT, PromptChunk, StepBatch
from pigou.runtime.attention.kv_cache import KEYS, VALUES, KVCache
from pigou.runtime.attention.paged_attention import HeadNorm, PagedAttention
from pigou.runtime.models.model_config import ModelConfig
from pigou.runtime.simd import LANES, accumulate, exponential, fast, narrow, product, row_max, widen
from pigou.runtime.tensor_io import stored
from pigou.runtime.thread_pool import ParallelKernel, RowRange, run_parallel
from pigou.runtime.token_eviction.entry_stats import MassTarget
from pigou.runtime.token_eviction.policy import MASS_LINE

#: Max probability sums (tile, head, entry) held at once.
_MAX_SUMS = 2**20
#: Columns of the tiles of `prefill`.
_TILE_FIRST, _TILE_COUNT, _TILE_SLOT, _TILE_ROW = range(4)
#: Single-thread nanoseconds per head dimension and entry.
_DECODE_NS, _PREFILL_NS = 0.08, 0.04
Stored = NDArray[Any]
Floats = NDArray[np.float32]
#: Query tokens per `prefill` tile.
TILE = 8
#: Rows of `HeadRotation.norms`.
QUERY_NORM, KEY_NORM = 0, 1
_FLOAT_BYTES = 4
#: Norm weights of query and key heads, shape (2, head_dim), or (2, 0) for none; eps; cosines and
#: sines by position, shape (positions, head_dim). Numba passes plain tuples several times faster
#: than named ones.
HeadRotation: TypeAlias = tuple[Stored, float, Floats]
#: Scale, window and soft cap of scores (0 for none); sinks per query head, or an empty array.
Scoring: TypeAlias = tuple[float, int, float, Floats]
#: One cache layer: `StepBatch.locations`, shape (3, >= tokens); block tables, shape (rows,
#: blocks); `kv`; its scales (blocks, 2, kv_heads, block size), or an empty array; block size.
PagedLayer: TypeAlias = tuple[Ints, Ints, Stored, Stored, int]


class CPUAttention(PagedAttention):
    """Attends to keys and values in place, without gathering."""

    kernels = "compiled kernels of the CPU"

    @staticmethod
    def supports(config: ModelConfig, cache: KVCache) -> bool:
        """True if the kernels support this cache."""
        sizes = {config.layer_attention(layer).head_dim for layer in range(config.layers)}
        sizes.add(cache.layout.block_size)
        if cache.layout.parts == 1:
            return False
        return cache.data.device.type == "cpu" and not any(size % LANES for size in sizes)

    def __init__(self, config: ModelConfig, cache: KVCache, tables: Ints, context: int) -> None:
        """Bind a cache; arguments as in `PagedAttention`."""
        super().__init__(config, cache, tables, context)
        self._forms = [config.layer_attention(layer) for layer in range(config.layers)]
        self._layers = [stored(self._view(layer)) for layer in range(config.layers)]
        self._scales = [stored(cache.scales(cache.data[:, i])) for i in range(config.layers)]
        self._no_sinks = np.empty(0, dtype=np.float32)
        self._tables = {config.head_dim: self.turns.numpy()}
        for width in {form.head_dim for form in self._forms} - {config.head_dim}:
            self._tables[width] = self._rotary_table(context, width).numpy()
        self._no_norm = stored(torch.empty((2, 0), dtype=cache.dtype))
        self._norms: dict[int, Stored] = {}

    def _view(self, layer: int) -> Tensor:
        form, both = self._forms[layer], self.cache.data[:, layer]
        width = form.head_dim * self.block_size
        if self.cache.quantised:
            return both[..., :width]
        own = both.flatten(2)[:, :, : form.kv_heads * width]
        return own.view(*own.shape[:2], form.kv_heads, width)

    def begin(self, batch: StepBatch) -> None:
        """Start a step."""
        self.batch = batch
        numbers = self.config.heads * self.config.head_dim
        entries = int(batch.slots[: batch.singles].sum()) + batch.singles
        self._decode_ns = _DECODE_NS * numbers * entries
        self._tiles = self._cut(batch)
        seen = sum(chunk.count * (2 * chunk.past + chunk.count) // 2 for chunk in batch.chunks)
        self._prefill_ns = _PREFILL_NS * numbers * seen

    def __call__(self, layer: int, qkv: Tensor, norm: HeadNorm | None) -> Tensor:
        """Attend in one layer (see `PagedAttention`)."""
        return self._compute(layer, qkv, norm, None).view(self.batch.size, -1)

    def compute(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in one layer for rotated parts (see `PagedAttention`)."""
        return self._compute(layer, torch.cat((query, key, value), 1), None, sinks)

    def _compute(
        self, layer: int, qkv: Tensor, norm: HeadNorm | None, sinks: Tensor | None
    ) -> Tensor:
        batch, form, size = self.batch, self._forms[layer], self.block_size
        heads = qkv.view(batch.size, -1, form.head_dim)
        out = qkv.new_empty((batch.size, form.heads, form.head_dim))
        array, result, kv = stored(heads), stored(out), self._layers[layer]
        norms, eps = self._no_norm, 0.0
        if norm is not None:
            norms, eps = self._norm(layer, norm), norm.eps
        rotation = (norms, eps, self._tables[form.head_dim])
        lone = self._no_sinks if sinks is None else sinks.float().numpy()
        scoring = (form.scale, form.window, form.softcap, lone)
        cached = (batch.locations, self.tables, kv, self._scales[layer], size)
        if batch.singles:
            tasks = (0, batch.singles * form.kv_heads)
            mass = None if self.watch is None else self.watch.target(layer)
            queries = _padded(form.heads // form.kv_heads)
            arguments = (array, rotation, cached, scoring, queries, result, mass)
            DECODE(self._decode_ns, tasks, *arguments)
        if batch.chunks:
            tokens = (batch.singles, batch.size)
            ROTATE_AND_STORE(1.0 * heads.numel(), tokens, array, rotation, cached)
            self._prefill(layer, array, cached, scoring, result)
        return out

    def _prefill(
        self, layer: int, qkv: Stored, cached: PagedLayer, scoring: Scoring, out: Stored
    ) -> None:
        heads, size = out.shape[1], self.block_size
        if self.watch is None:
            tasks = (0, len(self._tiles) * heads)
            PREFILL(self._prefill_ns, tasks, qkv, self._tiles, cached, scoring, out, None)
            return
        entries = self._tiles[:, _TILE_COUNT] + self._tiles[:, _TILE_SLOT]
        width = -(-int(entries.max()) // size) * size
        step = max(1, _MAX_SUMS // (heads * width))
        for at in range(0, len(self._tiles), step):
            tiles = self._tiles[at : at + step]
            sums = np.empty((len(tiles), heads, width), dtype=np.float32)
            work_ns = self._prefill_ns * len(tiles) / len(self._tiles)
            PREFILL(work_ns, (0, len(tiles) * heads), qkv, tiles, cached, scoring, out, sums)
            self.watch.absorb(layer, sums, tiles, self._folds[at : at + step], self.tables)

    def _cut(self, batch: StepBatch) -> Ints:
        if self.watch is None or not batch.chunks:
            return _tiles(batch.chunks)
        cuts = self.watch.cuts(batch)
        tiles = _tiles(batch.chunks, cuts)
        self._folds = np.isin(tiles[:, _TILE_FIRST], cuts)
        return tiles

    def _norm(self, layer: int, norm: HeadNorm) -> Stored:
        if layer not in self._norms:
            self._norms[layer] = stored(torch.stack((norm.query, norm.key)))
        return self._norms[layer]


def _padded(group: int) -> int:
    """Round up to 1, 2, 4 or a multiple of 8, the row counts of the kernels' products."""
    return next((rows for rows in (1, 2, 4) if group <= rows), -(-group // 8) * 8)


def _tiles(chunks: list[PromptChunk], cuts: Ints | None = None) -> Ints:
    tiles = []
    for chunk in chunks:
        stop = chunk.first + chunk.count
        within = [] if cuts is None else cuts[(cuts > chunk.first) & (cuts < stop)].tolist()
        for start, end in pairwise((chunk.first, *within, stop)):
            for at in range(start, end, TILE):
                slot = chunk.past + at - chunk.first
                tiles.append((at, min(TILE, end - at), slot, chunk.row))
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)


@fast
def rotate(head: Stored, norm: Stored, eps: float, turn: Floats, scale: float, out: Floats) -> None:
    """Normalize a head if `norm` is not empty, apply RoPE (cosines, then sines), and scale."""
    width = len(out)
    half = width // 2
    factor = np.float32(1.0)
    if len(norm):
        square = np.float32(0.0)
        for d in range(width):
            square += widen(head[d]) * widen(head[d])
        factor = np.float32(1.0) / np.sqrt(square / np.float32(width) + np.float32(eps))
    factor = factor * np.float32(scale)
    for d in range(half):
        first, second = widen(head[d]) * factor, widen(head[half + d]) * factor
        if len(norm):
            first, second = first * widen(norm[d]), second * widen(norm[half + d])
        out[d] = first * turn[d] - second * turn[half + d]
        out[half + d] = second * turn[d] + first * turn[half + d]


@fast
def softmax(scores: Floats, entries: int, lanes: Floats, sink: float) -> None:
    """Apply softmax to a row's first `entries` scores and a sink; `lanes` as in `row_max`."""
    largest = max(row_max(scores, entries, lanes), np.float32(sink))
    total = exponential(np.float32(sink) - largest) if sink > -np.inf else np.float32(0.0)
    for t in range(entries):
        weight = exponential(scores[t] - largest)
        scores[t] = weight
        total += weight
    scale = np.float32(1.0) / total
    for t in range(entries):
        scores[t] *= scale


@fast
def multiply(
    a: int, a_stride: int, b: int, b_stride: int, c: int, c_stride: int, depth: int, kv: Stored,
    rows: int,
) -> None:  # fmt: skip
    """Call `product` with a literal number of rows."""
    if rows == 1:
        product(a, a_stride, b, b_stride, c, c_stride, depth, kv, 1)
    elif rows == 2:
        product(a, a_stride, b, b_stride, c, c_stride, depth, kv, 2)
    elif rows == 4:
        product(a, a_stride, b, b_stride, c, c_stride, depth, kv, 4)
    else:
        product(a, a_stride, b, b_stride, c, c_stride, depth, kv, 8)


@fast
def attention_probabilities(
    query: Floats, kv: Stored, scales: Stored, table: Ints, head: int, entries: int,
    max_entries: int, block_size: int, scoring: Scoring, scores: Floats,
) -> int:  # fmt: skip
    """Write one KV head's attention probabilities to `scores` (rows, slots), zero-padded.

    `scoring` has a sink per row, or one. Returns the first block that a row attends to.
    """
    _, window, softcap, sinks = scoring
    rows, width = query.shape
    stride = scores.shape[1]
    item = kv.itemsize
    base = kv.ctypes.data + head * kv.strides[2]
    step = min(rows, 8)
    scores[:] = np.float32(0.0)
    start = max(0, entries - window) if window else 0
    first_block = start // block_size
    for block in range(first_block, stride // block_size):
        keys = base + table[block] * kv.strides[0]
        for first in range(0, rows, step):
            for t in range(0, block_size, LANES):
                multiply(
                    query.ctypes.data + first * width * _FLOAT_BYTES, width,
                    keys + t * item, block_size,
                    scores.ctypes.data + (first * stride + block * block_size + t) * _FLOAT_BYTES,
                    stride, width, kv, step,
                )  # fmt: skip
        if len(scales):
            apply_scales(scores, scales[table[block], KEYS, head], block * block_size)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows):
        seen = min(entries + row, max_entries)
        start = max(0, seen - window) if window else 0
        if softcap:
            for t in range(start, seen):
                scores[row, t] = np.float32(softcap) * np.tanh(scores[row, t] / np.float32(softcap))
        sink = np.float32(-np.inf)
        if len(sinks):
            sink = sinks[min(row, len(sinks) - 1)]
        softmax(scores[row, start:], seen - start, lanes, float(sink))
        scores[row, :start] = np.float32(0.0)
        scores[row, seen:] = np.float32(0.0)
    return first_block


@fast
def weighted_values(
    scores: Floats, kv: Stored, scales: Stored, table: Ints, head: int, first_block: int,
    entries: int, block_size: int, out: Floats,
) -> None:  # fmt: skip
    """Sum the values of a sequence's entries up to `entries`, weighted by `scores`.

    Scales of values are multiplied into `scores`.
    """
    rows, width = out.shape
    stride = scores.shape[1]
    base = kv.ctypes.data + head * kv.strides[2] + kv.strides[1]
    step = min(rows, 8)
    out[:] = np.float32(0.0)
    for block in range(first_block, stride // block_size):
        values = base + table[block] * kv.strides[0]
        depth = min(block_size, entries - block * block_size)
        if len(scales):
            apply_scales(scores, scales[table[block], VALUES, head], block * block_size)
        for first in range(0, rows, step):
            for d in range(0, width, LANES):
                multiply(
                    scores.ctypes.data + (first * stride + block * block_size) * _FLOAT_BYTES,
                    stride, values + d * kv.itemsize, width,
                    out.ctypes.data + (first * width + d) * _FLOAT_BYTES, width, depth, kv, step,
                )  # fmt: skip


@fast
def apply_scales(scores: Floats, scales: Stored, first: int) -> None:
    """Multiply the scores of a block's entries, from slot `first` on, by their scales."""
    for row in range(len(scores)):
        for t in range(len(scales)):
            scores[row, first + t] *= widen(scales[t])


@fast
def put_scale(head: Stored, scales: Stored, offset: int) -> Any:
    """Store the int8 scale of a key or value at `offset`; return its inverse."""
    largest = np.float32(0.0)
    for d in range(len(head)):
        largest = max(largest, abs(widen(head[d])))
    scales[offset] = narrow(largest / np.float32(127.0), scales)
    scale = widen(scales[offset])
    return np.float32(1.0) / scale if scale > 0 else np.float32(0.0)


@fast
def store(
    key: Floats, value: Stored, kv: Stored, scales: Stored, table: Ints, head: int, slot: int,
    block_size: int,
) -> None:  # fmt: skip
    """Store a rotated key and a value in slot `slot` of a sequence."""
    block, offset = table[slot // block_size], slot % block_size
    keys, values = kv[block, KEYS, head], kv[block, VALUES, head]
    key_unit = value_unit = np.float32(1.0)
    if len(scales):
        key_unit = put_scale(key, scales[block, KEYS, head], offset)
        value_unit = put_scale(value, scales[block, VALUES, head], offset)
    for d in range(len(key)):
        keys[d * block_size + offset] = narrow(key[d] * key_unit, kv)
        values[offset * len(key) + d] = narrow(widen(value[d]) * value_unit, kv)


@fast
def add_mass(
    scores: Floats, counted: int, target: MassTarget, head: int, table: Ints, own: int,
    entries: int, block_size: int,
) -> None:  # fmt: skip
    """Add one head's probabilities to the mass of a sequence's own entries."""
    numbers, layer, _ = target
    start, stride = (own + block_size - 1) // block_size, scores.shape[1]
    for slot in range(own, min(start * block_size, entries)):
        block, offset = table[slot // block_size], slot % block_size
        for row in range(counted):
            numbers[block, layer, head, MASS_LINE, offset] += scores[row, slot]
    lines = numbers.ctypes.data + layer * numbers.strides[1] + head * numbers.strides[2]
    lines += MASS_LINE * numbers.strides[3]
    for block in range(start, (entries + block_size - 1) // block_size):
        mass = lines + table[block] * numbers.strides[0]
        for t in range(0, block_size, LANES):
            source = scores.ctypes.data + (block * block_size + t) * _FLOAT_BYTES
            accumulate(mass + t * _FLOAT_BYTES, source, stride, counted)


@fast
def decode(
    tasks: RowRange, qkv: Stored, rotation: HeadRotation, layer: PagedLayer, scoring: Scoring,
    queries: int, out: Stored, mass: Any,
) -> None:  # fmt: skip
    """Normalize, rotate, store and attend for tokens of distinct sequences.

    `qkv` is (tokens, heads + 2 kv_heads, head_dim); `mass` None skips it (a separate
    specialization).
    """
    norms, eps, turns = rotation
    locations, tables, kv, scales, block_size = layer
    _, heads, width = out.shape
    kv_heads = kv.shape[2]
    group = heads // kv_heads
    scale, window, softcap, sinks = scoring
    query = np.zeros((queries, width), np.float32)
    result = np.empty((queries, width), np.float32)
    key = np.empty(width, np.float32)
    scratch = np.empty(queries * tables.shape[1] * block_size, np.float32)
    for task in range(tasks[0], tasks[1]):
        token, head = task // kv_heads, task % kv_heads
        turn, slot = turns[locations[POSITION, token]], locations[SLOT, token]
        table = tables[locations[ROW, token]]
        rotate(qkv[token, heads + head], norms[KEY_NORM], eps, turn, 1.0, key)
        value = qkv[token, heads + kv_heads + head]
        store(key, value, kv, scales, table, head, slot, block_size)
        for j in range(group):
            rotate(qkv[token, head * group + j], norms[QUERY_NORM], eps, turn, scale, query[j])
        stride = (slot + block_size) // block_size * block_size
        scores = scratch[: queries * stride].reshape(queries, stride)
        own = (scale, window, softcap, sinks[head * group : (head + 1) * group])
        first = attention_probabilities(
            query, kv, scales, table, head, slot + 1, slot + 1, block_size, own, scores
        )
        if mass is not None:
            _, _, owns = mass
            owned = owns[locations[ROW, token]]
            add_mass(scores, group, mass, head, table, owned, slot + 1, block_size)
        weighted_values(scores, kv, scales, table, head, first, slot + 1, block_size, result)
        for j in range(group):
            for d in range(width):
                out[token, head * group + j, d] = narrow(result[j, d], out)


@fast
def rotate_and_store(
    tokens: RowRange, qkv: Stored, rotation: HeadRotation, layer: PagedLayer
) -> None:
    """Normalize and rotate queries and keys of tokens in place; store keys and values."""
    norms, eps, turns = rotation
    locations, tables, kv, scales, block_size = layer
    width = qkv.shape[2]
    kv_heads = kv.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    turned = np.empty(width, np.float32)
    for token in range(tokens[0], tokens[1]):
        turn, slot = turns[locations[POSITION, token]], locations[SLOT, token]
        table = tables[locations[ROW, token]]
        for head in range(heads + kv_heads):
            norm = norms[KEY_NORM if head >= heads else QUERY_NORM]
            rotate(qkv[token, head], norm, eps, turn, 1.0, turned)
            for d in range(width):
                qkv[token, head, d] = narrow(turned[d], qkv)
            if head >= heads:
                value = qkv[token, head + kv_heads]
                store(turned, value, kv, scales, table, head - heads, slot, block_size)


@fast
def prefill(
    tasks: RowRange, qkv: Stored, tiles: Ints, layer: PagedLayer, scoring: Scoring, out: Stored,
    sums: Any,
) -> None:  # fmt: skip
    """Attend for `tiles` of consecutive chunk tokens, after `rotate_and_store`.

    `tiles` (tiles, 4) holds first token, count, first slot and batch row. `sums` (tiles, heads,
    slots) receives each entry's summed probabilities; None skips them (a separate specialization).
    """
    _, tables, kv, scales, block_size = layer
    _, heads, width = out.shape
    group = heads // kv.shape[2]
    scale, window, softcap, sinks = scoring
    query = np.zeros((TILE, width), np.float32)
    result = np.empty((TILE, width), np.float32)
    for task in range(tasks[0], tasks[1]):
        tile, head = task // heads, task % heads
        first, count, slot, row = tiles[tile]
        for j in range(count):
            for d in range(width):
                query[j, d] = widen(qkv[first + j, head, d]) * np.float32(scale)
        rows = 1
        while rows < count:
            rows *= 2
        entries, table = slot + count, tables[row]
        stride, kv_head = (entries + block_size - 1) // block_size * block_size, head // group
        scores = np.empty((rows, stride), np.float32)
        own = (scale, window, softcap, sinks[head : head + 1])
        first_block = attention_probabilities(
            query[:rows], kv, scales, table, kv_head, slot + 1, entries, block_size, own, scores
        )
        if sums is not None:
            sums[tile, head, :stride] = np.float32(0.0)
            for t in range(0, stride, LANES):
                target = sums[tile, head].ctypes.data + t * _FLOAT_BYTES
                accumulate(target, scores.ctypes.data + t * _FLOAT_BYTES, stride, count)
        weighted_values(
            scores, kv, scales, table, kv_head, first_block, entries, block_size, result[:rows]
        )
        for j in range(count):
            for d in range(width):
                out[first + j, head, d] = narrow(result[j, d], out)


@fast
def parallel_decode(
    start: int, threads: int, parts: int, tasks: RowRange, qkv: Stored, rotation: HeadRotation,
    layer: PagedLayer, scoring: Scoring, queries: int, out: Stored, mass: Any,
) -> None:  # fmt: skip
    """Run `decode` on several threads."""
    arguments = (tasks, qkv, rotation, layer, scoring, queries, out, mass)
    run_parallel(start, threads, parts, decode, arguments)


@fast
def parallel_rotate_and_store(
    start: int, threads: int, parts: int, tokens: RowRange, qkv: Stored, rotation: HeadRotation,
    layer: PagedLayer,
) -> None:  # fmt: skip
    """Run `rotate_and_store` on several threads."""
    run_parallel(start, threads, parts, rotate_and_store, (tokens, qkv, rotation, layer))


@fast
def parallel_prefill(
    start: int, threads: int, parts: int, tasks: RowRange, qkv: Stored, tiles: Ints,
    layer: PagedLayer, scoring: Scoring, out: Stored, sums: Any,
) -> None:  # fmt: skip
    """Run `prefill` on several threads."""
    run_parallel(start, threads, parts, prefill, (tasks, qkv, tiles, layer, scoring, out, sums))


DECODE = ParallelKernel(decode, parallel_decode)
ROTATE_AND_STORE = ParallelKernel(rotate_and_store, parallel_rotate_and_store)
PREFILL = ParallelKernel(prefill, parallel_prefill)
