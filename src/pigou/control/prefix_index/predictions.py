"""Predictions: what a worker without KV events is expected to hold, by what was sent to it.

Of an entry (`pigou.control.prefix_index.worker_entries`) the name is our key, the value the time
at which it expires. The list holds all entries, the one that was predicted first at its head.
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import NONE, Words, erase, find, insert
from pigou.control.prefix_index.holder_rows import DEVICE_BIT
from pigou.control.prefix_index.worker_entries import (
    EVICTED,
    LIMIT,
    MEDIA,
    NEXT,
    USED,
    WIDTH,
    BlockChanges,
    Entries,
    EntryArrays,
    WorkerEntries,
    allocate_entry,
    append_change,
    free_entry,
    insert_before,
    new_changes,
    unlink,
)
from pigou.request import BlockKeys

#: Most predictions that one call of `expire` drops, so that a call stays short.
_MAX_EXPIRED = 16384
_FOREVER = 2**64 - 1


class Predictions(WorkerEntries):
    """Keys that a worker is expected to hold in device memory, each until a time.

    At most `limit`; beyond it the one that was predicted longest ago goes, a chain's tail
    before its root, and is counted as evicted.
    """

    @property
    def keys(self) -> Words:
        """Our keys, (entries + 1,)."""
        return EntryArrays(*self.arrays).names

    def predict(self, keys: BlockKeys, expires_at: int) -> BlockChanges:
        """Expect a chain to be held until a time, in nanoseconds, that never falls."""
        self.reserve(len(keys))
        gained, lost = new_changes(len(keys)), new_changes(len(keys))
        gained_count, lost_count = predict(self.arrays, keys, np.uint64(expires_at), gained, lost)
        return BlockChanges(gained[:gained_count], lost[:lost_count])

    def expire(self, now: int) -> BlockChanges:
        """Drop what was expected until `now` (nanoseconds) or before, 16,384 at a time."""
        return self._expire(now, _MAX_EXPIRED)

    def evict(self, count: int) -> BlockChanges:
        """Drop `count` of them, or all, those that were predicted longest ago first."""
        change = self._expire(_FOREVER, count)
        self.counts[EVICTED] += len(change.lost)
        return change

    def _expire(self, now: int, max_count: int) -> BlockChanges:
        lost = new_changes(min(len(self), max_count))
        lost_count = expire(self.arrays, np.uint64(now), lost)
        return BlockChanges(new_changes(0), lost[:lost_count])


# --- kernels --------------------------------------------------------------------------------


@inlined
def drop_first(entries: EntryArrays, lost: Words, count: int) -> int:
    """Drop the prediction at the head of the list; return the new length of `lost`."""
    links, names, values, slots, counts = entries
    entry = np.uint64(links[NEXT])
    count = append_change(lost, count, names[entry], links[entry * WIDTH + MEDIA])
    erase(slots, names[entry], entry)
    unlink(links, entry)
    free_entry(links, names, values, counts, entry)
    return count


@bare_kernel
def predict(
    arrays: Entries, keys: Words, expires_at: np.uint64, gained: Words, lost: Words
) -> tuple[int, int]:
    """Expect a chain, up to its first 0, on the device until a time; its root ends the list.

    Returns:
        How many keys were gained, and lost to make room.
    """
    entries = EntryArrays(*arrays)
    links, names, values, slots, counts = entries
    gained_count, lost_count, blocks = 0, 0, 0
    while blocks < keys.shape[0] and keys[blocks] != 0:
        blocks += 1
    for i in range(blocks - 1, -1, -1):
        entry = find(names, slots, keys[i])
        if entry != 0:
            unlink(links, entry)
        else:
            if counts[USED] >= counts[LIMIT]:
                lost_count = drop_first(entries, lost, lost_count)
                counts[EVICTED] += 1
            entry = allocate_entry(links, counts, NONE)
            names[entry] = keys[i]
            links[entry * WIDTH + MEDIA] = DEVICE_BIT
            insert(slots, names[entry], entry)
            gained_count = append_change(gained, gained_count, keys[i], DEVICE_BIT)
        values[entry] = expires_at
        insert_before(links, NONE, entry)
    return gained_count, lost_count


@bare_kernel
def expire(arrays: Entries, now: np.uint64, lost: Words) -> int:
    """Drop what was expected until `now` or before, as far as `lost` has room; return how many."""
    entries = EntryArrays(*arrays)
    count = 0
    while (
        count < lost.shape[0]
        and entries.counts[USED] > 0
        and entries.values[entries.links[NEXT]] <= now
    ):
        count = drop_first(entries, lost, count)
    return count
