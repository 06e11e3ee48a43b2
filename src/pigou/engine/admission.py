"""Whether a waiting sequence fits, and how it takes its row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pigou.engine.draft import Draft, pairs
from pigou.engine.eviction import make_room
from pigou.engine.plan import Load, Started
from pigou.engine.sequence import NO_BLOCKS, Sequence, State
from pigou.engine.state import EngineState
from pigou.request import Ints


class Fit(NamedTuple):
    """Where a sequence's blocks come from.

    Attributes:
        shared: cached blocks that it will refer to, shape (n,).
        source: cached block that is copied to the one after those, -1 for none.
        total: blocks in all; the rest is new.
        computed: tokens whose KV is thereby there.
    """

    shared: Ints
    source: int
    total: int
    computed: int


def admit(state: EngineState, seq: Sequence, draft: Draft) -> bool:
    """Give the head of the queue a row, blocks for all tokens it has, and work to do.

    All blocks are taken at once, and `headroom` are left for each row in use, so that admitting
    does not make those preempt one another. When no row is in use and nothing is held, every
    request that `EngineCore.add` let in fits. Where too few blocks are free, running rows may give
    up entries.

    Returns:
        False when too few blocks are to be had; nothing has changed then, but what rows gave up.
    """
    fit = _fit(state, seq, state.pool.free - state.config.headroom * state.rows.used)
    if fit is None and state.appraisals is not None:
        fit = _squeeze(state, seq, draft)
    new = _new_blocks(state, seq, draft, fit) if fit is not None else None
    if fit is None or new is None:
        return False
    state.queue.pop()
    shared = len(fit.shared)
    row = state.rows.occupy(seq, fit.computed, fit.total, shared)
    table = state.rows.tables[row]
    if shared:
        state.pool.take(fit.shared, table[:shared])
    if fit.source >= 0:
        _refer(state, seq, fit.source)
    if len(new):
        table[shared : fit.total] = new
        state.removed(state.pool.claim(new))
    else:
        state.removed(state.pool.allocate(table[shared : fit.total]))
    if fit.source >= 0:
        draft.copies.append(np.array([[fit.source, table[shared]]], dtype=np.int32))
    if len(seq.host):
        _swap_in(state, seq, shared, draft)
    if seq.cached < 0:
        state.counters.queries += seq.request.prompt if state.config.prefix_caching else 0
        state.counters.hits += fit.computed
        seq.cached = fit.computed
    if seq.offer and _load(state, seq, shared, draft):
        return True
    if fit.source < 0 and _restore(state, seq, shared, draft):
        return True
    computed = state.rows.computed.item(row)
    state.run(seq)
    draft.started.append(Started(seq.request.id, row, computed))
    draft.compute(seq, seq.length - computed)
    return True


def fits_beside(state: EngineState, seq: Sequence) -> bool:
    """Whether a waiting sequence will be admitted, and compute, though each row grew by a block."""
    if seq.offer or not state.rows.free:
        return False
    spare = state.pool.free - (state.config.headroom + 1) * state.rows.used
    return _fit(state, seq, spare) is not None


def _fit(state: EngineState, seq: Sequence, spare: int) -> Fit | None:
    """Find the sequence's prefix in the cache; None when `spare` blocks are too few.

    The last token is computed in any case, for its logits. If all blocks are cached, the last
    one is copied and that one token computed in the copy, instead of the block's every token;
    where the copy does not fit, the block is computed as if it were not cached. After the
    expiry of its tenure nothing is found, nor by who gave up entries, and has the others on the
    host.
    """
    size = state.config.block_size
    total = -(-(seq.length - seq.dropped) // size)
    blocks, idle = state.prefix.match(seq.hashes, _findable(state, seq))
    hits = len(blocks)
    if hits * size < seq.length:
        fits = total - hits + idle <= spare
        return Fit(blocks, -1, total, hits * size) if fits else None
    if 1 + idle <= spare:
        return Fit(blocks[:-1], int(blocks[-1]), total, seq.length - 1)
    idle -= int(state.pool.refs(blocks[-1:])[0] == 0)
    return Fit(blocks[:-1], -1, total, (hits - 1) * size) if 1 + idle <= spare else None


def _findable(state: EngineState, seq: Sequence) -> int:
    """Return how many of a waiting sequence's blocks may be looked up."""
    if seq.dropped or seq.request.expiry <= state.unix:
        return 0
    return min(len(seq.hashes), seq.length // state.config.block_size)


def _squeeze(state: EngineState, seq: Sequence, draft: Draft) -> Fit | None:
    """Have running rows give up what a waiting sequence lacks; None where that is too little.

    What it will hit is referred to meanwhile, so that nobody gives that up.
    """
    pool, size = state.pool, state.config.block_size
    hits = state.prefix.match(seq.hashes, _findable(state, seq)).blocks.copy()
    pool.take(hits, hits)
    new = max(1, -(-(seq.length - seq.dropped) // size) - len(hits))
    reserve = state.config.headroom * state.rows.used
    done = make_room(state, draft, new - (pool.free - reserve))
    pool.release(hits, 0, len(hits), seq.hashes[:0])
    return _fit(state, seq, pool.free - reserve) if done else None


def _new_blocks(state: EngineState, seq: Sequence, draft: Draft, fit: Fit) -> Ints | None:
    """Return the blocks to be taken; none for those next in the queue; None for too few.

    Blocks that rows gave up in this plan are read until it is done, and loads begin to write at
    once: they go to nobody whose blocks are loaded.
    """
    if not draft.given or not _loads(state, seq, fit):
        return NO_BLOCKS
    count = fit.total - len(fit.shared)
    others = [given.blocks[len(given.blocks) - given.freed :] for given in draft.given.values()]
    others += [fit.shared, np.array([fit.source], dtype=np.int32)]
    taken = np.concatenate(others)
    free = state.pool.peek(min(state.pool.free, count + len(taken)))
    found = free[~np.isin(free, taken)][:count]
    return found if len(found) == count else None


def _loads(state: EngineState, seq: Sequence, fit: Fit) -> bool:
    """Whether some of a sequence's blocks will be loaded."""
    if seq.offer:
        return True
    if state.tiering is None or fit.source >= 0 or seq.dropped:
        return False
    return len(state.tiering.restorable(seq, len(fit.shared))) > 0


def _refer(state: EngineState, seq: Sequence, source: int) -> None:
    """Refer to the source of a copy until the plan is done, so that nobody writes to it."""
    block = np.array([source], dtype=np.int32)
    state.pool.take(block, block.copy())
    seq.source = source
    state.copying.append(seq)


def _swap_in(state: EngineState, seq: Sequence, shared: int, draft: Draft) -> None:
    """Bring back from the host what the cache does not have."""
    row = seq.row
    if seq.computed > state.rows.computed[row]:
        used = -(-(seq.computed - seq.dropped) // state.config.block_size)
        target = state.rows.tables[row, shared:used]
        draft.swap_in.append(pairs(seq.host[shared:used], target))
        state.rows.computed[row] = seq.computed
    state.host.release(seq.host)
    seq.host = NO_BLOCKS


def _load(state: EngineState, seq: Sequence, shared: int, draft: Draft) -> bool:
    """Ask for the offered blocks that were not hit; whether there are any."""
    last = min(seq.offer, seq.request.prompt - 1) // state.config.block_size
    seq.offer = 0
    blocks = state.rows.tables[seq.row, shared : max(last, shared)].copy()
    draft.loads.append(Load(seq.request.id, seq.row, shared, blocks))
    if not len(blocks):
        return False
    seq.state = State.LOADING
    seq.load = (shared, len(blocks))
    return True


def _restore(state: EngineState, seq: Sequence, shared: int, draft: Draft) -> bool:
    """Restore what tiers have of the blocks that were not hit; whether there are any."""
    size = state.config.block_size
    if state.tiering is None or state.rows.computed.item(seq.row) != shared * size:
        return False
    tiers = state.tiering.restorable(seq, shared)
    if not len(tiers):
        return False
    last = shared + len(tiers)
    hashes = seq.hashes[shared:last]
    blocks = state.rows.tables[seq.row, shared:last].copy()
    state.tiering.tiers.begin(seq.request.id, hashes, tiers, state.tiering.now)
    draft.loads.append(Load(seq.request.id, seq.row, shared, blocks, tiers, hashes))
    seq.state = State.LOADING
    seq.load = (shared, len(tiers))
    return True
