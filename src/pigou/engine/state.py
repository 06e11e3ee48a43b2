"""Everything that an EngineCore knows, and the changes that several of its parts make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pigou.config import EngineConfig
from pigou.engine import kernels
from pigou.engine.appraisals import Appraisals
from pigou.engine.plan import Effects, Finished, Started
from pigou.engine.preemption import Rates
from pigou.engine.queue import WaitingQueue
from pigou.engine.sequence import NO_BLOCKS, Rows, Sequence, State
from pigou.engine.tiering import Tiering
from pigou.events import BlockRemoved, BlockStored, KVEvent
from pigou.kv.host import HostPool
from pigou.kv.pool import BlockPool
from pigou.kv.prefix import PrefixCache
from pigou.kv.tiers import Tiers
from pigou.request import BlockHashes, FinishReason, Ints


@dataclass(frozen=True, slots=True)
class Kept:
    """Blocks that are referred to without a row: held for a pull, or still being written to.

    Attributes:
        blocks: ids in the order of the sequence, shape (n,).
        hashes: known hashes of the sequence, shape (known, 2).
        twins: whether some block of the sequence has its hash cached elsewhere.
    """

    blocks: Ints
    hashes: BlockHashes
    twins: bool


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    Attributes:
        queries: tokens of prompts looked up in the prefix cache.
        hits: of those, tokens found.
        preemptions: how often a sequence lost its row, `swaps` of them by swapping.
        swaps: see `preemptions`.
        given: entries that rows gave up.
        revived: entries that were computed again.
    """

    queries: int = 0
    hits: int = 0
    preemptions: int = 0
    swaps: int = 0
    given: int = 0
    revived: int = 0


class EngineState:
    """Sequences, rows, blocks, and what has happened that the world was not told yet."""

    def __init__(self, config: EngineConfig, tiers: Tiers | None) -> None:
        self.config = config
        self.pool = BlockPool(config.blocks)
        self.prefix = PrefixCache(self.pool)
        self.tiering: Tiering | None = None
        if tiers is not None:
            self.tiering = Tiering(tiers, self.pool, self.prefix, config.block_size)
        #: What entries are worth, where rows give some up; None where they do not.
        self.appraisals: Appraisals | None = None
        if config.eviction is not None:
            self.appraisals = Appraisals(config.eviction, config.blocks, config.max_seqs)
        self.host = HostPool(config.host_blocks)
        self.rows = Rows(config)
        self.queue = WaitingQueue()
        self.rates: Rates | None = None
        #: The time of the last plan, in nanoseconds since 1970.
        self.unix = 0
        self.counters = Counters()
        #: Sequences in flight by request id.
        self.sequences: dict[str, Sequence] = {}
        #: Finished prompts that another worker may pull.
        self.held: dict[str, Kept] = {}
        #: Aborted loads that have not been answered: something may still write there.
        self.draining: dict[str, Kept] = {}
        #: The head of the queue, once found not to fit, until blocks or rows become free.
        self.blocked: Sequence | None = None
        #: Running sequences that have more than one token to compute.
        self.prefilling: list[Sequence] = []
        #: Whether the order is by priority, and some request had another one than 0.
        self.ranked = False
        #: Sequences whose last block is copied by the plan under way.
        self.copying: list[Sequence] = []
        #: Requests whose load has come in since the last plan.
        self.starting: list[Started] = []
        self._order: Ints = np.zeros(config.max_seqs, dtype=np.int32)
        #: Rows that compute.
        self.computing = 0
        self._events: list[KVEvent] = []
        self._freed = 0

    @property
    def running(self) -> Ints:
        """Rows that compute, in the order in which they started, shape (n,)."""
        return self._order[: self.computing]

    def run(self, seq: Sequence) -> None:
        """Let a sequence that has a row compute."""
        seq.state = State.RUNNING
        self._order[self.computing] = seq.row
        self.computing += 1
        if self.rows.length.item(seq.row) - self.rows.computed.item(seq.row) > 1:
            self.prefilling.append(seq)

    def stop(self, seq: Sequence) -> None:
        """Take a running sequence out of the order, and from its row; its blocks are gone."""
        self.computing = kernels.strike(self._order, self.computing, seq.row)
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        self.vacate(seq)

    def vacate(self, seq: Sequence) -> None:
        """Take a sequence's row; the head of the queue no longer leaves a block for it."""
        if self.appraisals is not None:
            self.appraisals.clear(seq.row)
        self.rows.vacate(seq)
        self.blocked = None

    def removed(self, hashes: BlockHashes) -> None:
        """Note that hashes can no longer be hit."""
        if len(hashes):
            self._events.append(BlockRemoved(hashes))

    def note(self, event: KVEvent) -> None:
        """Note an event for the next effects."""
        self._events.append(event)

    def seal(self, seq: Sequence, stop: int) -> None:
        """Offer a row's blocks up to `stop` to the prefix cache; their hashes are known."""
        row = seq.row
        start = self.rows.sealed.item(row)
        self.rows.sealed[row] = stop
        first, count, twins = self.prefix.seal(self.rows.tables[row], seq.hashes, start, stop)
        seq.twins |= twins
        self.stored(seq, first, count)

    def stored(self, seq: Sequence, first: int, count: int) -> None:
        """Note that so many blocks of a sequence can be hit from now on."""
        if count:
            known = seq.hashes
            mine, before = known[first : first + count], known[max(first - 1, 0) : first]
            self._events.append(BlockStored(seq.request.id, first, mine, before))

    def free_row(self, seq: Sequence, keep: int = 0) -> None:
        """Drop the blocks of a sequence's row from index `keep` on."""
        row = seq.row
        if self.tiering is not None:
            self.tiering.leave(seq, self.rows.sealed.item(row))
        self.free_source(seq)
        self._release(
            self.rows.tables[row], keep, self.rows.blocks.item(row), seq.hashes, seq.twins
        )

    def cut_row(self, seq: Sequence, keep: int) -> None:
        """Drop the blocks of a sequence's row from index `keep` on; the sequence goes on."""
        row = seq.row
        self._release(
            self.rows.tables[row], keep, self.rows.blocks.item(row), seq.hashes, seq.twins
        )
        self.rows.blocks[row] = keep

    def recall(self) -> None:
        """Bring back from tiers what will soon be asked for, while nobody waits for blocks."""
        if self.tiering is None:
            return
        spare = self.pool.free - (self.config.headroom + 1) * self.rows.used
        for hashes in self.tiering.recall(0 if len(self.queue) else max(0, spare), self.unix):
            self.removed(hashes)

    def fetched(self, request: str, good: int) -> bool:
        """Cache the first `good` blocks that were fetched under this name; whether any were."""
        fetch = self.tiering.fetched(request) if self.tiering is not None else None
        if fetch is None:
            return False
        last = fetch.first + good
        first, count, _ = self.prefix.seal(fetch.table, fetch.hashes, fetch.first, last)
        if count:
            parent = fetch.hashes[max(first - 1, 0) : first]
            self._events.append(
                BlockStored(request, first, fetch.hashes[first : first + count], parent)
            )
        self.free_blocks(fetch.table)
        return True

    def free_kept(self, kept: Kept) -> None:
        """Drop blocks that were kept without a row."""
        self._release(kept.blocks, 0, len(kept.blocks), kept.hashes, kept.twins)

    def free_source(self, seq: Sequence) -> None:
        """Drop the block that the row's last block was copied from."""
        if seq.source >= 0:
            source = np.array([seq.source], dtype=np.int32)
            self._release(source, 0, 1, seq.hashes[:0], False)
            seq.source = -1
            self.copying.remove(seq)

    def free_blocks(self, blocks: Ints) -> None:
        """Drop blocks that no sequence has."""
        self._release(blocks, 0, len(blocks), np.empty((0, 2), dtype=np.uint64), False)

    def yield_blocks(self, blocks: Ints) -> None:
        """Drop blocks of a chain, from its beginning on, whose tail is handed out next."""
        self.freed(self.pool.yield_up(blocks))

    def keep_row(self, seq: Sequence, count: int) -> Kept:
        """Return the first blocks of a row as a value; their references stay."""
        blocks = self.rows.tables[seq.row, :count].copy()
        return Kept(blocks, seq.hashes[:count], seq.twins)

    def forget(self, seq: Sequence) -> None:
        """Drop what a sequence has while it waits."""
        self.host.release(seq.host)
        seq.host = NO_BLOCKS
        if self.blocked is seq:
            self.blocked = None

    def finished(self, seq: Sequence, reason: FinishReason, held: Ints = NO_BLOCKS) -> Finished:
        """Describe a sequence that left; it has no row any more."""
        return Finished(
            request=seq.request.id,
            reason=reason,
            prompt=seq.request.prompt,
            cached=max(seq.cached, 0),
            generated=seq.length - seq.request.prompt,
            preemptions=seq.preemptions,
            held=held,
        )

    def flush(self, effects: Effects) -> Effects:
        """Hand over what has happened since the last effects."""
        effects.events, self._events = self._events, []
        if self.tiering is not None:
            # After those of the device: a block that was restored is known by then.
            effects.events += self.tiering.tiers.events.take()
        effects.freed, self._freed = self._freed, 0
        return effects

    def _release(
        self, table: Ints, start: int, stop: int, hashes: BlockHashes, twins: bool
    ) -> None:
        self.freed(self.pool.release(table, start, stop, hashes, twins))

    def freed(self, freed: int) -> None:
        """Note that blocks came free: the head of the queue may fit now."""
        if freed:
            self._freed += freed
            self.blocked = None
