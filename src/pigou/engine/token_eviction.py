"""Token eviction: which rows give up cache entries, how many, and which recompute some.

An executor scores the entries of rows; the rows that lose least give up whole blocks of entries.
Shared blocks stay: a copy costs a block, and to drop all its entries gives back that one. So it
never gains memory, and of as many blocks the row's own earn least already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pigou.compiled import bare_kernel_over
from pigou.config import EvictionConfig
from pigou.engine.block_table import COMPUTED, DROPPED, LENGTH
from pigou.engine.plan import Compaction, Plan, Result, Revival
from pigou.engine.schedule_builder import RowEviction, ScheduleBuilder
from pigou.kv.block_pool_kernels import REFS
from pigou.kv.memory_price import FLOOR, Floats, MemoryPrice, blocks_above, blocks_below
from pigou.kv.memory_shares import (
    EvictionCurve,
    cheapest_evictions,
    evictable_by_tenant,
    marginal_ahead,
)
from pigou.request import Ints

if TYPE_CHECKING:
    from pigou.engine.state import EngineState

_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)
_NO_ROWS: Ints = np.empty((0, 3), dtype=np.int32)


class EvictionScores:
    """What the entries of running rows are worth, and the price of a block.

    Attributes:
        config: of token eviction.
        portfolio: the price of a block.
        losses: by row, return lost with each further block evicted; None without scores.
        gains: by row, return that comes back with each further block recomputed.
        scored_at: tokens computed when the row was scored, -1 for never, shape (max_seqs,).
        offered: blocks of the row that were offered to the tiers before, shape (max_seqs,).
        wanted: blocks that the plan under way lacked before rows gave some up.
    """

    def __init__(self, config: EvictionConfig, blocks: int, max_seqs: int) -> None:
        self.config = config
        self.portfolio = MemoryPrice(blocks, config.rate, config.by_price)
        self.losses: list[Floats | None] = [None] * max_seqs
        self.gains: list[Floats | None] = [None] * max_seqs
        self.scored_at: Ints = np.full(max_seqs, -1, dtype=np.int32)
        self.offered: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.wanted = 0
        #: What `evictable_blocks` writes, (max_seqs,) each.
        self.firsts: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.evictable: Ints = np.zeros(max_seqs, dtype=np.int32)

    def keep(self, row: int, computed: int, losses: Floats, gains: Floats | None) -> None:
        """Note a row's scores, of when so many of its tokens were computed."""
        self.losses[row] = losses
        self.gains[row] = gains
        self.scored_at[row] = computed

    def invalidate(self, row: int) -> None:
        """Forget a row's scores: its entries have moved."""
        self.losses[row] = None
        self.gains[row] = None
        self.scored_at[row] = -1

    def clear(self, row: int) -> None:
        """Forget a row that was freed."""
        self.invalidate(row)
        self.offered[row] = 0


class RowCurve(NamedTuple):
    """What a row could give up.

    Attributes:
        row: the row of the batch.
        first: index of the first entry that may go.
        losses: return lost with each further block, ascending, shape (blocks,).
    """

    row: int
    first: int
    losses: Floats


def evict_by_price(state: EngineState, builder: ScheduleBuilder) -> None:
    """Begin a plan. Where the policy goes by price, evict what earns less (Token-PD, Eq. 4)."""
    scores = _scores(state)
    scores.wanted = 0
    price = scores.portfolio.price
    if scores.portfolio.by_price and price > FLOOR:
        cheap = [
            curve._replace(losses=curve.losses[: blocks_below(curve.losses, price)])
            for curve in _curves(state, builder, blind=False)
        ]
        _evict(state, builder, cheap, 0, sum(len(curve.losses) for curve in cheap))


def evict_for_decodes(state: EngineState, builder: ScheduleBuilder, needed: int) -> bool:
    """Evict what decodes lack for the blocks they need, and some more; False for nothing done."""
    short = needed - state.pool.free
    slack = math.ceil(_scores(state).config.slack * len(state.running))
    return _evict_short(state, builder, short, short + slack, blind=True)


def evict_for_admission(state: EngineState, builder: ScheduleBuilder, blocks: int) -> bool:
    """Evict so many blocks for a sequence that waits; False for nothing done.

    Only entries of scored rows go: a newcomer can wait for scores.
    """
    return _evict_short(state, builder, blocks, blocks, blind=False)


def _scores(state: EngineState) -> EvictionScores:
    assert state.scores is not None, "token eviction is off"
    return state.scores


def _evict_short(
    state: EngineState, builder: ScheduleBuilder, needed: int, wanted: int, blind: bool
) -> bool:
    done = _evict(state, builder, _curves(state, builder, blind), needed, wanted)
    _scores(state).wanted += needed if done else 0
    return done


def _curves(state: EngineState, builder: ScheduleBuilder, blind: bool) -> list[RowCurve]:
    """Return the curves of the rows that could give something up.

    With `blind`, rows without scores are among them, with infinite losses. Rows that begin with
    this plan are left out: its executor does not know them.
    """
    scores, order = _scores(state), state.running
    _measure(state, order)
    curves = []
    new = {started.row for started in builder.started}
    for row, first, count in _evictable_rows(state, order):
        if row in new:
            continue
        losses, eviction = scores.losses[row], builder.evictions.get(row)
        if losses is not None:
            spent = eviction.freed if eviction is not None else 0
            losses = losses[spent : spent + count]
        elif blind:
            losses = np.full(count, math.inf)
        if losses is not None and len(losses):
            curves.append(RowCurve(row, first, losses))
    return curves


def _measure(state: EngineState, order: Ints) -> None:
    """Write what each of these rows could give up to `firsts` and `evictable`."""
    scores, rows = _scores(state), state.rows
    config = scores.config
    evictable_blocks(
        order, rows.columns, rows.tables, state.config.block_size, config.sinks, config.recent,
        config.least, state.pool.meta, scores.firsts, scores.evictable,
    )  # fmt: skip


@bare_kernel_over("engine", "kv")
def evictable_blocks(
    order: Ints, columns: Ints, tables: Ints, block_size: int, sinks: int, recent: int, least: int,
    meta: Ints, firsts: Ints, out: Ints,
) -> None:  # fmt: skip
    """Count the blocks of entries that each row of `order` could give up; 0 while it is a prompt.

    Shared blocks stay, and so do the first `sinks` entries, the last `recent` ones, and `least` in
    all. Tables are searched from the end for the last shared block.

    Args:
        order, columns, tables, block_size: the rows.
        sinks, recent, least: entries that stay.
        meta: the blocks.
        firsts: takes the first entry that may go, (n,).
        out: takes the number of blocks, (n,).
    """
    computed, length, dropped = columns[COMPUTED], columns[LENGTH], columns[DROPPED]
    for i in range(order.shape[0]):
        row = order[i]
        firsts[i] = 0
        out[i] = 0
        count = computed[row] - dropped[row]
        if length[row] - computed[row] != 1 or count - max(sinks + recent, least) < block_size:
            continue
        shared = (count + block_size - 1) // block_size
        while shared > 0 and meta[tables[row, shared - 1], REFS] < 2:
            shared -= 1
        first = shared * block_size
        spare = min(count - max(first, sinks) - recent, count - least)
        firsts[i] = first
        out[i] = max(spare, 0) // block_size


def _evictable_rows(state: EngineState, order: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first entry that may go, blocks) of the rows that could give up some.

    A prompt that another worker will pull is not touched.
    """
    scores = _scores(state)
    for i in np.flatnonzero(scores.evictable[: len(order)]).tolist():
        row = int(order[i])
        seq = state.rows.owner[row]
        if seq is not None and not seq.request.hold:
            yield row, int(scores.firsts[i]), int(scores.evictable[i])


def _evict(
    state: EngineState, builder: ScheduleBuilder, curves: list[RowCurve], needed: int, wanted: int
) -> bool:
    """Evict the blocks of least return; False where there are fewer than `needed`."""
    scores = _scores(state)
    config = scores.config
    spare = evictable_by_tenant(config.floors, _blocks_by_tenant(state)) if config.floors else {}
    offers = [EvictionCurve(c.losses, _tenant(state, c.row) if spare else "") for c in curves]
    chosen = cheapest_evictions(offers, needed, wanted, config.ceiling, spare)
    if chosen is None:
        return False
    for i in np.flatnonzero(chosen.counts).tolist():
        _evict_row(state, builder, curves[i].row, curves[i].first, int(chosen.counts[i]))
    ahead = -math.inf
    if not scores.portfolio.by_price:
        ahead = marginal_ahead(offers, chosen.counts, _growth(state))
    scores.portfolio.note(chosen.marginal, ahead)
    return True


def _tenant(state: EngineState, row: int) -> str:
    seq = state.rows.owner[row]
    return seq.request.tenant if seq is not None else ""


def _blocks_by_tenant(state: EngineState) -> dict[str, int]:
    """Count the blocks that each tenant's running requests have."""
    blocks: dict[str, int] = {}
    for row in state.running.tolist():
        tenant = _tenant(state, row)
        blocks[tenant] = blocks.get(tenant, 0) + int(state.rows.blocks[row])
    return blocks


def _evict_row(
    state: EngineState, builder: ScheduleBuilder, row: int, first: int, count: int
) -> None:
    """Take a row's last `count` blocks that hold entries; those before keep what is left.

    A block that was taken for the next token moves up with it. Blocks from `first` on lose their
    hashes, for they will hold something else.
    """
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
    state.counters.evicted_tokens += count * size
    state.free_blocks(freed)


def recompute_by_price(state: EngineState, builder: ScheduleBuilder) -> None:
    """Where the policy goes by price, recompute entries that earn more than it.

    Only while blocks are free beyond one for each running row, in a plan that takes none from
    any row, and as far as its budget of tokens goes.
    """
    scores, rows, size = _scores(state), state.rows, state.config.block_size
    portfolio = scores.portfolio
    if (
        not portfolio.by_price
        or builder.evictions
        or builder.preempted
        or state.blocked is not None
    ):
        return
    limit = min(state.pool.free - len(state.running), builder.budget // size)
    worth: list[tuple[int, Floats]] = []
    for row in state.running.tolist() if limit > 0 else ():
        gains = scores.gains[row]
        if gains is None or rows.length[row] - rows.computed[row] != 1:
            continue
        count = min(blocks_above(gains, portfolio.price), int(rows.dropped[row]) // size)
        worth.append((row, gains[:count]))
    chosen = cheapest_evictions([EvictionCurve(-gains) for _, gains in worth], 0, limit)
    assert chosen is not None, "none are needed"
    for (row, _), count in zip(worth, chosen.counts.tolist(), strict=True):
        if count:
            _recompute_row(state, builder, row, count)


def _recompute_row(state: EngineState, builder: ScheduleBuilder, row: int, count: int) -> None:
    """Give a row blocks for `count` blocks of tokens, which are computed again."""
    rows, size = state.rows, state.config.block_size
    table, blocks = rows.tables[row], int(rows.blocks[row])
    entries = int(rows.computed[row]) - int(rows.dropped[row])
    state.note_removed(state.pool.allocate(table[blocks : blocks + count]))
    rows.blocks[row] = blocks + count
    rows.dropped[row] -= count * size
    rows.compacted[row] = rows.computed[row]
    used = -(-(entries + count * size) // size)
    builder.revivals.append(Revival(row, entries, count * size, table[:used].copy()))
    builder.budget -= count * size
    state.counters.recomputed_tokens += count * size
    _scores(state).invalidate(row)


def write_evictions(state: EngineState, builder: ScheduleBuilder, plan: Plan, needs: int) -> None:
    """Write into a plan what is evicted, recomputed, and to be scored.

    Args:
        state: of the engine.
        builder: of the plan.
        plan: takes them.
        needs: free blocks that later steps of the plan write to.
    """
    scores, size = _scores(state), state.config.block_size
    for row, gone in builder.evictions.items():
        drop = gone.freed * size
        plan.compactions.append(
            Compaction(row, gone.entries, gone.first, drop, _NO_PAIRS, gone.blocks)
        )
        scores.invalidate(row)
    if builder.evictions:
        state.blocked = None  # a sequence with loads was not admitted beside them, and may be now
    plan.revivals = builder.revivals
    plan.appraised = _rows_to_score(state, needs)


def _rows_to_score(state: EngineState, needs: int) -> Ints:
    """Return (row, first entry that may go, blocks) of the rows to score, shape (k, 3).

    Rows are scored that were compacted since, or not scored for an interval. They are scored once
    fewer blocks are free than rows run, while a sequence waits for blocks, and while there is a
    price to go by.
    """
    scores, rows = _scores(state), state.rows
    order = state.running
    low = state.pool.free - needs < len(order) or (state.blocked is not None and rows.free > 0)
    priced = scores.portfolio.by_price and scores.portfolio.price > FLOOR
    if not len(order) or not (low or priced):
        return _NO_ROWS
    at = scores.scored_at[order]
    order = order[(at < 0) | (rows.computed[order] - at >= scores.config.interval)]
    _measure(state, order)
    to_score = list(_evictable_rows(state, order))
    if state.offload is not None:
        for row, _, _ in to_score:
            _offer_to_tiers(state, row)
    return np.array(to_score, dtype=np.int32).reshape(-1, 3)


def _offer_to_tiers(state: EngineState, row: int) -> None:
    """Offer a row's blocks to the tiers while they are whole, each once."""
    scores, seq, cached = _scores(state), state.rows.owner[row], int(state.rows.cached[row])
    if state.offload is not None and seq is not None and cached > scores.offered[row]:
        scores.offered[row] = cached
        state.offload.sequence_left(seq, cached)


def take_scores(state: EngineState, result: Result) -> None:
    """Take the scores of a result in, and move the price on."""
    scores, rows = _scores(state), state.rows
    for row, losses in result.losses.items():
        if rows.owner[row] is not None:
            scores.keep(row, int(rows.computed[row]), losses, result.gains.get(row))
            state.blocked = None  # it may fit now
    used = state.config.blocks - state.pool.free + scores.wanted
    scores.portfolio.step(used, result.steps, _growth(state) * len(state.running))


def _growth(state: EngineState) -> float:
    """Return the blocks that a row grows by until it is scored again."""
    return _scores(state).config.interval / state.config.block_size


def check_scores(plan: Plan, result: Result) -> None:
    """Refuse scores that the plan did not ask for, and curves of a wrong shape.

    Raises:
        ValueError: names the row.
    """
    asked = set(plan.appraised[:, 0].tolist()) if len(plan.appraised) else set()
    for name, curves, sign in (("losses", result.losses, 1), ("gains", result.gains, -1)):
        for row, curve in curves.items():
            if row not in asked:
                raise ValueError(f"{name} of row {row}, which the plan does not ask for")
            if not np.isfinite(curve).all() or (sign * np.diff(curve) < 0).any():
                order = "ascending" if sign > 0 else "descending"
                raise ValueError(f"{name} of row {row} must be finite and {order}")
