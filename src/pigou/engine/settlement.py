"""What follows from a computed plan: lengths, cached blocks, ends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pigou.engine import kernels, step_kernels
from pigou.engine.draft import Foresight
from pigou.engine.eviction import settle as settle_appraisals
from pigou.engine.plan import Effects, Finished, Plan, Result
from pigou.engine.sequence import NO_BLOCKS, Sequence
from pigou.engine.state import EngineState
from pigou.request import FinishReason, Ints


class Settlement:
    """Applies results to the engine's state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        seqs, blocks = state.config.max_seqs, state.config.blocks
        self._found: Ints = np.zeros((3, seqs), dtype=np.int32)
        self._taken, self._ended, self._fuller = self._found
        self._orphans: Ints = np.zeros(blocks, dtype=np.int32)
        self._marks = np.empty((state.rows.tables.shape[1], 3), dtype=np.int64)

    def settle(self, plan: Plan, ahead: Foresight, result: Result) -> Effects:
        """Take a plan's steps as done, in the order in which single steps would have been."""
        state, rows, pool = self._state, self._state.rows, self._state.pool
        if state.copying:
            for seq in state.copying[:]:
                state.free_source(seq)
        steps = NO_BLOCKS
        if result.finished:
            steps = np.full(len(plan.rows), result.steps, dtype=np.int32)
            for finish in result.finished:
                steps[finish.entry] = finish.steps
        tokens = np.empty(len(plan.rows), dtype=np.int32)
        later = bool(result.sealed)
        ends, full, dead, orphans = step_kernels.settle(
            plan.rows, plan.counts, plan.samples, steps, result.steps,
            rows.columns, rows.tables, state.config.block_size,
            pool.meta, pool.keys, pool.counts,
            ahead.needs, ahead.count, later,
            tokens, self._found, pool.removed, self._orphans,
        )  # fmt: skip
        if full or later:
            fuller = self._fuller[:full].tolist()
            if later and state.config.prefix_caching:
                fuller = sorted({*fuller, *self._learn(plan, result)})
            if len(fuller) == 1:
                self._seal(plan, ahead, result.steps, fuller[0])
            else:
                self._claim_and_seal(plan, ahead, result.steps, fuller)
        elif dead or orphans:
            self._claimed(dead, orphans)
        finished: list[Finished] = []
        if ends or result.finished:
            reasons = dict.fromkeys(self._ended[:ends].tolist(), FinishReason.LENGTH)
            if result.finished:
                reasons.update({finish.entry: finish.reason for finish in result.finished})
            finished = [self._leave(seq, reason) for seq, reason in self._owners(plan, reasons)]
        if state.appraisals is not None:
            settle_appraisals(state, result)
        return state.flush(Effects(tokens=tokens, finished=finished))

    def _owners(
        self, plan: Plan, reasons: dict[int, FinishReason]
    ) -> Iterator[tuple[Sequence, FinishReason]]:
        """Yield the sequences of entries, in their order, without those that were aborted."""
        for entry in sorted(reasons):
            seq = self._state.rows.owner[plan.rows[entry]]
            if seq is not None:
                yield seq, reasons[entry]

    def _learn(self, plan: Plan, result: Result) -> set[int]:
        """Note hashes of generated blocks; returns the entries that have blocks to seal."""
        rows = self._state.rows
        entries = set()
        for entry, row in enumerate(plan.rows.tolist()):
            seq = rows.owner[row]
            if seq is None or row not in result.sealed:
                continue
            full = rows.computed.item(row) // self._state.config.block_size
            seq.learn(result.sealed[row], full)
            if rows.compacted[row]:
                continue  # for when it is computed again, whole
            rows.known[row] = len(seq.hashes)
            if min(len(seq.hashes), full) > rows.sealed[row]:
                entries.add(entry)
        return entries

    def _seal(self, plan: Plan, ahead: Foresight, done: int, entry: int) -> None:
        """As `_claim_and_seal` where one entry has blocks to cache: mostly a prompt in chunks."""
        state, rows, pool = self._state, self._state.rows, self._state.pool
        row = plan.rows.item(entry)
        seq = rows.owner[row]
        assert seq is not None
        times, dead, freed, twins = step_kernels.seal(
            row, plan.starts.item(entry), plan.counts.item(entry), done,
            rows.columns, rows.tables, state.config.block_size,
            pool.meta, pool.keys, pool.slots, pool.counts,
            ahead.needs, ahead.count, self._taken,
            seq.hashes, pool.removed, self._orphans, self._marks,
        )  # fmt: skip
        seq.twins |= twins
        gone, told = pool.removed[:dead].copy() if dead else pool.removed[:0], 0
        for first, count, upto in self._marks[:times].tolist():
            state.removed(gone[told:upto])
            state.stored(seq, first, count)
            told = upto
        state.removed(gone[told:])
        state.freed(freed)

    def _claim_and_seal(self, plan: Plan, ahead: Foresight, done: int, entries: list[int]) -> None:
        """Take the blocks that later steps wrote to, and cache those that became full."""
        claimed = 0
        for step, entry, stop in self._seals(plan, ahead, entries) if entries else ():
            claimed = self._claim(ahead, claimed, step)
            seq = self._state.rows.owner[plan.rows[entry]]
            assert seq is not None
            self._state.seal(seq, stop)
        self._claim(ahead, claimed, done - 1)

    def _seals(
        self, plan: Plan, ahead: Foresight, entries: list[int]
    ) -> list[tuple[int, int, int]]:
        """List (step, entry, end of the range) of what is to be sealed, in order."""
        rows, size = self._state.rows, self._state.config.block_size
        ends: dict[tuple[int, int], int] = {}
        for entry in entries:
            row = plan.rows[entry]
            stop = min(rows.known.item(row), rows.computed.item(row) // size)
            if plan.repeat == 1:
                ends[0, entry] = stop
                continue
            start, count = plan.starts.item(entry), plan.counts.item(entry)
            if count > 1 and len(entries) == 1 and not ahead.count:
                ends[0, entry] = stop  # nothing happens in between
                continue
            block = rows.sealed.item(row)
            while block < stop:
                full_at = max(-(-((block + 1) * size - start) // count) - 1, 0)
                block = max(block + 1, min(stop, (start + (full_at + 1) * count) // size))
                ends[full_at, entry] = block
        return [(step, entry, stop) for (step, entry), stop in sorted(ends.items())]

    def _claim(self, ahead: Foresight, start: int, step: int) -> int:
        """Take the foreseen blocks from index `start` on that were written to up to `step`.

        A block that was written to for a sequence that had ended by then, or was aborted, is
        freed again; it must lose its hash all the same.

        Returns:
            Where the next call starts.
        """
        if start == ahead.count:
            return start
        state, rows = self._state, self._state.rows
        stop = int(ahead.steps.searchsorted(step, side="right"))
        blocks = ahead.blocks[start:stop]
        state.removed(state.pool.claim(blocks))
        orphans = kernels.append_wanted(
            rows.tables, rows.blocks, ahead.rows[start:stop], ahead.steps[start:stop],
            blocks, self._taken, self._orphans,
        )  # fmt: skip
        self._claimed(0, orphans)
        return stop

    def _claimed(self, dead: int, orphans: int) -> None:
        """Note hashes that died with the blocks that were taken; free those that nobody needs."""
        state = self._state
        if dead:
            state.removed(state.pool.removed[:dead].copy())
        if orphans:
            state.free_blocks(self._orphans[:orphans])

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
        if state.tiering is not None and reason is not FinishReason.ABORT:
            state.tiering.away(seq, state.rows.sealed.item(seq.row))
        state.free_row(seq, keep)
        state.stop(seq)
        del state.sequences[request.id]
        return state.finished(seq, reason, held)
