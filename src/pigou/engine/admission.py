"""Admission of waiting sequences to rows of the batch, and pins of cached prefixes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pigou.engine.checks import UnknownLoad
from pigou.engine.chunked_prefill import add_chunk
from pigou.engine.plan import Load, Started
from pigou.engine.schedule_builder import ScheduleBuilder, pairs
from pigou.engine.sequence import NO_BLOCKS, Sequence, SequenceState, leading_hashes
from pigou.engine.state import EngineState, PinnedBlocks
from pigou.engine.token_eviction import evict_for_admission
from pigou.request import Ints, Request


class Fit(NamedTuple):
    """Blocks of a sequence to be admitted."""

    shared: Ints  # cached blocks, shape (n,)
    source: int  # cached block to copy to the next one, -1 for none
    total: int  # blocks, new ones included
    computed: int  # tokens in the cached blocks


def admit(state: EngineState, seq: Sequence, builder: ScheduleBuilder) -> bool:
    """Admit the head of the queue: give it a row, all blocks for its tokens, and work.

    Leaves `headroom` blocks per row, to avoid preemptions; may evict entries of other rows. Returns
    False, with no other change, if too few blocks can be had.
    """
    own = state.account(seq.request.tenant)
    spare = state.available(own) - state.config.headroom * state.rows.used
    if state.lane is not None:
        spare -= state.lane.reserve(seq, state.config.block_size, state.rows.blocks, state.queue)
    fit = _fit(state, seq, spare)
    if fit is None and state.scores is not None:
        fit = _fit_by_eviction(state, seq, builder)
    new = _new_blocks(state, seq, builder, fit) if fit is not None else None
    if fit is None or new is None:
        return False
    state.queue.pop(seq)
    shared = len(fit.shared)
    row = state.rows.take_slot(seq, fit.computed, fit.total, shared)
    state.rows.account[row] = own
    state.note_row(seq)
    table = state.rows.tables[row]
    if shared:
        state.pool.take(fit.shared, table[:shared])
    if fit.source >= 0:
        _pin_copy_source(state, seq, fit.source)
    if len(new):
        table[shared : fit.total] = new
        state.note_removed(state.pool.claim(new))
    else:
        state.note_removed(state.pool.allocate(table[shared : fit.total], own))
    if fit.source >= 0:
        builder.copies.append(np.array([[fit.source, table[shared]]], dtype=np.int32))
    if len(seq.host_blocks):
        _swap_in(state, seq, shared, builder)
    if seq.cached_tokens < 0:
        state.stats.queried_tokens += seq.request.prompt if state.config.prefix_caching else 0
        state.stats.hit_tokens += fit.computed
        seq.cached_tokens = fit.computed
    if seq.remote_tokens and _load_remote(state, seq, shared, builder):
        return True
    if fit.source < 0 and _load_from_tiers(state, seq, shared, builder):
        return True
    computed = state.rows.computed.item(row)
    state.start(seq)
    builder.started.append(Started(seq.request.id, row, computed))
    add_chunk(builder, seq, seq.length - computed)
    return True


def fits_with_growth(state: EngineState, seq: Sequence) -> bool:
    """True if a waiting sequence fits and will compute even if each row grows by a block."""
    return not seq.remote_tokens and bool(state.rows.free) and fits(state, seq, growth=1)


def fits(state: EngineState, seq: Sequence, growth: int = 0) -> bool:
    """True if a waiting sequence fits beside rows that grow by `growth` blocks."""
    available = state.available(state.account(seq.request.tenant))
    spare = available - (state.config.headroom + growth) * state.rows.used
    return _fit(state, seq, spare) is not None


def _fit(state: EngineState, seq: Sequence, spare: int) -> Fit | None:
    size = state.config.block_size
    total = -(-(seq.length - seq.dropped) // size)
    blocks, idle = state.prefix.match(seq.hashes, _lookup_limit(state, seq))
    hits = len(blocks)
    if hits * size < seq.length:
        fits = total - hits + idle <= spare
        return Fit(blocks, -1, total, hits * size) if fits else None
    if 1 + idle <= spare:
        return Fit(blocks[:-1], int(blocks[-1]), total, seq.length - 1)
    idle -= int(state.pool.refs(blocks[-1:])[0] == 0)
    return Fit(blocks[:-1], -1, total, (hits - 1) * size) if 1 + idle <= spare else None


def _lookup_limit(state: EngineState, seq: Sequence) -> int:
    if seq.dropped or seq.request.expiry <= state.unix_ns:
        return 0
    return min(len(seq.hashes), seq.length // state.config.block_size)


def _fit_by_eviction(state: EngineState, seq: Sequence, builder: ScheduleBuilder) -> Fit | None:
    pool, size = state.pool, state.config.block_size
    hits = state.prefix.match(seq.hashes, _lookup_limit(state, seq)).blocks.copy()
    pool.take(hits, hits)
    new = max(1, -(-(seq.length - seq.dropped) // size) - len(hits))
    reserve = state.config.headroom * state.rows.used
    done = evict_for_admission(state, builder, new - (pool.free - reserve))
    pool.release(hits, 0, len(hits), seq.hashes[:0])
    return _fit(state, seq, pool.free - reserve) if done else None


def _new_blocks(
    state: EngineState, seq: Sequence, builder: ScheduleBuilder, fit: Fit
) -> Ints | None:
    """Return blocks to claim; empty to take the next in the queue; None for too few."""
    if not builder.evictions or not _is_loaded(state, seq, fit):
        return NO_BLOCKS
    count = fit.total - len(fit.shared)
    evictions = builder.evictions.values()
    others = [gone.blocks[len(gone.blocks) - gone.freed :] for gone in evictions]
    others += [fit.shared, np.array([fit.source], dtype=np.int32)]
    taken = np.concatenate(others)
    free = state.pool.peek(min(state.pool.free, count + len(taken)))
    blocks = free[~np.isin(free, taken)][:count]
    return blocks if len(blocks) == count else None


def _is_loaded(state: EngineState, seq: Sequence, fit: Fit) -> bool:
    if seq.remote_tokens:
        return True
    if state.offload is None or fit.source >= 0 or seq.dropped:
        return False
    return len(state.offload.restorable(seq, len(fit.shared))) > 0


def _pin_copy_source(state: EngineState, seq: Sequence, source: int) -> None:
    """Pin the source of a copy until the plan is applied."""
    block = np.array([source], dtype=np.int32)
    state.pool.take(block, block.copy())
    seq.copy_source = source
    state.copying.append(seq)


def _swap_in(state: EngineState, seq: Sequence, shared: int, builder: ScheduleBuilder) -> None:
    """Swap in the blocks that are not cached."""
    row = seq.row
    if seq.computed > state.rows.computed[row]:
        used = -(-(seq.computed - seq.dropped) // state.config.block_size)
        target = state.rows.tables[row, shared:used]
        builder.swap_in.append(pairs(seq.host_blocks[shared:used], target))
        state.rows.computed[row] = seq.computed
    state.host.release(seq.host_blocks)
    seq.host_blocks = NO_BLOCKS


def _load_remote(state: EngineState, seq: Sequence, shared: int, builder: ScheduleBuilder) -> bool:
    """Load blocks offered by another worker that were not hit; False for none."""
    last = min(seq.remote_tokens, seq.request.prompt - 1) // state.config.block_size
    seq.remote_tokens = 0
    blocks = state.rows.tables[seq.row, shared : max(last, shared)].copy()
    builder.loads.append(Load(seq.request.id, seq.row, shared, blocks))
    if not len(blocks):
        return False
    seq.state = SequenceState.LOADING
    seq.load = (shared, len(blocks))
    return True


def _load_from_tiers(
    state: EngineState, seq: Sequence, shared: int, builder: ScheduleBuilder
) -> bool:
    """Load blocks from tiers that were not hit; False for none."""
    size = state.config.block_size
    if state.offload is None or state.rows.computed.item(seq.row) != shared * size:
        return False
    tiers = state.offload.restorable(seq, shared)
    if not len(tiers):
        return False
    last = shared + len(tiers)
    hashes = seq.hashes[shared:last]
    blocks = state.rows.tables[seq.row, shared:last].copy()
    state.offload.tiers.begin_load(seq.request.id, hashes, tiers, state.offload.now)
    builder.loads.append(Load(seq.request.id, seq.row, shared, blocks, tiers, hashes))
    seq.state = SequenceState.LOADING
    seq.load = (shared, len(tiers))
    return True


def finish_load(state: EngineState, request: str, tokens: int, failed: bool) -> None:
    """Start a request whose load ended with `tokens` arrived; raises UnknownLoad or ValueError."""
    size = state.config.block_size
    if state.offload is not None:
        state.offload.on_load_done(request, tokens // size, failed)
        if state.cache_prefetched(request, tokens // size):
            return
    if request in state.draining:
        state.free_pinned(state.draining.pop(request))
        return
    seq = state.sequences.get(request)
    if seq is None or seq.state is not SequenceState.LOADING:
        raise UnknownLoad(f"request {request!r} has no load under way")
    first, blocks = seq.load
    if not 0 <= tokens <= blocks * size:
        raise ValueError(f"{tokens} tokens were loaded; it must be 0 to {blocks * size}")
    computed = first * size + tokens
    state.rows.computed[seq.row] = computed
    if not seq.preemptions:
        seq.cached_tokens = computed
    state.start(seq)
    state.starting.append(Started(request, seq.row, computed))
    full = min(computed // size, len(seq.hashes))
    if full > state.rows.cached[seq.row]:
        state.cache_full_blocks(seq, full)


def pin_cached(state: EngineState, request: Request, lookahead: Ints) -> Ints:
    """Pin the longest cached prefix of a prompt for another worker; return its blocks, (pinned,).

    Takes at most half of the spare idle blocks, and none while the head of the queue waits.
    `lookahead` has free blocks reserved for later steps of the current plan, shape (n,).
    """
    config = state.config
    hashes = leading_hashes(request.hashes, request.prompt // config.block_size)
    limit = 0 if request.expiry <= state.unix_ns or not config.prefix_caching else len(hashes)
    blocks = state.prefix.match(hashes, limit).blocks
    written = np.isin(blocks, lookahead)
    if written.any():  # it is not what its hash says until then
        blocks = blocks[: int(written.argmax())]
    idle = (state.pool.refs(blocks) == 0).cumsum()
    room = _pin_room(state, len(lookahead))
    blocks = blocks[: int(idle.searchsorted(room, side="right"))]
    if not len(blocks):
        return NO_BLOCKS
    pinned = np.empty(len(blocks), dtype=np.int32)
    state.pool.take(blocks, pinned)
    state.pinned[request.id] = PinnedBlocks(
        pinned, hashes[: len(pinned)].copy(), False, state.unix_ns, request.tenant
    )
    return pinned


def _pin_room(state: EngineState, lookahead: int) -> int:
    if state.blocked is not None:
        return 0
    spare = state.pool.free - lookahead - (state.config.headroom + 1) * state.rows.used
    return max(0, spare) // 2
