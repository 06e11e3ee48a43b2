"""Plan, Result and Effects: the interface between EngineCore, executor and driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.kv.offload import Move
from pigou.request import NEVER, BlockHashes, FinishReason, Ints, KVEvent, Nanos, no_hashes

_NONE: Ints = np.empty(0, dtype=np.int32)
_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)
_NO_TRIPLES: Ints = np.empty((0, 3), dtype=np.int32)
_NO_TIMES: Nanos = np.empty(0, dtype=np.int64)


class Started(msgspec.Struct, frozen=True):
    """A request that starts to compute in a row, first or after a preemption."""

    request: str
    row: int  # until it finishes or is preempted
    computed: int  # tokens with KV (prefix hit, swapped in, or loaded)


class Load(msgspec.Struct, frozen=True):
    """Blocks to fill from another worker or a lower tier.

    Answer each load with blocks once by `EngineCore.loaded`, also after an abort, when nothing
    writes to them any more. The request is `Started` after that.
    """

    request: str
    # the row of the batch that it holds; -1 where nobody asks for the blocks yet: a session that is
    # away is expected back (`pigou.kv.session_returns`), and never `Started`.
    row: int
    first: int  # index in the request of the first block to fill; those before were hit
    # device blocks to fill, in order, shape (n,); n = 0 when everything was hit, and the offer need
    # only be declined.
    blocks: Ints
    # from which tier each block is restored, shape (n,); empty where another worker offers them.
    tiers: Ints = _NONE
    # hashes of the restored blocks, shape (n, 2); empty where another worker offers them.
    hashes: BlockHashes = msgspec.field(default_factory=no_hashes)


class AdapterLoad(NamedTuple):
    """A LoRA adapter to copy to a slot of the device, answered by `EngineCore.adapter_loaded`."""

    adapter: str  # `Request.model`
    slot: int


class Compaction(msgspec.Struct, frozen=True):
    """Entries that a row evicts to free its last blocks; the rest is compacted.

    The executor chooses as many entries in each layer and KV head, by the row's last scores
    (`Plan.to_score`) if any.
    """

    row: int  # the row of the batch
    entries: int
    # index of the first entry that may go, a multiple of the block size: the blocks before it are
    # shared, and stay as they are.
    first: int
    drop: int  # entries to evict, a multiple of the block size
    # shared blocks of the row to their copies, made before anything else, shape (m, 2).
    copies: Ints
    # ids of the row's blocks, with the copies in their places, in order, those that come free among
    # them, shape (blocks that hold `entries`,).
    blocks: Ints


class Recomputation(msgspec.Struct, frozen=True):
    """Evicted entries of a row to recompute, appended behind its others."""

    row: int  # the row of the batch
    entries: int  # before the recomputation, after a compaction of the same plan
    count: int  # tokens to compute again, in all layers and heads
    blocks: Ints  # ids of the row's blocks afterwards, in order, shape (blocks,)


class Plan(msgspec.Struct):
    """One batch to compute for up to `repeat` steps.

    Order: `compactions`, `swap_out`, `copies`, `swap_in`, `recomputations`, then the first step.
    Entry i computes `counts[i]` tokens of row `rows[i]` from position `starts[i]`, against
    `kv_lens[i]` cached tokens. With `repeat > 1` every entry decodes one token per step, except a
    last one with equal chunks of a prompt (`EngineConfig.repeat_chunks`). With `drafts` all entries
    decode once: the last token, and `drafts[i]` draft tokens behind it to verify.
    """

    rows: Ints  # shape (n,)
    starts: Ints  # first position to compute, which is also its rotary position, shape (n,)
    counts: Ints  # tokens to compute in a step, shape (n,)
    # cache entries before the first step, shape (n,); equal to `starts` unless tokens were evicted.
    kv_lens: Ints
    samples: NDArray[np.bool_]  # whether the entry yields a token, shape (n,)
    repeat: int = 1  # maximum of steps
    horizon: int = NEVER  # no step begins at or after it, nanoseconds
    started: list[Started] = []
    preempted: list[str] = []  # request ids
    swap_out: Ints = _NO_PAIRS  # device block to host block, shape (m, 2)
    copies: Ints = _NO_PAIRS  # device block to device block (copy-on-write), shape (m, 2)
    swap_in: Ints = _NO_PAIRS  # host block to device block, shape (m, 2)
    loads: list[Load] = []
    adapters: list[AdapterLoad] = []
    # blocks to be copied to or between tiers, and to be deleted there, in order and off the step's
    # path; those with a number are answered with `EngineCore.on_transfer_done`.
    moves: list[Move] = []
    compactions: list[Compaction] = []  # in order
    recomputations: list[Recomputation] = []
    # rows whose entries `Result.lost_returns` is to score, shape (k, 3): the row; the first entry
    # that may go (a multiple of the block size: the blocks before it are shared); the maximum of
    # blocks of entries that are of interest.
    to_score: Ints = _NO_TRIPLES
    drafts: Ints = _NONE  # draft tokens among `counts`, shape (n,); empty for none
    # whether the plan is to end after a step behind which some row has drafts to offer.
    drafts_pay: bool = False

    @property
    def tokens(self) -> int:
        """Tokens computed per step."""
        return int(self.counts.sum())

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens computed per step."""
        if len(self.drafts):
            return 0
        return sum(count for count in self.counts.tolist() if count > 1)

    def __bool__(self) -> bool:
        return len(self.rows) > 0


class Finish(msgspec.Struct, frozen=True):
    """A sequence that ended before its length limit (end token, stop, error)."""

    entry: int  # index in the plan
    reason: FinishReason
    # steps of the plan that count for it, at least 1; later tokens are truncated before a block is
    # hashed.
    steps: int


class Result(msgspec.Struct):
    """Output of an executor for a plan."""

    steps: int = 1  # steps done, 1 to `plan.repeat`
    finished: list[Finish] = []  # sequences that ended early
    # per row, hashes of the blocks that became full, beyond those that the core knows, shape
    # (blocks, 2). The core knows `Request.hashes` and what it got before, also after a preemption.
    # A row left out, or fewer hashes, leaves blocks unshared.
    full_block_hashes: dict[int, BlockHashes] = {}
    # nanoseconds per step, shape (steps,); empty if not timed.
    durations: Nanos = _NO_TIMES
    # draft tokens accepted, by entry of a plan with `drafts`, shape (n,); fewer where one ended it.
    accepted: Ints = _NONE
    drafting: int = 0  # nanoseconds of the duration that a draft model took
    # for the rows that were to be scored, the return lost with each further block of entries that
    # the row gives up (those of least return first), after the plan's last step, shape (blocks that
    # it can give up,), ascending.
    lost_returns: dict[int, NDArray[np.float64]] = {}
    # for the same rows, the return regained with each further block of tokens that is recomputed,
    # shape (blocks that it gave up,), descending; a row left out can recompute nothing.
    regained_returns: dict[int, NDArray[np.float64]] = {}


class Finished(msgspec.Struct, frozen=True):
    """A request that left the engine."""

    request: str
    reason: FinishReason
    prompt: int  # tokens of its prompt
    cached: int  # prompt tokens hit or loaded at first admission
    generated: int  # tokens sampled
    preemptions: int
    # device blocks kept for another worker to pull, in prompt order; released by
    # `EngineCore.release`.
    held: Ints = _NONE


class Effects(msgspec.Struct):
    """Consequences of a call for the driver."""

    tokens: Ints = _NONE  # sampled tokens per plan entry, shape (n,)
    finished: list[Finished] = []
    events: list[KVEvent] = []  # KV events, in order
    freed: int = 0  # blocks that became free or evictable


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speeds of the machine."""

    prefill: float  # tokens per second
    swap: float  # bytes per second between device and host
    block_bytes: int

    def __post_init__(self) -> None:
        for name in ("prefill", "swap", "block_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
