"""Compiled kernels for the CPU: what lies between the products of a step.

Arrays hold float32, or bfloat16 as uint16; sums are in float32. `kv` is one layer of the cache,
shape (blocks, 2, kv_heads, head_dim * block_size): a head's keys dimension by dimension, so
that the scores of a block come out side by side, its values token by token.

Kernels that call one another live in this file, since numba's cache watches no other; after a
change in simd.py or elementary.py the cached ones must be removed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.request import Ints
from pigou.runtime.simd import LANES, accumulate, exponential, fast, narrow, product, widen
from pigou.runtime.thread_pool import team

Stored = NDArray[Any]
Floats = NDArray[np.float32]

#: Tokens that `prefill` attends with at once.
TILE = 8
#: First and last row, the last not included, that a call works on.
Range = tuple[int, int]


@fast
def add_norm(
    rows: Range, x: Stored, residual: Stored, weight: Stored, eps: float, out: Stored
) -> None:
    """Add x to the residual in place, and put the RMS norm of the sum, times weight, in out."""
    width = x.shape[1]
    sums = np.empty(width, np.float32)
    for i in range(rows[0], rows[1]):
        square = np.float32(0.0)
        for d in range(width):
            stored = narrow(widen(x[i, d]) + widen(residual[i, d]), residual)
            residual[i, d] = stored
            sums[d] = widen(stored)
            square += sums[d] * sums[d]
        scale = np.float32(1.0) / np.sqrt(square / np.float32(width) + np.float32(eps))
        for d in range(width):
            out[i, d] = narrow(sums[d] * scale * widen(weight[d]), out)


@fast
def gate(rows: Range, x: Stored, out: Stored) -> None:
    """Put silu(gate) * up in out, shape (n, width), for rows of x that hold gate, then up."""
    width = out.shape[1]
    for i in range(rows[0], rows[1]):
        for d in range(width):
            value = widen(x[i, d])
            silu = value / (np.float32(1.0) + exponential(-value))
            out[i, d] = narrow(silu * widen(x[i, width + d]), out)


@fast
def highest(row: Stored, count: int, lanes: Floats) -> Any:
    """Return the largest of the first numbers of a row, as float32.

    It is sought in 16 `lanes` (scratch, shape (16,)), or numba would go number by number.
    """
    bulk = count - count % LANES
    lanes[:] = np.float32(-np.inf)
    for start in range(0, bulk, LANES):
        for lane in range(LANES):
            number = widen(row[start + lane])
            lanes[lane] = number if number > lanes[lane] else lanes[lane]
    largest = np.float32(-np.inf)
    for lane in range(LANES):
        largest = max(largest, lanes[lane])
    for d in range(bulk, count):
        largest = max(largest, widen(row[d]))
    return largest


@fast
def argmax(rows: Range, x: Stored, out: NDArray[np.int64]) -> None:
    """Put the index of the first largest number of each row of x in out; 0 if all are NaN."""
    width = np.int32(x.shape[1])
    lanes = np.empty(LANES, np.float32)
    for i in range(rows[0], rows[1]):
        row = x[i]
        largest = highest(row, int(width), lanes)
        found = width
        for d in range(width):
            here = np.int32(d) if widen(row[d]) == largest else width
            found = here if here < found else found
        out[i] = found if found < width else 0


@fast
def rotate(head: Stored, norm: Stored, eps: float, turn: Floats, scale: float, out: Floats) -> None:
    """Norm a head, when `norm` is not empty, rotate it, and put it times `scale` in out.

    `turn` has the cosines, then the sines, of its position.
    """
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
def softmax(scores: Floats, entries: int, lanes: Floats) -> None:
    """Make the first `entries` of a row of scores into probabilities; `lanes` as in `highest`."""
    largest = highest(scores, entries, lanes)
    total = np.float32(0.0)
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
    """Call `product` with the number of rows as a literal."""
    if rows == 1:
        product(a, a_stride, b, b_stride, c, c_stride, depth, kv, 1)
    elif rows == 2:
        product(a, a_stride, b, b_stride, c, c_stride, depth, kv, 2)
    elif rows == 4:
        product(a, a_stride, b, b_stride, c, c_stride, depth, kv, 4)
    else:
        product(a, a_stride, b, b_stride, c, c_stride, depth, kv, 8)


@fast
def weigh(
    query: Floats, kv: Stored, table: Ints, head: int, entries: int, last: int, size: int,
    scores: Floats,
) -> None:  # fmt: skip
    """Find the probabilities that some queries of one KV head give to a sequence's entries.

    Args:
        query: already scaled, shape (rows, head_dim); rows is 1, 2, 4, or a multiple of 8.
        kv: a layer of the cache.
        table: block ids of the sequence.
        head: the KV head.
        entries: that the first query sees, at least 1.
        last: most entries that a query sees: each sees one more than the one before, up to this.
        size: tokens in a block.
        scores: is set to them, 0 where there are none, shape (rows, slots of the blocks).
    """
    rows, width = query.shape
    stride = scores.shape[1]
    item = kv.itemsize
    base = kv.ctypes.data + head * kv.strides[2]
    step = min(rows, 8)
    scores[:] = np.float32(0.0)
    for block in range(stride // size):
        keys = base + table[block] * kv.strides[0]
        for first in range(0, rows, step):
            for t in range(0, size, LANES):
                multiply(
                    query.ctypes.data + first * width * 4, width, keys + t * item, size,
                    scores.ctypes.data + (first * stride + block * size + t) * 4, stride,
                    width, kv, step,
                )  # fmt: skip
    lanes = np.empty(LANES, np.float32)
    for row in range(rows):
        seen = min(entries + row, last)
        softmax(scores[row], seen, lanes)
        scores[row, seen:] = np.float32(0.0)


@fast
def mix(
    scores: Floats, kv: Stored, table: Ints, head: int, last: int, size: int, out: Floats
) -> None:
    """Sum up the values of a sequence's first `last` entries by the probabilities of `weigh`."""
    rows, width = out.shape
    stride = scores.shape[1]
    base = kv.ctypes.data + head * kv.strides[2] + kv.strides[1]
    step = min(rows, 8)
    out[:] = np.float32(0.0)
    for block in range(stride // size):
        values = base + table[block] * kv.strides[0]
        depth = min(size, last - block * size)
        for first in range(0, rows, step):
            for d in range(0, width, LANES):
                multiply(
                    scores.ctypes.data + (first * stride + block * size) * 4, stride,
                    values + d * kv.itemsize, width, out.ctypes.data + (first * width + d) * 4,
                    width, depth, kv, step,
                )  # fmt: skip


@fast
def store(
    key: Floats, value: Stored, kv: Stored, table: Ints, head: int, slot: int, size: int
) -> None:
    """Store a rotated key and a value in the sequence's entry `slot`."""
    block, offset = table[slot // size], slot % size
    keys, values = kv[block, 0, head], kv[block, 1, head]
    for d in range(len(key)):
        keys[d * size + offset] = narrow(key[d], kv)
        values[offset * len(key) + d] = value[d]


@fast
def note(
    scores: Floats, counted: int, numbers: Floats, layer: int, head: int, table: Ints, own: int,
    entries: int, size: int,
) -> None:  # fmt: skip
    """Add to the mass of a sequence's entries from `own` on what one head's queries gave them.

    Args:
        scores: of `weigh`.
        counted: queries, the first ones, that count.
        numbers: `Stats.numbers`.
        layer: of the head.
        head: the KV head.
        table: block ids of the sequence.
        own: its first entry that it need not share.
        entries: that it has.
        size: tokens in a block.
    """
    start, stride = (own + size - 1) // size, scores.shape[1]
    for slot in range(own, min(start * size, entries)):
        for row in range(counted):
            numbers[table[slot // size], layer, head, 1, slot % size] += scores[row, slot]
    lines = numbers.ctypes.data + layer * numbers.strides[1] + head * numbers.strides[2]
    lines += numbers.strides[3]
    for block in range(start, (entries + size - 1) // size):
        mass = lines + table[block] * numbers.strides[0]
        for t in range(0, size, LANES):
            source = scores.ctypes.data + (block * size + t) * 4
            accumulate(mass + t * 4, source, stride, counted)


@fast
def decode(
    tasks: Range, qkv: Stored, norms: Stored, eps: float, turns: Floats, places: Ints,
    tables: Ints, kv: Stored, size: int, queries: int, out: Stored, watch: Any,
) -> None:  # fmt: skip
    """Norm, rotate, store and attend for tokens of which each has a sequence of its own.

    Args:
        tasks: range of token * kv_heads + KV head.
        qkv: queries, keys and values, shape (at least tokens, heads + 2 kv_heads, head_dim).
        norms: weights of the query heads' norm and of the key heads', shape (2, head_dim), or
            (2, 0) for none.
        eps: of these norms.
        turns: cosines and sines by position, shape (positions, head_dim).
        places: position, slot and row of the batch of each token, shape (3, at least tokens).
        tables: block ids by row of the batch.
        kv: a layer of the cache.
        size: tokens in a block.
        queries: of a KV head, rounded up to 1, 2, 4 or a multiple of 8.
        out: shape (at least tokens, heads, head_dim).
        watch: where each entry's probabilities are added up: `numbers` and `layer` of `note`, and
            each row's `own`, shape (rows,); None (which is another specialisation) for nowhere.
    """
    _, heads, width = out.shape
    kv_heads = kv.shape[2]
    group = heads // kv_heads
    scale = 1.0 / np.sqrt(width)
    query = np.zeros((queries, width), np.float32)
    result = np.empty((queries, width), np.float32)
    key = np.empty(width, np.float32)
    scratch = np.empty(queries * tables.shape[1] * size, np.float32)
    for task in range(tasks[0], tasks[1]):
        token, head = task // kv_heads, task % kv_heads
        turn, slot, table = turns[places[0, token]], places[1, token], tables[places[2, token]]
        rotate(qkv[token, heads + head], norms[1], eps, turn, 1.0, key)
        store(key, qkv[token, heads + kv_heads + head], kv, table, head, slot, size)
        for j in range(group):
            rotate(qkv[token, head * group + j], norms[0], eps, turn, scale, query[j])
        stride = (slot + size) // size * size
        scores = scratch[: queries * stride].reshape(queries, stride)
        weigh(query, kv, table, head, slot + 1, slot + 1, size, scores)
        if watch is not None:
            numbers, layer, owns = watch
            own = owns[places[2, token]]
            note(scores, group, numbers, layer, head, table, own, slot + 1, size)
        mix(scores, kv, table, head, slot + 1, size, result)
        for j in range(group):
            for d in range(width):
                out[token, head * group + j, d] = narrow(result[j, d], out)


@fast
def place(
    tokens: Range, qkv: Stored, norms: Stored, eps: float, turns: Floats, places: Ints,
    tables: Ints, kv: Stored, size: int,
) -> None:  # fmt: skip
    """Norm and rotate queries and keys in place, and store keys and values, of some tokens.

    The other arguments are those of `decode`.
    """
    width = qkv.shape[2]
    kv_heads = kv.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    turned = np.empty(width, np.float32)
    for token in range(tokens[0], tokens[1]):
        turn, slot, table = turns[places[0, token]], places[1, token], tables[places[2, token]]
        for head in range(heads + kv_heads):
            rotate(qkv[token, head], norms[int(head >= heads)], eps, turn, 1.0, turned)
            for d in range(width):
                qkv[token, head, d] = narrow(turned[d], qkv)
            if head >= heads:
                store(turned, qkv[token, head + kv_heads], kv, table, head - heads, slot, size)


@fast
def prefill(
    tasks: Range, qkv: Stored, tiles: Ints, tables: Ints, kv: Stored, size: int, out: Stored,
    sums: Any,
) -> None:  # fmt: skip
    """Attend for successive tokens of chunks, after `place`.

    Args:
        tasks: range of tile * heads + query head.
        qkv: rotated queries, shape (at least tokens, heads + 2 kv_heads, head_dim).
        tiles: of up to `TILE` successive tokens: first token, how many, slot of the first, and row
            of the batch, shape (tiles, 4).
        tables: block ids by row of the batch.
        kv: a layer of the cache.
        size: tokens in a block.
        out: shape (at least tokens, heads, head_dim).
        sums: is set to each entry's probabilities, summed over the tile's queries, shape
            (tiles, heads, at least the slots of its blocks); None (another specialisation) where
            nobody asks.
    """
    _, heads, width = out.shape
    group = heads // kv.shape[2]
    scale = np.float32(1.0 / np.sqrt(width))
    query = np.zeros((TILE, width), np.float32)
    result = np.empty((TILE, width), np.float32)
    for task in range(tasks[0], tasks[1]):
        tile, head = task // heads, task % heads
        first, count, slot, row = tiles[tile]
        for j in range(count):
            for d in range(width):
                query[j, d] = widen(qkv[first + j, head, d]) * scale
        rows = 1
        while rows < count:
            rows *= 2
        last = slot + count
        stride, kv_head = (last + size - 1) // size * size, head // group
        scores = np.empty((rows, stride), np.float32)
        weigh(query[:rows], kv, tables[row], kv_head, slot + 1, last, size, scores)
        if sums is not None:
            sums[tile, head, :stride] = np.float32(0.0)
            for t in range(0, stride, LANES):
                place = sums[tile, head].ctypes.data + t * 4
                accumulate(place, scores.ctypes.data + t * 4, stride, count)
        mix(scores, kv, tables[row], kv_head, last, size, result[:rows])
        for j in range(count):
            for d in range(width):
                out[first + j, head, d] = narrow(result[j, d], out)


# Each of these calls the kernel of its name on the threads of `start` (see `team`). The first three
# arguments are those of `team`, the others the kernel's.


@fast
def spread_add_norm(
    start: int, threads: int, parts: int, rows: Range, x: Stored, residual: Stored,
    weight: Stored, eps: float, out: Stored,
) -> None:  # fmt: skip
    """Call `add_norm` on several threads."""
    team(start, threads, parts, add_norm, (rows, x, residual, weight, eps, out))


@fast
def spread_gate(start: int, threads: int, parts: int, rows: Range, x: Stored, out: Stored) -> None:
    """Call `gate` on several threads."""
    team(start, threads, parts, gate, (rows, x, out))


@fast
def spread_argmax(
    start: int, threads: int, parts: int, rows: Range, x: Stored, out: NDArray[np.int64]
) -> None:
    """Call `argmax` on several threads."""
    team(start, threads, parts, argmax, (rows, x, out))


@fast
def spread_decode(
    start: int, threads: int, parts: int, tasks: Range, qkv: Stored, norms: Stored, eps: float,
    turns: Floats, places: Ints, tables: Ints, kv: Stored, size: int, queries: int, out: Stored,
    watch: Any,
) -> None:  # fmt: skip
    """Call `decode` on several threads."""
    arguments = (tasks, qkv, norms, eps, turns, places, tables, kv, size, queries, out, watch)
    team(start, threads, parts, decode, arguments)


@fast
def spread_place(
    start: int, threads: int, parts: int, tokens: Range, qkv: Stored, norms: Stored, eps: float,
    turns: Floats, places: Ints, tables: Ints, kv: Stored, size: int,
) -> None:  # fmt: skip
    """Call `place` on several threads."""
    team(start, threads, parts, place, (tokens, qkv, norms, eps, turns, places, tables, kv, size))


@fast
def spread_prefill(
    start: int, threads: int, parts: int, tasks: Range, qkv: Stored, tiles: Ints, tables: Ints,
    kv: Stored, size: int, out: Stored, sums: Any,
) -> None:  # fmt: skip
    """Call `prefill` on several threads."""
    team(start, threads, parts, prefill, (tasks, qkv, tiles, tables, kv, size, out, sums))
