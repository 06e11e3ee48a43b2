"""The toll policy's formula, compiled: one pass over the candidates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.kv.compiled import bare_kernel

#: Names of the parts, in the order of the rows that `price` returns.
PARTS = (
    "wait", "prefill", "transfer", "decode", "toll_stream", "toll_queue", "toll_stall",
)  # fmt: skip


@bare_kernel
def price(
    table: NDArray[np.float64],
    prefill_requests: NDArray[np.int64],
    prefill_tokens: NDArray[np.int64],
    decode_requests: NDArray[np.int64],
    cached: NDArray[np.int64],
    prefill: NDArray[np.int32],
    decode: NDArray[np.int32],
    prompt: int,
    output: float,
    toll: float,
    overlap_weight: float,
    found: NDArray[np.float64],
) -> None:
    """Write the parts of each candidate's cost, and in the last row their sum.

    `Toll` says what the parts are.

    Args:
        table: `Estimates.table`.
        prefill_requests, prefill_tokens, decode_requests: of the workers, (workers,).
        cached: tokens of the prompt that each worker holds, (workers,).
        prefill, decode: of the candidates, (candidates,); prefill is -1 for local.
        prompt: tokens.
        output: tokens expected.
        toll, overlap_weight: parameters of the policy.
        found: takes the parts in the order of `PARTS`, and the sum, shape (8, candidates).
    """
    base, token, move_base, move_token = table[0], table[1], table[2], table[3]
    arrivals, busy, a, b, d = table[4], table[5], table[6], table[7], table[8]
    n_sat, beta, floor = table[9], table[10], table[11]
    stall_base, stall_token = table[12], table[13]
    for i in range(decode.shape[0]):
        there = decode[i]
        local = prefill[i] < 0
        where = there if local else prefill[i]
        wait = base[where] * prefill_requests[where] + token[where] * prefill_tokens[where]
        uncached = prompt - overlap_weight * cached[where]
        service = base[where] + token[where] * uncached
        n = float(decode_requests[there])
        pace, slower = a[there] * n + b[there], a[there] * (n + 1.0) + b[there]
        if d[there] > 0.0:
            for step in range(2):
                gap = n_sat[there] - n - step
                near = max(gap, floor[there])
                pole = near ** -beta[there] * (1.0 + (near - gap) * beta[there] / near)
                if step:
                    slower += d[there] * pole
                else:
                    pace += d[there] * pole
        transfer, stall, delay = 0.0, 0.0, service
        if local:
            taken = stall_base[there] + stall_token[there] * uncached
            stall = toll * taken * n
            if n > 0.0:
                delay = taken
        else:
            missing = prompt - overlap_weight * cached[there]
            transfer = move_base[there] + move_token[there] * missing
        stream = toll * output * n * (slower - pace)
        queue = toll * delay * arrivals[where] * (wait + service) / (1.0 - busy[where])
        found[0, i] = wait
        found[1, i] = service
        found[2, i] = transfer
        found[3, i] = output * slower
        found[4, i] = stream
        found[5, i] = queue
        found[6, i] = stall
        # In the order of the rows, as whoever adds them up again does: sums must be the same.
        found[7, i] = wait + service + transfer + output * slower + stream + queue + stall
