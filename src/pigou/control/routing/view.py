"""The fleet as policies see it: vectors, one entry a worker, and pairs to choose from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.request import Ints

Counts = NDArray[np.int64]
Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FleetView:
    """Load of each worker, shape (workers,); index by `Candidates.decode` or `.prefill`.

    Attributes:
        ids: names of the workers, in order.
        prefill_requests: prompts that are to be computed, or are being computed.
        prefill_tokens: their tokens.
        decode_requests: streams that run, or are about to.
        decode_tokens: their tokens, prompt and output.
        running: requests that the worker says it runs.
        waiting: requests that the worker says wait there.
        kv_usage: share of its KV blocks in use, 0 to 1, as the worker says.
        overlap: leading blocks of this request's prompt that the worker holds.
        block_size: tokens in a block.
        blocks: KV blocks that it has, 0 when unknown.
    """

    ids: tuple[str, ...]
    prefill_requests: Counts
    prefill_tokens: Counts
    decode_requests: Counts
    decode_tokens: Counts
    running: Shares
    waiting: Shares
    kv_usage: Shares
    overlap: Counts
    block_size: Counts
    blocks: Counts


@dataclass(frozen=True, slots=True)
class Candidates:
    """Pairs to choose from, both of shape (candidates,).

    Attributes:
        prefill: index of the worker that computes the prompt; -1 where `decode` does.
        decode: index of the worker that streams.
    """

    prefill: Ints
    decode: Ints

    def __len__(self) -> int:
        return int(self.decode.size)
