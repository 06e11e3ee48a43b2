"""Entries of one worker, their list and their forest; compiled. `entries` has the arrays.

Entries are numbered from 1; 0 means "none".
    links: int32, shape (entries + 1, 8); the columns below. Row 0 is the sentinel of the list.
    names: uint64, shape (entries + 1, 2); the columns below.
    slots: from a name to its entry (`pigou.control.index.slots`).
    counts: int64, shape (4,); the entries below.
Blocks that are stored one after the other are entries that follow one another, as far as these
are free. Free ones are in a list by ELDER and YOUNGER, entry 0 its sentinel; their MEDIA are 0.
"""

from __future__ import annotations

import numpy as np

from pigou.control.index.slots import Counts, Words, find
from pigou.kv.compiled import bare_kernel, inlined
from pigou.request import Ints

#: Columns of `links`: neighbours in the list; parent, first child and siblings; tiers (bits).
PREV, NEXT, PARENT, CHILD, ELDER, YOUNGER, MEDIA = range(7)
WIDTH = 8
#: Columns of `names`.
NAME, VALUE = range(2)
#: Entries of `counts`: highest entry ever used, entries in use, those of them whose key is known,
#: and entries that were evicted.
TOP, USED, KNOWN, EVICTED = range(4)


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


@inlined
def note(changes: Words, done: int, key: np.uint64, media: int) -> int:
    """Append a key and its tiers to `changes`; an unknown key is none. Return the new length."""
    if key == 0:
        return done
    changes[done, 0] = key
    changes[done, 1] = media
    return done + 1


@bare_kernel
def list_all(links: Ints, names: Words, counts: Counts, column: int, held: Words) -> int:
    """Write the keys in a column of `names` and their tiers to `held`; return how many."""
    many = 0
    for entry in range(1, counts[TOP] + 1):
        if links[entry, MEDIA] != 0:
            many = note(held, many, names[entry, column], links[entry, MEDIA])
    return many
