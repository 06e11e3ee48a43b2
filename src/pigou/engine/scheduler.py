"""What is computed next: decodes, then chunks of running prompts, then new sequences.

With the order `priority` a prompt overtakes what runs. While a prompt of a lower number is to be
computed, prompts and decodes of a higher one are paused, and keep their blocks; one that waits is
admitted before they go on. Decodes of the prompt's own number are paused every other step: a prompt
is mostly one step, which they would only make longer, and they lose half of their steps at most.
"""

from __future__ import annotations

import numpy as np

from pigou.engine import scheduler_kernels as kernels
from pigou.engine.admission import admit, fits_with_growth
from pigou.engine.chunked_prefill import continue_prefills, prefill_room, still_prefilling
from pigou.engine.plan import Plan
from pigou.engine.preemption import preempt_last
from pigou.engine.schedule_builder import EntryBuffer, Lookahead, ScheduleBuilder
from pigou.engine.scheduler_kernels import PLAN_COLUMNS
from pigou.engine.state import EngineState
from pigou.engine.token_eviction import (
    evict_by_price,
    evict_for_decodes,
    recompute_by_price,
    write_evictions,
)


class Scheduler:
    """Makes plans out of the engine's state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._batch = EntryBuffer(state.work)
        #: Whether decodes of the highest priority prompt's own number were paused in the last step.
        self._paused = False

    def schedule(self, now: int, horizon: int) -> tuple[Plan, Lookahead]:
        """Plan the next step, and as many after it as cannot differ from it."""
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
        if state.scores is not None:
            evict_by_price(state, builder)
        priority = self._prefill_priority() if state.ranked else None
        builder.steady = priority is None
        self._continue_decodes(builder, self._runnable_below(priority))
        continue_prefills(state, builder, lambda before: self._admit_waiting(builder, before))
        if not builder.preempted:
            self._admit_waiting(builder)
        if state.scores is not None:
            recompute_by_price(state, builder)
        if state.ranked and builder.steady:  # who was let in now may have others yield next
            builder.steady = self._prefill_priority() is None
        changes = builder.preempted or not builder.steady or horizon <= now
        return self._finish(builder, horizon, 1 if changes else state.config.max_repeat)

    @property
    def _decode_only(self) -> bool:
        """Whether all there is to do is to go on with the rows that decode."""
        state = self._state
        if state.prefilling or state.queue or state.ranked:
            return False
        return state.scores is None and state.offload is None

    def _plan_decodes(self, horizon: int, max_steps: int) -> tuple[Plan, Lookahead] | None:
        """Plan for rows that all decode, in one pass; None where they lack blocks."""
        state, rows, pool = self._state, self._state.rows, self._state.pool
        order = state.running
        size = len(order)
        entries = np.empty((PLAN_COLUMNS, size), dtype=np.int32)
        samples = np.empty(size, dtype=np.bool_)
        self._batch.decode(0)
        count, gone, repeat, needs = kernels.plan_decodes(
            order, rows.columns, rows.tables, state.config.block_size,
            state.config.max_batched_tokens, max_steps,
            pool.arrays, state.work, entries, samples,
        )  # fmt: skip
        if count == kernels.TOO_FEW:
            return None
        if gone:
            state.note_removed(pool.removed[:gone].copy())
        if count < size:
            entries, samples = entries[:, :count], samples[:count]
        plan = Plan(
            entries[kernels.PLAN_ROWS], entries[kernels.PLAN_STARTS],
            entries[kernels.PLAN_COUNTS], entries[kernels.PLAN_KV_LENS],
            samples, repeat, horizon, state.starting,
        )  # fmt: skip
        state.starting = []
        return plan, Lookahead(state.work, needs)

    def _prefill_priority(self) -> int | None:
        """Return the priority of a prompt that others yield to; None where nobody has to.

        It is the lowest among the prompts that run, and the head of the queue if it fits.
        """
        state, rows = self._state, self._state.rows
        if not len(state.running):
            return None
        last = int(rows.priority[state.running].max())
        priorities = [seq.request.priority for seq in still_prefilling(state)]
        head = state.queue.head()
        if head is not None and head is not state.blocked:
            first = min(priorities, default=last)
            if head.request.priority < first and fits_with_growth(state, head):
                priorities.append(head.request.priority)
        highest = min(priorities, default=last)
        return highest if highest < last else None

    def _runnable_below(self, priority: int | None) -> int | None:
        """Return the number that a row's priority is below to decode; None where all decode."""
        if priority is None:
            return None
        self._paused = not self._paused
        return priority + (not self._paused)

    def _continue_decodes(self, builder: ScheduleBuilder, below: int | None) -> None:
        """Give each decoding row the block it needs, preempting from the back of the queue."""
        state, rows, pool = self._state, self._state.rows, self._state.pool
        while True:
            runnable = state.running
            if below is not None:
                runnable = runnable[rows.priority[runnable] < below]
            count, gone = kernels.start_decodes(
                runnable, rows.columns, rows.tables, state.config.block_size, builder.budget,
                pool.arrays, state.work,
            )  # fmt: skip
            if count != kernels.TOO_FEW:
                break
            if state.scores is None or not evict_for_decodes(state, builder, gone):
                preempt_last(state, builder)
        if gone:
            state.note_removed(pool.removed[:gone].copy())
        builder.batch.decode(count)
        builder.decodes = count
        builder.budget -= count

    def _admit_waiting(self, builder: ScheduleBuilder, before: int | None = None) -> None:
        """Admit from the head of the queue while there are rows, blocks and budget.

        Only those of a priority below `before`, where that is given.
        """
        state = self._state
        while builder.budget > 0:
            head = state.queue.head()
            if head is None or head is state.blocked or not state.rows.free:
                break
            if before is not None and head.request.priority >= before:
                break
            if builder.ranked and prefill_room(builder, head) == 0:
                break
            if not admit(state, head, builder):
                state.blocked = head
                break

    def _finish(
        self, builder: ScheduleBuilder, horizon: int, max_steps: int
    ) -> tuple[Plan, Lookahead]:
        """Make the plan, and extend it until something must change, to at most `max_steps`.

        It goes on while all entries decode, or while one more computes equal chunks of its prompt,
        which has all its blocks. Nothing can be admitted in between: a waiting sequence lacks a
        row, the budget or blocks, which only changes when a sequence ends. The plan also ends
        before a chain is due to be offered to the tiers.
        """
        state, rows, pool, size = self._state, self._state.rows, self._state.pool, self._batch.size
        chunks = state.config.repeat_chunks and builder.budget == 0
        if chunks and size > builder.decodes:
            chunks = not builder.moves and not state.copying
        entries = np.empty((PLAN_COLUMNS, size), dtype=np.int32)
        samples = np.empty(size, dtype=np.bool_)
        spare = pool.blocks if state.offload is None else state.offload.spare
        repeat, needs = kernels.finish_plan(
            builder.decodes, rows.columns, rows.tables, state.config.block_size, max_steps, chunks,
            spare, pool.arrays, state.work, entries, samples,
        )  # fmt: skip
        plan = builder.build(entries, samples, repeat, horizon)
        if state.scores is not None:
            write_evictions(state, builder, plan, needs)
        return plan, Lookahead(state.work, needs)
