"""Compiled `ReturnModel` for the CPU: entries are summed up and scored where they lie.

A block's entries lie side by side and go through the networks so, a head at a time: nothing is
gathered. `numbers` and `ids` are as in `pigou.runtime.token_eviction.entry_stats_kernels`. After a
change in simd.py what numba cached must be removed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.request import Ints
from pigou.runtime.kv_cache import KEYS, VALUES
from pigou.runtime.simd import LANES, exponential, fast, logarithm, product, widen
from pigou.runtime.token_eviction.entry_stats_kernels import (
    AFTER_MASS_LINE,
    MASS_LINE,
    POSITION_LINE,
)
from pigou.runtime.token_eviction.predictor import CONTENT, FLOOR, LOG_SIGMA_BOUNDS

Floats = NDArray[np.float32]
Stored = NDArray[Any]

#: Bytes of a float32.
_FLOAT_BYTES = 4
#: Hidden units that are computed at once, of which there are a multiple.
UNITS = 4
#: Entries that are scored at once: few enough that their hidden units stay near.
WIDE = 4 * LANES
#: Rows of what the second network yields.
_MEAN, _LOG_SIGMA = 0, 1


class RowStats(NamedTuple):
    """Side data of one row's entries, where it lies."""

    numbers: Floats  # `EntryStats.numbers`
    ids: Ints  # the same memory as int32
    table: Ints  # block ids of the row
    entries: int
    following: int  # position of its next token


class NetworkWeights(NamedTuple):
    """Weights of a network with one hidden layer, by layer * kv_heads + KV head."""

    into: Floats  # shape (layers * kv_heads, units, inputs)
    bias: Floats  # shape (layers * kv_heads, units)
    out: Floats  # shape (layers * kv_heads, outputs, units)


@fast
def hide(weights: Floats, bias: Floats, x: Floats, hidden: Floats) -> None:
    """Put silu(weights x + bias) in `hidden`, shape (units, columns), for x (depth, columns)."""
    units, depth = weights.shape
    columns = x.shape[1]
    for unit in range(units):
        hidden[unit] = bias[unit]
    for unit in range(0, units, UNITS):
        for at in range(0, columns, LANES):
            product(
                weights.ctypes.data + unit * depth * _FLOAT_BYTES, depth,
                x.ctypes.data + at * _FLOAT_BYTES, columns,
                hidden.ctypes.data + (unit * columns + at) * _FLOAT_BYTES, columns, depth, x, UNITS,
            )  # fmt: skip
    flat = hidden.reshape(-1)
    for i in range(len(flat)):
        flat[i] = flat[i] / (np.float32(1.0) + exponential(-flat[i]))


@fast
def show(weights: Floats, hidden: Floats, out: Floats) -> None:
    """Add weights hidden to `out`, both with columns as in `hide`; `weights` has two rows."""
    units, columns = hidden.shape
    for at in range(0, columns, LANES):
        product(
            weights.ctypes.data, units, hidden.ctypes.data + at * _FLOAT_BYTES, columns,
            out.ctypes.data + at * _FLOAT_BYTES, columns, units, hidden, 2,
        )  # fmt: skip


@fast
def turn_back(keys: Floats, cos: Floats, sin: Floats) -> None:
    """Take rotation off keys, shape (head_dim, LANES); `cos` and `sin` have half as many rows."""
    half = len(cos)
    first, second = keys[:half].reshape(-1), keys[half:].reshape(-1)
    c, s = cos.reshape(-1), sin.reshape(-1)
    for i in range(len(c)):
        a, b = first[i], second[i]
        first[i] = a * c[i] + b * s[i]
        second[i] = b * c[i] - a * s[i]


@fast
def load(keys: Stored, values: Stored, start: int, size: int, x: Floats) -> None:
    """Put keys and values of LANES of a block's entries, from `start` on, in x's rows.

    Args:
        keys: of the head's block, shape (head_dim * size,).
        values: shape (size * head_dim,).
        start: offset of the first entry.
        size: tokens in a block.
        x: written to, shape (2 * head_dim, LANES).
    """
    width = len(values) // size
    for d in range(width):
        line = keys[d * size + start : d * size + start + LANES]
        for lane in range(LANES):
            x[d, lane] = widen(line[lane])
    for lane in range(LANES):
        value = values[(start + lane) * width : (start + lane + 1) * width]
        for d in range(width):
            x[width + d, lane] = widen(value[d])


@fast
def summarize(
    kv: Stored, row: RowStats, stop: int, line: int, turns: Floats, scale: float,
    weights: NetworkWeights,
) -> None:  # fmt: skip
    """Sum up those entries of a sequence for which it was not done yet (`ReturnModel.birth`).

    Until then none of them has moved. So a slot is new in all layers and heads or in none, and
    holds the same token.

    Args:
        kv: the cache, shape (blocks, layers, 2, kv_heads, head_dim * block_size).
        row: where results are put; NaN where it was not done.
        stop: position before which they must be; others go with them, or once they are LANES.
        line: of `row.numbers`, the first that takes results.
        turns: cosines and sines by position, shape (positions, head_dim).
        weights: from keys and values to `CONTENT` numbers.
    """
    numbers, ids, table, entries, _ = row
    into, bias, out = weights
    _, layers, heads, _, size = numbers.shape
    width = turns.shape[1]
    half, unit = width // 2, np.float32(scale)
    x = np.empty((2 * width, LANES), np.float32)
    cos, sin = np.empty((half, LANES), np.float32), np.empty((half, LANES), np.float32)
    hidden = np.empty((into.shape[1], LANES), np.float32)
    content = np.empty((CONTENT, LANES), np.float32)
    new = np.empty(LANES, np.bool_)
    for first in range(0, entries, LANES):
        block, start, count = table[first // size], first % size, min(LANES, entries - first)
        some = False
        for lane in range(count):
            new[lane] = np.isnan(numbers[block, 0, 0, line, start + lane])
            soon = count == LANES or ids[block, 0, 0, POSITION_LINE, start + lane] < stop
            some = some or (new[lane] and soon)
        if not some:
            continue
        for lane in range(count):
            turn = turns[ids[block, 0, 0, POSITION_LINE, start + lane]]
            for d in range(half):
                cos[d, lane], sin[d, lane] = turn[d] * unit, turn[half + d] * unit
        for task in range(layers * heads):
            at, head = task // heads, task % heads
            load(kv[block, at, KEYS, head], kv[block, at, VALUES, head], start, size, x)
            turn_back(x[:width], cos, sin)
            hide(into[task], bias[task], x, hidden)
            content[:] = np.float32(0.0)
            show(out[task], hidden, content)
            lines = numbers[block, at, head]
            for lane in range(count):
                if new[lane]:
                    for k in range(CONTENT):
                        lines[line + k, start + lane] = content[k, lane]


@fast
def load_features(
    lines: Floats, positions: Ints, start: int, following: int, fades: Floats, x: Floats, at: int
) -> None:
    """Put LANES entries of a head's block in x's columns from `at` on, before logarithms.

    Args:
        lines: of the head's block, shape (1 + fields, size).
        positions: of its entries, shape (size,).
        start: offset of the first entry.
        following: position of the sequence's next token.
        fades: see `predict`.
        x: shape (CONTENT + scales + 1, columns).
        at: first column.
    """
    scales = len(fades)
    content_line = AFTER_MASS_LINE + scales
    mass = lines[MASS_LINE, start : start + LANES]
    for k in range(CONTENT):
        content, row = lines[content_line + k, start : start + LANES], x[k, at : at + LANES]
        for lane in range(LANES):
            row[lane] = np.float32(0.0) if np.isnan(content[lane]) else content[lane]
    for k in range(scales):
        older = lines[AFTER_MASS_LINE + k, start : start + LANES]
        row = x[CONTENT + k, at : at + LANES]
        for lane in range(LANES):
            row[lane] = older[lane] * fades[k] + mass[lane] + np.float32(FLOOR)
    row = x[CONTENT + scales, at : at + LANES]
    for lane in range(LANES):
        row[lane] = np.float32(following + 1 - positions[start + lane])


@fast
def predict(
    row: RowStats, fades: Floats, weights: NetworkWeights, last: Floats, order: Floats,
    scores: Floats, positions: Ints,
) -> None:  # fmt: skip
    """Score all entries of a sequence (`ReturnModel.value`): exp(mean + order sigma^2 / 2).

    Behind its position an entry has the mass since the last fold, a sum for each of `fades`, and
    its content.

    Args:
        fades: what is left of each sum by now, shape (scales,).
        weights: from CONTENT + scales + 1 features to mean and log sigma.
        last: bias of these two, shape (layers * kv_heads, 2).
        order: see above, shape (layers * kv_heads,).
        scores: written to, shape (layers * kv_heads, at least entries).
        positions: of entries, written to, the same shape.
    """
    numbers, ids, table, entries, following = row
    into, bias, out = weights
    _, layers, heads, _, size = numbers.shape
    x = np.ones((into.shape[2], WIDE), np.float32)
    hidden = np.empty((into.shape[1], WIDE), np.float32)
    outputs = np.empty((2, WIDE), np.float32)
    low, high = np.float32(LOG_SIGMA_BOUNDS[0]), np.float32(LOG_SIGMA_BOUNDS[1])
    for task in range(layers * heads):
        layer, head = task // heads, task % heads
        half = np.float32(0.5) * order[task]
        for first in range(0, entries, WIDE):
            count = min(WIDE, entries - first)
            for at in range(0, count, LANES):
                block, start = table[(first + at) // size], (first + at) % size
                line = ids[block, layer, head, POSITION_LINE]
                load_features(numbers[block, layer, head], line, start, following, fades, x, at)
                for lane in range(min(LANES, count - at)):
                    positions[task, first + at + lane] = line[start + lane]
            logs = x[CONTENT:].reshape(-1)
            for i in range(len(logs)):
                logs[i] = logarithm(logs[i])
            hide(into[task], bias[task], x, hidden)
            for k in range(2):
                outputs[k] = last[task, k]
            show(out[task], hidden, outputs)
            mean, log_sigma = outputs[_MEAN], outputs[_LOG_SIGMA]
            for i in range(WIDE):
                sigma = exponential(min(max(log_sigma[i], low), high))
                value = mean[i] + half * sigma * sigma
                endless = value + np.float32(np.inf)  # or NaN: neither is hidden
                mean[i] = exponential(value) if value < np.float32(87.0) else endless
            scores[task, first : first + count] = mean[:count]
