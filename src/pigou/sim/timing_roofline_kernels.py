"""The time of steps by FLOPs and bytes, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.request import Ints, Nanos

Floats = NDArray[np.float64]

#: Indices into the vector of rates; all in seconds for one unit.
FLOP, BYTE, ATTENTION_FLOP, LAYER, TOKEN, WORD, ROW = 0, 1, 2, 3, 4, 5, 6
STEP, HOP, HOP_BYTE, SUM_BYTES, GATHER_BYTES, LAYERS, READ_FLOPS, READ_BYTES, CACHE_BYTE = (
    7, 8, 9, 10, 11, 12, 13, 14, 15,
)  # fmt: skip
RATES = 16


@bare_kernel
def roofline_durations(
    counts: Ints,
    kv_lens: Ints,
    samples: NDArray[np.bool_],
    repeat: int,
    products: Floats,
    rates: Floats,
    experts: float,
    active: float,
    durations: Nanos,
) -> None:
    """Write the nanoseconds of each of `repeat` steps to `durations`, shape (repeat,).

    Args:
        counts: tokens that each entry computes.
        kv_lens: cache entries of each before the first step.
        samples: whether each yields a token.
        repeat: steps; in each, entries have as many more cached tokens as they computed before.
        products: matrix products, one a row: FLOPs of a token, bytes of weights, bytes of a
            token's input and output, and what it is (0 of each layer, 1 of each layer's experts,
            the weights of one of them, 2 of the output, for tokens that are sampled).
        rates: as the constants of this file say.
        experts: of a layer, 0 for a dense model.
        active: of those, that compute a token.
        durations: takes the result.
    """
    tokens, sampled, decodes, decode_reads = 0, 0, 0, 0
    prompt, squares, twice, prompt_kv = 0, 0, 0, 0
    for i in range(counts.shape[0]):
        count, kv = int(counts[i]), int(kv_lens[i])
        tokens += count
        sampled += 1 if samples[i] else 0
        if count == 1:
            decodes += 1
            decode_reads += kv + 1
        else:
            prompt += count
            squares += count * count
            twice += count * (2 * kv + count + 1)
            prompt_kv += kv + count
    layer = rates[LAYER] + tokens * rates[TOKEN] * rates[BYTE]
    head = 0.0
    for i in range(products.shape[0]):
        kind = products[i, 3]
        rows = sampled if kind == 2.0 else tokens
        if rows == 0:
            continue
        weights, units = products[i, 1], float(rows)
        if kind == 1.0:
            weights *= experts * (1.0 - (1.0 - active / experts) ** rows)
            units = rows * active
        compute = products[i, 0] * units * rates[FLOP]
        move = (weights + products[i, 2] * units) * rates[BYTE]
        if kind == 2.0:
            head += max(compute, move) + rows * rates[WORD] * rates[BYTE]
        else:
            layer += max(compute, move)
    if rates[HOP] > 0.0:
        layer += 2.0 * (rates[HOP] + tokens * rates[SUM_BYTES] * rates[HOP_BYTE])
        head += rates[HOP] / 2.0 + sampled * rates[GATHER_BYTES] * rates[HOP_BYTE]
    fixed = rates[LAYERS] * layer + head + rates[STEP] + tokens * rates[ROW] * rates[BYTE]
    for step in range(repeat):
        decode_kv = float(decode_reads + decodes * step)
        prompt_reads = (twice + 2 * squares * step) / 2.0
        time = max(
            prompt_reads * rates[READ_FLOPS] * rates[ATTENTION_FLOP],
            (prompt_kv + step * prompt) * rates[READ_BYTES] * rates[CACHE_BYTE],
        )
        time += max(
            decode_kv * rates[READ_FLOPS] * rates[ATTENTION_FLOP],
            decode_kv * rates[READ_BYTES] * rates[CACHE_BYTE],
        )
        durations[step] = max(int((fixed + rates[LAYERS] * time) * 1e9 + 0.5), 1)
