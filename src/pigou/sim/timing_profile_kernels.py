"""The time of steps by layer tables, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import inlined, kernel
from pigou.request import Ints, Nanos

Floats = NDArray[np.float64]


@inlined
def _bracket(axis: Floats, first: int, value: float) -> int:
    """Find i, at least `first`, such that `value` is between axis[i] and axis[i + 1].

    Outside the axis it is the first, or the last, pair; with a single point it is that point.
    """
    low, high = first, axis.shape[0] - 2
    while low < high:
        middle = (low + high + 1) // 2
        if axis[middle] <= value:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def _share(axis: Floats, at: int, value: float) -> float:
    """How far `value` is from axis[at] to axis[at + 1]; below the first 0, beyond the last > 1."""
    if at + 1 >= axis.shape[0] or value <= axis[at]:
        return 0.0
    return float((value - axis[at]) / (axis[at + 1] - axis[at]))


@inlined
def _decodes(
    grid: Floats, chunk: int, key: int, decodes: Floats, kvs: Floats, count: float, kv: float
) -> float:
    """Time at a point of the first two axes, linear in the number of decodes and their length."""
    if count == 0.0:
        return float(grid[chunk, key, 0, 0])
    at = _bracket(kvs, 0, kv)
    share = _share(kvs, at, kv)
    after = min(at + 1, kvs.shape[0] - 1)
    low = _bracket(decodes, 1, count)
    part = _share(decodes, low, count)
    high = min(low + 1, decodes.shape[0] - 1)
    less = grid[chunk, key, low, at] * (1.0 - share) + grid[chunk, key, low, after] * share
    more = grid[chunk, key, high, at] * (1.0 - share) + grid[chunk, key, high, after] * share
    return float(less * (1.0 - part) + more * part)


@inlined
def _chunk(
    grid: Floats, chunk: int, chunks: Floats, keys: Floats, decodes: Floats, kvs: Floats,
    reach: float, count: float, kv: float,
) -> float:  # fmt: skip
    """Time at a measured chunk length whose tokens read `reach` entries on average.

    A chunk of c tokens after k cached ones reads k + c/2 on average. Several short prompts read
    less than one of their length: the line from k = 0 to k = c goes on below, down to the time
    of the shortest chunk.
    """
    history = reach - chunks[chunk] / 2.0
    if history >= 0.0:
        at = _bracket(keys, 0, history)
        share = _share(keys, at, history)
        after = min(at + 1, keys.shape[0] - 1)
        near = _decodes(grid, chunk, at, decodes, kvs, count, kv)
        far = _decodes(grid, chunk, after, decodes, kvs, count, kv)
        return near * (1.0 - share) + far * share
    none = _decodes(grid, chunk, 0, decodes, kvs, count, kv)
    later = 0
    while later + 1 < keys.shape[0] and keys[later] < chunks[chunk]:
        later += 1
    if later == 0:
        return none
    slope = (_decodes(grid, chunk, later, decodes, kvs, count, kv) - none) / keys[later]
    least = min(none, _decodes(grid, 1, 0, decodes, kvs, count, kv))
    return float(max(none + max(slope, 0.0) * history, least))


@inlined
def _attention(
    grid: Floats, chunks: Floats, keys: Floats, decodes: Floats, kvs: Floats,
    tokens: float, reach: float, count: float, kv: float,
) -> float:  # fmt: skip
    """Time of one layer's attention: `tokens` of prompts, and `count` decodes of length `kv`."""
    if tokens == 0.0:
        return _decodes(grid, 0, 0, decodes, kvs, count, kv)
    at = _bracket(chunks, 1, tokens)
    share = _share(chunks, at, tokens)
    after = min(at + 1, chunks.shape[0] - 1)
    less = _chunk(grid, at, chunks, keys, decodes, kvs, reach, count, kv)
    if share == 0.0:
        return less
    more = _chunk(grid, after, chunks, keys, decodes, kvs, reach, count, kv)
    return less * (1.0 - share) + more * share


@inlined
def _ahead(table: Floats, at: int) -> float:
    """Read a table of whole numbers; beyond its end in proportion."""
    last = table.shape[0] - 1
    return float(table[at]) if at <= last else float(table[last] * (at / last))


@kernel
def profile_durations(
    counts: Ints,
    kv_lens: Ints,
    repeat: int,
    dense: Floats,
    heads: Floats,
    layers: float,
    skew: float,
    chunks: Floats,
    keys: Floats,
    decodes: Floats,
    kvs: Floats,
    grid: Floats,
) -> Nanos:
    """Return the nanoseconds of each of `repeat` steps, shape (repeat,).

    Args:
        counts: tokens that each entry computes.
        kv_lens: cache entries of each before the first step.
        repeat: steps; in each, entries have as many more cached tokens as they computed before.
        dense: time of all layers but attention, by tokens of the step.
        heads: time of the output layer and the sampler, by entries of the step.
        layers: attention layers.
        skew: weight of the longest decode against the mean one, 0 to 1.
        chunks: axis 0 of `grid`, and so on.
        keys: axis 1.
        decodes: axis 2.
        kvs: axis 3.
        grid: time of one layer's attention.
    """
    count, total, longest, prompt, squares, twice = 0, 0, 0, 0, 0, 0
    for i in range(counts.shape[0]):
        tokens, kv = int(counts[i]), int(kv_lens[i])
        if tokens == 1:
            count += 1
            total += kv
            longest = max(longest, kv)
        else:
            prompt += tokens
            squares += tokens * tokens
            twice += tokens * (2 * kv + tokens)
    fixed = _ahead(dense, prompt + count) + _ahead(heads, counts.shape[0])
    durations = np.empty(repeat, dtype=np.int64)
    for step in range(repeat):
        mean = (total + count * step) / count if count else 0.0
        reach = (twice + 2 * squares * step) / (2 * prompt) if prompt else 0.0
        time = _attention(
            grid, chunks, keys, decodes, kvs, float(prompt), reach, float(count), mean
        )
        most = float(longest + step)
        if skew > 0.0 and most > mean:
            worst = _attention(
                grid, chunks, keys, decodes, kvs, float(prompt), reach, float(count), most
            )
            time += skew * max(worst - time, 0.0)
        durations[step] = max(int(fixed + layers * time + 0.5), 1)
    return durations
