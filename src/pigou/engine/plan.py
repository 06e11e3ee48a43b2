"""Plan, Result and Effects: the interface between EngineCore, executor and driver."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A request computes in a row of the batch: for the first time, or after a preemption."""

    request: str  # its id
    row: int  # the row that is its own until it finishes or is preempted
    computed: int  # tokens whose KV is already there (prefix hit, swapped in, or loaded)


class Load(msgspec.Struct, frozen=True):
    """Blocks to be filled from outside (another worker, a lower tier) off the step's path.

    The driver answers each load that has blocks with `EngineCore.loaded`, once, when nothing
    writes to them any more, also after its request was aborted: until then they stay in use.
    The request computes nothing before that; it is `Started` by the first plan after it.
    """

    request: str  # its id
    # the row of the batch that it holds; -1 where nobody asks for the blocks yet: a session that is
    # away is expected back (`pigou.kv.session_returns`), and never `Started`.
    row: int
    first: int  # index of the first block to fill, within the request; those before were hit
    # device blocks to fill, in order, shape (n,); n = 0 when everything was hit, and the offer need
    # only be declined.
    blocks: Ints
    # from which tier each block is restored, shape (n,); empty where another worker offers them.
    tiers: Ints = _NONE
    # of the blocks that are restored, shape (n, 2); empty where another worker offers them.
    hashes: BlockHashes = msgspec.field(default_factory=no_hashes)


class Compaction(msgspec.Struct, frozen=True):
    """Cache entries that a row evicts for good, so that its last blocks come free.

    Which entries go is the executor's choice, in each layer and KV head for itself, and as many in
    each; those that are left close up. It knows them from the row's last scores
    (`Plan.to_score`); if there were none it chooses now.
    """

    row: int  # the row of the batch
    entries: int
    # index of the first entry that may go, a multiple of the block size: the blocks before it are
    # shared, and stay as they are.
    first: int
    drop: int  # how many go, a multiple of the block size
    # shared blocks of the row to their copies, made before anything else, shape (m, 2).
    copies: Ints
    # ids of the row's blocks, with the copies in their places, in order, those that come free among
    # them, shape (blocks that hold `entries`,).
    blocks: Ints


class Recomputation(msgspec.Struct, frozen=True):
    """Entries that a row gave up, and that are recomputed, behind those it has."""

    row: int  # the row of the batch
    entries: int  # that it has before (after a compaction of the same plan)
    count: int  # tokens to compute again, in all layers and heads
    blocks: Ints  # ids of the row's blocks after it, in order, shape (blocks that hold them all,)


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
    """

    rows: Ints  # shape (n,)
    starts: Ints  # first position to compute, which is also its rotary position, shape (n,)
    counts: Ints  # tokens to compute in a step, shape (n,)
    # cache entries before the first step, shape (n,); equal to `starts` unless tokens were evicted.
    kv_lens: Ints
    samples: NDArray[np.bool_]  # whether the entry yields a token, shape (n,)
    repeat: int = 1  # most steps to do
    horizon: int = NEVER  # no step may begin at or after this time, in nanoseconds
    started: list[Started] = []  # requests that compute from this plan on, in a row of their own
    preempted: list[str] = []  # ids of requests that lost their row since the last plan
    swap_out: Ints = _NO_PAIRS  # device block to host block, shape (m, 2)
    copies: Ints = _NO_PAIRS  # device block to device block (copy-on-write), shape (m, 2)
    swap_in: Ints = _NO_PAIRS  # host block to device block, shape (m, 2)
    loads: list[Load] = []  # blocks to be filled from outside
    # blocks to be copied to or between tiers, and to be deleted there, in order and off the step's
    # path; those with a number are answered with `EngineCore.on_transfer_done`.
    moves: list[Move] = []
    compactions: list[Compaction] = []  # entries to be given up, in order
    recomputations: list[Recomputation] = []  # entries to be computed again
    # rows whose entries `Result.lost_returns` is to score, shape (k, 3): the row; the first entry
    # that may go (a multiple of the block size: the blocks before it are shared); the maximum of
    # blocks of entries that are of interest.
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
    """A sequence that ended before its length limit (end token, stop, error)."""

    entry: int  # its index in the plan
    reason: FinishReason
    # of the plan's steps, how many count for it (at least 1); what was computed beyond is truncated
    # before a block is hashed.
    steps: int


class Result(msgspec.Struct):
    """What an executor computed of a plan."""

    steps: int = 1  # steps done, 1 to `plan.repeat`
    finished: list[Finish] = []  # sequences that ended early
    # per row, hashes of the blocks that became full, beyond those that the core knows, shape
    # (blocks, 2). The core knows `Request.hashes` and what it got before, also after a preemption.
    # A row left out, or fewer hashes, leaves blocks unshared.
    full_block_hashes: dict[int, BlockHashes] = {}
    # of each step, in nanoseconds, shape (steps,); empty where nobody timed them.
    durations: Nanos = _NO_TIMES
    # for the rows that were to be scored, the return lost with each further block of entries that
    # the row gives up (those of least return first), after the plan's last step, shape (blocks that
    # it can give up,), ascending.
    lost_returns: dict[int, NDArray[np.float64]] = {}
    # for the same rows, the return regained with each further block of tokens that is recomputed,
    # shape (blocks that it gave up,), descending; a row left out can recompute nothing.
    regained_returns: dict[int, NDArray[np.float64]] = {}


class Finished(msgspec.Struct, frozen=True):
    """A request left the engine."""

    request: str  # its id
    reason: FinishReason
    prompt: int  # tokens of its prompt
    cached: int  # of those, tokens that were not computed here (hit or loaded), at first admission
    generated: int  # tokens sampled
    preemptions: int  # times that it lost its row
    # device blocks kept for another worker to pull, in prompt order; released by
    # `EngineCore.release`.
    held: Ints = _NONE


class Effects(msgspec.Struct):
    """What follows for callers from one call."""

    tokens: Ints = _NONE  # per plan entry, tokens that count as sampled, shape (n,)
    finished: list[Finished] = []  # requests that left
    events: list[KVEvent] = []  # KV events, in order
    freed: int = 0  # blocks that became free or evictable


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speeds of the machine."""

    prefill: float  # tokens computed in a second
    swap: float  # bytes copied between device and host in a second
    block_bytes: int

    def __post_init__(self) -> None:
        for name in ("prefill", "swap", "block_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
