"""Compiled kernels over the rows of the batch. Arrays are those of `pigou.engine.sequence.Rows`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.request import Ints

#: Places of `Rows.columns`: handing one array to a kernel takes as long as a short kernel does.
COMPUTED, LENGTH, LIMIT, DROPPED, BLOCKS, KNOWN, SEALED, COMPACTED, PRIORITY = range(9)
COLUMNS = 9


@bare_kernel
def decodes(
    order: Ints,
    computed: Ints,
    length: Ints,
    dropped: Ints,
    blocks: Ints,
    block_size: int,
    budget: int,
    rows: Ints,
    growing: Ints,
) -> tuple[int, int]:
    """Find the rows of `order` with one token to compute, at most `budget`.

    Writes them to `rows`, and those whose blocks are full to `growing`.

    Returns:
        How many of each.
    """
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
def entries(
    rows: Ints,
    counts: Ints,
    computed: Ints,
    length: Ints,
    starts: Ints,
    samples: NDArray[np.bool_],
) -> bool:
    """Write where each entry of a plan starts, and whether it yields a token.

    Returns:
        Whether all compute one token and sample.
    """
    decode = True
    for i in range(rows.shape[0]):
        row = rows[i]
        starts[i] = computed[row]
        samples[i] = computed[row] + counts[i] == length[row]
        decode &= samples[i] and counts[i] == 1
    return decode


@bare_kernel
def strike(order: Ints, count: int, row: int) -> int:
    """Take a row out of the first `count` of `order`, which close up; return how many are left."""
    left = 0
    for i in range(count):
        if order[i] != row:
            order[left] = order[i]
            left += 1
    return left


@bare_kernel
def append_blocks(tables: Ints, blocks: Ints, rows: Ints, new: Ints) -> None:
    """Append one block to each row, in order; a row may occur several times."""
    for i in range(rows.shape[0]):
        row = rows[i]
        tables[row, blocks[row]] = new[i]
        blocks[row] += 1


@bare_kernel
def append_wanted(
    tables: Ints, blocks: Ints, rows: Ints, steps: Ints, new: Ints, taken: Ints, orphans: Ints
) -> int:
    """Append the blocks of each row's first `taken[row]` steps; write the others to `orphans`.

    Returns:
        How many others there are.
    """
    others = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if steps[i] < taken[row]:
            tables[row, blocks[row]] = new[i]
            blocks[row] += 1
        else:
            orphans[others] = new[i]
            others += 1
    return others


@bare_kernel
def foresee(
    rows: Ints,
    computed: Ints,
    length: Ints,
    limit: Ints,
    dropped: Ints,
    blocks: Ints,
    block_size: int,
    most: int,
    free: int,
    out_rows: Ints,
    out_steps: Ints,
    starts: Ints,
    fill: Ints,
    by_phase: Ints,
) -> tuple[int, int]:
    """Find for how many steps decoding rows can go on unchanged, and the blocks they need.

    The blocks of step 0 are there already. Needs of later steps are written to `out_rows` and
    `out_steps` in the order in which single steps would have them. `starts` and `fill`, of shape
    (block_size + 1,), and `by_phase`, (max_seqs,), are for use here.

    Returns:
        Steps until the first row reaches its limit, at most `most`, and before blocks run out;
        and the number of needs.
    """
    steps = most
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
    needs = 0
    for step in range(1, steps):
        phase = (step - 1) % block_size
        first, last = starts[phase], starts[phase + 1]
        if needs + last - first > free:
            return step, needs
        for i in range(first, last):
            out_rows[needs] = by_phase[i]
            out_steps[needs] = step
            needs += 1
    return steps, needs


@bare_kernel
def advance(
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
    block_size: int,
    tokens: Ints,
    taken: Ints,
    ended: Ints,
    fuller: Ints,
) -> tuple[int, int]:
    """Move the rows of a plan on by `steps`, each its own number, or by `done` where it is empty.

    Writes sampled tokens to `tokens`, each row's steps to `taken`, entries at their limit to
    `ended`, entries with full blocks to seal to `fuller`. Rows that lost their sequence since
    have taken no steps.

    Returns:
        How many ended, and how many have blocks to seal.
    """
    ends = 0
    full = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        tokens[i] = 0
        taken[row] = 0
        if length[row] == 0:
            continue
        mine = steps[i] if steps.shape[0] > 0 else done
        taken[row] = mine
        computed[row] += counts[i] * mine
        if samples[i]:
            length[row] += mine
            tokens[i] = mine
        if length[row] >= limit[row]:
            ended[ends] = i
            ends += 1
        if min(known[row], computed[row] // block_size) > sealed[row]:
            fuller[full] = i
            full += 1
    return ends, full
