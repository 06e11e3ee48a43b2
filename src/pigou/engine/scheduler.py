"""What is computed next: decodes, then chunks of running prefills, then admissions.

With the order `priority` a prompt overtakes what runs: while a prompt of a lower number is to be
computed, those of a higher one rest, prompts and decodes, and keep their blocks; and one that
waits is admitted before they go on. Decodes of its own number rest every other step: a prompt is
mostly one step, which they would only make longer, and they are never held up by more than half.
"""

from __future__ import annotations

import numpy as np

from pigou.engine import step_kernels as kernels
from pigou.engine.admission import admit, fits_beside
from pigou.engine.draft import Batch, Draft, Foresight, pairs
from pigou.engine.eviction import begin, conclude, grow, revive
from pigou.engine.plan import Plan
from pigou.engine.preemption import cheaper
from pigou.engine.sequence import Sequence
from pigou.engine.state import EngineState
from pigou.request import Ints


class Scheduler:
    """Makes plans out of the engine's state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        seqs, blocks = state.config.max_seqs, state.config.blocks
        self._batch = Batch(seqs)
        self._rested = False  # decodes of the leading prompt's own priority, in the last step
        self._growing: Ints = np.zeros((2, seqs), dtype=np.int32)
        self._needs: Ints = np.zeros((3, blocks), dtype=np.int32)
        self._phases: Ints = np.zeros((2, state.config.block_size + 1), dtype=np.int32)
        self._by_phase: Ints = np.zeros(seqs, dtype=np.int32)

    def schedule(self, now: int, horizon: int) -> tuple[Plan, Foresight]:
        """Plan the next step, and as many after it as cannot differ from it."""
        state = self._state
        if state.prefilling:
            state.prefilling = [seq for seq in state.prefilling if self._left(seq.row) > 1]
        if self._plain:
            found = self._decode(horizon, 1 if horizon <= now else state.config.max_repeat)
            if found is not None:
                return found
        budget = state.config.max_batched_tokens
        background = state.config.max_background_tokens or budget
        draft = Draft(self._batch, budget, background, state.ranked, state.starting)
        state.starting = []
        if state.appraisals is not None:
            begin(state, draft)
        leading = self._leading() if state.ranked else None
        draft.steady = leading is None
        self._continue_decodes(draft, self._awake(leading))
        self._continue_prefills(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        if state.appraisals is not None:
            revive(state, draft)
        if state.ranked and draft.steady:  # whoever was let in now may have others yield next
            draft.steady = self._leading() is None
        changes = draft.preempted or not draft.steady or horizon <= now
        return self._finish(draft, horizon, 1 if changes else state.config.max_repeat)

    @property
    def _plain(self) -> bool:
        """Whether all there is to do is to go on with the rows that decode."""
        state = self._state
        if state.prefilling or state.queue or state.ranked:
            return False
        return state.appraisals is None and state.tiering is None

    def _decode(self, horizon: int, most: int) -> tuple[Plan, Foresight] | None:
        """Plan for rows that all decode, in one pass; None where they lack blocks."""
        state, rows, pool = self._state, self._state.rows, self._state.pool
        order = state.running
        size = len(order)
        entries, samples = np.empty((4, size), dtype=np.int32), np.empty(size, dtype=np.bool_)
        self._batch.decode(0)
        count, dead, repeat, needs = kernels.decode(
            order, rows.columns, rows.tables, state.config.block_size,
            state.config.max_batched_tokens, most,
            pool.meta, pool.keys, pool.counts,
            self._batch.entries, self._growing, pool.removed, entries, samples,
            self._needs, self._phases, self._by_phase,
        )  # fmt: skip
        if count == kernels.TOO_FEW:
            return None
        if dead:
            state.removed(pool.removed[:dead].copy())
        if count < size:
            entries, samples = entries[:, :count], samples[:count]
        plan = Plan(
            entries[0], entries[1], entries[2], entries[3], samples, repeat, horizon, state.starting
        )  # fmt: skip
        state.starting = []
        return plan, Foresight(self._needs, needs)

    def _leading(self) -> int | None:
        """Return the priority of a prompt that others yield to; None where nobody has to.

        It is the lowest among the prompts that run, and the head of the queue if it fits.
        """
        state, rows = self._state, self._state.rows
        if not len(state.running):
            return None
        last = int(rows.priority[state.running].max())
        found = [seq.request.priority for seq in state.prefilling if self._left(seq.row) > 1]
        head = state.queue.head()
        if head is not None and head is not state.blocked:
            first = min(found, default=last)
            if head.request.priority < first and fits_beside(state, head):
                found.append(head.request.priority)
        leading = min(found, default=last)
        return leading if leading < last else None

    def _awake(self, leading: int | None) -> int | None:
        """Return the priority that rows must be below to decode; None where all do."""
        if leading is None:
            return None
        self._rested = not self._rested
        return leading + (not self._rested)

    def _left(self, row: int) -> int:
        """Return the tokens of a row that are still to be computed."""
        rows = self._state.rows
        return rows.length.item(row) - rows.computed.item(row)

    def _continue_decodes(self, draft: Draft, below: int | None) -> None:
        """Give each decoding row the block it needs, preempting from the back of the queue."""
        state, rows, pool = self._state, self._state.rows, self._state.pool
        while True:
            awake = state.running
            if below is not None:
                awake = awake[rows.priority[awake] < below]
            count, dead = kernels.begin(
                awake, rows.columns, rows.tables, state.config.block_size, draft.budget,
                pool.meta, pool.keys, pool.counts,
                draft.batch.entries, self._growing, pool.removed,
            )  # fmt: skip
            if count != kernels.TOO_FEW:
                break
            if state.appraisals is None or not grow(state, draft, dead):
                self._preempt(self._last(), draft)
        if dead:
            state.removed(pool.removed[:dead].copy())
        draft.batch.decode(count)
        draft.decodes = count
        draft.budget -= count

    def _continue_prefills(self, draft: Draft) -> None:
        """Compute the next chunks of prompts, in the order of the queue.

        Who waits with a lower priority is admitted between them.
        """
        state = self._state
        if not state.prefilling:
            return
        left = {seq: self._left(seq.row) for seq in state.prefilling}
        state.prefilling = sorted((s for s in left if left[s] > 1), key=lambda s: s.key)
        for seq in state.prefilling[:]:
            if state.ranked and not draft.preempted:
                self._admit_waiting(draft, seq.request.priority)
            if draft.budget == 0 or (draft.ranked and draft.room(seq) == 0):
                break
            draft.compute(seq, left[seq])

    def _admit_waiting(self, draft: Draft, before: int | None = None) -> None:
        """Admit from the head of the queue while there are rows, blocks and budget.

        Only those of a priority below `before`, where that is given.
        """
        state = self._state
        while draft.budget > 0:
            head = state.queue.head()
            if head is None or head is state.blocked or not state.rows.free:
                break
            if before is not None and head.request.priority >= before:
                break
            if draft.ranked and draft.room(head) == 0:
                break
            if not admit(state, head, draft):
                state.blocked = head
                break

    def _last(self) -> Sequence:
        """Return the running sequence that is last in the order of the queue."""
        owners = (self._state.rows.owner[row] for row in self._state.running.tolist())
        last: Sequence = max((seq for seq in owners if seq is not None), key=lambda seq: seq.key)
        return last

    def _preempt(self, seq: Sequence, draft: Draft) -> None:
        """Take a sequence's row; keep its KV on the host if that is cheaper."""
        state = self._state
        row = seq.row
        computed, dropped = int(state.rows.computed[row]), int(state.rows.dropped[row])
        used = -(-(computed - dropped) // state.config.block_size)
        seq.dropped = 0
        if self._swaps(seq, computed, used):
            seq.host = state.host.allocate(used)
            seq.computed, seq.dropped = computed, dropped
            draft.swap_out.append(pairs(state.rows.tables[row, :used], seq.host))
            state.counters.swaps += 1
        else:
            draft.given.pop(row, None)
        state.free_row(seq)
        state.stop(seq)
        seq.wait()
        state.queue.push(seq)
        state.counters.preemptions += 1
        draft.preempted.append(seq.request.id)

    def _swaps(self, seq: Sequence, computed: int, used: int) -> bool:
        """Whether a sequence is better swapped; what others keep in the cache will be hit.

        One that gave up entries is, wherever it can be: computed again, it would have them all, and
        need the memory that was not there.
        """
        state = self._state
        if state.rows.dropped[seq.row]:
            return 0 < used <= state.host.free
        if state.rates is None or not 0 < used <= state.host.free:
            return False
        size = state.config.block_size
        sealed = min(int(state.rows.sealed[seq.row]), computed // size)
        shared = state.prefix.match(seq.hashes, sealed).blocks
        alone = np.flatnonzero(state.pool.refs(shared) < 2)
        hits = int(alone[0]) if len(alone) else len(shared)
        return cheaper(computed, used, state.rates, hits * size, hits) == "swap"

    def _finish(self, draft: Draft, horizon: int, most: int) -> tuple[Plan, Foresight]:
        """Make the plan, and extend it over the steps until something must change, at most so many.

        It goes on while all entries decode, or while one more computes equal chunks of its prompt,
        which has all its blocks. Nobody can be admitted in between: whoever waits lacks a row, the
        budget is spent, or too few blocks are free, and all that only changes when a sequence ends.
        Before a chain is due to be offered to the tiers, the plan ends too.
        """
        state, rows, pool, batch = self._state, self._state.rows, self._state.pool, draft.batch
        size = batch.size
        chunks = state.config.repeat_chunks and draft.budget == 0
        if chunks and size > draft.decodes:
            chunks = not draft.moves and not state.copying
        entries, samples = np.empty((4, size), dtype=np.int32), np.empty(size, dtype=np.bool_)
        spare = pool.blocks if state.tiering is None else state.tiering.spare
        repeat, needs = kernels.finish(
            batch.entries, draft.decodes, rows.columns, rows.tables, state.config.block_size,
            most, chunks, spare, pool.meta, pool.counts, entries, samples,
            self._needs, self._phases, self._by_phase,
        )  # fmt: skip
        plan = draft.plan(entries, samples, repeat, horizon)
        if state.appraisals is not None:
            conclude(state, draft, plan, needs)
        return plan, Foresight(self._needs, needs)
