"""Compiled kernels of holdings: what one worker holds, by its engine's own hashes.

Entries are those of `pigou.control.prefix_index.entry_kernels`. The name is the engine's hash, the
value our key (0 where unknown). Entries form a forest by the parents that events name. Its leaves
are in the list, in the order in which eviction takes them: those stored last at its end; a parent
that becomes a leaf again at its head, so that a chain that is being evicted goes from its tail to
its root.
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.entry_kernels import (
    EVICTED,
    KNOWN,
    MEDIA,
    NEXT,
    WIDTH,
    Links,
    disown,
    give_entry,
    note,
)
from pigou.control.prefix_index.slots import NONE, Counts, Row, Words, find, strike

#: What 0 stands for, as no entry is named that.
_NAUGHT = np.uint64(0x9E3779B97F4A7C15)


@inlined
def called(name: np.uint64) -> np.uint64:
    """Return by what name a block is known whose engine's hash is `name`."""
    return name if name != 0 else _NAUGHT


@inlined
def forget(
    links: Links, names: Words, values: Words, slots: Words, counts: Counts, entry: Row
) -> None:
    """Drop an entry; its children have no parent any more."""
    if values[entry] != 0:
        counts[KNOWN] -= 1
    strike(slots, names[entry], entry)
    disown(links, entry)
    give_entry(links, names, values, counts, entry)


@inlined
def first_leaf(links: Links, spare: Row) -> Row:
    """Return the leaf that eviction takes first, other than `spare`; 0 where there is none."""
    entry = np.uint64(links[NEXT])
    if entry == spare:
        entry = np.uint64(links[entry * WIDTH + NEXT])
    return entry


@bare_kernel
def evict(
    links: Links, names: Words, values: Words, slots: Words, counts: Counts, many: int, lost: Words
) -> int:
    """Drop so many entries, which there must be; return how many keys are lost."""
    done = 0
    for _ in range(many):
        entry = first_leaf(links, NONE)
        done = note(lost, done, values[entry], links[entry * WIDTH + MEDIA])
        forget(links, names, values, slots, counts, entry)
        counts[EVICTED] += 1
    return done


@bare_kernel
def look_up(names: Words, slots: Words, name: np.uint64) -> Row:
    """Entry of a name, or 0."""
    return find(names, slots, called(name))


@bare_kernel
def absent(names: Words, slots: Words, hashes: Words) -> int:
    """Count the names (last column) that are not there."""
    count = 0
    for i in range(hashes.shape[0]):
        if find(names, slots, called(hashes[i, hashes.shape[1] - 1])) == 0:
            count += 1
    return count
