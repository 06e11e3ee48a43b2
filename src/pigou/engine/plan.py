"""Plan, Result and Effects: the interface between EngineCore, executor and driver."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.events import KVEvent
from pigou.kv.offload import Move
from pigou.request import NEVER, BlockHashes, FinishReason, Ints, Nanos, no_hashes

_NONE: Ints = np.empty(0, dtype=np.int32)
_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)
_NO_TRIPLES: Ints = np.empty((0, 3), dtype=np.int32)
_NO_TIMES: Nanos = np.empty(0, dtype=np.int64)


class Started(msgspec.Struct, frozen=True):
    """A request computes in a row of the batch: for the first time, or after a preemption.

    Attributes:
        request: its id.
        row: the row that is its own until it finishes or is preempted.
        computed: tokens whose KV is already there (prefix hit, swapped in, or loaded).
    """

    request: str
    row: int
    computed: int


class Load(msgspec.Struct, frozen=True):
    """Blocks to be filled from outside (another worker, a lower tier) off the step's path.

    The driver answers each load that has blocks with `EngineCore.loaded`, once, when nothing
    writes to them any more, also after its request was aborted: until then they stay in use.
    The request computes nothing before that; it is `Started` by the first plan after it.

    Attributes:
        request: its id.
        row: the row of the batch that it holds; -1 where nobody asks for the blocks yet: a session
            that is away is expected back (`pigou.kv.session_returns`), and never `Started`.
        first: index of the first block to fill, within the request; those before were hit.
        blocks: device blocks to fill, in order, shape (n,); n = 0 when everything was hit, and
            the offer need only be declined.
        tiers: from which tier each block is restored, shape (n,); empty where another worker
            offers them.
        hashes: of the blocks that are restored, shape (n, 2); empty where another worker offers
            them.
    """

    request: str
    row: int
    first: int
    blocks: Ints
    tiers: Ints = _NONE
    hashes: BlockHashes = msgspec.field(default_factory=no_hashes)


class Compaction(msgspec.Struct, frozen=True):
    """Cache entries that a row evicts for good, so that its last blocks come free.

    Which entries go is the executor's choice, in each layer and KV head for itself, and as many in
    each; those that are left close up. It knows them from the row's last scores
    (`Plan.to_score`); if there were none it chooses now.

    Attributes:
        row: the row of the batch.
        entries: that it has before.
        first: index of the first entry that may go, a multiple of the block size: the blocks before
            it are shared, and stay as they are.
        drop: how many go, a multiple of the block size.
        copies: shared blocks of the row to their copies, made before anything else, shape (m, 2).
        blocks: ids of the row's blocks, with the copies in their places, in order, those that come
            free among them, shape (blocks that hold `entries`,).
    """

    row: int
    entries: int
    first: int
    drop: int
    copies: Ints
    blocks: Ints


class Recomputation(msgspec.Struct, frozen=True):
    """Entries that a row gave up, and that are recomputed, behind those it has.

    Which tokens come back is the executor's choice: those of the highest return.

    Attributes:
        row: the row of the batch.
        entries: that it has before (after a compaction of the same plan).
        count: tokens to compute again, in all layers and heads.
        blocks: ids of the row's blocks after it, in order, shape (blocks that hold them all,).
    """

    row: int
    entries: int
    count: int
    blocks: Ints


class Plan(msgspec.Struct):
    """The same batch, computed for up to `repeat` steps.

    A plan that has entries is applied before the next is scheduled. Before the first step come
    `compactions`, then `swap_out`, `copies` and `swap_in`, then `recomputations`.

    Entry i computes `counts[i]` tokens of the sequence in row `rows[i]`, from position
    `starts[i]` on, against `kv_lens[i]` tokens already in the cache; its block ids are
    `EngineCore.tables[rows[i]]`. Where `samples[i]`, one token is sampled after each step. With
    `repeat > 1` every entry samples and computes one token a step, each starting where the step
    before ended; but for the last one under `EngineConfig.repeat_chunks`, which may compute a
    chunk of its prompt in each step, always as long, and not the prompt's end.

    Attributes:
        rows: shape (n,).
        starts: first position to compute, which is also its rotary position, shape (n,).
        counts: tokens to compute in a step, shape (n,).
        kv_lens: cache entries before the first step, shape (n,); equal to `starts` unless
            tokens were evicted.
        samples: whether the entry yields a token, shape (n,).
        repeat: most steps to do.
        horizon: no step may begin at or after this time, in nanoseconds.
        started: requests that compute from this plan on, in a row of their own.
        preempted: ids of requests that lost their row since the last plan.
        swap_out: device block to host block, shape (m, 2).
        copies: device block to device block (copy-on-write), shape (m, 2).
        swap_in: host block to device block, shape (m, 2).
        loads: blocks to be filled from outside.
        moves: blocks to be copied to or between tiers, and to be deleted there, in order and off
            the step's path; those with a number are answered with `EngineCore.landed`.
        compactions: entries to be given up, in order.
        recomputations: entries to be computed again.
        to_score: rows whose entries `Result.lost_returns` is to score, shape (k, 3): the row; the
            first entry that may go (a multiple of the block size: the blocks before it are
            shared); the maximum of blocks of entries that are of interest.
    """

    rows: Ints
    starts: Ints
    counts: Ints
    kv_lens: Ints
    samples: NDArray[np.bool_]
    repeat: int = 1
    horizon: int = NEVER
    started: list[Started] = msgspec.field(default_factory=list)
    preempted: list[str] = msgspec.field(default_factory=list)
    swap_out: Ints = _NO_PAIRS
    copies: Ints = _NO_PAIRS
    swap_in: Ints = _NO_PAIRS
    loads: list[Load] = msgspec.field(default_factory=list)
    moves: list[Move] = msgspec.field(default_factory=list)
    compactions: list[Compaction] = msgspec.field(default_factory=list)
    recomputations: list[Recomputation] = msgspec.field(default_factory=list)
    to_score: Ints = _NO_TRIPLES

    @property
    def tokens(self) -> int:
        """Tokens computed in one step."""
        return int(self.counts.sum())

    @property
    def chunk_tokens(self) -> int:
        """Tokens of chunks of prompts computed in one step."""
        return int(self.counts[self.counts > 1].sum())

    def __bool__(self) -> bool:
        """Whether there is anything to compute (moves and loads may exist without)."""
        return len(self.rows) > 0


class Finish(msgspec.Struct, frozen=True):
    """A sequence that ended before its length limit (end token, stop, error).

    Attributes:
        entry: its index in the plan.
        reason: why.
        steps: of the plan's steps, how many count for it (at least 1); what was computed beyond
            is truncated before a block is hashed.
    """

    entry: int
    reason: FinishReason
    steps: int


class Result(msgspec.Struct):
    """What an executor computed of a plan.

    Attributes:
        steps: steps done, 1 to `plan.repeat`.
        finished: sequences that ended early.
        full_block_hashes: per row, hashes of the blocks that became full, beyond those that the
            core knows, shape (blocks, 2). The core knows `Request.hashes` and what it got before,
            also after a preemption. A row left out, or fewer hashes, leaves blocks unshared.
        durations: of each step, in nanoseconds, shape (steps,); empty where nobody timed them.
        lost_returns: for the rows that were to be scored, the return lost with each further block
            of entries that the row gives up (those of least return first), after the plan's last
            step, shape (blocks that it can give up,), ascending.
        regained_returns: for the same rows, the return regained with each further block of tokens
            that is recomputed, shape (blocks that it gave up,), descending; a row left out can
            recompute nothing.
    """

    steps: int = 1
    finished: list[Finish] = msgspec.field(default_factory=list)
    full_block_hashes: dict[int, BlockHashes] = msgspec.field(default_factory=dict)
    durations: Nanos = _NO_TIMES
    lost_returns: dict[int, NDArray[np.float64]] = msgspec.field(default_factory=dict)
    regained_returns: dict[int, NDArray[np.float64]] = msgspec.field(default_factory=dict)


class Finished(msgspec.Struct, frozen=True):
    """A request left the engine.

    Attributes:
        request: its id.
        reason: why.
        prompt: tokens of its prompt.
        cached: of those, tokens that were not computed here (hit or loaded), at first admission.
        generated: tokens sampled.
        preemptions: times that it lost its row.
        held: device blocks kept for another worker to pull, in prompt order; released by
            `EngineCore.release`.
    """

    request: str
    reason: FinishReason
    prompt: int
    cached: int
    generated: int
    preemptions: int
    held: Ints = _NONE


class Effects(msgspec.Struct):
    """What follows for callers from one call.

    Attributes:
        tokens: per plan entry, tokens that count as sampled, shape (n,).
        finished: requests that left.
        events: KV events, in order.
        freed: blocks that became free or evictable.
    """

    tokens: Ints = _NONE
    finished: list[Finished] = msgspec.field(default_factory=list)
    events: list[KVEvent] = msgspec.field(default_factory=list)
    freed: int = 0


class Executor(Protocol):
    """Computes plans; a real one also keeps token ids and samples, a simulated one only time."""

    def execute(self, plan: Plan) -> Result:
        """Do the plan's moves, then its steps; return at the first sequence that ends.

        Args:
            plan: from `EngineCore.schedule`; block ids are read from `EngineCore.tables`.

        Returns:
            How far it came, and who ended.
        """
        ...
