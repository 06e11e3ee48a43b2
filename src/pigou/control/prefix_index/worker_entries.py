"""Entries of one worker: growing arrays under names, with a list and a forest; kernels compiled.

Entries are numbered from 1; 0 means "none". `EntryArrays` has their arrays. Blocks that are stored
one after the other are entries that follow one another, as far as these are free. Free entries are
in a list by ELDER and YOUNGER, entry 0 its sentinel; their MEDIA are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.hash_slots import (
    ENTRY_SLOTS,
    ONE,
    Counts,
    Row,
    Words,
    find,
    grow_slots,
    new_slots,
)

Links: TypeAlias = NDArray[np.uint32]
#: Fields of `EntryArrays`: kernels are called with a plain tuple, which costs less to hand over.
Entries: TypeAlias = tuple[Links, Words, Words, Words, Counts]

#: Of each entry in `links`: neighbours in the list; parent, first child and siblings; tiers (bits).
PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER, MEDIA = (np.uint64(i) for i in range(7))
WIDTH = np.uint64(8)
#: Entries of `counts`: highest entry ever used, entries in use, those of them whose key is known,
#: entries that were evicted; and, which stay, the most entries, and the worker's number.
TOP, USED, KNOWN, EVICTED, LIMIT, WORKER = range(6)
#: Columns of changes.
CHANGED_KEY, CHANGED_MEDIA = range(2)

_MIN_ENTRIES = 64
_NO_CHANGES: Words = np.zeros((0, 2), dtype=np.uint64)


class EntryArrays(NamedTuple):
    """Arrays of one worker's entries, as kernels see them."""

    # uint32, shape (8 (entries + 1),), eight of each entry by the names above. Entry 0 is the
    # sentinel of the list. (Two dimensions would be slower: the compiler makes more of a number of
    # columns that it knows.)
    links: Links
    names: Words  # uint64, shape (entries + 1,), 0 for a free entry
    values: Words  # uint64, shape (entries + 1,), 0 for a free entry
    slots: Words  # from a name to its entry (`pigou.control.prefix_index.hash_slots`)
    counts: Counts  # int64, shape (6,), by the names above


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Blocks that a worker gained and lost."""

    gained: Words  # keys and tiers (bits), shape (n, 2)
    lost: Words


class WorkerEntries:
    """Entries of one worker, whose arrays grow up to a limit.

    Attributes:
        limit: most entries.
        expected: entries that the first growth makes room for.
        arrays: fields of `EntryArrays`, for kernels.
        counted: entries at the last call of `growth`.
    """

    def __init__(self, limit: int, worker: int = 0) -> None:
        """Start empty, with room for `limit` entries at most, at least 1.

        `worker` is its number in the holder table.
        """
        self.limit = limit
        self.expected = 0
        self.counts: Counts = np.array([0, 0, 0, 0, limit, worker], dtype=np.int64)
        self.counted = 0
        self.arrays: Entries = self._new_arrays()

    def __len__(self) -> int:
        return self.counts.item(USED)

    @property
    def evicted(self) -> int:
        """Entries that were dropped to stay within limits."""
        return self.counts.item(EVICTED)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        links, names, values, slots, _ = self.arrays
        return links.nbytes + names.nbytes + values.nbytes + slots.nbytes

    @property
    def keys(self) -> Words:
        """Our keys, 0 where unknown, (entries + 1,)."""
        return EntryArrays(*self.arrays).values

    def growth(self) -> int:
        """Return by how many entries it grew since the last call."""
        before, self.counted = self.counted, len(self)
        return self.counted - before

    def reserve(self, new: int) -> None:
        """Make room for so many new entries, as far as the limit goes."""
        links, names, values, slots, counts = self.arrays
        needed, size = min(len(self) + new, self.limit), len(names) - 1
        # All slots are touched: no more of them than are of use.
        slots = grow_slots(slots, needed, ENTRY_SLOTS)
        if needed > size:
            needed = max(needed, min(self.expected, self.limit))
            while size < needed:
                size = min(2 * size, self.limit)
            more_links, more_names, more_values = _zeros(size)
            more_links[: len(links)] = links
            more_names[: len(names)] = names
            more_values[: len(values)] = values
            links, names, values = more_links, more_names, more_values
        self.arrays = links, names, values, slots, counts

    def clear(self) -> BlockChanges:
        """Forget all entries; the count of evicted ones stays."""
        lost = new_changes(len(self))
        links = EntryArrays(*self.arrays).links
        lost_count = list_keys(links, self.keys, self.counts, lost)
        self.counts[:EVICTED] = 0
        self.arrays = self._new_arrays()
        return BlockChanges(new_changes(0), lost[:lost_count])

    def _new_arrays(self) -> Entries:
        entries = min(_MIN_ENTRIES, self.limit)
        return *_zeros(entries), new_slots(entries, ENTRY_SLOTS), self.counts


def _zeros(entries: int) -> tuple[Links, Words, Words]:
    """Return links, names and values of so many entries."""
    return (
        np.zeros((entries + 1) * int(WIDTH), dtype=np.uint32),
        np.zeros(entries + 1, dtype=np.uint64),
        np.zeros(entries + 1, dtype=np.uint64),
    )


def new_changes(count: int) -> Words:
    """Return an uninitialised array for `count` keys and their tiers, (count, 2)."""
    return np.empty((count, 2), dtype=np.uint64) if count else _NO_CHANGES


# --- entries --------------------------------------------------------------------------------


@inlined
def entry_of(names: Words, slots: Words, name: np.uint64, neighbour: Row) -> Row:
    """Return the entry of a name, or 0; the ones beside `neighbour` are looked at first.

    Calls that store a chain go on to the next entry; calls that evict one, to the one before.
    """
    after, before = neighbour + ONE, neighbour - ONE
    if after < np.uint64(names.shape[0]) and names[after] == name:
        return after
    if neighbour > ONE and names[before] == name:
        return before
    return find(names, slots, name)


@inlined
def allocate_entry(links: Links, counts: Counts, previous: Row) -> Row:
    """Return a free entry: the one right after `previous` where that is possible."""
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
def free_entry(links: Links, names: Words, values: Words, counts: Counts, entry: Row) -> None:
    """Free an entry, which is out of list and forest; it goes to the end of the free ones."""
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
    """Put an entry into the list, right before `after`; before 0 is the end of the list."""
    before = links[after * WIDTH + PREV]
    links[entry * WIDTH + PREV] = before
    links[entry * WIDTH + NEXT] = after
    links[before * WIDTH + NEXT] = entry
    links[after * WIDTH + PREV] = entry


@inlined
def unlink(links: Links, entry: Row) -> None:
    """Take an entry out of the list."""
    before, after = links[entry * WIDTH + PREV], links[entry * WIDTH + NEXT]
    links[before * WIDTH + NEXT] = after
    links[after * WIDTH + PREV] = before
    links[entry * WIDTH + PREV] = 0
    links[entry * WIDTH + NEXT] = 0


@inlined
def add_child(links: Links, parent: Row, entry: Row) -> None:
    """Make a new entry the child of `parent` (0: a root), and the last of the leaves."""
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
    """Cut an entry out of the forest; a parent without other children is the first leaf."""
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
def append_change(changes: Words, count: int, key: np.uint64, media: int) -> int:
    """Append a key and its tiers to `changes`, unless it is unknown (0); return their count."""
    if key == 0:
        return count
    changes[count, CHANGED_KEY] = key
    changes[count, CHANGED_MEDIA] = media
    return count + 1


@bare_kernel
def list_keys(links: Links, keys: Words, counts: Counts, changes: Words) -> int:
    """Write the keys, which are names or values, and their tiers to `changes`; return how many."""
    count = 0
    for entry in range(1, counts[TOP] + 1):
        if links[entry * WIDTH + MEDIA] != 0:
            count = append_change(changes, count, keys[entry], links[entry * WIDTH + MEDIA])
    return count
