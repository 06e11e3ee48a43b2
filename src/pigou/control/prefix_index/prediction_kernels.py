"""Compiled kernels of predictions: what one worker is expected to hold, by our keys.

Entries are those of `pigou.control.prefix_index.entry_kernels`. The name is our key, the value the
time at which it is given up. The list holds all entries, the one that was predicted first at its
head.
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.entry_kernels import (
    EVICTED,
    MEDIA,
    NEXT,
    USED,
    WIDTH,
    Links,
    give_entry,
    link_before,
    note,
    take_entry,
    unlink,
)  # fmt: skip
from pigou.control.prefix_index.slots import NONE, Counts, Words, enter, find, strike


@inlined
def give_up(
    links: Links, names: Words, values: Words, slots: Words, counts: Counts, lost: Words, done: int
) -> int:
    """Drop the prediction at the head of the list; return the new length of `lost`."""
    entry = np.uint64(links[NEXT])
    done = note(lost, done, names[entry], links[entry * WIDTH + MEDIA])
    strike(slots, names[entry], entry)
    unlink(links, entry)
    give_entry(links, names, values, counts, entry)
    return done


@bare_kernel
def predict(
    links: Links,
    names: Words,
    values: Words,
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
                less = give_up(links, names, values, slots, counts, lost, less)
                counts[EVICTED] += 1
            entry = take_entry(links, counts, NONE)
            names[entry] = keys[i]
            links[entry * WIDTH + MEDIA] = media
            enter(slots, names[entry], entry)
            more = note(gained, more, keys[i], media)
        values[entry] = until
        link_before(links, NONE, entry)
    return more, less


@bare_kernel
def expire(
    links: Links,
    names: Words,
    values: Words,
    slots: Words,
    counts: Counts,
    now: np.uint64,
    lost: Words,
) -> int:
    """Drop what was expected until `now` or before, as far as `lost` has room; return how many."""
    done = 0
    while done < lost.shape[0] and counts[USED] > 0 and values[links[NEXT]] <= now:
        done = give_up(links, names, values, slots, counts, lost, done)
    return done
