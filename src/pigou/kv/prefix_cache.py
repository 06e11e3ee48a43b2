"""Prefix cache: finds and caches the blocks of a prefix by hash."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pigou.kv import block_pool
from pigou.kv.block import hashes_of
from pigou.kv.block_pool import BlockPool
from pigou.request import BlockHashes, Ints


class PrefixMatch(NamedTuple):
    """A cached prefix."""

    blocks: Ints  # in order, shape (n,); valid until the next `match`
    idle: int  # blocks among them without references


class NewlyCached(NamedTuple):
    """Result of `PrefixCache.cache_full_blocks`."""

    first: int  # index of the first block that is newly cached
    new: int
    duplicates: bool  # True if a hash of the range is cached under another block


class PrefixCache:
    """Maps hashes to blocks of a pool; the parent of a cached block is always cached.

    Example:
        cache = PrefixCache(BlockPool(1024))
        cache.cache_full_blocks(table, hashes, 0, len(hashes))  # once the blocks are computed
        blocks, idle = cache.match(hashes, len(hashes))         # the next request with this prefix
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: Ints = np.empty(pool.blocks, dtype=np.int32)
        self._block: Ints = np.empty(1, dtype=np.int32)

    def match(self, hashes: BlockHashes, limit: int) -> PrefixMatch:
        """Return the longest cached prefix of `hashes[:limit]`, shape (n, 2)."""
        if limit == 0:
            return PrefixMatch(self._blocks[:0], 0)
        pool = self._pool
        count, idle = block_pool.match(
            pool.meta, pool.hashes, pool.slots, hashes, min(limit, pool.blocks), self._blocks
        )
        return PrefixMatch(self._blocks[:count], idle)

    def holds(self, key: bytes) -> bool:
        """True if the block with this key (`pigou.kv.block`) is cached."""
        pool = self._pool
        count, _ = block_pool.match(
            pool.meta, pool.hashes, pool.slots, hashes_of([key]), min(1, pool.blocks), self._block
        )
        return bool(count)

    def cache_full_blocks(
        self, table: Ints, hashes: BlockHashes, start: int, stop: int
    ) -> NewlyCached:
        """Cache a sequence's blocks `table[start:stop]` under its hashes, up to a (0, 0)."""
        pool = self._pool
        return NewlyCached(
            *block_pool.cache_full_blocks(
                pool.meta, pool.hashes, pool.slots, pool.counts, table, hashes, start, stop
            )
        )

    def clear(self) -> None:
        """Remove all hashes; blocks and references stay."""
        pool = self._pool
        block_pool.clear(pool.meta, pool.hashes, pool.slots, pool.counts)
