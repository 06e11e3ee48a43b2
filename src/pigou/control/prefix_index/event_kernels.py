"""Compiled kernels of events: one call an event, for a worker's holdings, and the
table and the ghosts of all.

Arrays are those of `pigou.control.prefix_index.entry_kernels` (links, names, slots, counts: of the
worker), `pigou.control.prefix_index.table_kernels` (rows, row_slots, twins, totals) and
`pigou.control.prefix_index.ghost_kernels` (graves, tally).
"""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.control.prefix_index.entry_kernels import (
    CHILD,
    EVICTED,
    KNOWN,
    MEDIA,
    USED,
    WIDTH,
    Links,
    adopt,
    entry_of,
    link_before,
    take_entry,
    unlink,
)
from pigou.control.prefix_index.ghost_kernels import Tally, bury, shift_of, unbury
from pigou.control.prefix_index.holding_kernels import called, first_leaf, forget
from pigou.control.prefix_index.slots import (
    HALF,
    HELD,
    NONE,
    ONE,
    SPREAD,
    Counts,
    Words,
    crowded,
    find,
    probe,
    put,
    touch,
)
from pigou.control.prefix_index.table_kernels import (
    HOST,
    LOWER,
    ROWS,
    SEEN,
    TIERS,
    TWINS,
    hold,
    let_go,
    tiers_of,
)

#: What `store` returns where an array might be too small: nothing was done.
NO_ROOM = -(2**62)


@bare_kernel
def store(
    links: Links,
    names: Words,
    values: Words,
    slots: Words,
    counts: Counts,
    rows: Words,
    row_slots: Words,
    twins: Words,
    totals: Counts,
    graves: Words,
    tally: Tally,
    worker: int,
    limit: int,
    follows: bool,
    parent: np.uint64,
    media: int,
    hashes: Words,
    keys: Words,
    sure: bool,
) -> int:
    """Store consecutive blocks in one tier.

    Args:
        links, names, slots, counts: the holdings.
        rows, row_slots, twins, totals: the table.
        graves, tally: the ghosts.
        worker: its number.
        limit: most entries of the holdings.
        follows: whether they come behind a block; `parent` is its name.
        media: bit of the tier.
        hashes: of the engine, in the last column, shape (blocks, any).
        keys: in the last column, 0 where unknown, shape (blocks, any).
        sure: there is room in all arrays; the holdings need none beyond `limit`.

    Returns:
        By how many entries the holdings grew, or `NO_ROOM`.
    """
    before, blocks = counts[USED], hashes.shape[0]
    if not sure and (
        before + blocks >= names.shape[0]
        or crowded(slots, before + blocks, HELD)
        or totals[ROWS] + blocks >= rows.shape[0]
        or 2 * (totals[TWINS] + TIERS * blocks) > twins.shape[0]
        or media >> tiers_of(rows) != 0
    ):
        return NO_ROOM
    totals[LOWER] |= media >> HOST
    totals[SEEN] = np.int64(touch(slots, hashes) | touch(row_slots, keys))
    name_at, key_at = hashes.shape[1] - 1, keys.shape[1] - 1
    last, row = find(names, slots, called(parent)) if follows else NONE, NONE
    for i in range(blocks):
        name, key = called(hashes[i, name_at]), keys[i, key_at]
        entry, place = last + ONE, NONE
        if entry >= np.uint64(names.shape[0]) or names[entry] != name:
            entry, place = probe(names, slots, name)
        if entry == 0:
            if counts[USED] >= limit:
                leaf = first_leaf(links, last)
                if leaf == 0:
                    counts[EVICTED] += blocks - i
                    break
                gone, held = values[leaf], links[leaf * WIDTH + MEDIA]
                forget(links, names, values, slots, counts, leaf)
                counts[EVICTED] += 1
                if gone != 0:
                    let_go(rows, row_slots, twins, totals, worker, gone, held, NONE)
                _, place = probe(names, slots, name)
            entry = take_entry(links, counts, last)
            names[entry] = name
            put(slots, place, name, entry)
            adopt(links, last, entry)
        elif links[entry * WIDTH + CHILD] == 0:
            unlink(links, entry)
            link_before(links, NONE, entry)
        fresh = media & ~links[entry * WIDTH + MEDIA]
        links[entry * WIDTH + MEDIA] |= media
        if values[entry] == 0 and key != 0:
            values[entry] = key
            counts[KNOWN] += 1
            fresh = links[entry * WIDTH + MEDIA]
        if fresh != 0 and values[entry] != 0:
            row = hold(rows, row_slots, twins, totals, worker, values[entry], fresh, row)
        last = entry
    grown: int = counts[USED] - before
    if graves.shape[0] > 0:
        unbury(graves, tally, keys, worker, counts[USED], max(0, grown))
    return grown


@inlined
def _touch(
    slots: Words, row_slots: Words, graves: Words, shift: np.uint64, hashes: Words
) -> np.uint64:
    """As `slots.touch`, for all that blocks which go have a place in.

    Names are keys where engines' hashes are ours; elsewhere all but the first loads are in vain.
    """
    last, seen = hashes.shape[1] - 1, NONE
    mask, row_mask = np.uint64(slots.shape[0] - 1), np.uint64(row_slots.shape[0] - 1)
    for i in range(hashes.shape[0]):
        spread = hashes[i, last] * SPREAD
        tag = spread >> HALF
        seen |= slots[tag & mask] | row_slots[tag & row_mask] | graves[spread >> shift, 1]
    return seen


@bare_kernel
def remove(
    links: Links,
    names: Words,
    values: Words,
    slots: Words,
    counts: Counts,
    rows: Words,
    row_slots: Words,
    twins: Words,
    totals: Counts,
    graves: Words,
    worker: int,
    media: int,
    hashes: Words,
) -> int:
    """Remove blocks from one tier. Blocks that are not there are no error.

    Arguments are those of `store`. What is in no tier any more, and whose key is known, is a ghost.

    Returns:
        By how many entries the holdings grew, 0 or less.
    """
    before, name_at = counts[USED], hashes.shape[1] - 1
    shift = NONE
    if graves.shape[0] > 0:
        shift = shift_of(graves)
        totals[SEEN] = np.int64(_touch(slots, row_slots, graves, shift, hashes))
    entry, row = NONE, NONE
    for i in range(hashes.shape[0]):
        entry = entry_of(names, slots, called(hashes[i, name_at]), entry)
        if entry == 0 or links[entry * WIDTH + MEDIA] & media == 0:
            continue
        key = values[entry]
        links[entry * WIDTH + MEDIA] &= ~media
        if links[entry * WIDTH + MEDIA] == 0:
            forget(links, names, values, slots, counts, entry)
            if key != 0:
                bury(graves, shift, key, worker)
        if key != 0:
            row = let_go(rows, row_slots, twins, totals, worker, key, media, row)
    grown: int = counts[USED] - before
    return grown
