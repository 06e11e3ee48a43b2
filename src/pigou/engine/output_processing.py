"""Output processing: lengths, cached blocks and ends after a plan's steps; tokens taken back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pigou.engine import output_processing_kernels as kernels
from pigou.engine.block_table import append_wanted
from pigou.engine.eviction_scores import take_scores
from pigou.engine.plan import Effects, Finished, Plan, Result
from pigou.engine.schedule_builder import Lookahead
from pigou.engine.scheduler_kernels import (
    ENDED,
    FULL,
    MARK_FIRST,
    MARK_REMOVED,
    ORPHAN,
    STEPS_DONE,
    TOKENS,
)
from pigou.engine.sequence import NO_BLOCKS, Sequence, SequenceState
from pigou.engine.state import EngineState
from pigou.request import FinishReason


class OutputProcessor:
    """Applies results to the engine's state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def process(self, plan: Plan, ahead: Lookahead, result: Result) -> Effects:
        """Take a plan's steps as done, in the order in which single steps would have been."""
        state, rows, work = self._state, self._state.rows, self._state.work
        if state.copying:
            for seq in state.copying[:]:
                state.free_copy_source(seq)
        steps = NO_BLOCKS
        if result.finished:
            steps = np.full(len(plan.rows), result.steps, dtype=np.int32)
            for finish in result.finished:
                steps[finish.entry] = finish.steps
        has_new_hashes = bool(result.full_block_hashes)
        ended_count, full, gone, orphans = kernels.process_steps(
            plan.rows, plan.counts, plan.samples, steps, result.steps,
            rows.columns, rows.tables, state.config.block_size, state.pool.arrays,
            0 if has_new_hashes else ahead.count, work,
        )  # fmt: skip
        tokens = work[TOKENS, : len(plan.rows)].copy()
        if full or has_new_hashes:
            entries = work[FULL, :full].tolist()
            if has_new_hashes and state.config.prefix_caching:
                entries = sorted({*entries, *self._add_hashes(plan, result)})
            if len(entries) == 1:
                self._cache_one(plan, ahead, result.steps, entries[0])
            else:
                self._cache_in_order(plan, ahead, result.steps, entries)
        elif gone or orphans:
            self._claimed(gone, orphans)
        finished: list[Finished] = []
        if ended_count or result.finished:
            ended = work[ENDED, :ended_count].tolist()
            reasons = dict.fromkeys(ended, FinishReason.LENGTH)
            if result.finished:
                reasons.update({finish.entry: finish.reason for finish in result.finished})
            finished = [self._leave(seq, reason) for seq, reason in self._owners(plan, reasons)]
        if state.scores is not None:
            take_scores(state, result)
        return state.flush(Effects(tokens=tokens, finished=finished))

    def _owners(
        self, plan: Plan, reasons: dict[int, FinishReason]
    ) -> Iterator[tuple[Sequence, FinishReason]]:
        """Yield the sequences of entries, in their order, without those that were aborted."""
        for entry in sorted(reasons):
            seq = self._state.rows.owner[plan.rows[entry]]
            if seq is not None:
                yield seq, reasons[entry]

    def _add_hashes(self, plan: Plan, result: Result) -> set[int]:
        """Note hashes of generated blocks; return the entries that have blocks to cache."""
        rows = self._state.rows
        entries = set()
        for entry, row in enumerate(plan.rows.tolist()):
            seq = rows.owner[row]
            if seq is None or row not in result.full_block_hashes:
                continue
            full = rows.computed.item(row) // self._state.config.block_size
            seq.add_hashes(result.full_block_hashes[row], full)
            if rows.compacted[row]:
                continue  # for when it is computed again, whole
            rows.known[row] = len(seq.hashes)
            if min(len(seq.hashes), full) > rows.cached[row]:
                entries.add(entry)
        return entries

    def _cache_one(self, plan: Plan, ahead: Lookahead, done: int, entry: int) -> None:
        """As `_cache_in_order` where one entry has blocks to cache: mostly a prompt in chunks."""
        state, rows, pool, work = self._state, self._state.rows, self._state.pool, self._state.work
        row = plan.rows.item(entry)
        seq = rows.owner[row]
        assert seq is not None
        times, gone, freed, duplicates = kernels.cache_row(
            row, plan.starts.item(entry), plan.counts.item(entry), done,
            rows.columns, rows.tables, state.config.block_size, pool.arrays,
            ahead.count, seq.hashes, work,
        )  # fmt: skip
        seq.duplicates |= duplicates
        removed, noted = pool.removed[:gone].copy() if gone else pool.removed[:0], 0
        for first, count, upto in work[MARK_FIRST : MARK_REMOVED + 1, :times].T.tolist():
            state.note_removed(removed[noted:upto])
            state.note_stored(seq, first, count)
            noted = upto
        state.note_removed(removed[noted:])
        state.note_freed(freed)

    def _cache_in_order(self, plan: Plan, ahead: Lookahead, done: int, entries: list[int]) -> None:
        """Take the blocks that later steps wrote to, and cache those that became full."""
        claimed = 0
        for step, entry, stop in self._full_at(plan, ahead, entries) if entries else ():
            claimed = self._claim(ahead, claimed, step)
            seq = self._state.rows.owner[plan.rows[entry]]
            assert seq is not None
            self._state.cache_full_blocks(seq, stop)
        self._claim(ahead, claimed, done - 1)

    def _full_at(
        self, plan: Plan, ahead: Lookahead, entries: list[int]
    ) -> list[tuple[int, int, int]]:
        """List (step, entry, end of the range) of the blocks to cache, in order."""
        rows, size = self._state.rows, self._state.config.block_size
        cache_points: dict[tuple[int, int], int] = {}
        for entry in entries:
            row = plan.rows[entry]
            stop = min(rows.known.item(row), rows.computed.item(row) // size)
            if plan.repeat == 1:
                cache_points[0, entry] = stop
                continue
            start, count = plan.starts.item(entry), plan.counts.item(entry)
            if count > 1 and len(entries) == 1 and not ahead.count:
                cache_points[0, entry] = stop  # nothing happens in between
                continue
            block = rows.cached.item(row)
            while block < stop:
                full_at = max(-(-((block + 1) * size - start) // count) - 1, 0)
                block = max(block + 1, min(stop, (start + (full_at + 1) * count) // size))
                cache_points[full_at, entry] = block
        return [(step, entry, stop) for (step, entry), stop in sorted(cache_points.items())]

    def _claim(self, ahead: Lookahead, start: int, step: int) -> int:
        """Take the lookahead's blocks from index `start` on that were written to up to `step`.

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
        state.note_removed(state.pool.claim(blocks))
        orphans = append_wanted(
            rows.tables, rows.blocks, ahead.rows[start:stop], ahead.steps[start:stop],
            blocks, state.work[STEPS_DONE], state.work[ORPHAN],
        )  # fmt: skip
        self._claimed(0, orphans)
        return stop

    def _claimed(self, gone: int, orphans: int) -> None:
        """Note hashes that were removed with claimed blocks; free those that no row needs."""
        state = self._state
        if gone:
            state.note_removed(state.pool.removed[:gone].copy())
        if orphans:
            state.free_blocks(state.work[ORPHAN, :orphans])

    def _leave(self, seq: Sequence, reason: FinishReason) -> Finished:
        """Let a sequence go, and pin its prompt's full blocks if it asked for that."""
        state, request = self._state, seq.request
        keep = 0
        held = NO_BLOCKS
        if request.hold and reason in (FinishReason.STOP, FinishReason.LENGTH):
            keep = request.prompt // state.config.block_size
        if keep:
            pinned = state.pinned[request.id] = state.pin_row(seq, keep)
            held = pinned.blocks
        if state.offload is not None and reason is not FinishReason.ABORT:
            state.offload.session_left(seq, state.rows.cached.item(seq.row))
        state.free_row(seq, keep)
        state.stop(seq)
        del state.sequences[request.id]
        return state.finished(seq, reason, held)


def truncate(state: EngineState, seq: Sequence, tokens: int) -> None:
    """Take back the last tokens of a sequence that decodes; their blocks return at once.

    Args:
        seq: whose tokens; it stays where it is, with as many fewer.
        tokens: how many, at most those that it generated.

    Raises:
        ValueError: it generated fewer, does not decode, gave up entries since it computed them, or
            shares a block of which some are taken back. Nothing has changed then.
    """
    rows, size, row = state.rows, state.config.block_size, seq.row
    _check_truncation(state, seq, tokens)
    computed = int(rows.computed[row]) - tokens
    entries = computed - int(rows.dropped[row])
    full, used = entries // size, -(-entries // size)
    if used > full and full < rows.cached[row]:  # its end will hold something else
        state.note_removed(state.pool.forget(rows.tables[row], full, used))
    state.truncate_row(seq, used)
    rows.computed[row] = computed
    rows.length[row] -= tokens
    rows.cached[row] = min(int(rows.cached[row]), full)
    seq.hashes = seq.hashes[: max(seq.request.prompt, computed) // size]
    if not rows.compacted[row]:
        rows.known[row] = len(seq.hashes)
    if state.scores is not None:
        state.scores.invalidate(row)


def _check_truncation(state: EngineState, seq: Sequence, tokens: int) -> None:
    rows, size, row = state.rows, state.config.block_size, seq.row
    name = f"request {seq.request.id!r}"
    if seq.state is not SequenceState.RUNNING or rows.remaining(row) != 1:
        raise ValueError(f"{name} does not decode; nothing can be taken back")
    computed = int(rows.computed[row])
    generated = int(rows.length[row]) - seq.request.prompt
    since = computed - int(rows.compacted[row])
    limit = min(generated, since)
    if not 0 <= tokens <= limit:
        raise ValueError(
            f"{tokens} tokens of {name} are to be taken back; it generated {generated}, and "
            f"{since} since it gave up entries: give 0 to {limit}"
        )
    entries = computed - tokens - int(rows.dropped[row])
    part = rows.tables[row, entries // size : -(-entries // size)]
    if len(part) and entries // size < rows.cached[row] and (state.pool.refs(part) > 1).any():
        raise ValueError(f"the block of {name} that {tokens} tokens are to be taken from is shared")
