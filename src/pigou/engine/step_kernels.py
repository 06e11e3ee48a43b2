"""Compiled kernels of a whole plan: rows of the batch and blocks of the pool in one pass each.

Arrays are those of `pigou.engine.sequence.Rows` and, where they are named `meta`, `keys`, `slots`
and `pool`, those of `pigou.kv.kernels` (`pool` is its `counts`). Each array that is handed over
takes time, so those of one shape are rows of one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel_over, inlined
from pigou.engine.kernels import (
    BLOCKS,
    COMPUTED,
    DROPPED,
    KNOWN,
    LENGTH,
    LIMIT,
    SEALED,
    advance,
    append_blocks,
    append_wanted,
    decodes,
    entries,
    foresee,
)
from pigou.kv.kernels import FREE, REFS, Counts, allocate, claim, link_after, peek
from pigou.kv.kernels import seal as cache
from pigou.request import BlockHashes, Ints

#: What `begin` returns for the number of rows where too few blocks are free: nothing was done.
TOO_FEW = -1


@bare_kernel_over("engine", "kv")
def begin(
    order: Ints,
    columns: Ints,
    tables: Ints,
    block_size: int,
    budget: int,
    meta: Ints,
    keys: BlockHashes,
    pool: Counts,
    batch: Ints,
    growing: Ints,
    removed: BlockHashes,
) -> tuple[int, int]:
    """Find the rows of `order` that decode, at most `budget`, and give each the block it needs.

    Args:
        order, columns, tables, block_size, budget: the rows.
        meta, keys, pool: the blocks.
        batch: takes who decodes in its first row, (2, max_seqs).
        growing: for use here, (2, max_seqs).
        removed: takes the hashes that died.

    Returns:
        How many rows, and how many hashes; or `TOO_FEW` where they need more blocks than are free,
        and how many they need.
    """
    blocks = columns[BLOCKS]
    count, grow = decodes(
        order, columns[COMPUTED], columns[LENGTH], columns[DROPPED], blocks, block_size, budget,
        batch[0], growing[0],
    )  # fmt: skip
    if grow > pool[FREE]:
        return TOO_FEW, grow
    if grow == 0:
        return count, 0
    dead: int = allocate(meta, keys, pool, growing[1, :grow], removed)
    append_blocks(tables, blocks, growing[0, :grow], growing[1])
    return count, dead


@inlined
def lay(
    tables: Ints, blocks: Ints, rows: Ints, wanting: Ints, new: Ints, needs: int, more: Ints
) -> None:
    """Write foreseen blocks behind those of their rows, which do not own them yet."""
    for row in rows:
        more[row] = 0
    for i in range(needs):
        row = wanting[i]
        tables[row, blocks[row] + more[row]] = new[i]
        more[row] += 1


@bare_kernel_over("engine", "kv")
def finish(
    batch: Ints,
    decoding: int,
    columns: Ints,
    tables: Ints,
    block_size: int,
    most: int,
    chunks: bool,
    spare: int,
    meta: Ints,
    pool: Counts,
    plan: Ints,
    samples: NDArray[np.bool_],
    needs: Ints,
    phases: Ints,
    by_phase: Ints,
) -> tuple[int, int]:
    """Write a plan's entries, and lay out blocks for as many steps as it can go on unchanged.

    Args:
        batch: rows and counts of the entries, (2, entries and more).
        decoding: entries, the first ones, that decode.
        columns, tables, block_size: the rows.
        most: steps of one plan; 1 where the next step may differ.
        chunks: whether a last entry may compute equal chunks of its prompt.
        spare: free blocks that later steps may take at most; there are none where it is negative.
        meta, pool: the blocks.
        plan: takes rows, starts, counts and entries in the cache, (4, entries).
        samples: takes whether each entry yields a token, (entries,).
        needs: takes who needs a block, at which step, and which, (3, blocks).
        phases, by_phase: for use here, as `starts`, `fill` and `by_phase` of `foresee`.

    Returns:
        How many steps, and for how many blocks needs were written.
    """
    size = samples.shape[0]
    rows, counts = batch[0, :size], batch[1, :size]
    computed, length, dropped = columns[COMPUTED], columns[LENGTH], columns[DROPPED]
    decode: bool = entries(rows, counts, computed, length, plan[1], samples)
    for i in range(size):
        plan[0, i] = rows[i]
        plan[2, i] = counts[i]
        plan[3, i] = plan[1, i] - dropped[rows[i]]
    if most == 1 or size == 0:
        return 1, 0
    alike = size
    if not decode:
        if not chunks or size != decoding + 1 or samples[size - 1] or counts[size - 1] == 1:
            return 1, 0
        alike = decoding
        left = length[rows[size - 1]] - computed[rows[size - 1]]
        most = min(most, (left - 1) // counts[size - 1])
    blocks = columns[BLOCKS]
    repeat, count = foresee(
        rows[:alike], computed, length, columns[LIMIT], dropped, blocks, block_size, most,
        min(pool[FREE], spare), needs[0], needs[1], phases[0], phases[1], by_phase,
    )  # fmt: skip
    if count:
        peek(meta, count, needs[2])
        lay(tables, blocks, rows[:alike], needs[0], needs[2], count, by_phase)
    return repeat, count


@bare_kernel_over("engine", "kv")
def decode(
    order: Ints,
    columns: Ints,
    tables: Ints,
    block_size: int,
    budget: int,
    most: int,
    meta: Ints,
    keys: BlockHashes,
    pool: Counts,
    batch: Ints,
    growing: Ints,
    removed: BlockHashes,
    plan: Ints,
    samples: NDArray[np.bool_],
    needs: Ints,
    phases: Ints,
    by_phase: Ints,
) -> tuple[int, int, int, int]:
    """Do what `begin` and `finish` do where nobody has a prompt to compute, nor tiers a say.

    Arguments are theirs; `plan` and `samples` have an entry for each row of `order`. The counts in
    `batch` are 1.

    Returns:
        What `begin` returns, and what `finish` does; zeros where too few blocks are free.
    """
    count, dead = begin(
        order, columns, tables, block_size, budget, meta, keys, pool, batch, growing, removed
    )
    if count == TOO_FEW:
        return count, dead, 0, 0
    chunks = count < 0  # never; a literal would be another type, and compile `finish` once more
    repeat, wanted = finish(
        batch, count, columns, tables, block_size, most, chunks, pool[FREE], meta, pool, plan,
        samples[:count], needs, phases, by_phase,
    )  # fmt: skip
    return count, dead, repeat, wanted


@bare_kernel_over("engine", "kv")
def settle(
    rows: Ints,
    counts: Ints,
    samples: NDArray[np.bool_],
    steps: Ints,
    done: int,
    columns: Ints,
    tables: Ints,
    block_size: int,
    meta: Ints,
    keys: BlockHashes,
    pool: Counts,
    needs: Ints,
    wanted: int,
    later: bool,
    tokens: Ints,
    found: Ints,
    removed: BlockHashes,
    orphans: Ints,
) -> tuple[int, int, int, int]:
    """Move the rows of a plan on, and take the foreseen blocks that its steps wrote to.

    Blocks are not taken where some are to be sealed in between, or where that is done `later`.

    Args:
        rows, counts, samples: of the plan's entries.
        steps: that count for each entry, (entries,); empty where all of them do.
        done: steps of the plan.
        columns, tables, block_size: the rows.
        meta, keys, pool: the blocks.
        needs: foreseen blocks: who needs them, at which step, and which, (3, blocks and more).
        wanted: how many there are.
        later: see above.
        tokens: as of `advance`.
        found: takes its `taken`, `ended` and `fuller`, (3, max_seqs).
        removed: takes the hashes that died.
        orphans: takes blocks that nobody needs any more.

    Returns:
        How many entries ended, how many have blocks to seal; hashes that died; orphans.
    """
    ends, full = advance(
        rows, counts, samples, steps, done, columns[COMPUTED], columns[LENGTH], columns[LIMIT],
        columns[KNOWN], columns[SEALED], block_size, tokens, found[0], found[1], found[2],
    )  # fmt: skip
    if later or full > 0 or wanted == 0:
        return ends, full, 0, 0
    stop = 0
    while stop < wanted and needs[1, stop] < done:
        stop += 1
    dead = claim(meta, keys, pool, needs[2, :stop], removed)
    others = append_wanted(
        tables, columns[BLOCKS], needs[0, :stop], needs[1, :stop], needs[2, :stop], found[0],
        orphans,
    )  # fmt: skip
    return ends, full, dead, others


@inlined
def give_back(meta: Ints, pool: Counts, blocks: Ints, many: int) -> None:
    """Free blocks that were just taken, the last first; they are handed out next."""
    for i in range(many - 1, -1, -1):
        meta[blocks[i], REFS] = 0
        link_after(meta, meta.shape[0] - 1, blocks[i])
    pool[FREE] += many


@bare_kernel_over("engine", "kv")
def seal(
    row: int,
    start: int,
    count: int,
    done: int,
    columns: Ints,
    tables: Ints,
    block_size: int,
    meta: Ints,
    keys: BlockHashes,
    slots: Ints,
    pool: Counts,
    needs: Ints,
    wanted: int,
    taken: Ints,
    hashes: BlockHashes,
    removed: BlockHashes,
    orphans: Ints,
    marks: Counts,
) -> tuple[int, int, int, bool]:
    """Cache a row's blocks at the steps of a plan in which they became full.

    Before each, the foreseen blocks are taken that were written to by then, as by single steps.
    Where none were foreseen, nothing happens in between, and a prompt's are cached at once.

    Args:
        row: that has blocks to cache.
        start: position from which the plan computes it.
        count: tokens that it computes in a step.
        done: steps of the plan.
        columns, tables, block_size: the rows.
        meta, keys, slots, pool: the blocks.
        needs, wanted: foreseen blocks, as of `settle`.
        taken: steps that count for each row.
        hashes: of the row's sequence, (known, 2).
        removed: takes the hashes that died.
        orphans: for use here, (blocks,).
        marks: takes for each time the first block that was newly cached, how many were, and how
            many hashes had died before, (blocks of a row, 3).

    Returns:
        How many marks; how many hashes died; how many of the blocks that were taken nobody needs
        any more, and are free; whether a block has its hash cached elsewhere.
    """
    block: int = np.int64(columns[SEALED, row])  # type: ignore[assignment]
    stop: int = min(columns[KNOWN, row], columns[COMPUTED, row] // block_size)
    columns[SEALED, row] = stop
    at_once = count > 1 and wanted == 0
    times, claimed, dead, freed, twins = 0, 0, 0, 0, False
    while True:
        step, last = done - 1, stop
        if block < stop and not at_once:
            step = max((block * block_size + block_size - start + count - 1) // count - 1, 0)
            last = max(block + 1, min(stop, (start + (step + 1) * count) // block_size))
        upto = claimed
        while upto < wanted and needs[1, upto] <= step:
            upto += 1
        if upto > claimed:
            fresh = needs[2, claimed:upto]
            dead += claim(meta, keys, pool, fresh, removed[dead:])
            others = append_wanted(
                tables, columns[BLOCKS], needs[0, claimed:upto], needs[1, claimed:upto], fresh,
                taken, orphans,
            )  # fmt: skip
            give_back(meta, pool, orphans, others)
            freed += others
            claimed = upto
        if block >= stop:
            return times, dead, freed, twins
        first, many, twin = cache(meta, keys, slots, pool, tables[row], hashes, block, last)
        twins = twins or twin
        marks[times, 0] = first
        marks[times, 1] = many
        marks[times, 2] = dead
        times += 1
        block = last
