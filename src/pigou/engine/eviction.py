"""Which rows give up cache entries, how many, and which have some computed again.

What is shared is not touched. A copy of a shared block costs a block, and dropping all its
entries gives back that one: it never gains memory, and of the same number of blocks those that
earn least are among the row's own already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from pigou.engine.draft import Draft, Given
from pigou.engine.eviction_kernels import rooms
from pigou.engine.plan import Compaction, Plan, Result, Revival
from pigou.engine.state import EngineState
from pigou.kv.portfolio import Offer, allowances, cut, outlook
from pigou.kv.price import FLOOR, Floats, above, below
from pigou.request import Ints

_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)
_NOBODY: Ints = np.empty((0, 3), dtype=np.int32)


def begin(state: EngineState, draft: Draft) -> None:
    """Begin a plan; where the policy goes by price, give up what earns less (Token-PD, Eq. 4)."""
    found = state.appraisals
    assert found is not None
    found.wanted = 0
    price = found.portfolio.price
    if found.portfolio.by_price and price > FLOOR:
        cheap = [
            (row, first, losses[: below(losses, price)])
            for row, first, losses in _curves(state, draft, blind=False)
        ]
        _give(state, draft, cheap, 0, sum(len(losses) for _, _, losses in cheap))


def grow(state: EngineState, draft: Draft, needed: int) -> bool:
    """Give up what decodes lack for the blocks they need, and some more; False for nothing done."""
    found = state.appraisals
    assert found is not None
    short = needed - state.pool.free
    slack = math.ceil(found.config.slack * len(state.running))
    return _short(state, draft, short, short + slack, blind=True)


def make_room(state: EngineState, draft: Draft, blocks: int) -> bool:
    """Give up so many blocks for who waits; False for nothing done.

    Only rows whose entries were appraised give some up: a newcomer can wait for that.
    """
    return _short(state, draft, blocks, blocks, blind=False)


def _short(state: EngineState, draft: Draft, least: int, most: int, blind: bool) -> bool:
    found = state.appraisals
    assert found is not None
    done = _give(state, draft, _curves(state, draft, blind), least, most)
    found.wanted += least if done else 0
    return done


Curve = tuple[int, int, Floats]


def _curves(state: EngineState, draft: Draft, blind: bool) -> list[Curve]:
    """Return (row, first entry that may go, losses) of the rows that could give something up.

    Rows that were not appraised are among them where the choice may be `blind`; what they lose is
    unknown, and counts as infinite. Rows that begin with this plan are not known to its executor.
    """
    found, order = state.appraisals, state.running
    assert found is not None
    _measure(state, order)
    curves = []
    new = {started.row for started in draft.started}
    for row, first, room in _roomy(state, order):
        if row in new:
            continue
        losses, given = found.losses[row], draft.given.get(row)
        if losses is not None:
            spent = given.freed if given is not None else 0
            losses = losses[spent : spent + room]
        elif blind:
            losses = np.full(room, math.inf)
        if losses is not None and len(losses):
            curves.append((row, first, losses))
    return curves


def _measure(state: EngineState, order: Ints) -> None:
    """Write what each of these rows could give up to `firsts` and `rooms`."""
    found, rows = state.appraisals, state.rows
    assert found is not None
    config = found.config
    rooms(
        order, rows.computed, rows.length, rows.dropped, rows.tables,
        state.config.block_size, config.sinks, config.recent, config.least,
        state.pool.meta, found.firsts, found.rooms,
    )  # fmt: skip


def _roomy(state: EngineState, order: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first entry that may go, blocks) of the rows that could give up some.

    A prompt that another worker will pull is not touched.
    """
    found = state.appraisals
    assert found is not None
    for i in np.flatnonzero(found.rooms[: len(order)]).tolist():
        row = int(order[i])
        seq = state.rows.owner[row]
        if seq is not None and not seq.request.hold:
            yield row, int(found.firsts[i]), int(found.rooms[i])


def _give(state: EngineState, draft: Draft, curves: list[Curve], least: int, most: int) -> bool:
    """Give up blocks of least return, at least `least`; False where there are too few."""
    found = state.appraisals
    assert found is not None
    config = found.config
    spare = allowances(config.floors, _held(state)) if config.floors else {}
    offers = [Offer(losses, _tenant(state, row) if spare else "") for row, _, losses in curves]
    chosen = cut(offers, least, most, config.ceiling, spare)
    if chosen is None:
        return False
    for i in np.flatnonzero(chosen.counts).tolist():
        row, first, _ = curves[i]
        _shed(state, draft, row, first, int(chosen.counts[i]))
    ahead = -math.inf
    if not found.portfolio.by_price:
        ahead = outlook(offers, chosen.counts, _growth(state))
    found.portfolio.note(chosen.marginal, ahead)
    return True


def _tenant(state: EngineState, row: int) -> str:
    seq = state.rows.owner[row]
    return seq.request.tenant if seq is not None else ""


def _held(state: EngineState) -> dict[str, int]:
    """Count the blocks that each tenant's running requests have."""
    held: dict[str, int] = {}
    for row in state.running.tolist():
        tenant = _tenant(state, row)
        held[tenant] = held.get(tenant, 0) + int(state.rows.blocks[row])
    return held


def _shed(state: EngineState, draft: Draft, row: int, first: int, count: int) -> None:
    """Take a row's last `count` blocks that hold entries; those before keep what is left.

    A block that was taken for the next token moves up with it. Blocks from `first` on lose their
    hashes, for they will hold something else.
    """
    rows, size = state.rows, state.config.block_size
    table, blocks, computed = rows.tables[row], int(rows.blocks[row]), int(rows.computed[row])
    entries = computed - int(rows.dropped[row])
    held = -(-entries // size)
    given = draft.given.get(row)
    if given is None:
        given = draft.given[row] = Given(entries, first, table[:held].copy())
    given.freed += count
    state.removed(state.pool.forget(table, first // size, held))
    freed = table[held - count : held].copy()
    table[held - count : blocks - count] = table[held:blocks].copy()
    rows.blocks[row] = blocks - count
    rows.dropped[row] += count * size
    rows.compacted[row] = computed
    rows.known[row] = 0
    rows.sealed[row] = min(int(rows.sealed[row]), first // size)
    state.counters.given += count * size
    state.free_blocks(freed)


def revive(state: EngineState, draft: Draft) -> None:
    """Where the policy goes by price, have entries computed again that earn more than it.

    Only while blocks are free beyond one for each running row, in a plan that takes none from
    anybody, and as far as its budget of tokens goes.
    """
    found, rows, size = state.appraisals, state.rows, state.config.block_size
    assert found is not None
    if not found.portfolio.by_price or draft.given or draft.preempted or state.blocked is not None:
        return
    most = min(state.pool.free - len(state.running), draft.budget // size)
    worth: list[tuple[int, Floats]] = []
    for row in state.running.tolist() if most > 0 else ():
        gains = found.gains[row]
        if gains is None or rows.length[row] - rows.computed[row] != 1:
            continue
        count = min(above(gains, found.portfolio.price), int(rows.dropped[row]) // size)
        worth.append((row, gains[:count]))
    chosen = cut([Offer(-gains) for _, gains in worth], 0, most)
    assert chosen is not None, "none are needed"
    for (row, _), count in zip(worth, chosen.counts.tolist(), strict=True):
        if count:
            _restore(state, draft, row, count)


def _restore(state: EngineState, draft: Draft, row: int, count: int) -> None:
    """Give a row blocks for `count` blocks of tokens, which are computed again."""
    found, rows, size = state.appraisals, state.rows, state.config.block_size
    assert found is not None
    table, blocks = rows.tables[row], int(rows.blocks[row])
    entries = int(rows.computed[row]) - int(rows.dropped[row])
    state.removed(state.pool.allocate(table[blocks : blocks + count]))
    rows.blocks[row] = blocks + count
    rows.dropped[row] -= count * size
    rows.compacted[row] = rows.computed[row]
    held = -(-(entries + count * size) // size)
    draft.revivals.append(Revival(row, entries, count * size, table[:held].copy()))
    draft.budget -= count * size
    state.counters.revived += count * size
    found.spend(row)


def conclude(state: EngineState, draft: Draft, plan: Plan, needs: int) -> None:
    """Write into a plan what is given up, computed again, and to be appraised.

    Args:
        state: of the engine.
        draft: of the plan.
        plan: takes them.
        needs: free blocks that later steps of the plan write to.
    """
    found, size = state.appraisals, state.config.block_size
    assert found is not None
    for row, given in draft.given.items():
        drop = given.freed * size
        plan.compactions.append(
            Compaction(row, given.entries, given.first, drop, _NO_PAIRS, given.blocks)
        )
        found.spend(row)
    if draft.given:
        state.blocked = None  # who was not let in beside them, for it is loaded, may be now
    plan.revivals = draft.revivals
    plan.appraised = _asked(state, needs)


def _asked(state: EngineState, needs: int) -> Ints:
    """Return (row, first, most) of the rows to appraise, shape (k, 3).

    Asked are rows that were compacted since, or not appraised for an interval, once fewer blocks
    are free than rows run, or somebody waits for blocks; by price, while there is a price.
    """
    found, rows = state.appraisals, state.rows
    assert found is not None
    order = state.running
    low = state.pool.free - needs < len(order) or (state.blocked is not None and rows.free > 0)
    priced = found.portfolio.by_price and found.portfolio.price > FLOOR
    if not len(order) or not (low or priced):
        return _NOBODY
    at = found.at[order]
    order = order[(at < 0) | (rows.computed[order] - at >= found.config.interval)]
    _measure(state, order)
    asked = list(_roomy(state, order))
    if state.tiering is not None:
        for row, _, _ in asked:
            _offer(state, row)
    return np.array(asked, dtype=np.int32).reshape(-1, 3)


def _offer(state: EngineState, row: int) -> None:
    """Offer a row's blocks to the tiers while they are whole, each once."""
    found, seq, sealed = state.appraisals, state.rows.owner[row], int(state.rows.sealed[row])
    assert found is not None
    if state.tiering is not None and seq is not None and sealed > found.offered[row]:
        found.offered[row] = sealed
        state.tiering.leave(seq, sealed)


def settle(state: EngineState, result: Result) -> None:
    """Take in what rows are worth, and move the price on."""
    found, rows = state.appraisals, state.rows
    assert found is not None
    for row, losses in result.losses.items():
        if rows.owner[row] is not None:
            found.keep(row, int(rows.computed[row]), losses, result.gains.get(row))
            state.blocked = None  # it may fit now
    used = state.config.blocks - state.pool.free + found.wanted
    found.portfolio.step(used, result.steps, _growth(state) * len(state.running))


def _growth(state: EngineState) -> float:
    """Return the blocks that a row grows by until its curve is renewed."""
    assert state.appraisals is not None
    return state.appraisals.config.interval / state.config.block_size


def refuse(plan: Plan, result: Result) -> None:
    """Refuse appraisals that no plan asked for, and curves that are none.

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
