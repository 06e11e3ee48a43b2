"""Which prefixes are read from other workers, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.routing.laws_kernel import alone


@bare_kernel
def deepest(
    layout: NDArray[np.int64], device: NDArray[np.int64], work: NDArray[np.int64],
    open_: NDArray[np.bool_], best: NDArray[np.int64],
) -> bool:  # fmt: skip
    """Write which worker of each layout has most of a prompt on its device, the idlest of equals.

    Args:
        layout: of the workers, from 1 on; 0 for those that nobody reads, (workers,).
        device: leading blocks on each one's device, (workers,).
        work: uncached tokens that wait there, (workers,).
        open_: who may be used, (workers,).
        best: takes the row of each layout, -1 where it has nothing, (layouts,).

    Returns:
        Whether there is any.
    """
    found = False
    for i in range(best.shape[0]):
        best[i] = -1
    for w in range(layout.shape[0]):
        if layout[w] == 0 or device[w] == 0 or not open_[w]:
            continue
        first = best[layout[w]]
        if (
            first < 0
            or device[w] > device[first]
            or (device[w] == device[first] and work[w] < work[first])
        ):
            best[layout[w]] = w
        found = True
    return found


@bare_kernel
def choose_reads(
    table: NDArray[np.float64],
    layout: NDArray[np.int64],
    best: NDArray[np.int64],
    device: NDArray[np.int64],
    cached: NDArray[np.int64],
    block_size: NDArray[np.int64],
    prompt: int,
    restore: tuple[float, float],
    source: NDArray[np.int64],
    ready: NDArray[np.int64],
    host: NDArray[np.int64],
    storage: NDArray[np.int64],
    seconds: NDArray[np.float64],
    saves: NDArray[np.float64],
) -> int:
    """Write what each worker would read, as `Reads`; return how many would.

    Args:
        table: `Estimates.table`.
        layout: of the workers, (workers,).
        best: who would be read from, by layout (`deepest`).
        device: leading blocks of the prompt on each one's device, (workers,).
        cached: tokens of the prompt that each holds in any tier, (workers,).
        block_size: tokens in a block, (workers,).
        prompt: tokens.
        restore: shares of a token's seconds that one from host and one from storage takes.
        source, ready, host, storage, seconds, saves: as `Reads`, (workers,); ready, host and
            storage are what the worker has itself when this is called.
    """
    count = 0
    for w in range(layout.shape[0]):
        peer = best[layout[w]]
        if layout[w] == 0 or peer < 0 or peer == w:
            continue
        size = block_size[w]
        blocks = min(device[peer], (prompt - 1) // size)  # the last token is computed here
        if blocks <= device[w]:
            continue
        law = table[0, w], table[1, w], table[17, w]
        left = float(prompt - cached[w])
        below = restore[0] * host[w] + restore[1] * storage[w]
        without = alone(law, 1, left, left * (prompt - 0.5 * left)) + table[1, w] * size * below
        left = float(prompt - blocks * size)
        link = table[19, w] + table[20, w] * (blocks - device[w]) * size
        saved = without - alone(law, 1, left, left * (prompt - 0.5 * left)) - link
        if saved > 0.0:
            count += 1
            source[w], seconds[w], saves[w] = peer, link, saved
            ready[w], host[w], storage[w] = blocks * size, 0, 0
    return count
