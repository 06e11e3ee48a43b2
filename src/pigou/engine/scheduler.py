"""Scheduler: decodes first, then chunks of running prompts, then new sequences.

With the order `priority`, decodes and prompts of a higher number pause, keeping their blocks, while
a prompt of a lower number is computed. Decodes of the prompt's own number pause every other step,
so that they lose at most half of their steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, bare_kernel_over, inlined
from pigou.engine.admission import admit, fits_with_growth
from pigou.engine.block_table import (
    ACCOUNT,
    BLOCKS,
    BY_PHASE,
    COMPUTED,
    DROPPED,
    ENTRY_COUNT,
    ENTRY_ROW,
    GROWING_BLOCK,
    GROWING_ROW,
    LENGTH,
    LIMIT,
    NEED_BLOCK,
    NEED_ROW,
    NEED_STEP,
    PHASE_FILL,
    PHASE_START,
    PLAN_COLUMNS,
    PLAN_COUNTS,
    PLAN_KV_LENS,
    PLAN_ROWS,
    PLAN_STARTS,
    append_blocks,
)
from pigou.engine.chunked_prefill import continue_prefills, prefill_room, still_prefilling
from pigou.engine.plan import Plan
from pigou.engine.preemption import preempt_last, reclaim
from pigou.engine.schedule_builder import EntryBuffer, Lookahead, ScheduleBuilder
from pigou.engine.sequence import Sequence
from pigou.engine.state import EngineState
from pigou.engine.token_eviction import (
    evict_by_price,
    evict_for_decodes,
    recompute_by_price,
    write_evictions,
)
from pigou.kv.block_pool import FREE, OWNER, allocate, peek, protected
from pigou.request import BlockHashes, Counts, Ints

#: Result of `_start_decodes` if too few blocks are free.
TOO_FEW = -1


@bare_kernel
def find_decodes(
    order: Ints, columns: Ints, block_size: int, budget: int, rows: Ints, growing: Ints
) -> tuple[int, int]:
    """Write the rows of `order` that decode, at most `budget`, to `rows`."""
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
    """Write where each entry starts and whether it yields a token; return if all decode."""
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
    rows: Ints, columns: Ints, block_size: int, max_steps: int, free: int, work: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Return how many steps decodes run unchanged, and blocks needed; write them to `work`."""
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


@inlined
def is_alone(columns: Ints) -> bool:
    """True if one row alone is in use: it may take what floors keep, or it would never end."""
    rows = 0
    for row in range(columns.shape[1]):
        rows += columns[LENGTH, row] > 0
    return rows == 1


@bare_kernel_over("engine", "kv")
def _start_decodes(
    order: Ints, columns: Ints, tables: Ints, block_size: int, budget: int, meta: Ints,
    keys: BlockHashes, pool_counts: Counts, work: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Write decoding rows of `order` to `work`, at most `budget`, and give each its block."""
    count, grow = find_decodes(
        order, columns, block_size, budget, work[ENTRY_ROW], work[GROWING_ROW]
    )
    queue, given = meta.shape[0] - 1, grow
    has_accounts = meta[queue, OWNER] != queue
    if grow > pool_counts[FREE] and not has_accounts:
        return TOO_FEW, grow
    if grow == 0:
        return count, 0
    gone: int = np.int64(0)  # type: ignore[assignment]  # a literal is another type
    if not has_accounts:
        gone = allocate(meta, keys, pool_counts, work[GROWING_BLOCK, :grow], queue, gone)
    else:
        given = 0
        while given < grow:
            own: int = np.int64(columns[ACCOUNT, work[GROWING_ROW, given]])  # type: ignore[assignment]
            if pool_counts[FREE] <= protected(meta, own) and (
                pool_counts[FREE] == 0 or not is_alone(columns)
            ):
                break
            out = work[GROWING_BLOCK, given : given + 1]
            gone = allocate(meta, keys, pool_counts, out, own, gone)
            given += 1
    append_blocks(tables, columns[BLOCKS], work[GROWING_ROW, :given], work[GROWING_BLOCK])
    return count if given == grow else TOO_FEW, gone


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
def _finish_plan(
    decodes: int, columns: Ints, tables: Ints, block_size: int, max_steps: int, chunks: bool,
    spare: int, meta: Ints, pool_counts: Counts, work: Ints, plan: Ints,
    samples: NDArray[np.bool_],
) -> tuple[int, int]:  # fmt: skip
    """Write a plan's entries, and reserve blocks for as many unchanged steps as possible.

    The first `decodes` entries decode; with `chunks`, a last one may compute equal chunks. Later
    steps may take `spare` free blocks. `plan` is (4, entries). Returns steps and lookahead blocks.
    """
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
    free = min(pool_counts[FREE] - protected(meta, meta.shape[0] - 1), spare)
    repeat, count = look_ahead(rows[:same], columns, block_size, max_steps, free, work)
    if count:
        if peek(meta, count, work[NEED_BLOCK]) < count:
            return 1, 0
        lay_out(tables, columns[BLOCKS], rows[:same], count, work)
    return repeat, count


@bare_kernel_over("engine", "kv")
def plan_decodes(
    order: Ints, columns: Ints, tables: Ints, block_size: int, budget: int, max_steps: int,
    meta: Ints, keys: BlockHashes, pool_counts: Counts, work: Ints, plan: Ints,
    samples: NDArray[np.bool_],
) -> tuple[int, int, int, int]:  # fmt: skip
    """Fuse `_start_decodes` and `_finish_plan` for batches that only decode, without tiers."""
    count, gone = _start_decodes(
        order, columns, tables, block_size, budget, meta, keys, pool_counts, work
    )
    if count == TOO_FEW:
        return count, gone, 0, 0
    chunks = count < 0  # never; a literal is another type, and would compile `_finish_plan` again
    repeat, wanted = _finish_plan(
        count, columns, tables, block_size, max_steps, chunks, pool_counts[FREE], meta,
        pool_counts, work, plan, samples[:count],
    )  # fmt: skip
    return count, gone, repeat, wanted


class Scheduler:
    """Builds plans from the engine's state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._batch = EntryBuffer(state.work[:, : state.rows.count])
        #: Whether decodes of the highest priority prompt's own number were paused in the last step.
        self._paused = False

    def schedule(self, now: int, horizon: int) -> tuple[Plan, Lookahead]:
        """Plan the next step, and later ones as long as they are the same."""
        state = self._state
        if state.prefilling:
            state.prefilling = still_prefilling(state)
        if self._decode_only:
            plan = self._plan_decodes(horizon, 1 if horizon <= now else state.config.max_repeat)
            if plan is not None:
                return plan
        budget = state.config.max_batched_tokens
        background = state.config.max_background_tokens or budget
        builder = ScheduleBuilder(self._batch, budget, background, state.ranked, state.starting)
        state.starting = []
        if state.lane is not None:
            builder.lane = state.lane
            builder.long_tokens = state.lane.step_tokens(
                state.rows.used, state.queue, budget, state.prefilling
            )
        if state.scores is not None:
            evict_by_price(state, builder)
        priority = self._prefill_priority() if state.ranked else None
        builder.steady = priority is None
        if state.quotas is not None and state.quotas.blocked:
            reclaim(state, builder, state.quotas)
        self._continue_decodes(builder, self._runnable_below(priority))
        continue_prefills(state, builder, lambda before: self._admit_waiting(builder, before))
        if not builder.preempted:
            self._admit_waiting(builder)
        if state.scores is not None:
            recompute_by_price(state, builder)
        if state.ranked and builder.steady:  # admitted requests may preempt others next
            builder.steady = self._prefill_priority() is None
        changes = builder.preempted or not builder.steady or horizon <= now
        return self._finish(builder, horizon, 1 if changes else state.config.max_repeat)

    @property
    def _decode_only(self) -> bool:
        state = self._state
        if state.prefilling or state.queue or state.ranked:
            return False
        return state.scores is None and state.offload is None

    def _plan_decodes(self, horizon: int, max_steps: int) -> tuple[Plan, Lookahead] | None:
        """Plan decodes in one pass; None if blocks are lacking."""
        state, rows, pool = self._state, self._state.rows, self._state.pool
        order = state.running
        size = len(order)
        entries = np.empty((PLAN_COLUMNS, size), dtype=np.int32)
        samples = np.empty(size, dtype=np.bool_)
        self._batch.decode(0)
        count, gone, repeat, needs = plan_decodes(
            order, rows.columns, rows.tables, state.config.block_size,
            state.config.max_batched_tokens, max_steps,
            pool.meta, pool.hashes, pool.counts, state.work, entries, samples,
        )  # fmt: skip
        if count == TOO_FEW:
            self._note_given(gone)
            return None
        if gone:
            state.note_removed(pool.take_removed(gone))
        if count < size:
            entries, samples = entries[:, :count], samples[:count]
        plan = Plan(
            entries[PLAN_ROWS], entries[PLAN_STARTS],
            entries[PLAN_COUNTS], entries[PLAN_KV_LENS],
            samples, repeat, horizon, state.starting,
        )  # fmt: skip
        state.starting = []
        return plan, Lookahead(state.work, needs)

    def _prefill_priority(self) -> int | None:
        """Return the lowest priority number of prompts under prefill; None for none."""
        state, rows = self._state, self._state.rows
        if not len(state.running):
            return None
        last = int(rows.priority[state.running].max())
        priorities = [seq.request.priority for seq in still_prefilling(state)]
        head = self._next_waiting()
        if head is not None:
            first = min(priorities, default=last)
            if head.request.priority < first and fits_with_growth(state, head):
                priorities.append(head.request.priority)
        highest = min(priorities, default=last)
        return highest if highest < last else None

    def _runnable_below(self, priority: int | None) -> int | None:
        """Return the priority number below which rows decode; None if all do."""
        if priority is None:
            return None
        self._paused = not self._paused
        return priority + (not self._paused)

    def _continue_decodes(self, builder: ScheduleBuilder, below: int | None) -> None:
        """Give each decoding row its block, preempting from the back of the queue."""
        state, rows, pool = self._state, self._state.rows, self._state.pool
        while True:
            runnable = state.running
            if below is not None:
                runnable = runnable[rows.priority[runnable] < below]
            count, gone = _start_decodes(
                runnable, rows.columns, rows.tables, state.config.block_size, builder.budget,
                pool.meta, pool.hashes, pool.counts, state.work,
            )  # fmt: skip
            if count != TOO_FEW:
                break
            self._note_given(gone)
            if state.scores is None or not evict_for_decodes(state, builder, gone):
                preempt_last(state, builder)
        if gone:
            state.note_removed(pool.take_removed(gone))
        builder.batch.decode(count)
        builder.decodes = count
        builder.budget -= count

    def _note_given(self, gone: int) -> None:
        """Note what was evicted for the first rows, where quotas left none for the others."""
        if self._state.quotas is not None and gone:
            self._state.note_removed(self._state.pool.take_removed(gone))

    def _admit_waiting(self, builder: ScheduleBuilder, before: int | None = None) -> None:
        """Admit from the head of the queue (priority below `before`) while there is room."""
        state = self._state
        lane, full = state.lane, -1
        while builder.budget > 0 and state.rows.free:
            head = self._next_waiting(full)
            if head is None:
                break
            if before is not None and head.request.priority >= before:
                break
            if builder.ranked and prefill_room(builder, head) == 0 and lane is None:
                break
            adapter = head.request.model
            if adapter and state.adapters is not None and not state.adapters.admits(adapter):
                state.queue.park(head)
                continue
            if self._lane_admits(builder, head) and admit(state, head, builder):
                continue
            if state.quotas is not None:  # another tenant may have blocks of its own
                state.quotas.block(state.queue, head)
                state.blocked = head
                continue
            if lane is None:
                state.blocked = head
                break
            if full >= 0:
                break
            full = lane.of(head)  # the other lane goes on

    def _next_waiting(self, skip: int = -1) -> Sequence | None:
        """Return the next waiting sequence, not of lane `skip`; None if it did not fit before."""
        state = self._state
        if state.quotas is not None:
            return state.quotas.next(state.queue, skip)
        head = state.queue.head(skip)
        return None if head is state.blocked else head

    def _lane_admits(self, builder: ScheduleBuilder, head: Sequence) -> bool:
        """True if a sequence's lane has a row and tokens for it."""
        state = self._state
        if state.lane is None:
            return True
        if prefill_room(builder, head) == 0:
            return False
        return state.lane.has_row(head, state.rows, state.config.block_size, state.queue)

    def _finish(
        self, builder: ScheduleBuilder, horizon: int, max_steps: int
    ) -> tuple[Plan, Lookahead]:
        """Build the plan, and extend it to at most `max_steps` equal steps."""
        state, rows, pool, size = self._state, self._state.rows, self._state.pool, self._batch.size
        # A long prompt's chunk changes as soon as it has company.
        chunks = state.config.repeat_chunks and builder.budget == 0 and builder.lane is None
        if chunks and size > builder.decodes:
            chunks = not builder.moves and not state.copying
        entries = np.empty((PLAN_COLUMNS, size), dtype=np.int32)
        samples = np.empty(size, dtype=np.bool_)
        spare = pool.blocks if state.offload is None else state.offload.deferred.spare
        repeat, needs = _finish_plan(
            builder.decodes, rows.columns, rows.tables, state.config.block_size, max_steps, chunks,
            spare, pool.meta, pool.counts, state.work, entries, samples,
        )  # fmt: skip
        plan = builder.build(entries, samples, repeat, horizon)
        if state.scores is not None:
            write_evictions(state, builder, plan, needs)
        return plan, Lookahead(state.work, needs)
