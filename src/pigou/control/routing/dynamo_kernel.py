"""Dynamo's cost of workers that each serve whole requests, compiled: one pass over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel

Counts = NDArray[np.int64]

#: Names of the parts, in the order of the rows that `whole` writes.
PARTS = ("prefill", "decode", "requests")


@bare_kernel
def whole(
    prefills: NDArray[np.bool_],
    decodes: NDArray[np.bool_],
    splits: bool,
    prefill: NDArray[np.int32],
    decode: NDArray[np.int32],
    block_size: Counts,
    prefill_tokens: Counts,
    decode_tokens: Counts,
    decode_requests: Counts,
    device: Counts,
    host: Counts,
    storage: Counts,
    prompt: int,
    weights: tuple[float, float, float, float, float],
    found: NDArray[np.float64],
) -> bool:
    """Write the parts of each candidate's cost, and in the last row their sum.

    Args:
        prefills, decodes: roles of the workers, (workers,).
        splits: whether another worker may compute the prompt.
        prefill, decode: of the candidates, (candidates,); prefill is -1 for local.
        block_size, prefill_tokens, decode_tokens, decode_requests, device, host, storage: of the
            workers, as of `FleetView`, (workers,).
        prompt: tokens.
        weights: of blocks to compute, of cached ones on the device, in host memory and in storage,
            and of requests.
        found: takes the parts in the order of `PARTS`, and the sum, shape (4, candidates).

    Returns:
        False where stages are chosen apart, which this does not do; nothing is written then.
    """
    scale, here, near, far, each = weights
    for i in range(prefill.shape[0]):
        if prefill[i] >= 0:
            return False
    if splits:
        for w in range(prefills.shape[0]):
            if prefills[w] != decodes[w]:
                return False
    for i in range(decode.shape[0]):
        w = decode[i]
        size = block_size[w]
        credit = here * device[w]
        credit += near * host[w]
        credit += far * storage[w]
        left = prefill_tokens[w] / size + prompt / size - credit
        blocks = -(-decode_tokens[w] // size) - (-prompt // size)
        found[0, i] = scale * max(left, 0.0)
        found[1, i] = float(blocks)
        found[2, i] = each * float(decode_requests[w])
        # In the order of the rows, as whoever adds them up again does: sums must be the same.
        found[3, i] = found[0, i] + found[1, i] + found[2, i]
    return True
