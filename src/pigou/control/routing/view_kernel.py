"""What a fleet's view computes for every decision, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel


@bare_kernel
def cached_tokens(
    overlap: NDArray[np.int64], block_size: NDArray[np.int64], prompt: int, out: NDArray[np.int64]
) -> int:
    """Write the tokens of a prompt that each worker holds, (workers,); return the most of them.

    At least one token is left to compute.
    """
    most = max(0, prompt - 1)
    longest = 0
    for i in range(overlap.shape[0]):
        out[i] = min(overlap[i] * block_size[i], most)
        longest = max(longest, out[i])
    return longest
