"""Compiled kernels of output processing: a plan's steps in one pass over rows and blocks.

Arrays of rows are those of `pigou.engine.block_table.Rows`; `pool` is `BlockPool.arrays`, and
`work` is `EngineState.work`, whose rows `pigou.engine.scheduler_kernels` names.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, bare_kernel_over, inlined
from pigou.engine.block_table import (
    BLOCKS,
    CACHED,
    COMPUTED,
    KNOWN,
    LENGTH,
    LIMIT,
    append_wanted,
)
from pigou.engine.scheduler_kernels import (
    ENDED,
    FULL,
    MARK_COUNT,
    MARK_FIRST,
    MARK_REMOVED,
    NEED_BLOCK,
    NEED_ROW,
    NEED_STEP,
    ORPHAN,
    STEPS_DONE,
    TOKENS,
)
from pigou.kv.block_pool_kernels import (
    FREE,
    REFS,
    Counts,
    PoolArrays,
    cache_full_blocks,
    claim,
    link_after,
)
from pigou.request import BlockHashes, Ints


@bare_kernel
def advance(
    rows: Ints,
    counts: Ints,
    samples: NDArray[np.bool_],
    steps: Ints,
    done: int,
    columns: Ints,
    block_size: int,
    work: Ints,
) -> tuple[int, int]:
    """Move the rows of a plan on by `steps`, each its own number, or by `done` where it is empty.

    Writes tokens, steps, and the entries that ended or have full blocks to `work`. Rows that lost
    their sequence since did no steps.

    Returns:
        How many entries ended, and how many have blocks to cache.
    """
    computed, length, limit = columns[COMPUTED], columns[LENGTH], columns[LIMIT]
    known, cached = columns[KNOWN], columns[CACHED]
    steps_done, tokens = work[STEPS_DONE], work[TOKENS]
    ended, full_entries = work[ENDED], work[FULL]
    ended_count = 0
    full = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        tokens[i] = 0
        steps_done[row] = 0
        if length[row] == 0:
            continue
        mine = steps[i] if steps.shape[0] > 0 else done
        steps_done[row] = mine
        computed[row] += counts[i] * mine
        if samples[i]:
            length[row] += mine
            tokens[i] = mine
        if length[row] >= limit[row]:
            ended[ended_count] = i
            ended_count += 1
        if min(known[row], computed[row] // block_size) > cached[row]:
            full_entries[full] = i
            full += 1
    return ended_count, full


@bare_kernel_over("engine", "kv")
def process_steps(
    rows: Ints,
    counts: Ints,
    samples: NDArray[np.bool_],
    steps: Ints,
    done: int,
    columns: Ints,
    tables: Ints,
    block_size: int,
    pool: PoolArrays,
    wanted: int,
    work: Ints,
) -> tuple[int, int, int, int]:
    """Move the rows of a plan on, and take the lookahead blocks that its steps wrote to.

    Blocks are not taken where some are to be cached in between.

    Args:
        rows, counts, samples: of the plan's entries.
        steps: that count for each entry, (entries,); empty where all of them do.
        done: steps of the plan.
        columns, tables, block_size: the rows.
        pool: the blocks; its `removed` takes the hashes that were removed.
        wanted: blocks of the lookahead; 0 where they are taken later.
        work: as of `advance`; also takes the orphans, blocks that no row needs any more.

    Returns:
        How many entries ended, how many have blocks to cache; hashes removed; orphans.
    """
    ended_count, full = advance(rows, counts, samples, steps, done, columns, block_size, work)
    if full > 0 or wanted == 0:
        return ended_count, full, 0, 0
    meta, keys, _, pool_counts, removed = pool
    stop = 0
    while stop < wanted and work[NEED_STEP, stop] < done:
        stop += 1
    gone = claim(meta, keys, pool_counts, work[NEED_BLOCK, :stop], removed)
    others = append_wanted(
        tables, columns[BLOCKS], work[NEED_ROW, :stop], work[NEED_STEP, :stop],
        work[NEED_BLOCK, :stop], work[STEPS_DONE], work[ORPHAN],
    )  # fmt: skip
    return ended_count, full, gone, others


@inlined
def return_blocks(meta: Ints, counts: Counts, blocks: Ints, count: int) -> None:
    """Free blocks that were just taken, the last first; they are handed out next."""
    for i in range(count - 1, -1, -1):
        meta[blocks[i], REFS] = 0
        link_after(meta, meta.shape[0] - 1, blocks[i])
    counts[FREE] += count


@bare_kernel_over("engine", "kv")
def cache_row(
    row: int,
    start: int,
    count: int,
    done: int,
    columns: Ints,
    tables: Ints,
    block_size: int,
    pool: PoolArrays,
    wanted: int,
    hashes: BlockHashes,
    work: Ints,
) -> tuple[int, int, int, bool]:
    """Cache a row's blocks at the steps of a plan in which they became full.

    Before each, the lookahead blocks written to by then are taken, as by single steps. Without a
    lookahead, nothing happens in between, and a prompt's blocks are cached at once.

    Args:
        row: that has blocks to cache.
        start: position from which the plan computes it.
        count: tokens that it computes in a step.
        done: steps of the plan.
        columns, tables, block_size: the rows.
        pool: the blocks; its `removed` takes the hashes that were removed.
        wanted: blocks of the lookahead.
        hashes: of the row's sequence, (known, 2).
        work: as of `process_steps`; also takes a mark for each time.

    Returns:
        How many marks; hashes removed; blocks taken that no row needs any more, and are free;
        whether a block is a duplicate.
    """
    meta, keys, slots, counts, removed = pool
    orphans = work[ORPHAN]
    block: int = np.int64(columns[CACHED, row])  # type: ignore[assignment]
    stop: int = min(columns[KNOWN, row], columns[COMPUTED, row] // block_size)
    columns[CACHED, row] = stop
    at_once = count > 1 and wanted == 0
    times, claimed, gone, freed, duplicates = 0, 0, 0, 0, False
    while True:
        step, last = done - 1, stop
        if block < stop and not at_once:
            step = max((block * block_size + block_size - start + count - 1) // count - 1, 0)
            last = max(block + 1, min(stop, (start + (step + 1) * count) // block_size))
        upto = claimed
        while upto < wanted and work[NEED_STEP, upto] <= step:
            upto += 1
        if upto > claimed:
            fresh = work[NEED_BLOCK, claimed:upto]
            gone += claim(meta, keys, counts, fresh, removed[gone:])
            others = append_wanted(
                tables, columns[BLOCKS], work[NEED_ROW, claimed:upto],
                work[NEED_STEP, claimed:upto], fresh, work[STEPS_DONE], orphans,
            )  # fmt: skip
            return_blocks(meta, counts, orphans, others)
            freed += others
            claimed = upto
        if block >= stop:
            return times, gone, freed, duplicates
        first, many, duplicate = cache_full_blocks(
            meta, keys, slots, counts, tables[row], hashes, block, last
        )
        duplicates = duplicates or duplicate
        work[MARK_FIRST, times] = first
        work[MARK_COUNT, times] = many
        work[MARK_REMOVED, times] = gone
        times += 1
        block = last
