"""Blocks of one worker, by events and by prediction: arrays with a list and a forest.

Entries are numbered from 1; 0 means "none". Free entries are linked by ELDER and YOUNGER, with
entry 0 as sentinel and MEDIA 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import (
    ENTRY_SLOTS,
    NONE,
    ONE,
    Row,
    Slots,
    Words,
    erase,
    find,
    grow_slots,
    insert,
    new_slots,
)
from pigou.request import BlockKeys, Counts

Links: TypeAlias = NDArray[np.uint32]
#: Fields of `EntryArrays`: kernels are called with a plain tuple, which costs less to hand over.
Entries: TypeAlias = tuple[Links, Words, Words, Slots, Counts]

#: Tiers, the nearest first.
DEVICE, HOST, STORAGE = range(3)
TIERS = 3
DEVICE_BIT = 1 << DEVICE
#: Columns of `links`: neighbours in the list; parent, first child and siblings; tiers (bits).
PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER, MEDIA = (np.uint64(i) for i in range(7))
WIDTH = np.uint64(8)
#: Entries of `counts`: highest entry ever used, entries in use, entries with a known key, evicted
#: entries; and two constants, the most entries and the worker's number.
TOP, USED, KNOWN, EVICTED, LIMIT, WORKER = range(6)
#: Columns of changes.
CHANGED_KEY, CHANGED_MEDIA = range(2)

_MIN_ENTRIES = 64
#: Most predictions that one call of `expire` drops, so that a call stays short.
_MAX_EXPIRED = 16384
_FOREVER = 2**64 - 1
#: The name of a block whose hash is 0, since 0 names no entry.
ZERO_HASH = np.uint64(0x9E3779B97F4A7C15)
_NO_CHANGES: Words = np.zeros((0, 2), dtype=np.uint64)


class EntryArrays(NamedTuple):
    """Arrays of one worker's entries, as kernels read them."""

    # uint32, shape (8 (entries + 1),), eight of each entry by the names above. Entry 0 is the
    # sentinel of the list. (Two dimensions would be slower: the compiler makes more of a number of
    # columns that it knows.)
    links: Links
    names: Words  # uint64, shape (entries + 1,), 0 for a free entry
    values: Words  # uint64, shape (entries + 1,), 0 for a free entry
    slots: Slots  # from a name to its entry (`pigou.control.prefix_index.hash_slots`)
    counts: Counts  # int64, shape (6,), by the names above


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Blocks that a worker gained and lost."""

    gained: Words  # keys and tiers (bits), shape (n, 2)
    lost: Words


class WorkerEntries:
    """Entries of one worker; arrays grow up to a limit."""

    def __init__(self, limit: int, worker: int = 0) -> None:
        self.limit = limit
        self.expected = 0  # entries that the first growth makes room for
        self.counts: Counts = np.array([0, 0, 0, 0, limit, worker], dtype=np.int64)
        self.counted = 0  # entries at the last call of `growth`
        self.arrays: Entries = self._new_arrays()

    def __len__(self) -> int:
        return self.counts.item(USED)

    @property
    def evicted(self) -> int:
        """Entries dropped for the limit."""
        return self.counts.item(EVICTED)

    @property
    def keys(self) -> Words:
        """Router keys, 0 if unknown, (entries + 1,)."""
        return EntryArrays(*self.arrays).values

    def growth(self) -> int:
        """Return the growth in entries since the last call."""
        before, self.counted = self.counted, len(self)
        return self.counted - before

    def reserve(self, new: int) -> None:
        """Reserve room for new entries, up to the limit."""
        links, names, values, slots, counts = self.arrays
        needed, size = min(len(self) + new, self.limit), len(names) - 1
        room = max(needed, min(self.expected, self.limit))
        if needed > size:
            while size < room:
                size = min(2 * size, self.limit)
            more_links, more_names, more_values = _zeros(size)
            more_links[: len(links)] = links
            more_names[: len(names)] = names
            more_values[: len(values)] = values
            links, names, values = more_links, more_names, more_values
        # All slots are touched: no more of them than are of use.
        slots = grow_slots(slots, names, needed, ENTRY_SLOTS, room)
        self.arrays = links, names, values, slots, counts

    def clear(self) -> BlockChanges:
        """Remove all entries; the count of evicted ones stays."""
        lost = _new_changes(len(self))
        links = EntryArrays(*self.arrays).links
        lost_count = _list_keys(links, self.keys, self.counts, lost)
        self.counts[:EVICTED] = 0
        self.arrays = self._new_arrays()
        return BlockChanges(_new_changes(0), lost[:lost_count])

    def _new_arrays(self) -> Entries:
        entries = min(_MIN_ENTRIES, self.limit)
        return *_zeros(entries), new_slots(entries, ENTRY_SLOTS), self.counts


def _zeros(entries: int) -> tuple[Links, Words, Words]:
    return (
        np.zeros((entries + 1) * int(WIDTH), dtype=np.uint32),
        np.zeros(entries + 1, dtype=np.uint64),
        np.zeros(entries + 1, dtype=np.uint64),
    )


def _new_changes(count: int) -> Words:
    return np.empty((count, 2), dtype=np.uint64) if count else _NO_CHANGES


class Holdings(WorkerEntries):
    """Blocks of one worker by events; names are engine hashes, values router keys (or 0).

    Entries form a forest by parent. Leaves are listed by time of storing, and evicted oldest first
    beyond `limit`; a chain is evicted from tail to root.
    """

    @property
    def known(self) -> int:
        """Blocks with a known key, which alone are matched."""
        return int(self.counts[KNOWN])

    def key(self, name: int) -> int | None:
        """Return a held block's key; None if not held or unknown."""
        arrays = EntryArrays(*self.arrays)
        entry = look_up(arrays.names, arrays.slots, np.uint64(name))
        return int(arrays.values[entry]) or None if entry else None

    def count_absent(self, hashes: Words) -> int:
        """Return how many of these blocks are not held; hashes in the last column."""
        arrays = EntryArrays(*self.arrays)
        return count_absent(arrays.names, arrays.slots, hashes)

    def evict(self, count: int) -> BlockChanges:
        """Evict `count` blocks, or all, oldest leaves first."""
        count = min(count, len(self))
        lost = _new_changes(count)
        lost_count = evict(self.arrays, count, lost)
        return BlockChanges(_new_changes(0), lost[:lost_count])


class Predictions(WorkerEntries):
    """Predicted keys, by expiry, oldest first; evicted in that order beyond `limit`."""

    @property
    def keys(self) -> Words:
        """Router keys, (entries + 1,)."""
        return EntryArrays(*self.arrays).names

    def predict(self, keys: BlockKeys, expires_at: int) -> BlockChanges:
        """Predict a chain until a time in nanoseconds that never falls."""
        self.reserve(len(keys))
        gained, lost = _new_changes(len(keys)), _new_changes(len(keys))
        gained_count, lost_count = predict(self.arrays, keys, np.uint64(expires_at), gained, lost)
        return BlockChanges(gained[:gained_count], lost[:lost_count])

    def expire(self, now: int) -> BlockChanges:
        """Drop predictions expired at `now` (nanoseconds), 16,384 at a time."""
        return self._expire(now, _MAX_EXPIRED)

    def evict(self, count: int) -> BlockChanges:
        """Evict `count` predictions, or all, oldest first."""
        change = self._expire(_FOREVER, count)
        self.counts[EVICTED] += len(change.lost)
        return change

    def _expire(self, now: int, max_count: int) -> BlockChanges:
        lost = _new_changes(min(len(self), max_count))
        lost_count = expire(self.arrays, np.uint64(now), lost)
        return BlockChanges(_new_changes(0), lost[:lost_count])


# --- entries --------------------------------------------------------------------------------


@inlined
def entry_of(names: Words, slots: Slots, name: np.uint64, neighbour: Row) -> Row:
    """Return the entry of a name, or 0; checks the entries beside `neighbour` first."""
    after, before = neighbour + ONE, neighbour - ONE
    if after < np.uint64(names.shape[0]) and names[after] == name:
        return after
    if neighbour > ONE and names[before] == name:
        return before
    return find(names, slots, name)


@inlined
def allocate_entry(links: Links, counts: Counts, previous: Row) -> Row:
    """Return a free entry, after `previous` if possible."""
    counts[USED] += 1
    entry, top = previous + ONE, np.uint64(counts[TOP])
    if entry <= top and links[entry * WIDTH + MEDIA] != 0:
        entry = top + ONE
    if entry > top:
        head = np.uint64(links[YOUNGER])
        if entry < np.uint64(links.shape[0]) // WIDTH and (previous == top or head == 0):
            counts[TOP] = entry
            return entry
        entry = head
    before, after = links[entry * WIDTH + ELDER], links[entry * WIDTH + YOUNGER]
    links[before * WIDTH + YOUNGER] = after
    links[after * WIDTH + ELDER] = before
    links[entry * WIDTH + ELDER] = 0
    links[entry * WIDTH + YOUNGER] = 0
    return entry


@inlined
def _free_entry(links: Links, names: Words, values: Words, counts: Counts, entry: Row) -> None:
    """Append an unlinked entry to the free ones."""
    before = links[ELDER]
    links[entry * WIDTH + PARENT] = 0
    links[entry * WIDTH + CHILD] = 0
    links[entry * WIDTH + MEDIA] = 0
    links[entry * WIDTH + YOUNGER] = 0
    links[entry * WIDTH + ELDER] = before
    links[before * WIDTH + YOUNGER] = entry
    links[ELDER] = entry
    names[entry] = 0
    values[entry] = 0
    counts[USED] -= 1


# --- the list and the forest ----------------------------------------------------------------


@inlined
def insert_before(links: Links, after: Row, entry: Row) -> None:
    """Insert an entry into the list before `after`; 0 appends."""
    before = links[after * WIDTH + PREV]
    links[entry * WIDTH + PREV] = before
    links[entry * WIDTH + NEXT] = after
    links[before * WIDTH + NEXT] = entry
    links[after * WIDTH + PREV] = entry


@inlined
def unlink(links: Links, entry: Row) -> None:
    """Remove an entry from the list."""
    before, after = links[entry * WIDTH + PREV], links[entry * WIDTH + NEXT]
    links[before * WIDTH + NEXT] = after
    links[after * WIDTH + PREV] = before
    links[entry * WIDTH + PREV] = 0
    links[entry * WIDTH + NEXT] = 0


@inlined
def add_child(links: Links, parent: Row, entry: Row) -> None:
    """Make a new entry a child of `parent` (0: a root), and the last leaf."""
    last = links[PREV]
    if parent != 0:
        eldest = links[parent * WIDTH + CHILD]
        links[parent * WIDTH + CHILD] = entry
        links[entry * WIDTH + PARENT] = parent
        if eldest != 0:
            links[entry * WIDTH + YOUNGER] = eldest
            links[eldest * WIDTH + ELDER] = entry
        elif last == parent:  # it was the last leaf: the new one takes its place
            last = links[parent * WIDTH + PREV]
            links[parent * WIDTH + PREV] = 0
        else:
            unlink(links, parent)
    links[entry * WIDTH + PREV] = last
    links[last * WIDTH + NEXT] = entry
    links[PREV] = entry


@inlined
def detach(links: Links, entry: Row) -> None:
    """Remove an entry from the forest; a childless parent becomes the first leaf."""
    child = links[entry * WIDTH + CHILD]
    if child == 0:
        unlink(links, entry)
    while child != 0:
        younger = links[child * WIDTH + YOUNGER]
        links[child * WIDTH + PARENT] = 0
        links[child * WIDTH + ELDER] = 0
        links[child * WIDTH + YOUNGER] = 0
        child = younger
    parent, elder, younger = (
        links[entry * WIDTH + PARENT],
        links[entry * WIDTH + ELDER],
        links[entry * WIDTH + YOUNGER],
    )
    if younger != 0:
        links[younger * WIDTH + ELDER] = elder
    if elder != 0:
        links[elder * WIDTH + YOUNGER] = younger
    elif parent != 0:
        links[parent * WIDTH + CHILD] = younger
        if younger == 0:
            insert_before(links, links[NEXT], parent)


@inlined
def _append_change(changes: Words, count: int, key: np.uint64, media: int) -> int:
    """Append a key and its tiers to `changes` unless it is 0; return their count."""
    if key == 0:
        return count
    changes[count, CHANGED_KEY] = key
    changes[count, CHANGED_MEDIA] = media
    return count + 1


@bare_kernel
def _list_keys(links: Links, keys: Words, counts: Counts, changes: Words) -> int:
    """Write all keys and their tiers to `changes`; return their count."""
    count = 0
    for entry in range(1, counts[TOP] + 1):
        if links[entry * WIDTH + MEDIA] != 0:
            count = _append_change(changes, count, keys[entry], links[entry * WIDTH + MEDIA])
    return count


# --- holdings -------------------------------------------------------------------------------


@inlined
def name_of_hash(block_hash: np.uint64) -> np.uint64:
    """Return a block's name from the engine's hash."""
    return block_hash if block_hash != 0 else ZERO_HASH


@inlined
def drop_entry(entries: EntryArrays, entry: Row) -> None:
    """Remove an entry; its children become roots."""
    links, names, values, slots, counts = entries
    if values[entry] != 0:
        counts[KNOWN] -= 1
    erase(names, slots, entry)
    detach(links, entry)
    _free_entry(links, names, values, counts, entry)


@inlined
def first_leaf(links: Links, spare: Row) -> Row:
    """Return the next leaf to evict, other than `spare`; 0 for none."""
    entry = np.uint64(links[NEXT])
    if entry == spare:
        entry = np.uint64(links[entry * WIDTH + NEXT])
    return entry


@bare_kernel
def evict(arrays: Entries, count: int, lost: Words) -> int:
    """Evict `count` existing entries; return how many keys are lost."""
    entries = EntryArrays(*arrays)
    lost_count = 0
    for _ in range(count):
        entry = first_leaf(entries.links, NONE)
        media = entries.links[entry * WIDTH + MEDIA]
        lost_count = _append_change(lost, lost_count, entries.values[entry], media)
        drop_entry(entries, entry)
        entries.counts[EVICTED] += 1
    return lost_count


@bare_kernel
def look_up(names: Words, slots: Slots, block_hash: np.uint64) -> Row:
    """Return the entry of a hash, or 0."""
    return find(names, slots, name_of_hash(block_hash))


@bare_kernel
def count_absent(names: Words, slots: Slots, hashes: Words) -> int:
    """Count the hashes (last column) that are not held."""
    count = 0
    for i in range(hashes.shape[0]):
        if find(names, slots, name_of_hash(hashes[i, hashes.shape[1] - 1])) == 0:
            count += 1
    return count


# --- predictions ----------------------------------------------------------------------------


@inlined
def _drop_first(entries: EntryArrays, lost: Words, count: int) -> int:
    """Drop the oldest prediction; return the new length of `lost`."""
    links, names, values, slots, counts = entries
    entry = np.uint64(links[NEXT])
    count = _append_change(lost, count, names[entry], links[entry * WIDTH + MEDIA])
    erase(names, slots, entry)
    unlink(links, entry)
    _free_entry(links, names, values, counts, entry)
    return count


@bare_kernel
def predict(
    arrays: Entries, keys: Words, expires_at: np.uint64, gained: Words, lost: Words
) -> tuple[int, int]:
    """Predict a chain up to its first 0; return the keys gained, and lost for room."""
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
                lost_count = _drop_first(entries, lost, lost_count)
                counts[EVICTED] += 1
            entry = allocate_entry(links, counts, NONE)
            names[entry] = keys[i]
            links[entry * WIDTH + MEDIA] = DEVICE_BIT
            insert(slots, names[entry], entry)
            gained_count = _append_change(gained, gained_count, keys[i], DEVICE_BIT)
        values[entry] = expires_at
        insert_before(links, NONE, entry)
    return gained_count, lost_count


@bare_kernel
def expire(arrays: Entries, now: np.uint64, lost: Words) -> int:
    """Drop predictions expired at `now`, as far as `lost` has room; return how many."""
    entries = EntryArrays(*arrays)
    count = 0
    while (
        count < lost.shape[0]
        and entries.counts[USED] > 0
        and entries.values[entries.links[NEXT]] <= now
    ):
        count = _drop_first(entries, lost, count)
    return count
