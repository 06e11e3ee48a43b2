"""Prefix cache: finds and caches the blocks of a prefix by hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pigou.kv import block_pool
from pigou.kv.block import hashes_of
from pigou.kv.block_pool import BlockPool
from pigou.kv.tenure import salt_expiry
from pigou.request import NEVER, SECOND, BlockHashes, Ints

#: Tenures of which first blocks are known, and such blocks of each, at most.
_MAX_TENURES, _MAX_ROOTS = 4096, 256


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


@dataclass(slots=True)
class _LiveTenure:
    expiry: int  # ns since 1970
    roots: set[bytes] = field(default_factory=set)
    ended: bool = False


class TenureRoots:
    """Keys of the first blocks of chains by tenure, under which all it left is found at its end."""

    def __init__(self) -> None:
        self._tenures: OrderedDict[str, _LiveTenure] = OrderedDict()  # by salt, least recent first
        self._due = NEVER  # when one expires

    def note(self, salt: str, root: bytes) -> bool:
        """Note what a request left; True if its tenure has ended, so that it is freed now."""
        tenure = self._tenure(salt)
        if not tenure.ended and len(tenure.roots) < _MAX_ROOTS:
            tenure.roots.add(root)
            self._due = min(self._due, tenure.expiry)
        return tenure.ended

    def end(self, salts: Iterable[str]) -> list[bytes]:
        """End tenures; return the roots to free."""
        roots: list[bytes] = []
        for salt in salts:
            tenure = self._tenure(salt)
            roots += tenure.roots
            tenure.roots, tenure.ended = set(), True
        return roots

    def expire(self, now: int) -> list[bytes]:
        """Return the roots of tenures that expired, a second late at most."""
        if now < self._due:
            return []
        gone = [salt for salt, tenure in self._tenures.items() if tenure.expiry <= now]
        roots = [root for salt in gone for root in self._tenures.pop(salt).roots]
        first = min((tenure.expiry for tenure in self._tenures.values()), default=NEVER)
        self._due = max(first, now + SECOND)
        return roots

    def _tenure(self, salt: str) -> _LiveTenure:
        tenure = self._tenures.pop(salt, None) or _LiveTenure(salt_expiry(salt))
        self._tenures[salt] = tenure
        if len(self._tenures) > _MAX_TENURES:
            self._tenures.popitem(last=False)
        return tenure
