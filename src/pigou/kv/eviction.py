"""The order in which cached blocks die: leaf-first, least recently used.

The free queue of a `BlockPool` is that order. A sequence that ends appends its blocks to the
queue from its tail to its head, so a prefix outlives what stands on it; a hit takes blocks out
of the queue, and so makes them young again. Blocks that nobody could hit stand at its front.
Handing out a cached block forgets its hash, after those of its descendants (which are in use
then, by a sequence that has a private duplicate of the block).
"""

from __future__ import annotations

import numpy as np

from pigou.kv import kernels
from pigou.kv.pool import BlockPool
from pigou.request import Ints


def eviction_order(pool: BlockPool) -> Ints:
    """Return all free blocks in the order in which they will be handed out, shape (free,)."""
    return pool.peek(pool.free)


def eviction_rank(pool: BlockPool) -> Ints:
    """Return each block's place in that order, -1 for blocks in use, shape (blocks,)."""
    rank: Ints = np.full(pool.blocks, -1, dtype=np.int32)
    order = eviction_order(pool)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


def parents(pool: BlockPool) -> Ints:
    """Return the block that each cached block stands on, -1 for none, shape (blocks,)."""
    column: Ints = pool.meta[: pool.blocks, kernels.PARENT].copy()
    return column
