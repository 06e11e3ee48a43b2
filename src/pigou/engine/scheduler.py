"""What is computed next: decodes, then chunks of running prefills, then admissions."""

from __future__ import annotations

import numpy as np

from pigou.engine import kernels
from pigou.engine.admission import admit
from pigou.engine.draft import NO_FORESIGHT, Batch, Draft, Foresight, pairs
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
        self._growing: Ints = np.zeros(seqs, dtype=np.int32)
        self._need_rows: Ints = np.zeros(blocks, dtype=np.int32)
        self._need_steps: Ints = np.zeros(blocks, dtype=np.int32)

    def schedule(self, now: int, horizon: int) -> tuple[Plan, Foresight]:
        """Plan the next step, and as many after it as cannot differ from it."""
        state = self._state
        draft = Draft(self._batch, state.config.max_batched_tokens, state.starting)
        state.starting = []
        self._continue_decodes(draft)
        self._continue_prefills(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        plan, decode = draft.plan(state.rows, horizon)
        if decode and not draft.preempted and horizon > now and state.config.max_repeat > 1:
            return plan, self._look_ahead(plan)
        return plan, NO_FORESIGHT

    def _continue_decodes(self, draft: Draft) -> None:
        """Give each decoding row the block it needs, preempting from the back of the queue."""
        state, rows = self._state, self._state.rows
        while True:
            count, grow = kernels.decodes(
                state.running, rows.computed, rows.length, rows.blocks,
                state.config.block_size, draft.budget, draft.batch.rows, self._growing,
            )  # fmt: skip
            if grow <= state.pool.free:
                break
            self._preempt(self._last(), draft)
        if grow:
            new = np.empty(grow, dtype=np.int32)
            state.removed(state.pool.allocate(new))
            kernels.append_blocks(rows.tables, rows.blocks, self._growing[:grow], new)
        draft.batch.decode(count)
        draft.budget -= count

    def _continue_prefills(self, draft: Draft) -> None:
        """Compute the next chunks of prompts, in the order of the queue."""
        state, rows = self._state, self._state.rows
        if not state.prefilling:
            return
        left = {seq: int(rows.length[seq.row] - rows.computed[seq.row]) for seq in state.prefilling}
        state.prefilling = sorted((s for s in left if left[s] > 1), key=lambda s: s.key)
        for seq in state.prefilling:
            if draft.budget == 0:
                break
            draft.compute(seq.row, left[seq])

    def _admit_waiting(self, draft: Draft) -> None:
        """Admit from the head of the queue while there are rows, blocks and budget."""
        state = self._state
        while draft.budget > 0 and state.rows.free:
            head = state.queue.head()
            if head is None or head is state.blocked:
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
        computed = int(state.rows.computed[row])
        used = -(-computed // state.config.block_size)
        if self._swaps(seq, computed, used):
            seq.host = state.host.allocate(used)
            seq.computed = computed
            draft.swap_out.append(pairs(state.rows.tables[row, :used], seq.host))
            state.counters.swaps += 1
        state.free_row(seq)
        state.stop(seq)
        seq.wait()
        state.queue.push(seq)
        state.counters.preemptions += 1
        draft.preempted.append(seq.request.id)

    def _swaps(self, seq: Sequence, computed: int, used: int) -> bool:
        """Whether a sequence is better swapped; what others keep in the cache will be hit."""
        state = self._state
        if state.rates is None or not 0 < used <= state.host.free:
            return False
        size = state.config.block_size
        sealed = min(int(state.rows.sealed[seq.row]), computed // size)
        shared = state.prefix.match(seq.hashes, sealed).blocks
        alone = np.flatnonzero(state.pool.refs(shared) < 2)
        hits = int(alone[0]) if len(alone) else len(shared)
        return cheaper(computed, used, state.rates, hits * size, hits) == "swap"

    def _look_ahead(self, plan: Plan) -> Foresight:
        """Extend a plan in which everyone decodes over the steps until something must change.

        Nobody can be admitted in between: whoever waits lacks a row, the budget is spent on
        decodes, or too few blocks are free, and all that only changes when a sequence ends.
        """
        state, rows = self._state, self._state.rows
        steps, needs = kernels.foresee(
            plan.rows, rows.computed, rows.length, rows.limit, rows.blocks,
            state.config.block_size, state.config.max_repeat, state.pool.free,
            self._need_rows, self._need_steps,
        )  # fmt: skip
        plan.repeat = steps
        if not needs:
            return NO_FORESIGHT
        ahead = Foresight(
            self._need_rows[:needs].copy(), self._need_steps[:needs].copy(), state.pool.peek(needs)
        )
        kernels.append_blocks(rows.tables, rows.blocks.copy(), ahead.rows, ahead.blocks)
        return ahead
