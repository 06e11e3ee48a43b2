"""Rows of the tables, and groups of the arrays, that the toll policy's kernels read and write.

A kernel takes a group as a plain tuple, which numba recognises sooner than a named one, and names
its fields inside: `load = WorkerLoad(*load)`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.int32]

#: Names of the parts of a cost, in the order of the rows that `price` writes.
PARTS = (
    "wait", "prefill", "transfer", "decode", "toll_stream", "toll_queue", "toll_stall",
    "toll_memory", "toll_place", "tail",
)  # fmt: skip
#: The rows of those parts that other kernels read, and of their sum.
WAIT, TOLL_QUEUE, TAIL = PARTS.index("wait"), PARTS.index("toll_queue"), PARTS.index("tail")
TOTAL = len(PARTS)

#: Rows of `queues`, (5, workers): seconds of prompts that wait, prompts that one more delays, the
#: most seconds that this may cost, what the wait adds to the tail, and seconds of a mean request.
WAIT_S, DELAYED_PROMPTS, TOLL_LIMIT_S, WAIT_TAIL_S, REQUEST_S = range(5)
QUEUE_ROWS = 5


class WorkerLoad(NamedTuple):
    """What each worker has to do, as of `FleetView`, (workers,) each."""

    prefills: Flags
    decodes: Flags
    prefill_requests: Counts
    prefill_tokens: Counts
    prefill_pairs: Counts
    decode_requests: Counts
    decode_tokens: Counts


class PromptsUnderWay(NamedTuple):
    """The prompt that each worker computes now, (workers,) each; empty where unknown.

    Attributes:
        tokens: that are uncached.
        pairs: of those with the ones before them.
        since_ns: when it began.
    """

    tokens: Counts
    pairs: Counts
    since_ns: Counts


class PromptCaches(NamedTuple):
    """What each worker has of the prompt, (workers,) each.

    Attributes:
        cached: tokens that it holds.
        ready: tokens that it would not compute.
        host, storage: blocks of those that it would bring back to its device.
        fetch_s: seconds until it has fetched the others from another worker; or empty.
        block_size: tokens in a block.
        recomputed_share: blocks computed again for each that is stored.
    """

    cached: Counts
    ready: Counts
    host: Counts
    storage: Counts
    fetch_s: Numbers
    block_size: Counts
    recomputed_share: Numbers


class TollWeights(NamedTuple):
    """Parameters of the policy (`TollParams`)."""

    toll: float
    overlap_weight: float
    fairness: float
    host_restore: float
    storage_restore: float


LoadArrays: TypeAlias = tuple[Flags, Flags, Counts, Counts, Counts, Counts, Counts]
UnderWayArrays: TypeAlias = tuple[Counts, Counts, Counts]
CacheArrays: TypeAlias = tuple[Counts, Counts, Counts, Counts, Numbers, Counts, Numbers]
#: Uncached tokens of recent prompts, and their patience in seconds (`RecentPrompts`).
RecentArrays: TypeAlias = tuple[Numbers, Numbers]
#: Workers of the candidates that prefill (-1 for local) and that decode, (candidates,) each.
PairArrays: TypeAlias = tuple[Indices, Indices]
Weights: TypeAlias = tuple[float, float, float, float, float]
