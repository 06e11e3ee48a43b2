"""Token eviction: which rows evict cache entries, how many, and which recompute some.

Rows of the lowest scores evict whole blocks of entries. Shared blocks stay: evicting from one takes
a copy, which gains no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pigou.compiled import bare_kernel_over
from pigou.engine.block_table import COMPUTED, DROPPED, LENGTH
from pigou.engine.plan import Compaction, Plan, Recomputation, Result
from pigou.engine.schedule_builder import RowEviction, ScheduleBuilder
from pigou.engine.state import EngineState, EvictionScores
from pigou.kv.block_pool import REFS
from pigou.kv.memory_price import (
    FLOOR,
    EvictionCurve,
    Floats,
    blocks_above,
    blocks_below,
    cheapest_evictions,
    evictable_by_tenant,
    marginal_ahead,
)
from pigou.request import Ints

_NO_ROWS: Ints = np.empty((0, 3), dtype=np.int32)
_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)


def _scores_of(state: EngineState) -> EvictionScores:
    assert state.scores is not None, "token eviction is off"
    return state.scores


def measure(state: EngineState, order: Ints) -> None:
    """Write to `firsts` and `evictable` what each of these rows could evict."""
    scores, rows = _scores_of(state), state.rows
    config = scores.config
    evictable_blocks(
        order, rows.columns, rows.tables, state.config.block_size, config.sinks, config.recent,
        config.least, state.pool.meta, scores.firsts, scores.evictable,
    )  # fmt: skip


@bare_kernel_over("engine", "kv")
def evictable_blocks(
    order: Ints, columns: Ints, tables: Ints, block_size: int, sinks: int, recent: int,
    min_entries: int, meta: Ints, firsts: Ints, out: Ints,
) -> None:  # fmt: skip
    """Write how many blocks of entries each row of `order` could evict, (n,); 0 during prefill.

    Keeps shared blocks, the first `sinks` entries, the last `recent`, and `min_entries` in all.
    `firsts` takes the first evictable entry, (n,).
    """
    computed, length, dropped = columns[COMPUTED], columns[LENGTH], columns[DROPPED]
    for i in range(order.shape[0]):
        row = order[i]
        firsts[i] = 0
        out[i] = 0
        count = computed[row] - dropped[row]
        if (
            length[row] - computed[row] != 1
            or count - max(sinks + recent, min_entries) < block_size
        ):
            continue
        shared = (count + block_size - 1) // block_size
        while shared > 0 and meta[tables[row, shared - 1], REFS] < 2:
            shared -= 1
        first = shared * block_size
        spare = min(count - max(first, sinks) - recent, count - min_entries)
        firsts[i] = first
        out[i] = max(spare, 0) // block_size


def _evictable_rows(state: EngineState, order: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first evictable entry, blocks) of rows with evictable blocks."""
    scores = _scores_of(state)
    for i in np.flatnonzero(scores.evictable[: len(order)]).tolist():
        row = int(order[i])
        seq = state.rows.owner[row]
        if seq is not None and not seq.request.hold:
            yield row, int(scores.firsts[i]), int(scores.evictable[i])


def _rows_to_score(state: EngineState, needs: int) -> Ints:
    """Return (row, first evictable entry, blocks) of the rows to score, shape (k, 3)."""
    scores, rows = _scores_of(state), state.rows
    order = state.running
    low = state.pool.free - needs < len(order) or (state.blocked is not None and rows.free > 0)
    priced = scores.memory_price.by_price and scores.memory_price.price > FLOOR
    if not len(order) or not (low or priced):
        return _NO_ROWS
    at = scores.scored_at[order]
    order = order[(at < 0) | (rows.computed[order] - at >= scores.config.interval)]
    measure(state, order)
    to_score = list(_evictable_rows(state, order))
    if state.offload is not None:
        for row, _, _ in to_score:
            _offer_to_tiers(state, row)
    return np.array(to_score, dtype=np.int32).reshape(-1, 3)


def _offer_to_tiers(state: EngineState, row: int) -> None:
    """Offer a row's blocks to the tiers once, before their first eviction."""
    scores, seq, cached = _scores_of(state), state.rows.owner[row], int(state.rows.cached[row])
    if state.offload is not None and seq is not None and cached > scores.offered_blocks[row]:
        scores.offered_blocks[row] = cached
        state.offload.sequence_left(seq, cached)


def take_scores(state: EngineState, result: Result) -> None:
    """Store a result's scores, and update the price."""
    scores, rows = _scores_of(state), state.rows
    for row, lost_returns in result.lost_returns.items():
        if rows.owner[row] is not None:
            regained_returns = result.regained_returns.get(row)
            scores.keep(row, int(rows.computed[row]), lost_returns, regained_returns)
            state.blocked = None  # the head may fit now
    used = state.config.blocks - state.pool.free + scores.wanted
    scores.memory_price.step(used, result.steps, growth_blocks(state) * len(state.running))


def growth_blocks(state: EngineState) -> float:
    """Return the expected growth of a row until its next score, in blocks."""
    return _scores_of(state).config.interval / state.config.block_size


def check_scores(plan: Plan, result: Result) -> None:
    """Raise a ValueError for scores not requested or curves of a wrong shape."""
    scored = {row for row, _, _ in plan.to_score.tolist()}
    kinds = ("losses", result.lost_returns, 1), ("gains", result.regained_returns, -1)
    for name, curves, sign in kinds:
        for row, curve in curves.items():
            if row not in scored:
                raise ValueError(f"{name} of row {row}, which the plan does not ask for")
            if not np.isfinite(curve).all() or (sign * np.diff(curve) < 0).any():
                order = "ascending" if sign > 0 else "descending"
                raise ValueError(f"{name} of row {row} must be finite and {order}")


class RowCurve(NamedTuple):
    """Evictable blocks of a row."""

    row: int  # the row of the batch
    first: int  # index of the first evictable entry
    lost_returns: Floats  # return lost with each further block, ascending, shape (blocks,)


def evict_by_price(state: EngineState, builder: ScheduleBuilder) -> None:
    """Start a plan: under a price policy, evict entries below the price (Token-PD, Eq. 4)."""
    scores = _scores_of(state)
    scores.wanted = 0
    price = scores.memory_price.price
    if scores.memory_price.by_price and price > FLOOR:
        curves = _curves(state, builder, blind=False)
        counts = [blocks_below(curve.lost_returns, price) for curve in curves]
        cheap = [
            c._replace(lost_returns=c.lost_returns[:n]) for c, n in zip(curves, counts, strict=True)
        ]
        _evict(state, builder, cheap, 0, sum(len(curve.lost_returns) for curve in cheap))


def evict_for_decodes(state: EngineState, builder: ScheduleBuilder, needed: int) -> bool:
    """Evict the blocks that decodes lack, and a margin; False if nothing was done."""
    short = needed - state.pool.free
    slack = math.ceil(_scores_of(state).config.slack * len(state.running))
    return _evict_short(state, builder, short, short + slack, blind=True)


def evict_for_admission(state: EngineState, builder: ScheduleBuilder, blocks: int) -> bool:
    """Evict blocks of scored rows for a waiting sequence; False if nothing was done."""
    return _evict_short(state, builder, blocks, blocks, blind=False)


def _evict_short(
    state: EngineState, builder: ScheduleBuilder, needed: int, wanted: int, blind: bool
) -> bool:
    done = _evict(state, builder, _curves(state, builder, blind), needed, wanted)
    _scores_of(state).wanted += needed if done else 0
    return done


def _curves(state: EngineState, builder: ScheduleBuilder, blind: bool) -> list[RowCurve]:
    """Return the curves of rows; with `blind`, infinite ones for rows without scores."""
    scores, order = _scores_of(state), state.running
    measure(state, order)
    curves = []
    new = {started.row for started in builder.started}
    for row, first, count in _evictable_rows(state, order):
        if row in new:
            continue
        lost_returns, eviction = scores.lost_returns[row], builder.evictions.get(row)
        if lost_returns is not None:
            spent = eviction.freed if eviction is not None else 0
            lost_returns = lost_returns[spent : spent + count]
        elif blind:
            lost_returns = np.full(count, math.inf)
        if lost_returns is not None and len(lost_returns):
            curves.append(RowCurve(row, first, lost_returns))
    return curves


def _evict(
    state: EngineState, builder: ScheduleBuilder, curves: list[RowCurve], needed: int, wanted: int
) -> bool:
    """Evict the blocks of least return; False if fewer than `needed`."""
    scores = _scores_of(state)
    config = scores.config
    spare = evictable_by_tenant(config.floors, _blocks_by_tenant(state)) if config.floors else {}
    offers = [EvictionCurve(c.lost_returns, _tenant(state, c.row) if spare else "") for c in curves]
    chosen = cheapest_evictions(offers, needed, wanted, config.ceiling, spare)
    if chosen is None:
        return False
    for i in np.flatnonzero(chosen.counts).tolist():
        _evict_row(state, builder, curves[i].row, curves[i].first, int(chosen.counts[i]))
    ahead = -math.inf
    if not scores.memory_price.by_price:
        ahead = marginal_ahead(offers, chosen.counts, growth_blocks(state))
    scores.memory_price.note(chosen.marginal, ahead)
    return True


def _tenant(state: EngineState, row: int) -> str:
    seq = state.rows.owner[row]
    return seq.request.tenant if seq is not None else ""


def _blocks_by_tenant(state: EngineState) -> dict[str, int]:
    blocks: dict[str, int] = {}
    for row in state.running.tolist():
        tenant = _tenant(state, row)
        blocks[tenant] = blocks.get(tenant, 0) + int(state.rows.blocks[row])
    return blocks


def _evict_row(
    state: EngineState, builder: ScheduleBuilder, row: int, first: int, count: int
) -> None:
    """Evict a row's last `count` blocks; those from `first` on lose their hashes."""
    rows, size = state.rows, state.config.block_size
    table, blocks, computed = rows.tables[row], int(rows.blocks[row]), int(rows.computed[row])
    entries = computed - int(rows.dropped[row])
    used = -(-entries // size)
    eviction = builder.evictions.get(row)
    if eviction is None:
        eviction = builder.evictions[row] = RowEviction(entries, first, table[:used].copy())
    eviction.freed += count
    state.note_removed(state.pool.forget(table, first // size, used))
    freed = table[used - count : used].copy()
    table[used - count : blocks - count] = table[used:blocks].copy()
    rows.blocks[row] = blocks - count
    rows.dropped[row] += count * size
    rows.compacted[row] = computed
    rows.known[row] = 0
    rows.cached[row] = min(int(rows.cached[row]), first // size)
    state.stats.evicted_tokens += count * size
    state.free_blocks(freed)


def recompute_by_price(state: EngineState, builder: ScheduleBuilder) -> None:
    """Under a price policy, recompute entries above the price while blocks are spare."""
    scores, rows, size = _scores_of(state), state.rows, state.config.block_size
    memory_price = scores.memory_price
    is_short = builder.evictions or builder.preempted or state.blocked is not None
    if is_short or not memory_price.by_price:
        return
    limit = min(state.pool.free - len(state.running), builder.budget // size)
    candidates: list[tuple[int, Floats]] = []
    for row in state.running.tolist() if limit > 0 else ():
        regained = scores.regained_returns[row]
        if regained is None or rows.length[row] - rows.computed[row] != 1:
            continue
        count = min(blocks_above(regained, memory_price.price), int(rows.dropped[row]) // size)
        candidates.append((row, regained[:count]))
    chosen = cheapest_evictions([EvictionCurve(-regained) for _, regained in candidates], 0, limit)
    assert chosen is not None, "none are needed"
    for (row, _), count in zip(candidates, chosen.counts.tolist(), strict=True):
        if count:
            _recompute_row(state, builder, row, count)


def _recompute_row(state: EngineState, builder: ScheduleBuilder, row: int, count: int) -> None:
    """Give a row `count` blocks for tokens to recompute."""
    rows, size = state.rows, state.config.block_size
    table, blocks = rows.tables[row], int(rows.blocks[row])
    entries = int(rows.computed[row]) - int(rows.dropped[row])
    state.note_removed(state.pool.allocate(table[blocks : blocks + count]))
    rows.blocks[row] = blocks + count
    rows.dropped[row] -= count * size
    rows.compacted[row] = rows.computed[row]
    used = -(-(entries + count * size) // size)
    builder.recomputations.append(Recomputation(row, entries, count * size, table[:used].copy()))
    builder.budget -= count * size
    state.stats.recomputed_tokens += count * size
    _scores_of(state).invalidate(row)


def write_evictions(state: EngineState, builder: ScheduleBuilder, plan: Plan, needs: int) -> None:
    """Write evictions, recomputations and rows to score into a plan."""
    scores, size = _scores_of(state), state.config.block_size
    for row, gone in builder.evictions.items():
        drop = gone.freed * size
        evicted = Compaction(row, gone.entries, gone.first, drop, _NO_PAIRS, gone.blocks)
        plan.compactions.append(evicted)
        scores.invalidate(row)
    if builder.evictions:
        state.blocked = None  # a sequence with loads was not admitted beside them, and may be now
    plan.recomputations = builder.recomputations
    plan.to_score = _rows_to_score(state, needs)
