"""Compiled kernels of one worker's entries. `holdings` and `predictions` wrap them.

Entries are numbered from 1; 0 means "none".
    links: int32, shape (entries + 1, 8); the columns below. Row 0 is the sentinel of the list.
    names: uint64, shape (entries + 1, 2); the columns below.
    slots: uint64, a power of two; open addressing with linear probing from a name to its entry:
        tag (32 bits of the spread name, where probing begins) and entry, 0 where empty.
    counts: int64, shape (4,); the entries below.
Blocks that are stored one after the other are entries that follow one another, as far as these
are free. Free ones are in a list by ELDER and YOUNGER, entry 0 its sentinel; their MEDIA are 0.

Holdings: the name is the engine's hash, the value our key (0 where unknown). Entries form a forest
by the parents that events name. Its leaves are in the list, in the order in which eviction takes
them: those stored last at its end; a parent that becomes a leaf again at its head, so that a
chain that is being evicted goes from its tail to its root.

Predictions: the name is our key, the value the time at which it is given up. The list holds all
entries, the one that was predicted first at its head.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.kv.compiled import bare_kernel, inlined
from pigou.request import Ints

Words: TypeAlias = NDArray[np.uint64]
Counts: TypeAlias = NDArray[np.int64]

#: Columns of `links`: neighbours in the list; parent, first child and siblings; tiers (bits).
PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER, MEDIA = range(7)
WIDTH = 8
#: Columns of `names`.
NAME, VALUE = range(2)
#: Entries of `counts`: highest entry ever used, entries in use, those of them whose key is known,
#: and entries that were evicted.
TOP, USED, KNOWN, EVICTED = range(4)


# --- slots (also in `table_kernels`: kernels that call one another live in one file) ---------

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio (Knuth, 6.4)
_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)


@inlined
def find(names: Words, slots: Words, name: np.uint64) -> int:
    """Row of `names` whose first column is `name`, or 0."""
    mask = slots.shape[0] - 1
    tag = (name * _SPREAD) >> _HALF
    i = np.int64(tag) & mask
    while slots[i] != 0:
        if slots[i] >> _HALF == tag:
            row: int = np.int64(slots[i] & _LOW)  # type: ignore[assignment]
            if names[row, 0] == name:
                return row
        i = (i + 1) & mask
    return 0


@inlined
def enter(slots: Words, name: np.uint64, row: int) -> None:
    """Make a row findable by its name, which must not be there yet."""
    mask = slots.shape[0] - 1
    tag = (name * _SPREAD) >> _HALF
    i = np.int64(tag) & mask
    while slots[i] != 0:
        i = (i + 1) & mask
    slots[i] = (tag << _HALF) | np.uint64(row)


@bare_kernel
def enter_all(old: Words, slots: Words) -> None:
    """Enter all that `old` has into new, empty slots."""
    mask = slots.shape[0] - 1
    for slot in old:
        if slot != 0:
            i = np.int64(slot >> _HALF) & mask
            while slots[i] != 0:
                i = (i + 1) & mask
            slots[i] = slot


@inlined
def strike(slots: Words, name: np.uint64, row: int) -> None:
    """Make a row unfindable, closing the gap (no tombstones)."""
    mask = slots.shape[0] - 1
    tag = (name * _SPREAD) >> _HALF
    slot = (tag << _HALF) | np.uint64(row)
    gap = np.int64(tag) & mask
    while slots[gap] != slot:
        gap = (gap + 1) & mask
    i = gap
    while True:
        i = (i + 1) & mask
        if slots[i] == 0:
            break
        start = np.int64(slots[i] >> _HALF)
        if ((i - start) & mask) >= ((i - gap) & mask):
            slots[gap] = slots[i]
            gap = i
    slots[gap] = 0


# --- entries --------------------------------------------------------------------------------


@inlined
def entry_of(links: Ints, names: Words, slots: Words, name: np.uint64, after: int) -> int:
    """Entry of a name, or 0; the one behind `after` is looked at first."""
    entry = after + 1
    if entry < names.shape[0] and names[entry, NAME] == name and links[entry, MEDIA] != 0:
        return entry
    return find(names, slots, name)


@inlined
def take_entry(links: Ints, counts: Counts, after: int) -> int:
    """Return a free entry: the one right behind `after` where that is possible."""
    counts[USED] += 1
    entry = after + 1
    if entry <= counts[TOP] and links[entry, MEDIA] != 0:
        entry = counts[TOP] + 1
    if entry > counts[TOP]:
        head: int = np.int64(links[0, YOUNGER])  # type: ignore[assignment]
        if entry < links.shape[0] and (after == counts[TOP] or head == 0):
            counts[TOP] = entry
            return entry
        entry = head
    before, behind = links[entry, ELDER], links[entry, YOUNGER]
    links[before, YOUNGER] = behind
    links[behind, ELDER] = before
    links[entry, ELDER] = 0
    links[entry, YOUNGER] = 0
    return entry


@inlined
def give_entry(links: Ints, names: Words, counts: Counts, entry: int) -> None:
    """Free an entry, which is out of list and forest; it goes to the end of the free ones."""
    before = links[0, ELDER]
    links[entry, PARENT] = 0
    links[entry, CHILD] = 0
    links[entry, MEDIA] = 0
    links[entry, YOUNGER] = 0
    links[entry, ELDER] = before
    links[before, YOUNGER] = entry
    links[0, ELDER] = entry
    names[entry, NAME] = 0
    names[entry, VALUE] = 0
    counts[USED] -= 1


# --- the list and the forest ----------------------------------------------------------------


@inlined
def link_before(links: Ints, after: int, entry: int) -> None:
    """Put an entry into the list, right before `after`; before 0 is the end of the list."""
    before = links[after, PREV]
    links[entry, PREV] = before
    links[entry, NEXT] = after
    links[before, NEXT] = entry
    links[after, PREV] = entry


@inlined
def unlink(links: Ints, entry: int) -> None:
    """Take an entry out of the list."""
    before, after = links[entry, PREV], links[entry, NEXT]
    links[before, NEXT] = after
    links[after, PREV] = before
    links[entry, PREV] = 0
    links[entry, NEXT] = 0


@inlined
def adopt(links: Ints, parent: int, entry: int) -> None:
    """Make a new entry the child of `parent` (0: of nobody), and the last of the leaves."""
    last = links[0, PREV]
    if parent != 0:
        eldest = links[parent, CHILD]
        links[parent, CHILD] = entry
        links[entry, PARENT] = parent
        if eldest != 0:
            links[entry, YOUNGER] = eldest
            links[eldest, ELDER] = entry
        elif last == parent:  # it was the last leaf: the new one takes its place
            last = links[parent, PREV]
            links[parent, PREV] = 0
        else:
            unlink(links, parent)
    links[entry, PREV] = last
    links[last, NEXT] = entry
    links[0, PREV] = entry


@inlined
def disown(links: Ints, entry: int) -> None:
    """Cut an entry out of the forest; a parent without other children is the first leaf."""
    child = links[entry, CHILD]
    if child == 0:
        unlink(links, entry)
    while child != 0:
        younger = links[child, YOUNGER]
        links[child, PARENT] = 0
        links[child, ELDER] = 0
        links[child, YOUNGER] = 0
        child = younger
    parent, elder, younger = links[entry, PARENT], links[entry, ELDER], links[entry, YOUNGER]
    if younger != 0:
        links[younger, ELDER] = elder
    if elder != 0:
        links[elder, YOUNGER] = younger
    elif parent != 0:
        links[parent, CHILD] = younger
        if younger == 0:
            link_before(links, links[0, NEXT], parent)


# --- holdings -------------------------------------------------------------------------------


@inlined
def note(changes: Words, done: int, key: np.uint64, media: int) -> int:
    """Append a key and its tiers to `changes`; an unknown key is none. Return the new length."""
    if key == 0:
        return done
    changes[done, 0] = key
    changes[done, 1] = media
    return done + 1


@inlined
def forget(links: Ints, names: Words, slots: Words, counts: Counts, entry: int) -> None:
    """Drop an entry; its children have no parent any more."""
    if names[entry, VALUE] != 0:
        counts[KNOWN] -= 1
    strike(slots, names[entry, NAME], entry)
    disown(links, entry)
    give_entry(links, names, counts, entry)


@inlined
def evict(
    links: Ints, names: Words, slots: Words, counts: Counts, spare: int, lost: Words, done: int
) -> int:
    """Drop the first leaf that is not `spare`; note what is lost. Return the new length of it.

    Returns -1 where there is no such leaf.
    """
    entry = links[0, NEXT]
    if entry == spare:
        entry = links[entry, NEXT]
    if entry == 0:
        return -1
    done = note(lost, done, names[entry, VALUE], links[entry, MEDIA])
    forget(links, names, slots, counts, entry)
    counts[EVICTED] += 1
    return done


@bare_kernel
def evict_many(
    links: Ints, names: Words, slots: Words, counts: Counts, many: int, lost: Words
) -> int:
    """Drop so many entries, which there must be; return how many keys are lost."""
    done = 0
    for _ in range(many):
        done = evict(links, names, slots, counts, 0, lost, done)
    return done


@bare_kernel
def look_up(names: Words, slots: Words, name: np.uint64) -> int:
    """Entry of a name, or 0."""
    return find(names, slots, name)


@bare_kernel
def absent(names: Words, slots: Words, hashes: Words) -> int:
    """Count the names that are not there; their slots are in the processor's cache after it."""
    count = 0
    for i in range(hashes.shape[0]):
        if find(names, slots, hashes[i]) == 0:
            count += 1
    return count


@bare_kernel
def store(
    links: Ints,
    names: Words,
    slots: Words,
    counts: Counts,
    limit: int,
    parent: int,
    media: int,
    hashes: Words,
    keys: Words,
    gained: Words,
    lost: Words,
) -> tuple[int, int]:
    """Store consecutive blocks in one tier.

    Args:
        links, names, slots, counts: the holdings, with room for all blocks up to `limit`.
        limit: most entries.
        parent: entry of the block before, or 0.
        media: bit of the tier.
        hashes: of the engine, shape (blocks,).
        keys: shape (blocks,); 0 where unknown.
        gained: takes keys and tiers that are held from now on, shape (blocks, 2).
        lost: takes those that were evicted to make room, shape (blocks, 2).

    Returns:
        How many were gained and lost.
    """
    more, less = 0, 0
    for i in range(hashes.shape[0]):
        entry = entry_of(links, names, slots, hashes[i], parent)
        if entry == 0:
            if counts[USED] >= limit:
                freed = evict(links, names, slots, counts, parent, lost, less)
                if freed < 0:
                    counts[EVICTED] += hashes.shape[0] - i
                    break
                less = freed
            entry = take_entry(links, counts, parent)
            names[entry, NAME] = hashes[i]
            enter(slots, names[entry, NAME], entry)
            adopt(links, parent, entry)
        elif links[entry, CHILD] == 0:
            unlink(links, entry)
            link_before(links, 0, entry)
        fresh = media & ~links[entry, MEDIA]
        links[entry, MEDIA] |= media
        if names[entry, VALUE] == 0 and keys[i] != 0:
            names[entry, VALUE] = keys[i]
            counts[KNOWN] += 1
            fresh = links[entry, MEDIA]
        if fresh != 0:
            more = note(gained, more, names[entry, VALUE], fresh)
        parent = entry
    return more, less


@bare_kernel
def remove(
    links: Ints,
    names: Words,
    slots: Words,
    counts: Counts,
    media: int,
    hashes: Words,
    lost: Words,
) -> int:
    """Remove blocks from one tier; return how many keys are lost, which `lost` takes."""
    less, entry = 0, 0
    for i in range(hashes.shape[0]):
        entry = entry_of(links, names, slots, hashes[i], entry)
        if entry == 0 or links[entry, MEDIA] & media == 0:
            continue
        less = note(lost, less, names[entry, VALUE], media)
        links[entry, MEDIA] &= ~media
        if links[entry, MEDIA] == 0:
            forget(links, names, slots, counts, entry)
    return less


@bare_kernel
def list_all(links: Ints, names: Words, counts: Counts, column: int, held: Words) -> int:
    """Write the keys in a column of `names` and their tiers to `held`; return how many."""
    many = 0
    for entry in range(1, counts[TOP] + 1):
        if links[entry, MEDIA] != 0:
            many = note(held, many, names[entry, column], links[entry, MEDIA])
    return many


# --- predictions ----------------------------------------------------------------------------


@inlined
def give_up(links: Ints, names: Words, slots: Words, counts: Counts, lost: Words, done: int) -> int:
    """Drop the prediction at the head of the list; return the new length of `lost`."""
    entry = links[0, NEXT]
    done = note(lost, done, names[entry, NAME], links[entry, MEDIA])
    strike(slots, names[entry, NAME], entry)
    unlink(links, entry)
    give_entry(links, names, counts, entry)
    return done


@bare_kernel
def predict(
    links: Ints,
    names: Words,
    slots: Words,
    counts: Counts,
    limit: int,
    media: int,
    keys: Words,
    until: np.uint64,
    gained: Words,
    lost: Words,
) -> tuple[int, int]:
    """Expect a chain, up to its first 0, to be held until a time; its root ends the list.

    Returns:
        How many keys were gained, and lost to make room.
    """
    more, less, count = 0, 0, 0
    while count < keys.shape[0] and keys[count] != 0:
        count += 1
    for i in range(count - 1, -1, -1):
        entry = find(names, slots, keys[i])
        if entry != 0:
            unlink(links, entry)
        else:
            if counts[USED] >= limit:
                less = give_up(links, names, slots, counts, lost, less)
                counts[EVICTED] += 1
            entry = take_entry(links, counts, 0)
            names[entry, NAME] = keys[i]
            links[entry, MEDIA] = media
            enter(slots, names[entry, NAME], entry)
            more = note(gained, more, keys[i], media)
        names[entry, VALUE] = until
        link_before(links, 0, entry)
    return more, less


@bare_kernel
def expire(
    links: Ints, names: Words, slots: Words, counts: Counts, now: np.uint64, lost: Words
) -> int:
    """Drop what was expected until `now` or before, as far as `lost` has room; return how many."""
    done = 0
    while done < lost.shape[0] and counts[USED] > 0 and names[links[0, NEXT], VALUE] <= now:
        done = give_up(links, names, slots, counts, lost, done)
    return done
