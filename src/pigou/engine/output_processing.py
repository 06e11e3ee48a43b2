"""Output processing: updates lengths, caches full blocks and ends sequences after a plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, bare_kernel_over, inlined
from pigou.engine.block_table import (
    ACCOUNT,
    BLOCKS,
    CACHED,
    COMPUTED,
    ENDED,
    ENTRY_COUNT,
    ENTRY_ROW,
    FULL,
    KNOWN,
    LENGTH,
    LIMIT,
    MARK_COUNT,
    MARK_FIRST,
    MARK_REMOVED,
    NEED_BLOCK,
    NEED_ROW,
    NEED_STEP,
    ORPHAN,
    STEPS_DONE,
    TOKENS,
    append_wanted,
    charge_rows,
)
from pigou.engine.plan import Effects, Finished, Plan, Result
from pigou.engine.schedule_builder import NO_LOOKAHEAD, Lookahead
from pigou.engine.sequence import NO_BLOCKS, Sequence, SequenceState
from pigou.engine.state import EngineState
from pigou.engine.token_eviction import take_scores
from pigou.kv.block_pool import FREE, REFS, cache_full_blocks, claim, discharge, link_after
from pigou.request import BlockHashes, Counts, FinishReason, Ints


@bare_kernel
def advance(
    samples: NDArray[np.bool_], steps: Ints, done: int, columns: Ints, block_size: int, work: Ints
) -> tuple[int, int]:
    """Advance a plan's rows; return the number of entries ended, and with full blocks."""
    computed, length, limit = columns[COMPUTED], columns[LENGTH], columns[LIMIT]
    known, cached = columns[KNOWN], columns[CACHED]
    steps_done, tokens = work[STEPS_DONE], work[TOKENS]
    ended, full_entries = work[ENDED], work[FULL]
    rows, counts = work[ENTRY_ROW], work[ENTRY_COUNT]
    ended_count = 0
    full = 0
    for i in range(samples.shape[0]):
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
def _process_steps(
    samples: NDArray[np.bool_], steps: Ints, done: int, columns: Ints, tables: Ints,
    block_size: int, meta: Ints, keys: BlockHashes, pool_counts: Counts, wanted: int, work: Ints,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Advance the plan's rows, and claim the `wanted` lookahead blocks written by the steps done.

    `steps` has shape (entries,), or is empty. Claims wait if blocks are to be cached in between.
    Returns entries ended, entries with full blocks, hashes removed, and orphaned blocks.
    """
    ended_count, full = advance(samples, steps, done, columns, block_size, work)
    if full > 0 or wanted == 0:
        return ended_count, full, 0, 0
    stop = 0
    while stop < wanted and work[NEED_STEP, stop] < done:
        stop += 1
    gone = claim(meta, keys, pool_counts, work[NEED_BLOCK, :stop], full)  # `full` is 0
    charge_rows(meta, columns[ACCOUNT], work[NEED_ROW, :stop], work[NEED_BLOCK, :stop])
    others = append_wanted(
        tables, columns[BLOCKS], work[NEED_ROW, :stop], work[NEED_STEP, :stop],
        work[NEED_BLOCK, :stop], work[STEPS_DONE], work[ORPHAN],
    )  # fmt: skip
    return ended_count, full, gone, others


@inlined
def return_blocks(meta: Ints, counts: Counts, blocks: Ints, count: int) -> None:
    """Free blocks just taken, last first, for allocation next."""
    for i in range(count - 1, -1, -1):
        meta[blocks[i], REFS] = 0
        discharge(meta, blocks[i], 0)
        link_after(meta, meta.shape[0] - 1, blocks[i])
    counts[FREE] += count


@bare_kernel_over("engine", "kv")
def _cache_row(
    entry: int, done: int, columns: Ints, tables: Ints, block_size: int, meta: Ints,
    keys: BlockHashes, slots: Ints, counts: Counts, wanted: int, hashes: BlockHashes, work: Ints,
) -> tuple[int, int, int, bool]:  # fmt: skip
    """Cache an entry's full blocks in the order in which single steps would have filled them.

    Lookahead blocks written before are claimed first. Returns marks written to `work`, hashes
    removed, orphaned blocks, and whether a block is a duplicate.
    """
    orphans = work[ORPHAN]
    row, count = work[ENTRY_ROW, entry], work[ENTRY_COUNT, entry]
    start = columns[COMPUTED, row] - count * work[STEPS_DONE, row]
    block: int = np.int64(columns[CACHED, row])  # type: ignore[assignment]
    stop: int = min(columns[KNOWN, row], columns[COMPUTED, row] // block_size)
    columns[CACHED, row] = stop
    at_once = count > 1 and wanted == 0
    gone: int = np.int64(0)  # type: ignore[assignment]  # a literal is another type, for `claim`
    times, claimed, freed, duplicates = 0, 0, 0, False
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
            gone = claim(meta, keys, counts, fresh, gone)
            charge_rows(meta, columns[ACCOUNT], work[NEED_ROW, claimed:upto], fresh)
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


class OutputProcessor:
    """Applies results to the engine's state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def process(self, plan: Plan, ahead: Lookahead, result: Result) -> Effects:
        """Apply a plan's steps, in the order of single steps."""
        state, rows, pool, work = self._state, self._state.rows, self._state.pool, self._state.work
        if state.copying:
            for seq in state.copying[:]:
                state.free_copy_source(seq)
        steps = NO_BLOCKS
        if result.finished:
            steps = np.full(len(plan.rows), result.steps, dtype=np.int32)
            for finish in result.finished:
                steps[finish.entry] = finish.steps
        has_new_hashes = bool(result.full_block_hashes)
        ended_count, full, gone, orphans = _process_steps(
            plan.samples, steps, result.steps, rows.columns, rows.tables, state.config.block_size,
            pool.meta, pool.hashes, pool.counts, 0 if has_new_hashes else ahead.count, work,
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

    def process_drafts(self, plan: Plan, result: Result) -> Effects:
        """Apply a step that verified drafts; free the blocks that only rejected ones were in."""
        rows, accepted, size = self._state.rows, result.accepted, self._state.config.block_size
        entries = rows.computed[plan.rows] - rows.dropped[plan.rows] + 1 + accepted
        used = -(-entries // size)
        for i in np.flatnonzero(rows.blocks[plan.rows] > used).tolist():
            if (seq := rows.owner[plan.rows.item(i)]) is not None:
                self._state.truncate_row(seq, used.item(i))
        running = rows.length[plan.rows] > 0
        rows.length[plan.rows[running]] += accepted[running]
        counts = self._state.work[ENTRY_COUNT, : len(accepted)]
        counts[:] = 1 + accepted
        effects = self.process(plan, NO_LOOKAHEAD, result)
        counts[:] = 1
        effects.tokens += accepted * (effects.tokens > 0)
        return effects

    def _owners(
        self, plan: Plan, reasons: dict[int, FinishReason]
    ) -> Iterator[tuple[Sequence, FinishReason]]:
        for entry in sorted(reasons):
            seq = self._state.rows.owner[plan.rows[entry]]
            if seq is not None:
                yield seq, reasons[entry]

    def _add_hashes(self, plan: Plan, result: Result) -> set[int]:
        """Store hashes of generated blocks; return the entries with blocks to cache."""
        rows = self._state.rows
        entries = set()
        for entry, row in enumerate(plan.rows.tolist()):
            seq = rows.owner[row]
            if seq is None or row not in result.full_block_hashes:
                continue
            full = rows.computed.item(row) // self._state.config.block_size
            seq.add_hashes(result.full_block_hashes[row], full)
            if rows.compacted[row]:
                continue  # kept for a recomputation of the whole sequence
            rows.known[row] = len(seq.hashes)
            if min(len(seq.hashes), full) > rows.cached[row]:
                entries.add(entry)
        return entries

    def _cache_one(self, plan: Plan, ahead: Lookahead, done: int, entry: int) -> None:
        """Like `_cache_in_order` for one entry, mostly a chunked prompt."""
        state, rows, pool, work = self._state, self._state.rows, self._state.pool, self._state.work
        seq = rows.owner[plan.rows.item(entry)]
        assert seq is not None
        times, gone, freed, duplicates = _cache_row(
            entry, done, rows.columns, rows.tables, state.config.block_size, pool.meta,
            pool.hashes, pool.slots, pool.counts, ahead.count, seq.hashes, work,
        )  # fmt: skip
        seq.duplicates |= duplicates
        removed, noted = pool.take_removed(gone), 0
        for first, count, upto in work[MARK_FIRST : MARK_REMOVED + 1, :times].T.tolist():
            state.note_removed(removed[noted:upto])
            state.note_stored(seq.request.id, seq.hashes, first, count)
            noted = upto
        state.note_removed(removed[noted:])
        state.note_freed(freed)

    def _cache_in_order(self, plan: Plan, ahead: Lookahead, done: int, entries: list[int]) -> None:
        """Claim the blocks written by later steps, and cache full ones."""
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
        """Return (step, entry, end of the range) of the blocks to cache, in order."""
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
        """Claim lookahead blocks from `start` written up to `step`; return the next start."""
        if start == ahead.count:
            return start
        state, rows = self._state, self._state.rows
        stop = int(ahead.steps.searchsorted(step, side="right"))
        blocks = ahead.blocks[start:stop]
        state.note_removed(state.pool.claim(blocks))
        charge_rows(state.pool.meta, rows.account, ahead.rows[start:stop], blocks)
        orphans = append_wanted(
            rows.tables, rows.blocks, ahead.rows[start:stop], ahead.steps[start:stop],
            blocks, state.work[STEPS_DONE], state.work[ORPHAN],
        )  # fmt: skip
        self._claimed(0, orphans)
        return stop

    def _claimed(self, gone: int, orphans: int) -> None:
        state = self._state
        if gone:
            state.note_removed(state.pool.take_removed(gone))
        if orphans:
            state.free_blocks(state.work[ORPHAN, :orphans])

    def _leave(self, seq: Sequence, reason: FinishReason) -> Finished:
        """Finish a sequence; pin its prompt's full blocks if requested."""
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
        if state.lengths is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            state.lengths.observe(request, seq.length - request.prompt)
        return state.finished(seq, reason, held)


def truncate(state: EngineState, seq: Sequence, tokens: int) -> None:
    """Remove the last tokens of a decoding sequence; raises ValueError, with no change."""
    rows, size, row = state.rows, state.config.block_size, seq.row
    _check_truncation(state, seq, tokens)
    computed = int(rows.computed[row]) - tokens
    entries = computed - int(rows.dropped[row])
    full, used = entries // size, -(-entries // size)
    if used > full and full < rows.cached[row]:  # other tokens will fill its end
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
