"""What follows from a computed plan: lengths, cached blocks, ends."""

from __future__ import annotations

import numpy as np

from pigou.engine import kernels
from pigou.engine.draft import Foresight
from pigou.engine.plan import Effects, Finish, Finished, Plan, Result
from pigou.engine.sequence import NO_BLOCKS, Sequence
from pigou.engine.state import EngineState
from pigou.request import FinishReason, Ints


class Settlement:
    """Applies results to the engine's state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        seqs = state.config.max_seqs
        self._ended: Ints = np.zeros(seqs, dtype=np.int32)
        self._fuller: Ints = np.zeros(seqs, dtype=np.int32)

    def settle(self, plan: Plan, ahead: Foresight, result: Result) -> Effects:
        """Take a plan's steps as done, in the order in which single steps would have been."""
        state, rows = self._state, self._state.rows
        for seq in state.copying[:]:
            state.free_source(seq)
        steps = np.full(len(plan.rows), result.steps, dtype=np.int32)
        early = {finish.entry: finish for finish in result.finished}
        for finish in result.finished:
            steps[finish.entry] = min(finish.steps, result.steps)
        tokens = np.empty(len(plan.rows), dtype=np.int32)
        ends, fuller = kernels.advance(
            plan.rows, plan.counts, plan.samples, steps,
            rows.computed, rows.length, rows.limit, rows.known, rows.sealed,
            state.config.block_size, tokens, self._ended, self._fuller,
        )  # fmt: skip
        entries = set(self._fuller[:fuller].tolist())
        if result.sealed and state.config.prefix_caching:
            entries |= self._learn(plan, result)
        self._claim_and_seal(plan, ahead, result.steps, steps, sorted(entries))
        ended = sorted(early.keys() | set(self._ended[:ends].tolist()))
        finished = self._finish(plan, ended, early)
        return state.flush(Effects(tokens=tokens, finished=finished))

    def _learn(self, plan: Plan, result: Result) -> set[int]:
        """Note hashes of generated blocks; returns the entries that have blocks to seal."""
        rows = self._state.rows
        entries = set()
        for entry, row in enumerate(plan.rows.tolist()):
            seq = rows.owner[row]
            if seq is None or row not in result.sealed:
                continue
            full = int(rows.computed[row]) // self._state.config.block_size
            seq.learn(result.sealed[row], full)
            rows.known[row] = len(seq.hashes)
            if min(len(seq.hashes), full) > rows.sealed[row]:
                entries.add(entry)
        return entries

    def _claim_and_seal(
        self, plan: Plan, ahead: Foresight, done: int, steps: Ints, entries: list[int]
    ) -> None:
        """Take the blocks that later steps wrote to, and cache those that became full."""
        claimed = 0
        for step, entry, stop in self._seals(plan, entries):
            claimed = self._claim(plan, ahead, claimed, step, steps)
            seq = self._state.rows.owner[plan.rows[entry]]
            assert seq is not None
            self._state.seal(seq, stop)
        self._claim(plan, ahead, claimed, done - 1, steps)

    def _seals(self, plan: Plan, entries: list[int]) -> list[tuple[int, int, int]]:
        """List (step, entry, end of the range) of what is to be sealed, in order."""
        rows, size = self._state.rows, self._state.config.block_size
        found = []
        for entry in entries:
            row = plan.rows[entry]
            stop = min(int(rows.known[row]), int(rows.computed[row]) // size)
            if plan.repeat == 1:
                found.append((0, entry, stop))
                continue
            start = int(plan.starts[entry])
            for block in range(int(rows.sealed[row]), stop):
                found.append((max((block + 1) * size - start - 1, 0), entry, block + 1))
        return sorted(found) if plan.repeat > 1 else found

    def _claim(self, plan: Plan, ahead: Foresight, start: int, step: int, steps: Ints) -> int:
        """Take the foreseen blocks from index `start` on that were written to up to `step`.

        A block that was written to for a sequence that had ended by then, or was aborted, is
        freed again; it must lose its hash all the same.
        """
        if start == len(ahead.blocks):
            return start
        state, rows = self._state, self._state.rows
        stop = int(np.searchsorted(ahead.steps, step, side="right"))
        if stop == start:
            return start
        blocks, takers = ahead.blocks[start:stop], ahead.rows[start:stop]
        state.removed(state.pool.claim(blocks))
        allowed = np.zeros(len(rows.owner), dtype=np.int32)
        allowed[plan.rows] = np.where(rows.length[plan.rows] > 0, steps, 0)
        wanted = ahead.steps[start:stop] < allowed[takers]
        kernels.append_blocks(rows.tables, rows.blocks, takers[wanted], blocks[wanted])
        if not wanted.all():
            state.free_blocks(blocks[~wanted])
        return stop

    def _finish(self, plan: Plan, ended: list[int], early: dict[int, Finish]) -> list[Finished]:
        finished = []
        for entry in ended:
            seq = self._state.rows.owner[plan.rows[entry]]
            if seq is not None:
                reason = early[entry].reason if entry in early else FinishReason.LENGTH
                finished.append(self._leave(seq, reason))
        return finished

    def _leave(self, seq: Sequence, reason: FinishReason) -> Finished:
        """Let a sequence go, and hold its prompt's full blocks if it asked for that."""
        state, request = self._state, seq.request
        keep = 0
        held = NO_BLOCKS
        if request.hold and reason in (FinishReason.STOP, FinishReason.LENGTH):
            keep = request.prompt // state.config.block_size
        if keep:
            kept = state.held[request.id] = state.keep_row(seq, keep)
            held = kept.blocks
        state.free_row(seq, keep)
        state.stop(seq)
        del state.sequences[request.id]
        return state.finished(seq, reason, held)
