"""A table of estimates out of the fleet's laws and the workers' scales, compiled."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel

Numbers: TypeAlias = NDArray[np.float64]


@bare_kernel
def fill(
    table: Numbers,
    column: Numbers,
    prefill: Numbers,
    transfer: Numbers,
    itl: Numbers,
    commons: tuple[float, float, float],
    least_slope: float,
) -> None:
    """Write all rows of `Estimates.table`, shape (24, workers).

    Args:
        table: to write; its rows are named in `pigou.control.speeds.estimates.ROWS`.
        column: what a worker with a scale of 1 has, (24,).
        prefill, transfer, itl: scales of each worker's own, (workers,).
        commons: scales of all of them together, in this order.
        least_slope: seconds by which the law of ITL rises a stream, at least.
    """
    for w in range(table.shape[1]):
        for row in range(table.shape[0]):
            table[row, w] = column[row]
        prompts, moves, pace = (
            commons[0] * prefill[w],
            commons[1] * transfer[w],
            commons[2] * itl[w],
        )
        table[0, w] = column[0] * prompts
        table[1, w] = column[1] * prompts
        table[2, w] = column[2] * moves
        table[3, w] = column[3] * moves
        table[6, w] = max(column[6] * pace, least_slope * pace)
        table[7, w] = column[7] * pace
        table[8, w] = column[8] * pace
        table[14, w] = column[14] * prompts
        table[17, w] = column[17] * prompts
        table[18, w] = column[18] * prompts
        table[22, w] = column[22] * pace
