"""Commands to the engine thread, and its reports to the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import KVQuota
from pigou.engine.plan import Finished, Plan, Result
from pigou.engine.state import EngineStats, PinnedBlocks
from pigou.kv.block import Block
from pigou.request import BlockHashes, Ints, Request, SamplingParams
from pigou.runtime.step_output import RankedLogprobs, StepOutput

if TYPE_CHECKING:
    from pigou.engine.core import EngineCore
    from pigou.runtime.structured_output import GrammarState
    from pigou.worker.device_use import WorkEstimate

#: Called after each step; returns True to continue the plan.
OnStep: TypeAlias = Callable[[StepOutput], bool]


class Add(msgspec.Struct, frozen=True):
    """Compute a request."""

    request: Request  # `remote` is set if `ticket` is
    tokens: list[int]
    params: SamplingParams
    generated: int  # trailing `tokens` that were generated elsewhere
    seed: bytes  # seed of the block hashes; empty for no caching
    salt: str | None = None
    ticket: dict[str, Any] | None = None  # `kv_transfer_params` of the worker that has its blocks
    grammar: GrammarState | None = None  # state of `params.grammar` after the generated tokens
    tenure: bytes = b""  # seed of ticket hashes, with or without caching
    trace_id: str = ""  # empty if not traced


class Abort(msgspec.Struct, frozen=True):
    """Abort a request."""

    request: str
    turn_ended: bool = False  # True if its text ended it


class Release(msgspec.Struct, frozen=True):
    """Free the blocks held for another worker."""

    request: str


class LeaseCached(msgspec.Struct, frozen=True):
    """Offer a prompt's cached blocks to another worker, computing nothing."""

    request: Request


class EndLease(msgspec.Struct, frozen=True):
    """Withdraw an offer of cached blocks that was never announced."""

    request: str


class Loaded(msgspec.Struct, frozen=True):
    """A load has ended; `tokens` arrived, in `bytes` bytes of `blocks` blocks."""

    request: str
    tokens: int
    blocks: int
    bytes: int


class Restored(msgspec.Struct, frozen=True):
    """A load from tiers ended with its first `blocks` blocks; if `failed`, more may be stored."""

    request: str
    blocks: int
    failed: bool


class AdapterLoaded(msgspec.Struct, frozen=True):
    """A LoRA adapter is in its slot, unless there is an error."""

    adapter: str
    error: str
    seconds: float = 0.0


class OffloadDone(msgspec.Struct, frozen=True):
    """A move has ended; `good` marks the blocks that arrived."""

    move: int
    good: list[bool]


class Recovered(msgspec.Struct, frozen=True):
    """A tier's store has these blocks from an earlier run."""

    tier: int
    blocks: list[Block]


class ClearCache(msgspec.Struct, frozen=True):
    """Clear the prefix cache."""

    salts: list[str] | None = None  # tenures to end; None for the whole cache


class SetLimits(msgspec.Struct, frozen=True):
    """Limit running sequences and tokens per step from the next plan on."""

    max_seqs: int
    max_batched_tokens: int
    kv_quotas: dict[str, KVQuota] | None = None  # None leaves them


class Stop(msgspec.Struct, frozen=True):
    """Stop the thread."""


Command: TypeAlias = (
    Add | Abort | Release | LeaseCached | EndLease | Loaded | Restored | AdapterLoaded | OffloadDone
    | Recovered | ClearCache | SetLimits | Stop
)  # fmt: skip


class Gauges(msgspec.Struct):
    """Metrics of the core, written by the engine thread alone; "total" counts since the start."""

    running: int = 0
    waiting: int = 0
    added_total: int = 0  # requests accepted or refused, as of `waiting`
    loading: int = 0
    held: int = 0
    pinned: tuple[PinnedBlocks, ...] = ()
    free: int = 0
    cached: int = 0
    table_blocks: int = 0
    table_tokens: int = 0
    tenant_blocks: dict[str, int] = {}  # by tenant, with quotas
    usage: float = 0.0
    stats: EngineStats = msgspec.field(default_factory=EngineStats)
    price: float = 0.0
    missing: int = 0
    steps_total: int = 0
    tokens_total: int = 0
    prefill_ns_total: int = 0
    prefill_tokens_total: int = 0
    blocks_received_total: int = 0
    bytes_received_total: int = 0
    blocks_leased_total: int = 0
    work: WorkEstimate | None = None  # GPU use of the steps; None if the shape is unknown

    def count_steps(self, plan: Plan, result: Result) -> None:
        """Count a plan's computed tokens; prompt chunks come last in a plan."""
        self.steps_total += result.steps
        self.tokens_total += plan.tokens * result.steps
        if self.work is not None:
            self.work.count(plan, result.steps)
        if plan and plan.counts.item(-1) > 1 and not len(plan.drafts):
            self.prefill_ns_total += int(result.durations.sum())
            self.prefill_tokens_total += plan.chunk_tokens * result.steps

    def read_load(self, core: EngineCore, added: int) -> None:
        """Read the core's load, after it took `added` requests."""
        self.running, self.loading = core.running - core.loading, core.loading
        self.waiting, self.added_total = core.waiting, added
        self.free, self.usage = core.free_blocks, core.usage
        self.held, self.cached, self.pinned = core.held, core.cached_blocks, core.pinned
        self.tenant_blocks = core.tenant_blocks

    def read(self, core: EngineCore, plan: Plan, added: int) -> None:
        """Read all metrics at a plan's start."""
        self.read_load(core, added)
        rows, used = core.rows, core.rows.length > 0
        self.table_blocks = int(rows.blocks[used].sum())
        self.table_tokens = int((rows.computed - rows.dropped)[used].sum())
        self.table_tokens += plan.tokens * plan.repeat
        if core.config.eviction is not None:
            self.price, self.missing = core.price, core.missing_entries


class Failed(msgspec.Struct, frozen=True):
    """A request that the engine refused, or that failed in it."""

    request: str
    status: int  # HTTP status
    message: str
    type: str = ""  # `type` of the error body; empty for the status's own


def failed_alone(why: str) -> str:
    """Return the error message of a request that failed by itself."""
    return f"The engine failed on this request alone ({why}); change it before it is sent again."


class Begun(msgspec.Struct, frozen=True):
    """A request took a row, first or after a preemption."""

    request: str
    computed: int  # tokens already computed
    loaded: int  # computed tokens fetched from another worker
    now: int  # monotonic nanoseconds
    loading: int = 0  # start of its block transfer; 0 if none or not traced


class Report(msgspec.Struct):
    """Everything that one step did."""

    now: int = 0  # end, monotonic nanoseconds
    begun: list[Begun] = []
    # (request, token, logprobs if requested), in order.
    tokens: list[tuple[str, int, RankedLogprobs | None]] = []
    # (request, prompt logprobs), in order.
    prompts: list[tuple[str, list[RankedLogprobs | None]]] = []
    # (request, pooled hidden states of its prompt), in order.
    pooled: list[tuple[str, NDArray[np.float32]]] = []
    finished: list[Finished] = []
    # `kv_transfer_params` of held blocks, by request.
    tickets: dict[str, dict[str, Any]] = {}
    # the same of cached blocks; None without any.
    leases: dict[str, dict[str, Any] | None] = {}
    failed: list[Failed] = []
    events: list[dict[str, Any]] = []  # KV events in wire format
    computed: int = 0  # tokens per step of the plan; 0 in reports between its steps
    steps: int = 0
    # prefill chunks of traced requests: (request, begin, end, tokens), times as `now`.
    chunks: list[tuple[str, int, int, int]] = []


class Backend(Protocol):
    """Executes plans, on the engine thread; implemented by `TorchExecutor`."""

    def set_beat(self, beat: Callable[[], None]) -> None:
        """Call `beat` while a step progresses, at least once a second if possible."""

    def add(
        self, request: str, tokens: list[int], params: SamplingParams, *, seed: bytes,
        resume: int = 0, hashes: BlockHashes | None = None, grammar: GrammarState | None = None,
        adapter: str = "",
    ) -> None:  # fmt: skip
        """Add a request before it is planned.

        `hashes` are those the core knows, None for all full blocks; `grammar` is the state after
        the resumed tokens. Raises ValueError if a parameter, mostly a grammar, cannot be honoured.
        """

    def drop(self, request: str) -> None:
        """Drop a request; unknown ids are ignored."""

    def drafts(self) -> Ints | None:
        """Return the draft tokens that each row offers, (max_seqs,); None for none."""

    def execute(self, plan: Plan, on_step: OnStep | None = None) -> Result:
        """Run the plan's moves, then its steps; return early if a sequence ends."""
