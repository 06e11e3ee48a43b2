"""PrefixIndex: which worker holds which blocks, by KV events or by prediction."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.config import check_bounds
from pigou.control.prefix_index.block_keys import chain
from pigou.control.prefix_index.hash_slots import Words
from pigou.control.prefix_index.holder_table import RUN, UNKNOWN_WORKER, HolderTable
from pigou.control.prefix_index.worker_cache import Ghosts, WorkerCache, WorkerCacheStats
from pigou.control.prefix_index.worker_entries import (
    DEVICE_BIT,
    HOST,
    STORAGE,
    BlockChanges,
    Holdings,
    Predictions,
    WorkerEntries,
)
from pigou.request import SECOND, AllBlocksCleared, BlockKeys, BlockRemoved, BlockStored, KVEvent
from pigou.wire.kv_event_decoding import Cleared, Removed, Stored, WireEvent, WireHash

#: Bit of the tier of each medium; None is the device, and any other medium is storage.
TIER_BITS: dict[str | None, int] = {
    None: DEVICE_BIT,
    "GPU": DEVICE_BIT,
    "CPU": 1 << HOST,
    "CPU_PINNED": 1 << HOST,
}
STORAGE_BIT = 1 << STORAGE
_MAX_NAME = 2**64
#: Dtype of keys and hashes; kernels take contiguous arrays.
WORD = np.dtype(np.uint64)
#: Most orders of workers that are cached; with one more, all are dropped.
_MAX_ORDERS = 64


class KeyedStored(msgspec.Struct, frozen=True, eq=False, tag_field="kind", tag="stored"):
    """Blocks that became cached."""

    hashes: Words  # the engine's own, as 64-bit names, shape (blocks,)
    keys: Words  # the router's, shape (blocks,); 0 where unknown
    parent: int | None  # name of the block before them; None at the beginning of a sequence
    medium: str | None = None  # tier, as the sender names it; None means the device


class KeyedRemoved(msgspec.Struct, frozen=True, eq=False, tag_field="kind", tag="removed"):
    """Removed blocks: names, shape (blocks,), and tier; None means the device."""

    hashes: Words
    medium: str | None = None


class KeyedCleared(msgspec.Struct, frozen=True, tag_field="kind", tag="cleared"):
    """The whole cache was cleared."""


KeyedEvent: TypeAlias = KeyedStored | KeyedRemoved | KeyedCleared


class PrefixIndex:
    """Blocks of all workers, by 64-bit keys over token ids (`block_keys`).

    Engine hashes only link events of one worker. Blocks without tokens or a known parent are
    counted but never matched.

    Example:
        index = PrefixIndex()
        index.apply("w0", [Stored((7, 8), None, tuple(range(32)), 16)])
        index.overlaps(("w0", "w1"), chain(range(32), 16))[RUN]  # [2, 0]
    """

    def __init__(
        self, max_blocks: int = 2**20, max_total: int = 2**22, ttl: int = 120 * SECOND
    ) -> None:
        """Limit blocks per worker, by events and by prediction, and in total; old leaves go first.

        Beyond `max_total` the worker with the most evicts. Predictions last `ttl` nanoseconds.
        """
        for name, value in (("max_blocks", max_blocks), ("max_total", max_total), ("ttl", ttl)):
            check_bounds(name, value, ge=1)
        self._limit = min(max_blocks, max_total)
        self._max_total = max_total
        self._ttl = ttl
        self._table = HolderTable()
        self._ghosts = Ghosts()
        self._caches: dict[str, WorkerCache] = {}
        self._orders: dict[tuple[str, ...], NDArray[np.int64]] = {}
        self._last_ids: tuple[str, ...] = ()
        self._last_order: NDArray[np.int64] = self._arrange(())
        self.blocks = 0  # total over all workers, predictions counted
        self._evicted = 0
        self.removed = 0  # blocks evicted from a device, as events told
        self._predicts = False  # whether anything was predicted
        self._free_numbers: list[int] = []
        self._next_number = 0

    @property
    def keys(self) -> int:
        """Distinct blocks that can be matched."""
        return self._table.keys

    @property
    def evicted(self) -> int:
        """Blocks dropped for the limits, since the start."""
        return self._evicted + sum(cache.evicted for cache in self._caches.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        entries = [e for c in self._caches.values() for e in (c.holdings, c.predictions)]
        parts: list[HolderTable | Ghosts | WorkerEntries] = [self._table, self._ghosts, *entries]
        return sum(array.nbytes for part in parts for array in part.arrays)

    def apply(self, worker: str, events: Iterable[KVEvent | WireEvent | KeyedEvent]) -> None:
        """Apply a worker's events in order, from the wire or a simulated core."""
        cache = self._caches.get(worker) or self._cache_of(worker)
        for event in events:
            cache.events += 1
            if type(event) is BlockStored:  # quicker than `isinstance`
                keys = np.ascontiguousarray(event.hashes, dtype=WORD)  # the names are the keys
                parent = event.parent.item(-1) if event.parent.size else None
                self._store(cache, keys, keys, parent, event.medium)
            elif type(event) is BlockRemoved:
                names = np.ascontiguousarray(event.hashes, dtype=WORD)
                self._remove(cache, names, event.medium)
            elif isinstance(event, Stored):
                hashes, keys, parent = _keyed(cache, event)
                self._store(cache, _column(hashes), _column(keys), parent, event.medium)
            elif isinstance(event, Removed | KeyedRemoved):
                names = _column(_names_of(event.hashes))
                self._remove(cache, names, event.medium)
            elif isinstance(event, Cleared | AllBlocksCleared | KeyedCleared):
                self._change(cache, cache.holdings, cache.holdings.clear())
            elif isinstance(event, KeyedStored):
                names, keys = _column(event.hashes), _column(event.keys)
                self._store(cache, names, keys, event.parent, event.medium)

    def keyed(self, worker: str, event: KVEvent | WireEvent | KeyedEvent) -> KeyedEvent:
        """Return a worker's next event with keys in place of tokens."""
        if isinstance(event, Stored):
            return KeyedStored(*_keyed(self._caches.get(worker), event), event.medium)
        if isinstance(event, BlockStored):
            low, before = _names_of(event.hashes[:, 1]), event.parent[:, 1]
            return KeyedStored(low, low, int(before[-1]) if len(before) else None, event.medium)
        if isinstance(event, Removed):
            return KeyedRemoved(_names_of(event.hashes), event.medium)
        if isinstance(event, BlockRemoved):
            return KeyedRemoved(_names_of(event.hashes[:, 1]), event.medium)
        return KeyedCleared() if isinstance(event, Cleared | AllBlocksCleared) else event

    def expect(self, worker: str, blocks: int) -> None:
        """Set a worker's number of blocks, 0 if unknown; arrays grow on demand."""
        self._cache_of(worker).holdings.expected = blocks

    def predict(self, worker: str, keys: BlockKeys, now: int) -> None:
        """Predict that a worker without KV events holds a chain for `ttl` from `now` on."""
        self._predicts = True
        cache = self._cache_of(worker)
        self._make_room(len(keys))
        words = np.ascontiguousarray(keys, dtype=WORD)
        changes = cache.predictions.predict(words, now + self._ttl)
        self._change(cache, cache.predictions, changes)

    def expire(self, now: int) -> None:
        """Drop expired predictions; call it several times a second."""
        if not self._predicts:
            return
        for cache in self._caches.values():
            if len(cache.predictions):
                self._change(cache, cache.predictions, cache.predictions.expire(now))

    def lost(self, worker: str) -> None:
        """Forget a worker's blocks after missed events."""
        cache = self._cache_of(worker)
        cache.event_gaps += 1
        self._change(cache, cache.holdings, cache.holdings.clear())

    def drop(self, worker: str) -> None:
        """Forget a worker."""
        cache = self._caches.pop(worker, None)
        if cache is None:
            return
        self._change(cache, cache.holdings, cache.holdings.clear())
        self._change(cache, cache.predictions, cache.predictions.clear())
        self._evicted += cache.evicted
        self._free_numbers.append(cache.number)
        self._forget_orders()

    def cache(self, worker: str) -> WorkerCacheStats:
        """Return a worker's cache statistics; zeros if unknown."""
        cache = self._caches.get(worker)
        return WorkerCacheStats() if cache is None else cache.stats

    def overlap(self, worker: str, keys: BlockKeys) -> int:
        """Return how many leading blocks of a chain the worker holds, in any tier."""
        return int(self.overlaps((worker,), keys)[RUN, 0])

    def overlaps(self, workers: Sequence[str], keys: BlockKeys) -> NDArray[np.int64]:
        """Return how many leading blocks of a chain each worker holds, (4, workers).

        Rows are the blocks by their best tier, and the whole run (`holder_table.RUN`).
        """
        return self._table.overlaps(self._order(workers), np.ascontiguousarray(keys, dtype=WORD))

    def recomputed_share(self, workers: Sequence[str]) -> NDArray[np.float64]:
        """Return evicted and recomputed blocks per stored block, (workers,)."""
        return self._ghosts.recomputed_share(self._order(workers))

    def _order(self, workers: Sequence[str]) -> NDArray[np.int64]:
        if workers is self._last_ids:  # hashing many names takes longer than a short walk
            return self._last_order
        ids = tuple(workers)
        cached = self._orders.get(ids)
        order = self._arrange(ids) if cached is None else cached
        if ids is workers:
            self._last_ids, self._last_order = ids, order
        return order

    def _arrange(self, ids: tuple[str, ...]) -> NDArray[np.int64]:
        if len(self._orders) >= _MAX_ORDERS:
            self._orders.clear()
        caches = (self._caches.get(worker) for worker in ids)
        numbers = [UNKNOWN_WORKER if cache is None else cache.number for cache in caches]
        order = self._orders[ids] = np.array(numbers, dtype=np.int64)
        return order

    def _forget_orders(self) -> None:
        self._orders.clear()
        self._last_ids = ()
        self._last_order = self._arrange(())

    def _cache_of(self, worker: str) -> WorkerCache:
        cache = self._caches.get(worker)
        if cache is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
            else:
                number, self._next_number = self._next_number, self._next_number + 1
            self._table.admit(number)
            self._ghosts.admit(number)
            cache = WorkerCache(number, self._limit)
            self._caches[worker] = cache
            self._forget_orders()
        return cache

    def _store(
        self, cache: WorkerCache, hashes: Words, keys: Words, parent: int | None,
        medium: str | None,
    ) -> None:  # fmt: skip
        """Store blocks; hashes and keys are in the last columns."""
        if self.blocks + len(hashes) > self._max_total:
            self._make_room(cache.holdings.count_absent(hashes))
        media = TIER_BITS.get(medium, STORAGE_BIT)
        self.blocks += cache.store(self._table, self._ghosts, hashes, keys, parent, media)
        if self.blocks > self._max_total:  # blocks removed for room may be stored again
            self._make_room(0)

    def _remove(self, cache: WorkerCache, hashes: Words, medium: str | None) -> None:
        """Remove blocks from a tier; hashes are in the last column."""
        media = TIER_BITS.get(medium, STORAGE_BIT)
        if media == DEVICE_BIT:
            self.removed += len(hashes)
        ghosts = self._ghosts
        if self.blocks > ghosts.capacity:
            ghosts.reserve(self.blocks)
        self.blocks += cache.remove(self._table, ghosts, hashes, media)

    def _change(self, cache: WorkerCache, entries: WorkerEntries, changes: BlockChanges) -> None:
        self._table.change(cache.number, changes)
        self.blocks += entries.growth()

    def _make_room(self, new: int) -> None:
        while self.blocks and self.blocks + new > self._max_total:
            cache, entries = self._largest()
            changes = entries.evict(self.blocks + new - self._max_total)
            self._change(cache, entries, changes)

    def _largest(self) -> tuple[WorkerCache, Holdings | Predictions]:
        return max(
            (
                (cache, entries)
                for cache in self._caches.values()
                for entries in (cache.holdings, cache.predictions)
            ),
            key=lambda candidate: len(candidate[1]),
        )


def _keyed(cache: WorkerCache | None, event: Stored) -> tuple[Words, Words, int | None]:
    """Return the blocks' names and keys, and the parent's name."""
    names, before = _names_of(event.hashes), None
    parent = None if event.parent is None else _name_of(event.parent)
    if parent is not None and cache is not None:
        before = cache.holdings.key(parent)
    whole = len(event.token_ids) == len(names) * event.block_size
    if whole and (parent is None or before is not None):
        try:
            salt, lora = event.salt or "", event.lora or ""
            return names, chain(event.token_ids, event.block_size, salt, before, lora), parent
        except (OverflowError, TypeError):
            pass  # ids that are no tokens: their blocks cannot be keyed
    return names, np.zeros(len(names), dtype=np.uint64), parent


def _name_of(value: WireHash) -> int:
    if isinstance(value, bytes):
        return xxh3_64_intdigest(value)
    if 0 <= value < _MAX_NAME:
        return value
    return xxh3_64_intdigest(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _column(words: Words) -> Words:
    return np.ascontiguousarray(words, dtype=WORD).reshape(-1, 1)


def _names_of(hashes: Sequence[WireHash] | NDArray[np.uint64]) -> Words:
    """Return hashes as names, shape (blocks,)."""
    if isinstance(hashes, np.ndarray):
        return np.ascontiguousarray(hashes, dtype=np.uint64)
    try:
        return np.array(array("Q", cast("Sequence[int]", hashes)), dtype=np.uint64)
    except (OverflowError, TypeError):
        return np.array([_name_of(value) for value in hashes], dtype=np.uint64)


def warm_up() -> None:
    """Compile or load every kernel of the index, which takes seconds once."""
    index, tokens = PrefixIndex(max_blocks=4096, ttl=1), np.arange(512, dtype=np.uint32)
    keys = chain(tokens, 1)
    for size, worker in ((1, "a"), (2, "b")):
        names = np.arange(1, 1 + len(tokens) // size, dtype=np.uint64)
        index.apply(worker, [Stored(names, None, tokens, size), Removed(names[1:])])
        index.predict(worker, keys, 0)
    index.apply("a", [Stored((b"x",), 1, (2,), 1), Stored((7, 8), None, (0, 1), 1), Cleared()])
    tokens = np.arange(4096, dtype=np.uint32)
    for salt in ("s", "t"):
        names = tokens.astype(np.uint64) + np.uint64(10_000 * len(salt))
        index.apply("a", [Stored(names, None, tokens, 1, salt=salt)])
    index.overlaps(("a", "b"), keys)
    index.recomputed_share(("a", "b"))
    index.expire(2)
    index.drop("a")
