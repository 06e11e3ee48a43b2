"""Scores of cache entries: which running rows are scored, and what they could give up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pigou.compiled import bare_kernel_over
from pigou.config import EvictionConfig
from pigou.engine.block_table import COMPUTED, DROPPED, LENGTH
from pigou.engine.plan import Plan, Result
from pigou.kv.block_pool_kernels import REFS
from pigou.kv.memory_price import FLOOR, Floats, MemoryPrice
from pigou.request import Ints

if TYPE_CHECKING:
    from pigou.engine.state import EngineState

_NO_ROWS: Ints = np.empty((0, 3), dtype=np.int32)


class EvictionScores:
    """Scores of the entries of running rows, and the price of a block.

    Attributes:
        lost_returns: by row, return lost with each further block evicted; None without scores.
        regained_returns: by row, return that comes back with each further block recomputed.
        scored_at: tokens computed when the row was scored, -1 for never, shape (max_seqs,).
        offered_blocks: of the row, offered to the tiers before, shape (max_seqs,).
        wanted: blocks that the plan under way lacked before rows gave some up.
    """

    def __init__(self, config: EvictionConfig, blocks: int, max_seqs: int) -> None:
        self.config = config
        self.memory_price = MemoryPrice(blocks, config.rate, config.by_price)
        self.lost_returns: list[Floats | None] = [None] * max_seqs
        self.regained_returns: list[Floats | None] = [None] * max_seqs
        self.scored_at: Ints = np.full(max_seqs, -1, dtype=np.int32)
        self.offered_blocks: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.wanted = 0
        #: What `evictable_blocks` writes, (max_seqs,) each.
        self.firsts: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.evictable: Ints = np.zeros(max_seqs, dtype=np.int32)

    def keep(
        self, row: int, computed: int, lost_returns: Floats, regained_returns: Floats | None
    ) -> None:
        """Note a row's scores, of when so many of its tokens were computed."""
        self.lost_returns[row] = lost_returns
        self.regained_returns[row] = regained_returns
        self.scored_at[row] = computed

    def invalidate(self, row: int) -> None:
        """Forget a row's scores: its entries have moved."""
        self.lost_returns[row] = None
        self.regained_returns[row] = None
        self.scored_at[row] = -1

    def clear(self, row: int) -> None:
        """Forget a row that was freed."""
        self.invalidate(row)
        self.offered_blocks[row] = 0


def scores_of(state: EngineState) -> EvictionScores:
    """Return the scores of an engine that evicts tokens."""
    assert state.scores is not None, "token eviction is off"
    return state.scores


def measure(state: EngineState, order: Ints) -> None:
    """Write what each of these rows could give up to `firsts` and `evictable`."""
    scores, rows = scores_of(state), state.rows
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
    """Count the blocks of entries that each row of `order` could give up; 0 while it is a prompt.

    Shared blocks stay, and so do the first `sinks` entries, the last `recent` ones, and
    `min_entries` in all. Tables are searched from the end for the last shared block.

    Args:
        order, columns, tables, block_size: the rows.
        sinks, recent, min_entries: entries that stay.
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


def evictable_rows(state: EngineState, order: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first entry that may go, blocks) of the rows that could give up some.

    A prompt that another worker will pull is not touched.
    """
    scores = scores_of(state)
    for i in np.flatnonzero(scores.evictable[: len(order)]).tolist():
        row = int(order[i])
        seq = state.rows.owner[row]
        if seq is not None and not seq.request.hold:
            yield row, int(scores.firsts[i]), int(scores.evictable[i])


def rows_to_score(state: EngineState, needs: int) -> Ints:
    """Return (row, first entry that may go, blocks) of the rows to score, shape (k, 3).

    Rows are scored that were compacted since, or not scored for an interval. They are scored once
    fewer blocks are free than rows run, while a sequence waits for blocks, and while there is a
    price to go by.
    """
    scores, rows = scores_of(state), state.rows
    order = state.running
    low = state.pool.free - needs < len(order) or (state.blocked is not None and rows.free > 0)
    priced = scores.memory_price.by_price and scores.memory_price.price > FLOOR
    if not len(order) or not (low or priced):
        return _NO_ROWS
    at = scores.scored_at[order]
    order = order[(at < 0) | (rows.computed[order] - at >= scores.config.interval)]
    measure(state, order)
    to_score = list(evictable_rows(state, order))
    if state.offload is not None:
        for row, _, _ in to_score:
            _offer_to_tiers(state, row)
    return np.array(to_score, dtype=np.int32).reshape(-1, 3)


def _offer_to_tiers(state: EngineState, row: int) -> None:
    """Offer a row's blocks to the tiers while they are whole, each once."""
    scores, seq, cached = scores_of(state), state.rows.owner[row], int(state.rows.cached[row])
    if state.offload is not None and seq is not None and cached > scores.offered_blocks[row]:
        scores.offered_blocks[row] = cached
        state.offload.sequence_left(seq, cached)


def take_scores(state: EngineState, result: Result) -> None:
    """Take the scores of a result in, and move the price on."""
    scores, rows = scores_of(state), state.rows
    for row, lost_returns in result.lost_returns.items():
        if rows.owner[row] is not None:
            scores.keep(
                row, int(rows.computed[row]), lost_returns, result.regained_returns.get(row)
            )
            state.blocked = None  # it may fit now
    used = state.config.blocks - state.pool.free + scores.wanted
    scores.memory_price.step(used, result.steps, growth_blocks(state) * len(state.running))


def growth_blocks(state: EngineState) -> float:
    """Return the blocks that a row grows by until it is scored again."""
    return scores_of(state).config.interval / state.config.block_size


def check_scores(plan: Plan, result: Result) -> None:
    """Refuse scores that the plan did not ask for, and curves of a wrong shape.

    Raises:
        ValueError: names the row.
    """
    scored = {row for row, _, _ in plan.to_score.tolist()}
    for name, curves, sign in (
        ("losses", result.lost_returns, 1),
        ("gains", result.regained_returns, -1),
    ):
        for row, curve in curves.items():
            if row not in scored:
                raise ValueError(f"{name} of row {row}, which the plan does not ask for")
            if not np.isfinite(curve).all() or (sign * np.diff(curve) < 0).any():
                order = "ascending" if sign > 0 else "descending"
                raise ValueError(f"{name} of row {row} must be finite and {order}")
