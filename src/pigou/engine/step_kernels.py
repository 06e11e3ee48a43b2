"""Compiled kernels of a whole plan: rows of the batch and blocks of the pool in one pass each.

Arrays are those of `pigou.engine.sequence.Rows` and, where they are named `meta`, `keys`, `slots`
and `pool`, those of `pigou.kv.kernels` (`pool` is its `counts`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel_over, inlined
from pigou.engine.kernels import (
    advance,
    append_blocks,
    append_wanted,
    decodes,
    entries,
    foresee,
)
from pigou.kv.kernels import FREE, Counts, allocate, claim, peek
from pigou.request import BlockHashes, Ints

#: What `begin` returns for the number of rows where too few blocks are free: nothing was done.
TOO_FEW = -1


@bare_kernel_over("engine", "kv")
def begin(
    order: Ints,
    computed: Ints,
    length: Ints,
    dropped: Ints,
    blocks: Ints,
    tables: Ints,
    block_size: int,
    budget: int,
    meta: Ints,
    keys: BlockHashes,
    slots: Ints,
    pool: Counts,
    rows: Ints,
    growing: Ints,
    new: Ints,
    removed: BlockHashes,
) -> tuple[int, int]:
    """Find the rows of `order` that decode, at most `budget`, and give each the block it needs.

    Args:
        order, computed, length, dropped, blocks, tables, block_size, budget: the rows.
        meta, keys, slots, pool: the blocks.
        rows: takes who decodes, (max_seqs,).
        growing, new: for use here, (max_seqs,) each.
        removed: takes the hashes that died.

    Returns:
        How many rows, and how many hashes; or `TOO_FEW` where they need more blocks than are free,
        and how many they need.
    """
    count, grow = decodes(
        order, computed, length, dropped, blocks, block_size, budget, rows, growing
    )
    if grow > pool[FREE]:
        return TOO_FEW, grow
    if grow == 0:
        return count, 0
    dead: int = allocate(meta, keys, slots, pool, new[:grow], removed)
    append_blocks(tables, blocks, growing[:grow], new)
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
    rows: Ints,
    counts: Ints,
    decoding: int,
    computed: Ints,
    length: Ints,
    limit: Ints,
    dropped: Ints,
    blocks: Ints,
    tables: Ints,
    block_size: int,
    most: int,
    chunks: bool,
    spare: int,
    meta: Ints,
    pool: Counts,
    plan: Ints,
    samples: NDArray[np.bool_],
    wanting: Ints,
    steps: Ints,
    new: Ints,
    starts: Ints,
    fill: Ints,
    by_phase: Ints,
) -> tuple[int, int]:
    """Write a plan's entries, and lay out blocks for as many steps as it can go on unchanged.

    Args:
        rows, counts: of the entries, (entries,).
        decoding: entries, the first ones, that decode.
        computed, length, limit, dropped, blocks, tables, block_size: the rows.
        most: steps of one plan; 1 where the next step may differ.
        chunks: whether a last entry may compute equal chunks of its prompt.
        spare: free blocks that later steps may take at most; there are none where it is negative.
        meta, pool: the blocks.
        plan: takes rows, starts, counts and entries in the cache, (4, entries).
        samples: takes whether each entry yields a token, (entries,).
        wanting, steps, new: take who needs a block, at which step, and which, (blocks,) each.
        starts, fill, by_phase: for use here, as of `foresee`.

    Returns:
        How many steps, and for how many blocks needs were written.
    """
    size = rows.shape[0]
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
    repeat, needs = foresee(
        rows[:alike], computed, length, limit, dropped, blocks, block_size, most,
        min(pool[FREE], spare), wanting, steps, starts, fill, by_phase,
    )  # fmt: skip
    if needs:
        peek(meta, needs, new)
        lay(tables, blocks, rows[:alike], wanting, new, needs, by_phase)
    return repeat, needs


@bare_kernel_over("engine", "kv")
def settle(
    rows: Ints,
    counts: Ints,
    samples: NDArray[np.bool_],
    steps: Ints,
    done: int,
    computed: Ints,
    length: Ints,
    limit: Ints,
    known: Ints,
    sealed: Ints,
    blocks: Ints,
    tables: Ints,
    block_size: int,
    meta: Ints,
    keys: BlockHashes,
    slots: Ints,
    pool: Counts,
    wanting: Ints,
    when: Ints,
    new: Ints,
    later: bool,
    tokens: Ints,
    taken: Ints,
    ended: Ints,
    fuller: Ints,
    removed: BlockHashes,
    orphans: Ints,
) -> tuple[int, int, int, int]:
    """Move the rows of a plan on, and take the foreseen blocks that its steps wrote to.

    Blocks are not taken where some are to be sealed in between, or where that is done `later`.

    Args:
        rows, counts, samples: of the plan's entries.
        steps: that count for each entry, (entries,).
        done: steps of the plan.
        computed, length, limit, known, sealed, blocks, tables, block_size: the rows.
        meta, keys, slots, pool: the blocks.
        wanting, when, new: foreseen blocks: who needs them, at which step, and which they are.
        later: see above.
        tokens, taken, ended, fuller: as of `advance`.
        removed: takes the hashes that died.
        orphans: takes blocks that nobody needs any more.

    Returns:
        How many entries ended, how many have blocks to seal; hashes that died; orphans.
    """
    ends, full = advance(
        rows, counts, samples, steps, computed, length, limit, known, sealed, block_size,
        tokens, taken, ended, fuller,
    )  # fmt: skip
    if later or full > 0 or when.shape[0] == 0:
        return ends, full, 0, 0
    stop = 0
    while stop < when.shape[0] and when[stop] < done:
        stop += 1
    dead = claim(meta, keys, slots, pool, new[:stop], removed)
    others = append_wanted(tables, blocks, wanting[:stop], when[:stop], new[:stop], taken, orphans)
    return ends, full, dead, others
