"""Triton kernels of CUDA attention: one fused store, one paged attention for prompts and decodes.

Attention follows FlashAttention-2 (Dao 2023, Algorithm 1), over block tables; a decode's context is
split over programs (FlashDecoding), whose parts `combine` joins.

| symbol | meaning |
|---|---|
| D, BS | head dimension, tokens in a block |
| G | query heads per KV head, padded to GP, a power of two |
| M = BQ GP | rows of a tile: BQ tokens of one sequence, times the query heads of a KV head |
| N | cache entries of an iteration, a multiple of BS |
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_rotated(
    q, k, v, norms, turns, positions, slots, query, cache, q_stride, k_stride, v_stride,
    block_stride, key_offset, value_offset, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, HP: tl.constexpr, BS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate one head of one token; write queries to `query`, the rest to the cache.

    With `ROTATE` heads are queries, keys, values; without, keys and values as they are. `slots`
    (tokens,) are block * BS + offset, -1 for padding; `norms` (2, D) weights of queries and keys.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not ROTATE:
        head += HEADS
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    half = tl.arange(0, HP)
    inside = half < D // 2
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    if is_query:
        source = q + token * q_stride + head * D
    elif is_value:
        source = v + token * v_stride + (head - HEADS - KV_HEADS) * D
    else:
        source = k + token * k_stride + (head - HEADS) * D
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2 + half, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        if not is_value:
            if NORM:
                square = tl.sum(first * first) + tl.sum(second * second)
                scale = tl.rsqrt(square / D + eps)
                weight = norms + tl.where(is_query, 0, D)
                first *= scale * tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
                second *= scale * tl.load(
                    weight + D // 2 + half, mask=inside, other=0.0
                ).to(tl.float32)  # fmt: skip
            turn = turns + tl.load(positions + token) * D + half
            cos = tl.load(turn, mask=inside, other=0.0)
            sin = tl.load(turn + D // 2, mask=inside, other=0.0)
            first, second = first * cos - second * sin, second * cos + first * sin
    block, offset = slot // BS, slot % BS
    if is_query:
        target = query + (token * HEADS + head) * D
        tl.store(target + half, first, mask=inside)
        tl.store(target + D // 2 + half, second, mask=inside)
    elif is_value:
        target = cache + block * block_stride + value_offset
        target += (head - HEADS - KV_HEADS) * D * BS + offset * D
        tl.store(target + half, first, mask=inside)
        tl.store(target + D // 2 + half, second, mask=inside)
    else:
        target = cache + block * block_stride + key_offset + (head - HEADS) * D * BS + offset
        tl.store(target + half * BS, first, mask=inside)
        tl.store(target + (half + D // 2) * BS, second, mask=inside)


@triton.jit
def paged_attention(
    query, cache, tables, tiles, sinks, out, parts,
    block_stride, key_offset, value_offset, table_stride, scale,
    window, softcap, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BQ: tl.constexpr, N: tl.constexpr,
    SPLITS: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of queries to its sequence's cache entries.

    `tiles` (tiles, 4): table row, first token, tokens (0 for none), slot of the first token.
    `parts` (tokens, HEADS, SPLITS, D + 2) receives each split's sums, maximum and weight; with one
    split, `out` (tokens, HEADS, D) the result. `window` 0 and `softcap` 0.0 are off.
    """
    G: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + tile * 4)
    first = tl.load(tiles + tile * 4 + 1)
    count = tl.load(tiles + tile * 4 + 2)
    slot = tl.load(tiles + tile * 4 + 3)
    if count == 0:
        return
    m = tl.arange(0, BQ * GP)
    token, group = m // GP, m % GP
    real = (token < count) & (group < G)
    head = kv_head * G + group
    d = tl.arange(0, DP)
    q_rows = ((first + token) * HEADS + head).to(tl.int64)
    q = tl.load(
        query + q_rows[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    own = slot + token  # slot of part row's own entry
    highest = tl.full((BQ * GP,), float("-inf"), tl.float32)
    weight = tl.zeros((BQ * GP,), tl.float32)
    sums = tl.zeros((BQ * GP, DP), tl.float32)
    if SINKS:
        if split == 0:
            highest = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            weight += 1.0
    stop = slot + count
    start = 0
    if window > 0:
        start = tl.maximum(slot - window + 1, 0) // N * N
    part = (tl.cdiv(stop - start, N) + SPLITS - 1) // SPLITS * N
    begin = start + split * part
    end = tl.minimum(begin + part, stop)
    for at in range(begin, end, N):
        j = at + tl.arange(0, N)
        valid = j < stop
        block = tl.load(tables + row * table_stride + j // BS, mask=valid, other=0).to(tl.int64)
        base = cache + block * block_stride + kv_head * D * BS
        inside = valid[None, :] & (d < D)[:, None]
        k = tl.load(
            base[None, :] + key_offset + d[:, None] * BS + (j % BS)[None, :], mask=inside, other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
        if softcap > 0.0:
            ratio = tl.exp(-2.0 * tl.abs(scores / softcap))
            scores = tl.where(scores < 0, -softcap, softcap) * (1.0 - ratio) / (1.0 + ratio)
        seen = (j[None, :] <= own[:, None]) & valid[None, :]
        if window > 0:
            seen = seen & (j[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp(scores - safe[:, None])
        rescale = tl.exp(highest - safe)
        v = tl.load(
            base[:, None] + value_offset + (j % BS)[:, None] * D + d[None, :],
            mask=valid[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        weight = weight * rescale + tl.sum(p, 1)
        sums = sums * rescale[:, None]
        sums += tl.dot(p.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        highest = top
    if SPLITS == 1:
        result = sums / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(
            out + q_rows[:, None] * D + d[None, :], result.to(out.dtype.element_ty),
            mask=real[:, None] & (d < D)[None, :],
        )  # fmt: skip
    else:
        target = parts + (q_rows * SPLITS + split) * (D + 2)
        tl.store(target[:, None] + d[None, :], sums, mask=real[:, None] & (d < D)[None, :])
        tl.store(target + D, highest, mask=real)
        tl.store(target + D + 1, weight, mask=real)


@triton.jit
def combine(
    parts, out, tiles, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr
):
    """Join the splits of one head of a single token: `parts` (tokens * HEADS, SPLITS, D + 2)."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tiles + row // HEADS * 4 + 2) == 0:
        return
    s, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    target = parts + (row * SPLITS + s) * (D + 2)
    highest, weight = tl.load(target + D), tl.load(target + D + 1)
    share = tl.exp(highest - tl.max(highest, 0))
    sums = tl.load(target[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    total = tl.sum(sums * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out + row * D + d, total.to(out.dtype.element_ty), mask=d < D)
