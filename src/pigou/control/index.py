"""Who holds which blocks: an index over the workers' KV events, under a hash of our own.

Engines hash blocks each in their own way, so their hashes only name blocks between one worker's
events. The key of the index is a 64-bit chain over token ids, which is the same for every engine;
a collision misroutes a request, and can do no other harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from pigou.wire.kv_events import Cleared, Removed, Stored, WireEvent, WireHash

Chain: TypeAlias = NDArray[np.uint64]

_DEVICE = "GPU"


def chain(
    tokens: Sequence[int], block_size: int, salt: str = "", parent: int | None = None
) -> Chain:
    """Hash the full blocks of a sequence, each together with all before it.

    Args:
        tokens: token ids in [0, 2^32), from the block after `parent` on.
        block_size: tokens in a block.
        salt: cache salt of the request.
        parent: hash of the block before; None at the beginning.

    Returns:
        XXH3 (64 bits) of each block's ids as u32 little-endian, seeded by the block before; the
        first one's seed is the hash of the salt, seeded by the block size. Shape (blocks,).
    """
    seed = xxh3_64_intdigest(salt.encode(), block_size) if parent is None else parent
    blocks = len(tokens) // block_size
    data = np.asarray(tokens[: blocks * block_size], dtype="<u4").tobytes()
    hashes = np.empty(blocks, dtype=np.uint64)
    for i in range(blocks):
        seed = xxh3_64_intdigest(data[4 * block_size * i : 4 * block_size * (i + 1)], seed)
        hashes[i] = seed
    return hashes


@dataclass(slots=True)
class _Block:
    """A block of one worker: its key in the index (None where unknown) and the tiers it is in."""

    key: int | None
    media: set[str]


@dataclass(slots=True)
class Cache:
    """What one worker holds.

    Attributes:
        blocks: by the engine's own hash.
        held: how many of them have this key.
        events: that were taken in.
        losses: times that everything was forgotten, because events were missed.
    """

    blocks: dict[WireHash, _Block] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    events: int = 0
    losses: int = 0

    def clear(self) -> None:
        """Forget all blocks."""
        self.blocks.clear()
        self.held.clear()


class PrefixIndex:
    """The blocks of every worker, kept by its KV events."""

    def __init__(self) -> None:
        self._caches: dict[str, Cache] = {}

    def apply(self, worker: str, events: Iterable[KVEvent | WireEvent]) -> None:
        """Take in events of a worker, in order.

        Events of the wire are keyed by token ids and parent. A block whose tokens are hidden, or
        whose parent is unknown, is counted, and never matched. Core events (a simulated worker's)
        carry hashes that every worker shares; the low half is the key.
        """
        cache = self._caches.setdefault(worker, Cache())
        for event in events:
            cache.events += 1
            if isinstance(event, Stored):
                keys = _keys(cache, event)
                _store(cache, event.hashes, keys, event.medium or _DEVICE)
            elif isinstance(event, BlockStored):
                low = _low(event.hashes)
                _store(cache, low, low, event.medium.value)
            elif isinstance(event, Removed):
                _remove(cache, event.hashes, event.medium or _DEVICE)
            elif isinstance(event, BlockRemoved):
                _remove(cache, _low(event.hashes), event.medium.value)
            elif isinstance(event, Cleared | AllBlocksCleared):
                cache.clear()

    def lost(self, worker: str) -> None:
        """Forget a worker's blocks, because events were missed; they come back one by one."""
        cache = self._caches.setdefault(worker, Cache())
        cache.clear()
        cache.losses += 1

    def drop(self, worker: str) -> None:
        """Forget a worker."""
        self._caches.pop(worker, None)

    def cache(self, worker: str) -> Cache:
        """Return what a worker holds; an empty cache for one that never spoke."""
        return self._caches.get(worker) or Cache()

    def overlap(self, worker: str, hashes: Chain) -> int:
        """Return how many leading blocks of this chain the worker holds, in any tier."""
        cache = self._caches.get(worker)
        if cache is None or not cache.held:
            return 0
        held = cache.held
        for count, key in enumerate(hashes.tolist()):
            if key not in held:
                return count
        return len(hashes)


def _low(hashes: NDArray[np.uint64]) -> list[int]:
    low: list[int] = hashes[:, 1].tolist()
    return low


def _keys(cache: Cache, event: Stored) -> Sequence[int | None]:
    """Return the key of each stored block."""
    unknown = [None] * len(event.hashes)
    if len(event.token_ids) != len(event.hashes) * event.block_size:
        return unknown
    parent = None
    if event.parent is not None:
        before = cache.blocks.get(event.parent)
        if before is None or before.key is None:
            return unknown
        parent = before.key
    keys: list[int | None] = chain(
        event.token_ids, event.block_size, event.salt or "", parent
    ).tolist()
    return keys


def _store(
    cache: Cache, hashes: Sequence[WireHash], keys: Sequence[int | None], medium: str
) -> None:
    for name, key in zip(hashes, keys, strict=True):
        block = cache.blocks.get(name)
        if block is None:
            cache.blocks[name] = _Block(key, {medium})
        else:
            block.media.add(medium)
            if block.key is not None or key is None:
                continue
            block.key = key
        if key is not None:
            cache.held[key] = cache.held.get(key, 0) + 1


def _remove(cache: Cache, hashes: Sequence[WireHash], medium: str) -> None:
    for name in hashes:
        block = cache.blocks.get(name)
        if block is None:
            continue
        block.media.discard(medium)
        if block.media:
            continue
        del cache.blocks[name]
        if block.key is None:
            continue
        if cache.held[block.key] == 1:
            del cache.held[block.key]
        else:
            cache.held[block.key] -= 1
