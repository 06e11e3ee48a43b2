"""Entries of one worker, their list and their forest; compiled. `entries` has the arrays.

Entries are numbered from 1; 0 means "none".
    links: uint32, shape (8 (entries + 1),), eight of each entry, those below. The entry that stands
        for "none" is the sentinel of the list. (Not of two dimensions: the compiler makes more
        of a number of columns that it knows.)
    names, values: uint64, shape (entries + 1,) each; both 0 for a free entry.
    slots: from a name to its entry (`pigou.control.prefix_index.slots`).
    counts: int64, shape (4,); the entries below.
Blocks that are stored one after the other are entries that follow one another, as far as these
are free. Free ones are in a list by ELDER and YOUNGER, entry 0 its sentinel; their MEDIA are 0.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.slots import ONE, Counts, Row, Words, find

Links: TypeAlias = NDArray[np.uint32]

#: Of each entry in `links`: neighbours in the list; parent, first child and siblings; tiers (bits).
PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER, MEDIA = (np.uint64(i) for i in range(7))
WIDTH = np.uint64(8)
#: Entries of `counts`: highest entry ever used, entries in use, those of them whose key is known,
#: and entries that were evicted.
TOP, USED, KNOWN, EVICTED = range(4)


@inlined
def entry_of(names: Words, slots: Words, name: np.uint64, after: Row) -> Row:
    """Entry of a name, or 0; the ones beside `after` are looked at first.

    Who stores a chain goes to the one behind it; who evicts one, to the one before it.
    """
    behind, before = after + ONE, after - ONE
    if behind < np.uint64(names.shape[0]) and names[behind] == name:
        return behind
    if after > ONE and names[before] == name:
        return before
    return find(names, slots, name)


@inlined
def take_entry(links: Links, counts: Counts, after: Row) -> Row:
    """Return a free entry: the one right behind `after` where that is possible."""
    counts[USED] += 1
    entry, top = after + ONE, np.uint64(counts[TOP])
    if entry <= top and links[entry * WIDTH + MEDIA] != 0:
        entry = top + ONE
    if entry > top:
        head = np.uint64(links[YOUNGER])
        if entry < np.uint64(links.shape[0]) // WIDTH and (after == top or head == 0):
            counts[TOP] = entry
            return entry
        entry = head
    before, behind = links[entry * WIDTH + ELDER], links[entry * WIDTH + YOUNGER]
    links[before * WIDTH + YOUNGER] = behind
    links[behind * WIDTH + ELDER] = before
    links[entry * WIDTH + ELDER] = 0
    links[entry * WIDTH + YOUNGER] = 0
    return entry


@inlined
def give_entry(links: Links, names: Words, values: Words, counts: Counts, entry: Row) -> None:
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
def link_before(links: Links, after: Row, entry: Row) -> None:
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
def adopt(links: Links, parent: Row, entry: Row) -> None:
    """Make a new entry the child of `parent` (0: of nobody), and the last of the leaves."""
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
def disown(links: Links, entry: Row) -> None:
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
            link_before(links, links[NEXT], parent)


@inlined
def note(changes: Words, done: int, key: np.uint64, media: int) -> int:
    """Append a key and its tiers to `changes`; an unknown key is none. Return the new length."""
    if key == 0:
        return done
    changes[done, 0] = key
    changes[done, 1] = media
    return done + 1


@bare_kernel
def list_all(links: Links, keys: Words, counts: Counts, held: Words) -> int:
    """Write the keys, which are names or values, and their tiers to `held`; return how many."""
    many = 0
    for entry in range(1, counts[TOP] + 1):
        if links[entry * WIDTH + MEDIA] != 0:
            many = note(held, many, keys[entry], links[entry * WIDTH + MEDIA])
    return many
