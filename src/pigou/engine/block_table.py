"""Block tables and lengths of running sequences, one row of the batch each."""

from __future__ import annotations

import numpy as np

from pigou.compiled import bare_kernel, bare_kernel_over
from pigou.config import EngineConfig
from pigou.engine.sequence import Sequence
from pigou.kv.block_pool import charge
from pigou.request import Ints

#: Columns of a row, by index in `Rows.columns`. They are one array because passing an array to a
#: kernel takes as long as a short kernel runs.
COMPUTED, LENGTH, LIMIT, DROPPED, BLOCKS, KNOWN, CACHED, COMPACTED, PRIORITY, ACCOUNT = range(10)
COLUMNS = 10


#: Rows of a plan's array: rows, first positions, tokens to compute, entries in the cache.
PLAN_ROWS, PLAN_STARTS, PLAN_COUNTS, PLAN_KV_LENS = range(4)
PLAN_COLUMNS = 4
#: Rows of `work`, arrays reused for each plan. Scheduler: entries of the plan with their rows and
#: tokens; rows whose blocks are full, and the blocks that they get; for each block of the lookahead
#: the row that needs it, the step and the block; and the sort keys of `look_ahead`.
(
    ENTRY_ROW, ENTRY_COUNT, GROWING_ROW, GROWING_BLOCK, NEED_ROW, NEED_STEP, NEED_BLOCK,
    PHASE_START, PHASE_FILL, BY_PHASE,
) = range(10)  # fmt: skip
#: Output processing: steps of each row; tokens of each entry; entries at their limit, and those
#: with blocks to cache; freed blocks; for each batch of cached blocks the first one, their number,
#: and the hashes removed before.
STEPS_DONE, TOKENS, ENDED, FULL, ORPHAN, MARK_FIRST, MARK_COUNT, MARK_REMOVED = range(10, 18)
WORK_ROWS = 18


class Rows:
    """Rows of the batch, one sequence each, as arrays of shape (max_seqs,).

    `tables` has device block ids, (max_seqs, blocks of the longest sequence); `columns` has all
    others as one array, (COLUMNS, max_seqs).
    """

    def __init__(self, config: EngineConfig) -> None:
        count = config.max_seqs
        max_blocks = -(-config.max_model_len // config.block_size)
        self.tables: Ints = np.zeros((count, max_blocks), dtype=np.int32)
        self.columns: Ints = np.zeros((COLUMNS, count), dtype=np.int32)
        #: tokens with KV; position of the next token
        self.computed: Ints = self.columns[COMPUTED]
        #: tokens in the sequence; 0 for a free row, `computed` + 1 in decode
        self.length: Ints = self.columns[LENGTH]
        self.limit: Ints = self.columns[LIMIT]  # maximum length
        self.dropped: Ints = self.columns[DROPPED]  # computed tokens with evicted entries
        self.blocks: Ints = self.columns[BLOCKS]
        self.known: Ints = self.columns[KNOWN]  # blocks with a known hash; 0 once compacted
        self.cached: Ints = self.columns[CACHED]  # full blocks offered to the cache
        self.compacted: Ints = self.columns[COMPACTED]
        self.priority: Ints = self.columns[PRIORITY]
        self.account: Ints = self.columns[ACCOUNT]  # account of the row's tenant in the block pool
        self.account[:] = config.blocks
        self.owner: list[Sequence | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))
        self.used = 0
        #: Limit of rows in use; rows beyond a lowered limit run to their end.
        self.max_used = self.count = count

    @property
    def free(self) -> int:
        """Number of free rows."""
        return max(min(len(self._free), self.max_used - self.used), 0)

    def remaining(self, row: int) -> int:
        """Return the tokens of a row still to compute."""
        return self.length.item(row) - self.computed.item(row)

    def take_slot(self, seq: Sequence, computed: int, blocks: int, cached: int) -> int:
        """Assign a row to a sequence and return it."""
        row = self._free.pop()
        self.used += 1
        self.owner[row] = seq
        self.computed[row] = computed
        self.length[row] = seq.length
        self.limit[row] = seq.request.prompt + seq.request.max_tokens
        self.blocks[row] = blocks
        self.dropped[row] = seq.dropped
        self.compacted[row] = seq.computed if seq.dropped else 0
        self.known[row] = 0 if seq.dropped else len(seq.hashes)
        self.cached[row] = cached
        self.priority[row] = seq.request.priority
        seq.row = row
        return row

    def free_slot(self, seq: Sequence) -> None:
        """Free a sequence's row; copy its length back."""
        row = seq.row
        seq.length = self.length.item(row)
        self.owner[row] = None
        self.length[row] = 0
        self.computed[row] = 0
        self.dropped[row] = 0
        self.compacted[row] = 0
        self.blocks[row] = 0
        self._free.append(row)
        self.used -= 1
        seq.row = -1


@bare_kernel_over("engine", "kv")
def charge_rows(meta: Ints, accounts: Ints, rows: Ints, blocks: Ints) -> None:
    """Give blocks just claimed to the accounts of their rows."""
    for i in range(rows.shape[0]):
        charge(meta, blocks[i], accounts[rows[i]])


@bare_kernel
def append_blocks(tables: Ints, blocks: Ints, rows: Ints, new: Ints) -> None:
    """Append one block to each row, in order; rows may repeat."""
    for i in range(rows.shape[0]):
        row = rows[i]
        tables[row, blocks[row]] = new[i]
        blocks[row] += 1


@bare_kernel
def append_wanted(
    tables: Ints, blocks: Ints, rows: Ints, steps: Ints, new: Ints, done: Ints, orphans: Ints
) -> int:
    """Append the blocks of each row's first `done[row]` steps; write the rest to `orphans`."""
    others = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if steps[i] < done[row]:
            tables[row, blocks[row]] = new[i]
            blocks[row] += 1
        else:
            orphans[others] = new[i]
            others += 1
    return others


@bare_kernel
def remove_row(order: Ints, count: int, row: int) -> int:
    """Remove a row from the first `count` of `order`; return how many are left."""
    left = 0
    for i in range(count):
        if order[i] != row:
            order[left] = order[i]
            left += 1
    return left
