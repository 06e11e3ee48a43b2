"""EngineCore: schedules what one worker computes next."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import msgspec

from pigou.config import EngineConfig, KVQuota
from pigou.engine.admission import finish_load, pin_cached
from pigou.engine.checks import (
    DuplicateRequest,
    OutOfTurn,
    QueueFull,
    RequestTooLarge,
    check_hashes,
    check_id,
    check_request,
    check_result,
    check_state,
)
from pigou.engine.lanes import LONG, SHORT
from pigou.engine.output_processing import OutputProcessor, truncate
from pigou.engine.plan import Effects, Plan, Rates, Result
from pigou.engine.schedule_builder import NO_LOOKAHEAD
from pigou.engine.scheduler import Scheduler
from pigou.engine.sequence import Sequence, SequenceState, leading_hashes, order_key
from pigou.engine.speculation import DraftPricer, add_drafts
from pigou.engine.state import EngineState, PinnedBlocks
from pigou.engine.token_eviction import check_scores
from pigou.kv.tiers import Tiers
from pigou.request import NEVER, AllBlocksCleared, FinishReason, Ints, Request, no_hashes


class EngineCore:
    """Continuous batching over paged, shared blocks; a state machine without a clock.

    `schedule` and `apply` alternate; other calls may come at any time. `tables` has the block ids
    of rows, (max_seqs, blocks of the longest sequence), valid from `schedule` to `apply`.

    Example:
        core.add(Request("a", prompt=700, max_tokens=64, hashes=hashes))
        plan = core.schedule(now)                             # what to compute, for some steps
        effects = core.apply(plan, executor.execute(plan))    # tokens, ended requests, KV events
    """

    def __init__(self, config: EngineConfig, epoch: int = 0, tiers: Tiers | None = None) -> None:
        if tiers is not None and not config.prefix_caching:
            raise ValueError("prefix_caching is off, and tiers are given; they hold cached blocks")
        self.config = config
        self.tiers = tiers
        self._epoch = epoch
        self._state = EngineState(config, tiers)
        self._scheduler = Scheduler(self._state)
        self._output = OutputProcessor(self._state)
        self._plan: Plan | None = None
        self._ahead = NO_LOOKAHEAD
        self._number = 0
        self.rows, self.tables = self._state.rows, self._state.rows.tables
        self.stats = self._state.stats
        #: Prices of draft tokens; None without speculation.
        self.drafts: DraftPricer | None = None
        if config.num_speculative_tokens:
            self.drafts = DraftPricer(config.max_seqs, config.num_speculative_tokens)

    # --- calls ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; raises the errors of `check_request`."""
        state = self._state
        check_request(state, request)
        seq = state.sequences[request.id] = self._queued(request)
        self._number += 1
        state.ranked |= request.priority != 0 and self.config.order == "priority"
        state.queue.push(seq)
        if state.offload is not None:
            state.offload.returns.on_request(seq.hashes, request.arrival + self._epoch)

    def set_limits(self, max_seqs: int, max_batched_tokens: int) -> Effects:
        """Limit running sequences and batched tokens from the next plan on, up to `config`."""
        self._state.set_limits(max_seqs, max_batched_tokens)
        return self._state.flush(Effects())

    def set_quotas(self, quotas: Mapping[str, KVQuota]) -> None:
        """Replace the quotas of KV blocks by tenant; raises ConfigError."""
        self._state.set_quotas(quotas)

    def would_wait(self, request: Request) -> bool:
        """True if `add` would accept a request and queue it behind another of its lane."""
        lane = self.config.lane
        other = -1 if lane is None else SHORT if lane.is_long(request.prompt) else LONG
        head = self._state.queue.head(skip=other)
        if head is None:
            return False
        try:
            check_request(self._state, request)
        except (ValueError, RequestTooLarge, DuplicateRequest, QueueFull):
            return False
        return not self.config.max_waiting and self._queued(request).key > head.key

    def _queued(self, request: Request) -> Sequence:
        """Return a request's sequence, with its place in the order."""
        state, hashes, computed = self._state, no_hashes(), 0
        if self.config.prefix_caching:
            hashes = leading_hashes(request.hashes, request.prompt // self.config.block_size)
        if state.lengths is not None:
            if not request.expected:
                expected = max(1, round(state.lengths.predict(request).rank))
                request = msgspec.structs.replace(request, expected=expected)
            computed = max(request.remote, state.cached_tokens(hashes))
        key = order_key(request, self.config, self._number, computed=computed)
        return Sequence(request, key, hashes)

    def abort(self, request: str, *, turn_ended: bool = False) -> Effects:
        """End a request or release its pins; blocks under load stay in use until `loaded`.

        `turn_ended`: its text ended it, and its session may return.
        """
        state = self._state
        seq = state.sequences.pop(request, None)
        if seq is None:
            return self.release(request)
        if seq.state is SequenceState.WAITING:
            state.queue.remove(seq)
            state.forget(seq)
            if state.adapters is not None:
                state.adapters.assign()
        elif seq.state is SequenceState.LOADING:
            blocks = state.rows.blocks.item(seq.row)
            state.draining[request] = state.pin_row(seq, blocks)
            state.free_slot(seq)
        else:
            state.starting = [s for s in state.starting if s.request != request]
            if turn_ended and state.offload is not None:
                state.offload.session_left(seq, state.rows.cached.item(seq.row))
            state.free_row(seq)
            state.stop(seq)
        return state.flush(Effects(finished=[state.finished(seq, FinishReason.ABORT)]))

    def schedule(self, now: int, horizon: int = NEVER, drafts: Ints | None = None) -> Plan:
        """Plan steps from `now` (ns), none from `horizon` on but the first; raises OutOfTurn.

        `drafts` (max_seqs,) has the draft tokens that each row offers to verify, if any.
        """
        if self._plan is not None:
            raise OutOfTurn("apply the last plan before the next is scheduled")
        self._state.unix_ns = now + self._epoch
        self._state.free_trees(self._state.tenures.expire(self._state.unix_ns))
        offload = self._state.offload
        if offload is not None:
            offload.offer_pending(self._state.unix_ns)
        plan, self._ahead = self._scheduler.schedule(now, horizon)
        if self._state.adapters is not None:
            plan.adapters, self._state.adapters.loads = self._state.adapters.loads, []
        if self.drafts is not None and add_drafts(self._state, self.drafts, plan, drafts):
            self._ahead = NO_LOOKAHEAD
        if offload is not None:
            plan.loads += offload.take_loads()
            plan.moves = offload.tiers.drain()
        self._plan = plan if len(plan.rows) else None
        return plan

    def apply(self, plan: Plan, result: Result) -> Effects:
        """Apply a plan's result; raises OutOfTurn for another plan, ValueError for a bad result."""
        if plan is not self._plan:
            if not plan and self._plan is None:
                return self._state.flush(Effects())
            raise OutOfTurn("this is not the plan that was scheduled last")
        check_result(plan, result)
        if result.lost_returns or result.regained_returns:
            check_scores(plan, result)
        self._plan = None
        ahead, self._ahead = self._ahead, NO_LOOKAHEAD
        if self.drafts is not None:
            self.drafts.observe(plan, result)
            if len(plan.drafts):
                return self._output.process_drafts(plan, result)
        return self._output.process(plan, ahead, result)

    def loaded(self, request: str, tokens: int, failed: bool = False) -> Effects:
        """End a load, also of an aborted request, with `tokens` arrived; the rest is computed.

        If it `failed`, the rest may still be in its tier. Raises UnknownLoad, or ValueError for a
        bad number of tokens.
        """
        finish_load(self._state, request, int(tokens), failed)
        return self._state.flush(Effects())

    def adapter_loaded(self, adapter: str, good: bool = True, seconds: float = 0.0) -> Effects:
        """End a plan's `AdapterLoad`; requests that wait for one which failed end with an error."""
        state = self._state
        assert state.adapters is not None, "without slots nothing is loaded"
        ended = Effects()
        for seq in [] if good else [s for s in state.queue if s.request.model == adapter]:
            del state.sequences[seq.request.id]
            state.queue.remove(seq)
            state.forget(seq)
            ended.finished.append(state.finished(seq, FinishReason.ERROR))
        state.adapters.loaded(adapter, good, seconds)
        state.queue.unpark(adapter)
        return state.flush(ended)

    def on_transfer_done(self, move: int, good: Items[bool]) -> Effects:
        """End a plan's move; `good` says which blocks arrived. Raises ValueError if unknown."""
        state = self._state
        assert state.offload is not None, "without tiers nothing moves"
        copy = state.offload.on_transfer_done(move, good)
        if copy is not None and copy.evict_next:
            state.free_chain(copy.table)
        elif copy is not None:
            state.free_blocks(copy.table)
        return state.flush(Effects())

    @property
    def next_return(self) -> int | None:
        """When to call `recall`, in nanoseconds of the caller's clock; None for never."""
        offload = self._state.offload
        due = offload.returns.next() if offload is not None else None
        return None if due is None else due - self._epoch

    def recall(self, now: int) -> Effects:
        """Prefetch blocks of due sessions from tiers; the next plan has the loads."""
        self._state.unix_ns = now + self._epoch
        self._state.prefetch_returning()
        return self._state.flush(Effects())

    def hold_cached(self, request: Request, now: int) -> Ints:
        """Pin a prompt's cached prefix for another worker until `release`; return its blocks, (n,).

        Pins at most half of the spare blocks. Raises ValueError or DuplicateRequest.
        """
        check_hashes(request)
        check_id(self._state, request)
        self._state.unix_ns = now + self._epoch
        return pin_cached(self._state, request, self._ahead.blocks)

    def release(self, request: str) -> Effects:
        """Free the blocks pinned for a request, if any."""
        state = self._state
        pinned = state.pinned.pop(request, None)
        if pinned is not None:
            state.free_pinned(pinned)
        return state.flush(Effects())

    def truncate(self, request: str, tokens: int) -> Effects:
        """Remove the last tokens of a decoding request, and free their blocks.

        Raises OutOfTurn during a plan; ValueError, with no change, if too few tokens were
        generated, entries were evicted, or a block is shared.
        """
        if self._plan is not None:
            raise OutOfTurn("apply the plan under way before tokens are taken back")
        seq = self._state.sequences.get(request)
        if seq is None:
            raise ValueError(f"no request {request!r} is in flight")
        truncate(self._state, seq, tokens)
        return self._state.flush(Effects())

    def clear_cache(self, salts: Items[str] | None = None) -> Effects:
        """Clear the prefix cache in all tiers; running requests continue.

        With `salts`, end these tenures: what they cached goes first, and what runs once it ends.
        """
        if salts is not None:
            self._state.free_trees(self._state.tenures.end(salts))
            return self._state.flush(Effects())
        self._state.prefix.clear()
        if self._state.offload is not None:
            self._state.offload.clear()
        self._state.note(AllBlocksCleared())
        return self._state.flush(Effects())

    def check_integrity(self) -> None:
        """Raise an IntegrityError if blocks or counts are inconsistent."""
        check_state(self._state)

    @property
    def rates(self) -> Rates | None:
        """Measured rates; None means that preempted sequences are recomputed."""
        return self._state.rates

    @rates.setter
    def rates(self, rates: Rates | None) -> None:
        self._state.rates = rates

    @property
    def running(self) -> int:
        """Requests with a row, loading ones included."""
        return self._state.rows.used

    @property
    def computing(self) -> int:
        """Running requests that are not loading."""
        return self._state.computing

    @property
    def waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._state.queue)

    @property
    def loading(self) -> int:
        """Requests with loads under way."""
        return self._state.rows.used - self._state.computing

    @property
    def held(self) -> int:
        """Prompts with pinned blocks, finished or cached."""
        return len(self._state.pinned)

    @property
    def pinned(self) -> tuple[PinnedBlocks, ...]:
        """Blocks of held prompts, which nothing computes with."""
        return tuple(self._state.pinned.values())

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self._state.pool.free

    @property
    def cached_blocks(self) -> int:
        """Blocks in the prefix cache, in use or free."""
        return self._state.pool.cached

    @property
    def tenant_blocks(self) -> dict[str, int]:
        """Blocks by tenant, in use or cached; empty without quotas."""
        quotas = self._state.quotas
        return {} if quotas is None else quotas.accounts.held()

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - self._state.pool.free / self.config.blocks

    def usage_at(self, step: int) -> float:
        """Return the share of blocks in use during a step (from 0) of the current plan."""
        claimed = int(self._ahead.steps.searchsorted(step, side="right"))
        return 1.0 - (self._state.pool.free - claimed) / self.config.blocks

    @property
    def price(self) -> float:
        """Minimum return of a block of entries; 0 without token eviction."""
        scores = self._state.scores
        return scores.memory_price.price if scores is not None else 0.0

    @property
    def missing_entries(self) -> int:
        """Evicted entries of running requests."""
        return int(self._state.rows.dropped.sum())

    def __contains__(self, request: str) -> bool:
        return request in self._state.sequences
