"""A worker's cache in the index; each KV event is one compiled call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import DirectCalls, bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import (
    ENTRY_SLOTS,
    NONE,
    ONE,
    SPREAD,
    Slots,
    Words,
    crowded,
    find,
    prefetch,
    probe,
    put,
    spread_of,
)
from pigou.control.prefix_index.holder_table import (
    BELOW_DEVICE,
    DUPLICATES,
    PREFETCHED,
    ROWS,
    HolderTable,
    TableArrays,
    TableTuple,
    add_holder,
    drop_holder,
    tiers_of,
)
from pigou.control.prefix_index.worker_entries import (
    CHILD,
    EVICTED,
    HOST,
    KNOWN,
    LIMIT,
    MEDIA,
    TIERS,
    USED,
    WIDTH,
    WORKER,
    ZERO_HASH,
    Entries,
    EntryArrays,
    Holdings,
    Predictions,
    add_child,
    allocate_entry,
    drop_entry,
    entry_of,
    first_leaf,
    insert_before,
    name_of_hash,
    unlink,
)
from pigou.request import Counts

Rates: TypeAlias = NDArray[np.float64]
#: Fields of `GhostArrays`: kernels are called with a plain tuple, which costs less to hand over.
GhostTuple: TypeAlias = tuple[Words, Rates]

#: Bits of a ghost that are the worker's number.
_WORKER = np.uint64(2**16 - 1)
#: Rows of `counts`: blocks that were computed again, and blocks that were stored.
RECOMPUTED, STORED = range(2)
#: Blocks of a cacheful, at least.
_MIN_BLOCKS = 1024
_WORKERS = 8
#: Returned by `store` if an array might be too small; nothing was done.
NO_ROOM = -(2**62)


class GhostArrays(NamedTuple):
    """Arrays of ghosts, as kernels read them."""

    # uint64, shape (a power of two,), or empty until something is evicted: the upper 48 bits of a
    # key's spread, whose first ones are the row, and 16 of the number of the worker that evicted
    # it; 0 where empty. A new ghost replaces another, and so the oldest are forgotten, by chance.
    blocks: Words
    counts: Rates  # float64, shape (2, workers), by the rows above


class Ghosts:
    """Memory price of each worker, in blocks recomputed per block stored.

    Evicted blocks are remembered as ghosts, about as many as all workers hold (Megiddo and Modha,
    "ARC", FAST 2003). One stored anew anywhere counts for the worker that evicted it. Counts halve
    with each cacheful stored.
    """

    def __init__(self) -> None:
        blocks: Words = np.zeros(0, dtype=np.uint64)
        self.arrays: GhostTuple = blocks, np.zeros((2, _WORKERS))
        self.capacity = 0  # blocks that it has room for
        self._zeros: Rates = np.zeros(0)

    def admit(self, worker: int) -> None:
        """Start to count for a worker."""
        blocks, counts = self.arrays
        while worker >= counts.shape[1]:
            counts = np.concatenate([counts, np.zeros_like(counts)], axis=1)
        counts[:, worker] = 0.0
        blocks[blocks & _WORKER == worker] = 0
        self.arrays = blocks, counts

    def reserve(self, held: int) -> None:
        """Grow for `held` blocks of all workers before evictions."""
        if held > self.capacity:
            self.capacity = max(_MIN_BLOCKS, 1 << (held - 1).bit_length())
            self.arrays = np.zeros(self.capacity, dtype=np.uint64), self.arrays[1]

    def recomputed_share(self, workers: NDArray[np.int64]) -> Rates:
        """Return blocks recomputed per block stored, 0 to 1, (workers,)."""
        blocks, counts = self.arrays
        if not len(blocks) and len(self._zeros) == len(workers):
            return self._zeros
        shares: Rates = np.zeros(len(workers))
        if len(blocks):
            recomputed_share(counts, workers, shares)
        else:
            self._zeros = shares
        return shares


@dataclass(frozen=True, slots=True)
class WorkerCacheStats:
    """Statistics of one worker's cache."""

    blocks: int = 0
    # those of them that can be matched; the tokens or the parent of others are unknown.
    held: int = 0
    predicted: int = 0  # blocks that it is expected to hold
    events: int = 0
    event_gaps: int = 0  # times that all was forgotten, because events were missed
    evicted: int = 0  # blocks that were dropped to stay within limits


class WorkerCache:
    """Blocks of one worker, by events and by prediction; at most `limit` of each."""

    __slots__ = ("event_gaps", "events", "holdings", "number", "predictions")

    def __init__(self, number: int, limit: int) -> None:
        self.number = number  # worker's number in the holder table and among ghosts
        self.holdings = Holdings(limit, number)
        self.predictions = Predictions(limit, number)
        self.events = self.event_gaps = 0

    @property
    def evicted(self) -> int:
        """Blocks dropped for the limits."""
        return self.holdings.evicted + self.predictions.evicted

    @property
    def stats(self) -> WorkerCacheStats:
        """Return the current counts."""
        return WorkerCacheStats(
            blocks=len(self.holdings), held=self.holdings.known, predicted=len(self.predictions),
            events=self.events, event_gaps=self.event_gaps, evicted=self.evicted,
        )  # fmt: skip

    def store(
        self, table: HolderTable, ghosts: Ghosts, hashes: Words, keys: Words, parent: int | None,
        media: int,
    ) -> int:  # fmt: skip
        """Store consecutive blocks in a tier; hashes and keys are (blocks, any).

        Return the growth.
        """
        holdings = self.holdings
        name = NONE if parent is None else np.uint64(parent or ZERO_HASH)
        new: int = _calls.store(
            holdings.arrays, table.arrays, ghosts.arrays, media, name, hashes, keys, False
        )
        if new == NO_ROOM:
            holdings.reserve(holdings.count_absent(hashes))
            table.reserve(len(hashes), media)
            new = _calls.store(
                holdings.arrays, table.arrays, ghosts.arrays, media, name, hashes, keys, True
            )
        holdings.counted += new
        return new

    def remove(self, table: HolderTable, ghosts: Ghosts, hashes: Words, media: int) -> int:
        """Remove blocks from a tier; return the growth, 0 or less."""
        holdings = self.holdings
        new: int = _calls.remove(holdings.arrays, table.arrays, ghosts.arrays, media, hashes)
        holdings.counted += new
        return new


# --- kernels --------------------------------------------------------------------------------


@inlined
def _ghost_shift(blocks: Words) -> np.uint64:
    return np.uint64(64 - int(math.log2(blocks.shape[0]) + 0.5))


@inlined
def _add_ghost(blocks: Words, shift: np.uint64, key: np.uint64, worker: int) -> None:
    """Remember a block that a worker evicted from its last tier."""
    spread = key * SPREAD
    blocks[spread >> shift] = (spread & ~_WORKER) | (np.uint64(worker) & _WORKER)


@inlined
def _count_stored(ghosts: GhostArrays, keys: Words, worker: int, held: int, new: int) -> None:
    """Count stored blocks, and ghosts among them for the worker that evicted them."""
    blocks, counts = ghosts
    keep = 0.5 ** (new / max(_MIN_BLOCKS, held))
    counts[RECOMPUTED, worker] *= keep
    counts[STORED, worker] = keep * counts[STORED, worker] + new
    key_column = keys.shape[1] - 1
    shift = _ghost_shift(blocks)
    for i in range(keys.shape[0]):
        key = keys[i, key_column]
        spread = key * SPREAD
        ghost = blocks[spread >> shift]
        if key != 0 and ghost != 0 and ghost ^ spread <= _WORKER:
            counts[RECOMPUTED, ghost & _WORKER] += 1.0
            blocks[spread >> shift] = 0


@bare_kernel
def recomputed_share(counts: Rates, workers: Counts, shares: Rates) -> None:
    """Write blocks recomputed per block stored, at most 1; `shares` starts at zeros."""
    for i in range(workers.shape[0]):
        worker = workers[i]
        if worker >= 0:
            shares[i] = min(1.0, counts[RECOMPUTED, worker] / max(counts[STORED, worker], 1.0))


@bare_kernel
def store(
    entry_arrays: Entries, table_arrays: TableTuple, ghosts: GhostTuple, media: int,
    parent: np.uint64, hashes: Words, keys: Words, reserved: bool,
) -> int:  # fmt: skip
    """Store consecutive blocks in one tier; return the growth of the holdings, or `NO_ROOM`.

    `hashes` and `keys` (0: unknown) are in the last columns, (blocks, any); `reserved` skips the
    check for room.
    """
    entries, table = EntryArrays(*entry_arrays), TableArrays(*table_arrays)
    links, names, values, slots, counts = entries
    rows, row_slots, duplicates, totals = table
    worker: int = counts[WORKER]
    before, new_blocks = counts[USED], hashes.shape[0]
    if not reserved and (
        before + new_blocks >= names.shape[0]
        or crowded(slots, before + new_blocks, ENTRY_SLOTS)
        or totals[ROWS] + new_blocks >= rows.shape[0]
        or 2 * (totals[DUPLICATES] + TIERS * new_blocks) > duplicates.shape[0]
        or media >> tiers_of(rows) != 0
    ):
        return NO_ROOM
    totals[BELOW_DEVICE] |= media >> HOST
    totals[PREFETCHED] = np.int64(prefetch(slots, hashes) | prefetch(row_slots, keys))
    hash_column, key_column = hashes.shape[1] - 1, keys.shape[1] - 1
    previous, row = find(names, slots, parent) if parent != 0 else NONE, NONE
    for i in range(new_blocks):
        name, key = name_of_hash(hashes[i, hash_column]), keys[i, key_column]
        entry, slot = previous + ONE, NONE
        if entry >= np.uint64(names.shape[0]) or names[entry] != name:
            entry, slot = probe(names, slots, name)
        if entry == 0:
            if counts[USED] >= counts[LIMIT]:
                leaf = first_leaf(links, previous)
                if leaf == 0:
                    counts[EVICTED] += new_blocks - i
                    break
                evicted_key, evicted_media = values[leaf], links[leaf * WIDTH + MEDIA]
                drop_entry(entries, leaf)
                counts[EVICTED] += 1
                if evicted_key != 0:
                    drop_holder(table, worker, evicted_key, evicted_media, NONE)
                _, slot = probe(names, slots, name)
            entry = allocate_entry(links, counts, previous)
            names[entry] = name
            put(slots, slot, name, entry)
            add_child(links, previous, entry)
        elif links[entry * WIDTH + CHILD] == 0:
            unlink(links, entry)
            insert_before(links, NONE, entry)
        new_media = media & ~links[entry * WIDTH + MEDIA]
        links[entry * WIDTH + MEDIA] |= media
        if values[entry] == 0 and key != 0:
            values[entry] = key
            counts[KNOWN] += 1
            new_media = links[entry * WIDTH + MEDIA]
        if new_media != 0 and values[entry] != 0:
            row = add_holder(table, worker, values[entry], new_media, row)
        previous = entry
    new: int = counts[USED] - before
    if ghosts[0].shape[0] > 0:
        _count_stored(GhostArrays(*ghosts), keys, worker, counts[USED], max(0, new))
    return new


@inlined
def _prefetch_removed(
    slots: Slots, row_slots: Slots, ghosts: Words, shift: np.uint64, hashes: Words
) -> np.uint64:
    # As `hash_slots.prefetch`. It takes names for keys, as they are where engines' hashes are ours;
    # elsewhere only the first loads are of use.
    hash_column, loaded = hashes.shape[1] - 1, NONE
    mask, row_mask = np.uint64(slots.shape[0] - 1), np.uint64(row_slots.shape[0] - 1)
    for i in range(hashes.shape[0]):
        name = hashes[i, hash_column]
        start = spread_of(name)
        loaded |= slots[start & mask] | row_slots[start & row_mask]
        loaded |= ghosts[(name * SPREAD) >> shift]
    return loaded


@bare_kernel
def remove(
    entry_arrays: Entries, table_arrays: TableTuple, ghost_arrays: GhostTuple, media: int,
    hashes: Words,
) -> int:  # fmt: skip
    """Remove blocks from one tier; return the growth.

    Known keys leaving their last tier become ghosts.
    """
    entries, table = EntryArrays(*entry_arrays), TableArrays(*table_arrays)
    links, names, values, slots, counts = entries
    ghosts = ghost_arrays[0]
    worker: int = counts[WORKER]
    before, hash_column = counts[USED], hashes.shape[1] - 1
    shift = NONE
    if ghosts.shape[0] > 0:
        shift = _ghost_shift(ghosts)
        loaded = _prefetch_removed(slots, table.slots, ghosts, shift, hashes)
        table.totals[PREFETCHED] = np.int64(loaded)
    entry, row = NONE, NONE
    for i in range(hashes.shape[0]):
        entry = entry_of(names, slots, name_of_hash(hashes[i, hash_column]), entry)
        if entry == 0 or links[entry * WIDTH + MEDIA] & media == 0:
            continue
        key = values[entry]
        links[entry * WIDTH + MEDIA] &= ~media
        if links[entry * WIDTH + MEDIA] == 0:
            drop_entry(entries, entry)
            if key != 0:
                _add_ghost(ghosts, shift, key, worker)
        if key != 0:
            row = drop_holder(table, worker, key, media, row)
    new: int = counts[USED] - before
    return new


_ENTRIES = "Tuple((u4[::1], u8[::1], u8[::1], u4[::1], i8[::1]))"
_TABLE, _GHOSTS = (
    "Tuple((u8[:, ::1], u4[::1], u8[:, ::1], i8[::1]))",
    "Tuple((u8[::1], f8[:, ::1]))",
)
_GROUPS = f"{_ENTRIES}, {_TABLE}, {_GHOSTS}"
_calls = DirectCalls(
    store=(store, f"i8({_GROUPS}, i8, u8, u8[:, ::1], u8[:, ::1], b1)"),
    remove=(remove, f"i8({_GROUPS}, i8, u8[:, ::1])"),
)
