"""The cache of one worker as the index knows it; each KV event is one compiled call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.ghosts import (
    GHOST_WORKER,
    GhostArrays,
    Ghosts,
    Rates,
    add_ghost,
    count_stored,
    ghost_shift,
)
from pigou.control.prefix_index.hash_slots import (
    ENTRY_SLOTS,
    HALF,
    NONE,
    ONE,
    SPREAD,
    Counts,
    Words,
    crowded,
    find,
    prefetch,
    probe,
    put,
)
from pigou.control.prefix_index.holder_rows import (
    BELOW_DEVICE,
    DUPLICATES,
    HOST,
    PREFETCHED,
    ROWS,
    TIERS,
    TableArrays,
    add_holder,
    drop_holder,
    tiers_of,
)
from pigou.control.prefix_index.holder_table import HolderTable
from pigou.control.prefix_index.holdings import (
    ZERO_HASH,
    Holdings,
    drop_entry,
    first_leaf,
    name_of_hash,
)
from pigou.control.prefix_index.predictions import Predictions
from pigou.control.prefix_index.worker_entries import (
    CHILD,
    EVICTED,
    KNOWN,
    LIMIT,
    MEDIA,
    USED,
    WIDTH,
    WORKER,
    Entries,
    EntryArrays,
    Links,
    add_child,
    allocate_entry,
    entry_of,
    insert_before,
    unlink,
)

#: What `store` returns where an array might be too small: nothing was done.
NO_ROOM = -(2**62)


@dataclass(frozen=True, slots=True)
class WorkerCacheStats:
    """What the index knows of one worker's cache."""

    blocks: int = 0
    # those of them that can be matched; the tokens or the parent of others are unknown.
    held: int = 0
    predicted: int = 0  # blocks that it is expected to hold
    events: int = 0
    event_gaps: int = 0  # times that all was forgotten, because events were missed
    evicted: int = 0  # blocks that were dropped to stay within limits


class WorkerCache:
    """Blocks of one worker, by its events and by prediction.

    Attributes:
        number: of the worker, in the holder table and among ghosts.
        holdings: blocks by its events.
        predictions: blocks by prediction.
        events, event_gaps: as of `WorkerCacheStats`.
    """

    __slots__ = ("event_gaps", "events", "holdings", "number", "predictions")

    def __init__(self, number: int, limit: int) -> None:
        """Start empty; `limit` is the most blocks by events, and by prediction."""
        self.number = number
        self.holdings = Holdings(limit, number)
        self.predictions = Predictions(limit, number)
        self.events = self.event_gaps = 0

    @property
    def evicted(self) -> int:
        """Blocks that were dropped to stay within limits."""
        return self.holdings.evicted + self.predictions.evicted

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.holdings.nbytes + self.predictions.nbytes

    @property
    def stats(self) -> WorkerCacheStats:
        """Counts as they stand."""
        return WorkerCacheStats(
            blocks=len(self.holdings),
            held=self.holdings.known,
            predicted=len(self.predictions),
            events=self.events,
            event_gaps=self.event_gaps,
            evicted=self.evicted,
        )

    def store(
        self,
        table: HolderTable,
        ghosts: Ghosts,
        hashes: Words,
        keys: Words,
        parent: int | None,
        media: int,
    ) -> int:
        """Store consecutive blocks in one tier, here and in the table; return how many are new.

        Args:
            hashes: of the engine, in the last column, shape (blocks, any).
            keys: in the last column, 0 where unknown, shape (blocks, any).
            parent: the engine's hash of the block before; None at the beginning.
            media: bit of the tier.
        """
        holdings = self.holdings
        name = NONE if parent is None else np.uint64(parent or ZERO_HASH)
        new = store(
            holdings.arrays, *table.arrays, *ghosts.arrays, media, name, hashes, keys, False
        )
        if new == NO_ROOM:
            holdings.reserve(holdings.count_absent(hashes))
            table.reserve(len(hashes), media)
            new = store(
                holdings.arrays, *table.arrays, *ghosts.arrays, media, name, hashes, keys, True
            )
        holdings.counted += new
        return new

    def remove(self, table: HolderTable, ghosts: Ghosts, hashes: Words, media: int) -> int:
        """Remove blocks from one tier, here and in the table; return how many are new, 0 or less.

        Blocks that are not there are no error. Arguments are those of `store`.
        """
        holdings = self.holdings
        new = remove(*holdings.arrays, *table.arrays, ghosts.arrays[0], media, hashes)
        holdings.counted += new
        return new


# --- kernels --------------------------------------------------------------------------------


@bare_kernel
def store(
    entry_arrays: Entries,
    rows: Words,
    row_slots: Words,
    duplicates: Words,
    totals: Counts,
    ghosts: Words,
    ghost_counts: Rates,
    media: int,
    parent: np.uint64,
    hashes: Words,
    keys: Words,
    reserved: bool,
) -> int:
    """Store consecutive blocks in one tier.

    Args:
        entry_arrays: the holdings, fields of `EntryArrays`.
        rows, row_slots, duplicates, totals: of the holder table (`TableArrays`). Each tuple that
            Python hands over costs a tenth of a microsecond, so there is only one.
        ghosts, ghost_counts: `GhostArrays`.
        media: bit of the tier.
        parent: name of the block before; 0 at the beginning.
        hashes: of the engine, in the last column, shape (blocks, any).
        keys: in the last column, 0 where unknown, shape (blocks, any).
        reserved: whether all arrays have room; the holdings need none beyond their limit.

    Returns:
        By how many entries the holdings grew, or `NO_ROOM`.
    """
    entries = EntryArrays(*entry_arrays)
    table = TableArrays(rows, row_slots, duplicates, totals)
    links, names, values, slots, counts = entries
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
    if ghosts.shape[0] > 0:
        count_stored(GhostArrays(ghosts, ghost_counts), keys, worker, counts[USED], max(0, new))
    return new


@inlined
def _prefetch_removed(
    slots: Words, row_slots: Words, ghosts: Words, shift: np.uint64, hashes: Words
) -> np.uint64:
    """As `hash_slots.prefetch`, for all arrays that a removal looks into.

    It takes names for keys, as they are where engines' hashes are ours; elsewhere only the first
    loads are of use.
    """
    hash_column, loaded = hashes.shape[1] - 1, NONE
    mask, row_mask = np.uint64(slots.shape[0] - 1), np.uint64(row_slots.shape[0] - 1)
    for i in range(hashes.shape[0]):
        spread = hashes[i, hash_column] * SPREAD
        tag = spread >> HALF
        loaded |= slots[tag & mask] | row_slots[tag & row_mask]
        loaded |= ghosts[spread >> shift, GHOST_WORKER]
    return loaded


@bare_kernel
def remove(
    links: Links,
    names: Words,
    values: Words,
    slots: Words,
    counts: Counts,
    rows: Words,
    row_slots: Words,
    duplicates: Words,
    totals: Counts,
    ghosts: Words,
    media: int,
    hashes: Words,
) -> int:
    """Remove blocks from one tier. Blocks that are not there are no error.

    The first five are fields of `EntryArrays`, the others are as of `store`. A block that leaves
    its last tier, and whose key is known, becomes a ghost.

    Returns:
        By how many entries the holdings grew, 0 or less.
    """
    entries = EntryArrays(links, names, values, slots, counts)
    table = TableArrays(rows, row_slots, duplicates, totals)
    worker: int = counts[WORKER]
    before, hash_column = counts[USED], hashes.shape[1] - 1
    shift = NONE
    if ghosts.shape[0] > 0:
        shift = ghost_shift(ghosts)
        loaded = _prefetch_removed(slots, row_slots, ghosts, shift, hashes)
        totals[PREFETCHED] = np.int64(loaded)
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
                add_ghost(ghosts, shift, key, worker)
        if key != 0:
            row = drop_holder(table, worker, key, media, row)
    new: int = counts[USED] - before
    return new
