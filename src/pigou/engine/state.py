"""State of an EngineCore, and changes shared by several of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

import msgspec
import numpy as np

from pigou.config import ConfigError, EngineConfig, EvictionConfig, KVQuota, check_bounds
from pigou.control.lengths import Online
from pigou.engine.adapters import AdapterSlots
from pigou.engine.block_table import WORK_ROWS, Rows, remove_row
from pigou.engine.kv_offload import KVOffloadConnector
from pigou.engine.lanes import LongLane
from pigou.engine.plan import Effects, Finished, Rates, Started
from pigou.engine.quotas import Accounts, TenantQuotas
from pigou.engine.sequence import NO_BLOCKS, Sequence, SequenceState, WaitingQueue
from pigou.kv.block import HostPool, hashes_of, keys_of
from pigou.kv.block_pool import BlockPool
from pigou.kv.memory_price import Floats, MemoryPrice
from pigou.kv.prefix_cache import PrefixCache, TenureRoots
from pigou.kv.quotas import check_quotas
from pigou.kv.tiers import Tiers
from pigou.request import (
    SECOND,
    BlockHashes,
    BlockRemoved,
    BlockStored,
    FinishReason,
    Ints,
    KVEvent,
    no_hashes,
)

#: Age at which pinned blocks count as idle.
_IDLE_NS = 5 * SECOND


class PinnedBlocks(NamedTuple):
    """Blocks referenced without a row: for a pull, or while something writes to them."""

    blocks: Ints  # ids in the order of the sequence, shape (n,)
    hashes: BlockHashes  # known hashes of the sequence, shape (known, 2)
    duplicates: bool  # whether some block of the sequence has its hash cached elsewhere
    since: int = 0  # when they were pinned, nanoseconds since 1970
    tenant: str = ""

    def is_idle(self, unix_ns: int) -> bool:
        """True if nothing was computed with them for 5 s."""
        return unix_ns - self.since >= _IDLE_NS


class EngineStats(msgspec.Struct):
    """Totals since the start."""

    queried_tokens: int = 0  # tokens of prompts looked up in the prefix cache
    hit_tokens: int = 0  # queried tokens that were cached
    preemptions: int = 0  # how often a sequence lost its row
    swaps: int = 0
    evicted_tokens: int = 0  # entries that rows gave up
    recomputed_tokens: int = 0


class EvictionScores:
    """Scores of cache entries of running rows, and the price of a block."""

    def __init__(self, config: EvictionConfig, blocks: int, max_seqs: int) -> None:
        self.config = config
        self.memory_price = MemoryPrice(blocks, config.rate, config.by_price)
        #: by row, return lost with each further block evicted
        self.lost_returns: list[Floats | None] = [None] * max_seqs
        #: by row, return regained with each block recomputed
        self.regained_returns: list[Floats | None] = [None] * max_seqs
        #: tokens computed when the row was scored, -1 for never
        self.scored_at: Ints = np.full(max_seqs, -1, dtype=np.int32)
        #: by row, blocks offered to the tiers so far
        self.offered_blocks: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.wanted = 0  # blocks that the plan under way lacked before rows gave some up
        #: Outputs of `evictable_blocks`, (max_seqs,) each.
        self.firsts: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.evictable: Ints = np.zeros(max_seqs, dtype=np.int32)

    def keep(
        self, row: int, computed: int, lost_returns: Floats, regained_returns: Floats | None
    ) -> None:
        """Store a row's scores, made when `computed` of its tokens were computed."""
        self.lost_returns[row] = lost_returns
        self.regained_returns[row] = regained_returns
        self.scored_at[row] = computed

    def invalidate(self, row: int) -> None:
        """Drop a row's scores: its entries have moved."""
        self.lost_returns[row] = None
        self.regained_returns[row] = None
        self.scored_at[row] = -1

    def clear(self, row: int) -> None:
        """Forget a freed row."""
        self.invalidate(row)
        self.offered_blocks[row] = 0


class EngineState:
    """Sequences, rows, blocks, and effects not yet returned by a call."""

    def __init__(self, config: EngineConfig, tiers: Tiers | None) -> None:
        self.config = config
        self._max_step_tokens = config.max_batched_tokens
        self.pool = BlockPool(config.blocks)
        self.prefix = PrefixCache(self.pool)
        self.tenures = TenureRoots()
        #: Tiers beyond the device; None for the device alone.
        self.offload: KVOffloadConnector | None = None
        if tiers is not None:
            self.offload = KVOffloadConnector(tiers, self.pool, self.prefix, config.block_size)
        #: Scores of cache entries; None where no row gives any up.
        self.scores: EvictionScores | None = None
        if config.eviction is not None:
            self.scores = EvictionScores(config.eviction, config.blocks, config.max_seqs)
        self.host = HostPool(config.host_blocks)
        self.rows = Rows(config)
        self.queue = WaitingQueue() if config.lane is None else WaitingQueue(config.lane.min_prompt)
        #: Lane of long prompts; None for one queue.
        self.lane = None if config.lane is None else LongLane(config.lane, config.blocks)
        #: Slots of LoRA adapters; None where `Request.model` does not matter.
        self.adapters: AdapterSlots | None = None
        if config.max_loras:
            patience = max(1, config.max_seqs // config.max_loras)
            waiting = self.queue.adapters
            self.adapters = AdapterSlots(config.max_loras, patience, lambda name: waiting[name] > 0)
        #: Predicts output lengths; None where the order does not go by them.
        self.lengths = Online() if config.order == "shortest" else None
        #: Quotas of tenants; None for none.
        self.quotas: TenantQuotas | None = None
        self.rates: Rates | None = None
        #: The time of the last plan, in nanoseconds since 1970.
        self.unix_ns = 0
        self.stats = EngineStats()
        #: Sequences in flight by request id.
        self.sequences: dict[str, Sequence] = {}
        #: Prompts that another worker may pull, by request id.
        self.pinned: dict[str, PinnedBlocks] = {}
        #: Aborted loads that have not been answered: something may still write there.
        self.draining: dict[str, PinnedBlocks] = {}
        #: The head of the queue, once it did not fit, until blocks or rows become free.
        self.blocked: Sequence | None = None
        #: Running sequences that have more than one token to compute.
        self.prefilling: list[Sequence] = []
        #: Whether the order is by priority, and some request had another one than 0.
        self.ranked = False
        #: Sequences whose last block is copied by the plan under way.
        self.copying: list[Sequence] = []
        #: Requests whose load has ended since the last plan.
        self.starting: list[Started] = []
        width = max(config.blocks, config.max_seqs, config.block_size + 1)
        #: Arrays that kernels use again for each plan; `block_table` names its rows.
        self.work: Ints = np.zeros((WORK_ROWS, width), dtype=np.int32)
        self._order: Ints = np.zeros(config.max_seqs, dtype=np.int32)
        #: How many rows compute.
        self.computing = 0
        self._events: list[KVEvent] = []
        self._freed = 0
        if config.kv_quotas:
            self.set_quotas(config.kv_quotas)

    def set_limits(self, max_seqs: int, max_batched_tokens: int) -> None:
        """Set limits up to the initial ones; raises ValueError below 1."""
        check_bounds("max_seqs", max_seqs, ge=1)
        check_bounds("max_batched_tokens", max_batched_tokens, ge=1)
        self.rows.max_used = min(max_seqs, self.rows.count)
        tokens = min(max_batched_tokens, self._max_step_tokens)
        self.config = msgspec.structs.replace(self.config, max_batched_tokens=tokens)

    def set_quotas(self, quotas: Mapping[str, KVQuota]) -> None:
        """Replace the tenants' quotas; raises ConfigError."""
        check_quotas(quotas)
        if quotas and self.scores is not None:
            raise ConfigError("kv_quotas are given, and token eviction is on; it knows no quotas")
        if self.quotas is None and quotas:
            self.quotas = TenantQuotas(self.prefix, Accounts(self.pool), self.config.block_size)
            self.queue.split()
            self.rows.account[:] = self.pool.nobody - 1
        if self.quotas is not None:
            self.quotas.set(quotas)
        if self.offload is not None:
            self.offload.tiers.set_quotas(quotas)

    def account(self, tenant: str) -> int:
        """Return a tenant's account in the pool."""
        return self.pool.nobody if self.quotas is None else self.quotas.accounts.row(tenant)

    def available(self, account: int) -> int:
        """Return the blocks for an account; without running sequences, others' floors too."""
        return self.pool.available(account) if self.rows.used else self.pool.free

    def unblock(self) -> None:
        """Let waiting sequences that did not fit be tried again."""
        self.blocked = None
        if self.quotas is not None:
            self.quotas.unblock()

    # --- rows -------------------------------------------------------------------------------

    @property
    def running(self) -> Ints:
        """Running rows, in the order of their start, shape (n,)."""
        return self._order[: self.computing]

    def start(self, seq: Sequence) -> None:
        """Add a sequence's row to the running ones."""
        seq.state = SequenceState.RUNNING
        self._order[self.computing] = seq.row
        self.computing += 1
        if self.rows.remaining(seq.row) > 1:
            self.prefilling.append(seq)

    def note_row(self, seq: Sequence) -> None:
        """Record in its lane and its adapter's slot that a sequence has a row."""
        if self.lane is not None:
            self.lane.enter(seq)
        if self.adapters is not None:
            self.adapters.enter(seq.request.model)

    def stop(self, seq: Sequence) -> None:
        """Remove a running sequence from its row, after its blocks were freed."""
        self.computing = remove_row(self._order, self.computing, seq.row)
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        self.free_slot(seq)

    def free_slot(self, seq: Sequence) -> None:
        """Free a sequence's row, and unblock the head of the queue."""
        if self.scores is not None:
            self.scores.clear(seq.row)
        if self.lane is not None:
            self.lane.leave(seq)
        self.rows.free_slot(seq)
        self.unblock()
        if self.adapters is not None:
            self.adapters.leave(seq.request.model)

    # --- blocks -----------------------------------------------------------------------------

    def cache_full_blocks(self, seq: Sequence, stop: int) -> None:
        """Cache a row's blocks up to `stop`; their hashes are known."""
        row = seq.row
        start = self.rows.cached.item(row)
        self.rows.cached[row] = stop
        first, count, duplicates = self.prefix.cache_full_blocks(
            self.rows.tables[row], seq.hashes, start, stop
        )
        seq.duplicates |= duplicates
        self.note_stored(seq.request.id, seq.hashes, first, count)

    def cache_prefetched(self, request: str, good: int) -> bool:
        """Cache the first `good` blocks of a prefetch; False if there is none."""
        fetch = self.offload.prefetches.pop(request, None) if self.offload else None
        if fetch is None:
            return False
        last = fetch.first + good
        table, hashes = fetch.table, fetch.hashes
        first, count, _ = self.prefix.cache_full_blocks(table, hashes, fetch.first, last)
        self.note_stored(request, fetch.hashes, first, count)
        self.free_blocks(fetch.table)
        return True

    def prefetch_returning(self) -> None:
        """Prefetch due sessions from tiers while no request waits for blocks."""
        if self.offload is None:
            return
        spare = self.pool.free - (self.config.headroom + 1) * self.rows.used
        spare = 0 if len(self.queue) else max(0, spare)
        for hashes in self.offload.prefetch_returning(spare, self.unix_ns, self.account):
            self.note_removed(hashes)

    def free_row(self, seq: Sequence, keep: int = 0) -> None:
        """Free the blocks of a sequence's row from index `keep` on."""
        if self.offload is not None:
            self.offload.sequence_left(seq, self.rows.cached.item(seq.row))
        self.free_copy_source(seq)
        self._release_row(seq, keep)

    def truncate_row(self, seq: Sequence, keep: int) -> None:
        """Free a row's blocks from index `keep` on; the sequence continues."""
        self._release_row(seq, keep)
        self.rows.blocks[seq.row] = keep

    def free_pinned(self, pinned: PinnedBlocks) -> None:
        """Free blocks pinned without a row."""
        blocks = pinned.blocks
        self._release(blocks, 0, len(blocks), pinned.hashes, pinned.duplicates)

    def free_copy_source(self, seq: Sequence) -> None:
        """Free the source of the copy to the row's last block."""
        if seq.copy_source >= 0:
            source = np.array([seq.copy_source], dtype=np.int32)
            self._release(source, 0, 1, seq.hashes[:0])
            seq.copy_source = -1
            self.copying.remove(seq)

    def free_blocks(self, blocks: Ints) -> None:
        """Free blocks without a sequence."""
        self._release(blocks, 0, len(blocks), no_hashes())

    def free_chain(self, blocks: Ints) -> None:
        """Free blocks of a chain from its beginning; its tail is allocated next."""
        self.note_freed(self.pool.release_chain(blocks))

    def free_trees(self, roots: Items[bytes]) -> None:
        """Forget blocks and what extends them in all tiers; their idle ones are allocated next."""
        for root in hashes_of(roots) if roots else ():
            for block in self.prefix.match(root[None], 1).blocks.tolist():
                self.note_removed(self.pool.forget_tree(block))
        if self.offload is not None and roots:
            self.offload.tiers.drop(roots, self.unix_ns)

    def pin_row(self, seq: Sequence, count: int) -> PinnedBlocks:
        """Return the first `count` blocks of a row, still referenced."""
        blocks = self.rows.tables[seq.row, :count].copy()
        return PinnedBlocks(
            blocks, seq.hashes[:count], seq.duplicates, self.unix_ns, seq.request.tenant
        )

    def forget(self, seq: Sequence) -> None:
        """Free the host blocks of a waiting sequence."""
        self.host.release(seq.host_blocks)
        seq.host_blocks = NO_BLOCKS
        if self.blocked is seq or self.quotas is not None:
            self.unblock()

    def _release_row(self, seq: Sequence, keep: int) -> None:
        rows, row = self.rows, seq.row
        self._release(rows.tables[row], keep, rows.blocks.item(row), seq.hashes, seq.duplicates)

    def _release(
        self, table: Ints, start: int, stop: int, hashes: BlockHashes, duplicates: bool = False
    ) -> None:
        self.note_freed(self.pool.release(table, start, stop, hashes, duplicates))

    # --- effects ----------------------------------------------------------------------------

    def note(self, event: KVEvent) -> None:
        """Append an event to the next effects."""
        self._events.append(event)

    def note_removed(self, hashes: BlockHashes) -> None:
        """Append the removal of hashes from the cache."""
        if len(hashes):
            self._events.append(BlockRemoved(hashes))

    def note_stored(self, request: str, hashes: BlockHashes, first: int, count: int) -> None:
        """Append that `count` blocks of a request from `first` on were cached."""
        if count:
            stored, parent = hashes[first : first + count], hashes[max(first - 1, 0) : first]
            self._events.append(BlockStored(request, first, stored, parent))

    def cached_tokens(self, hashes: BlockHashes) -> int:
        """Return the leading tokens of these blocks that the device holds."""
        return len(self.prefix.match(hashes, len(hashes)).blocks) * self.config.block_size

    def note_freed(self, freed: int) -> None:
        """Record freed blocks, and unblock the head of the queue."""
        if freed:
            self._freed += freed
            self.unblock()

    def finished(self, seq: Sequence, reason: FinishReason, held: Ints = NO_BLOCKS) -> Finished:
        """Return the record of a sequence that left its row; free what an ended tenure left."""
        if seq.request.salt and len(seq.hashes) and seq.hashes[0].any():
            root = keys_of(seq.hashes[:1])
            if self.tenures.note(seq.request.salt, root[0]):
                self.free_trees(root)
        return Finished(
            request=seq.request.id, reason=reason, prompt=seq.request.prompt,
            cached=max(seq.cached_tokens, 0), generated=seq.length - seq.request.prompt,
            preemptions=seq.preemptions, held=held,
        )  # fmt: skip

    def flush(self, effects: Effects) -> Effects:
        """Move pending events and results into the effects."""
        effects.events, self._events = self._events, []
        if self.offload is not None:
            # After those of the device: a block that was restored is known by then.
            effects.events += self.offload.tiers.events.take()
        effects.freed, self._freed = self._freed, 0
        return effects
