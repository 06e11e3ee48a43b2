"""Preemption: takes a running sequence's row; its KV is recomputed or swapped."""

from __future__ import annotations

import numpy as np

from pigou.engine.admission import fits
from pigou.engine.plan import Rates
from pigou.engine.quotas import TenantQuotas
from pigou.engine.schedule_builder import ScheduleBuilder, pairs
from pigou.engine.sequence import Sequence, order_key
from pigou.engine.state import EngineState
from pigou.request import SECOND

#: Minimum of tokens for a step to measure the speed of prefill.
_MIN_TOKENS = 32
#: Weight of the newest step in the mean speed.
_NEW = 0.1


def is_swap_cheaper(
    tokens: int, blocks: int, rates: Rates, hit_tokens: int = 0, hit_blocks: int = 0
) -> bool:
    """True if swapping `blocks` out and in takes less time than to recompute `tokens`.

    Hits are expected in the cache, so they are neither swapped in nor recomputed. Ties recompute,
    which needs no host memory.
    """
    again_s = (tokens - hit_tokens) / rates.prefill
    return (2 * blocks - hit_blocks) * rates.block_bytes / rates.swap < again_s


class RateMeter:
    """Measures the speed of prefill; the speed of swapping is measured once."""

    def __init__(self, swap: float, block_bytes: int) -> None:
        self._swap = swap
        self._block_bytes = block_bytes
        self._prefill = 0.0

    def observe(self, tokens: int, duration: int) -> Rates | None:
        """Record a step of `tokens` in `duration` nanoseconds; return new rates, if any."""
        if tokens < _MIN_TOKENS or duration <= 0:
            return None
        rate = tokens * SECOND / duration
        self._prefill += (rate - self._prefill) * (_NEW if self._prefill else 1.0)
        return Rates(self._prefill, self._swap, self._block_bytes)


def preempt_last(state: EngineState, builder: ScheduleBuilder) -> None:
    """Preempt the running sequence that is last in queue order."""
    owners = (state.rows.owner[row] for row in state.running.tolist())
    running = [seq for seq in owners if seq is not None]
    if state.lane is not None:
        running = state.lane.victims(running, state.rows.blocks)
    if state.quotas is not None:
        running = state.quotas.victims(running)
    last = max(running, key=lambda seq: seq.key)
    _preempt(state, builder, last)


def reclaim(state: EngineState, builder: ScheduleBuilder, quotas: TenantQuotas) -> None:
    """Preempt for a waiting sequence within its tenant's floor that did not fit."""
    seq = quotas.entitled(state.queue)
    if seq is None:
        return
    seq.was_owed = True
    while not fits(state, seq):
        owners = [state.rows.owner[row] for row in state.running.tolist()]
        above = quotas.above_floors([owner for owner in owners if owner is not None])
        above = [s for s in above if s.request.tenant != seq.request.tenant]
        if not above:
            return
        _preempt(state, builder, max(quotas.victims(above), key=lambda s: s.key))
        quotas.owed = seq


def _preempt(state: EngineState, builder: ScheduleBuilder, seq: Sequence) -> None:
    """Free a sequence's row; swap its KV to the host if that is cheaper."""
    row = seq.row
    computed, dropped = int(state.rows.computed[row]), int(state.rows.dropped[row])
    used = -(-(computed - dropped) // state.config.block_size)
    seq.dropped = 0
    if _swaps(state, seq, computed, used):
        seq.host_blocks = state.host.allocate(used)
        seq.computed, seq.dropped = computed, dropped
        builder.swap_out.append(pairs(state.rows.tables[row, :used], seq.host_blocks))
        state.stats.swaps += 1
    else:
        builder.evictions.pop(row, None)
    state.free_row(seq)
    state.stop(seq)
    seq.requeue()
    if state.config.order == "shortest":
        generated = seq.length - seq.request.prompt
        held = seq.computed if len(seq.host_blocks) else state.cached_tokens(seq.hashes)
        seq.key = order_key(seq.request, state.config, seq.key[2], generated, held)
    state.queue.push(seq)
    state.stats.preemptions += 1
    builder.preempted.append(seq.request.id)


def _swaps(state: EngineState, seq: Sequence, computed: int, used: int) -> bool:
    """True if swapping beats recomputing, counting surviving prefix hits."""
    if state.rows.dropped[seq.row]:
        return 0 < used <= state.host.free
    if state.rates is None or not 0 < used <= state.host.free:
        return False
    size = state.config.block_size
    cached = min(int(state.rows.cached[seq.row]), computed // size)
    shared = state.prefix.match(seq.hashes, cached).blocks
    unshared = np.flatnonzero(state.pool.refs(shared) < 2)
    hits = int(unshared[0]) if len(unshared) else len(shared)
    return is_swap_cheaper(computed, used, state.rates, hits * size, hits)
