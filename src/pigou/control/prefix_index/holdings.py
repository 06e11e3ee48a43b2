"""Holdings: the blocks of one worker by its engine's own hashes, as its events tell.

Of an entry (`pigou.control.prefix_index.worker_entries`) the name is the engine's hash, the value
our key (0 where unknown). Entries form a forest by the parents that events name. Its leaves are in
the list, in the order of eviction: those stored last at its end; a parent that becomes a leaf again
at its head, so that a chain is evicted from its tail to its root.
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import NONE, Row, Words, erase, find
from pigou.control.prefix_index.worker_entries import (
    EVICTED,
    KNOWN,
    MEDIA,
    NEXT,
    WIDTH,
    BlockChanges,
    Entries,
    EntryArrays,
    Links,
    WorkerEntries,
    append_change,
    detach,
    free_entry,
    new_changes,
)

#: The name of a block whose hash is 0, since 0 names no entry.
ZERO_HASH = np.uint64(0x9E3779B97F4A7C15)


class Holdings(WorkerEntries):
    """Blocks of one worker: engine's hash, our key, tiers.

    At most `limit`; beyond it the leaf that was stored longest ago goes, and what does not fit
    even so (a chain longer than the limit) is left out. Both are counted as evicted.
    """

    @property
    def known(self) -> int:
        """Blocks whose key is known: only those are ever matched."""
        return int(self.counts[KNOWN])

    def key(self, name: int) -> int | None:
        """Return the key of a block that is held; None where it is not, or is not known."""
        arrays = EntryArrays(*self.arrays)
        entry = look_up(arrays.names, arrays.slots, np.uint64(name))
        return int(arrays.values[entry]) or None if entry else None

    def count_absent(self, hashes: Words) -> int:
        """Return how many of these blocks are not held; hashes in the last column."""
        arrays = EntryArrays(*self.arrays)
        return count_absent(arrays.names, arrays.slots, hashes)

    def evict(self, count: int) -> BlockChanges:
        """Drop `count` blocks, or all, the leaves that were stored longest ago first."""
        count = min(count, len(self))
        lost = new_changes(count)
        lost_count = evict(self.arrays, count, lost)
        return BlockChanges(new_changes(0), lost[:lost_count])


# --- kernels --------------------------------------------------------------------------------


@inlined
def name_of_hash(block_hash: np.uint64) -> np.uint64:
    """Return the name of a block by the engine's hash."""
    return block_hash if block_hash != 0 else ZERO_HASH


@inlined
def drop_entry(entries: EntryArrays, entry: Row) -> None:
    """Drop an entry; its children become roots."""
    links, names, values, slots, counts = entries
    if values[entry] != 0:
        counts[KNOWN] -= 1
    erase(slots, names[entry], entry)
    detach(links, entry)
    free_entry(links, names, values, counts, entry)


@inlined
def first_leaf(links: Links, spare: Row) -> Row:
    """Return the leaf that eviction takes first, other than `spare`; 0 where there is none."""
    entry = np.uint64(links[NEXT])
    if entry == spare:
        entry = np.uint64(links[entry * WIDTH + NEXT])
    return entry


@bare_kernel
def evict(arrays: Entries, count: int, lost: Words) -> int:
    """Drop so many entries, which there must be; return how many keys are lost."""
    entries = EntryArrays(*arrays)
    lost_count = 0
    for _ in range(count):
        entry = first_leaf(entries.links, NONE)
        media = entries.links[entry * WIDTH + MEDIA]
        lost_count = append_change(lost, lost_count, entries.values[entry], media)
        drop_entry(entries, entry)
        entries.counts[EVICTED] += 1
    return lost_count


@bare_kernel
def look_up(names: Words, slots: Words, block_hash: np.uint64) -> Row:
    """Return the entry of a hash, or 0."""
    return find(names, slots, name_of_hash(block_hash))


@bare_kernel
def count_absent(names: Words, slots: Words, hashes: Words) -> int:
    """Count the hashes (last column) that are not held."""
    count = 0
    for i in range(hashes.shape[0]):
        if find(names, slots, name_of_hash(hashes[i, hashes.shape[1] - 1])) == 0:
            count += 1
    return count
