"""Compiled kernels of the scheduler: rows of the batch and blocks of the pool in one pass each.

Arrays of rows are those of `pigou.engine.block_table.Rows`; `pool` is `BlockPool.arrays`, and
`work` is `EngineState.work`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, bare_kernel_over, inlined
from pigou.engine.block_table import BLOCKS, COMPUTED, DROPPED, LENGTH, LIMIT, append_blocks
from pigou.kv.block_pool_kernels import FREE, PoolArrays, allocate, peek
from pigou.request import Ints

#: Rows of a plan's array: rows, first positions, tokens to compute, entries in the cache.
PLAN_ROWS, PLAN_STARTS, PLAN_COUNTS, PLAN_KV_LENS = range(4)
PLAN_COLUMNS = 4
#: Rows of `work`, arrays that are used again for each plan. Of the scheduler: entries of the plan,
#: their rows and tokens; rows whose blocks are full, and the blocks that they get; of each block of
#: the lookahead who needs it, at which step, and which it is; and what `look_ahead` sorts rows by.
(
    ENTRY_ROW, ENTRY_COUNT, GROWING_ROW, GROWING_BLOCK, NEED_ROW, NEED_STEP, NEED_BLOCK,
    PHASE_START, PHASE_FILL, BY_PHASE,
) = range(10)  # fmt: skip
#: Of output processing: steps of each row; tokens of each entry; entries at their limit, and those
#: with blocks to cache; blocks that no row needs any more; of each time that blocks were cached the
#: first one, how many there were, and how many hashes had been removed before.
STEPS_DONE, TOKENS, ENDED, FULL, ORPHAN, MARK_FIRST, MARK_COUNT, MARK_REMOVED = range(10, 18)
WORK_ROWS = 18
#: What `start_decodes` returns for the number of rows where too few blocks are free.
TOO_FEW = -1


@bare_kernel
def find_decodes(
    order: Ints, columns: Ints, block_size: int, budget: int, rows: Ints, growing: Ints
) -> tuple[int, int]:
    """Find the rows of `order` with one token to compute, at most `budget`.

    Writes them to `rows`, and those whose blocks are full to `growing`.

    Returns:
        How many of each.
    """
    computed, length, dropped = columns[COMPUTED], columns[LENGTH], columns[DROPPED]
    blocks = columns[BLOCKS]
    count = 0
    grow = 0
    for row in order:
        if count == budget:
            break
        if length[row] - computed[row] == 1:
            rows[count] = row
            count += 1
            if computed[row] - dropped[row] == blocks[row] * block_size:
                growing[grow] = row
                grow += 1
    return count, grow


@bare_kernel
def write_starts(
    rows: Ints, counts: Ints, columns: Ints, starts: Ints, samples: NDArray[np.bool_]
) -> bool:
    """Write where each entry of a plan starts, and whether it yields a token.

    Returns:
        Whether all compute one token and sample.
    """
    computed, length = columns[COMPUTED], columns[LENGTH]
    decode = True
    for i in range(rows.shape[0]):
        row = rows[i]
        starts[i] = computed[row]
        samples[i] = computed[row] + counts[i] == length[row]
        decode &= samples[i] and counts[i] == 1
    return decode


@bare_kernel
def look_ahead(
    rows: Ints,
    columns: Ints,
    block_size: int,
    max_steps: int,
    free: int,
    work: Ints,
) -> tuple[int, int]:
    """Find for how many steps decoding rows can go on unchanged, and the blocks they need.

    The blocks of step 0 are there already. Rows and steps of later needs are written to `work` in
    the order of single steps.

    Returns:
        Steps until the first row reaches its limit or blocks run out, at most `max_steps`; and the
        number of needs.
    """
    computed, length, limit = columns[COMPUTED], columns[LENGTH], columns[LIMIT]
    dropped, blocks = columns[DROPPED], columns[BLOCKS]
    starts, fill, by_phase = work[PHASE_START, : block_size + 1], work[PHASE_FILL], work[BY_PHASE]
    out_rows, out_steps = work[NEED_ROW], work[NEED_STEP]
    steps = max_steps
    for row in rows:
        steps = min(steps, limit[row] - length[row])
    # Rows by the step at which they first need a block, 1 to block_size, in stable order.
    starts[:] = 0
    for row in rows:
        starts[blocks[row] * block_size - computed[row] + dropped[row]] += 1
    for i in range(1, block_size + 1):
        starts[i] += starts[i - 1]
    for i in range(block_size + 1):
        fill[i] = starts[i]
    for row in rows:
        phase = blocks[row] * block_size - computed[row] + dropped[row] - 1
        by_phase[fill[phase]] = row
        fill[phase] += 1
    count = 0
    for step in range(1, steps):
        phase = (step - 1) % block_size
        first, last = starts[phase], starts[phase + 1]
        if count + last - first > free:
            return step, count
        for i in range(first, last):
            out_rows[count] = by_phase[i]
            out_steps[count] = step
            count += 1
    return steps, count


@bare_kernel_over("engine", "kv")
def start_decodes(
    order: Ints,
    columns: Ints,
    tables: Ints,
    block_size: int,
    budget: int,
    pool: PoolArrays,
    work: Ints,
) -> tuple[int, int]:
    """Find the rows of `order` that decode, at most `budget`, and give each the block it needs.

    Args:
        order: rows, in the order in which they started.
        columns, tables, block_size: the rows.
        budget: tokens.
        pool: the blocks; its `removed` takes the hashes that were removed.
        work: its `ENTRY_ROW` takes who decodes.

    Returns:
        How many rows, and how many hashes; or `TOO_FEW` where they need more blocks than are free,
        and how many they need. Nothing was done then.
    """
    meta, keys, _, counts, removed = pool
    count, grow = find_decodes(
        order, columns, block_size, budget, work[ENTRY_ROW], work[GROWING_ROW]
    )
    if grow > counts[FREE]:
        return TOO_FEW, grow
    if grow == 0:
        return count, 0
    gone: int = allocate(meta, keys, counts, work[GROWING_BLOCK, :grow], removed)
    append_blocks(tables, columns[BLOCKS], work[GROWING_ROW, :grow], work[GROWING_BLOCK])
    return count, gone


@inlined
def lay_out(tables: Ints, blocks: Ints, rows: Ints, count: int, work: Ints) -> None:
    """Write lookahead blocks behind those of their rows, which do not own them yet."""
    needing, new, more = work[NEED_ROW], work[NEED_BLOCK], work[BY_PHASE]
    for row in rows:
        more[row] = 0
    for i in range(count):
        row = needing[i]
        tables[row, blocks[row] + more[row]] = new[i]
        more[row] += 1


@bare_kernel_over("engine", "kv")
def finish_plan(
    decodes: int,
    columns: Ints,
    tables: Ints,
    block_size: int,
    max_steps: int,
    chunks: bool,
    spare: int,
    pool: PoolArrays,
    work: Ints,
    plan: Ints,
    samples: NDArray[np.bool_],
) -> tuple[int, int]:
    """Write a plan's entries, and lay out blocks for as many steps as it can go on unchanged.

    Args:
        decodes: entries, the first ones, that decode.
        columns, tables, block_size: the rows.
        max_steps: steps of one plan; 1 where the next step may differ.
        chunks: whether a last entry may compute equal chunks of its prompt.
        spare: free blocks that later steps may take; none where it is negative.
        pool: the blocks.
        work: has the entries, and takes the lookahead.
        plan: takes rows, starts, counts and entries in the cache, (4, entries).
        samples: takes whether each entry yields a token, (entries,).

    Returns:
        How many steps, and the blocks of the lookahead.
    """
    meta, _, _, pool_counts, _ = pool
    size = samples.shape[0]
    rows, counts = work[ENTRY_ROW, :size], work[ENTRY_COUNT, :size]
    computed, length, dropped = columns[COMPUTED], columns[LENGTH], columns[DROPPED]
    starts = plan[PLAN_STARTS]
    decode: bool = write_starts(rows, counts, columns, starts, samples)
    for i in range(size):
        plan[PLAN_ROWS, i] = rows[i]
        plan[PLAN_COUNTS, i] = counts[i]
        plan[PLAN_KV_LENS, i] = starts[i] - dropped[rows[i]]
    if max_steps == 1 or size == 0:
        return 1, 0
    same = size
    if not decode:
        last = size - 1
        if not chunks or size != decodes + 1 or samples[last] or counts[last] == 1:
            return 1, 0
        same = decodes
        left = length[rows[last]] - computed[rows[last]]
        max_steps = min(max_steps, (left - 1) // counts[last])
    free = min(pool_counts[FREE], spare)
    repeat, count = look_ahead(rows[:same], columns, block_size, max_steps, free, work)
    if count:
        peek(meta, count, work[NEED_BLOCK])
        lay_out(tables, columns[BLOCKS], rows[:same], count, work)
    return repeat, count


@bare_kernel_over("engine", "kv")
def plan_decodes(
    order: Ints,
    columns: Ints,
    tables: Ints,
    block_size: int,
    budget: int,
    max_steps: int,
    pool: PoolArrays,
    work: Ints,
    plan: Ints,
    samples: NDArray[np.bool_],
) -> tuple[int, int, int, int]:
    """Do what `start_decodes` and `finish_plan` do where no prompt is computed, without tiers.

    Arguments are theirs; `plan` and `samples` have an entry for each row of `order`. The entries'
    counts in `work` are 1.

    Returns:
        What `start_decodes` returns, and what `finish_plan` does; zeros where too few blocks are
        free.
    """
    count, gone = start_decodes(order, columns, tables, block_size, budget, pool, work)
    if count == TOO_FEW:
        return count, gone, 0, 0
    _, _, _, counts, _ = pool
    chunks = count < 0  # never; a literal is another type, and would compile `finish_plan` again
    repeat, wanted = finish_plan(
        count, columns, tables, block_size, max_steps, chunks, counts[FREE], pool, work, plan,
        samples[:count],
    )  # fmt: skip
    return count, gone, repeat, wanted
