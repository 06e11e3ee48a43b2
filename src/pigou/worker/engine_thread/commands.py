"""What passes between the event loop and the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pigou.engine.plan import Finished, Plan, Result
from pigou.kv.block import Block
from pigou.request import BlockHashes, Request
from pigou.runtime.step_output import RankedLogprobs, StepOutput
from pigou.sampling import SamplingParams

if TYPE_CHECKING:
    from pigou.engine.core import EngineCore
    from pigou.runtime.structured_output import GrammarState
    from pigou.worker.device_use import WorkEstimate


@dataclass(frozen=True, slots=True)
class Add:
    """Compute a request."""

    request: Request  # for the core; `remote` is set where `ticket` is
    tokens: list[int]
    params: SamplingParams
    generated: int  # how many of the last `tokens` were generated elsewhere
    seed: bytes  # of its block hashes; empty where none of it is cached
    salt: str | None = None
    ticket: dict[str, Any] | None = None  # `kv_transfer_params` of the worker that has its blocks
    # state of `params.grammar` behind the generated tokens; None without one.
    grammar: GrammarState | None = None
    tenure: bytes = b""  # seed of the hashes that tickets name, whether or not anything is cached
    trace_id: str = ""  # of its trace; empty where it is not traced


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request."""

    request: str


@dataclass(frozen=True, slots=True)
class Release:
    """Free the blocks that are held for another worker."""

    request: str


@dataclass(frozen=True, slots=True)
class LeaseCached:
    """Offer what is cached of a prompt to another worker; the request is not computed."""

    request: Request


@dataclass(frozen=True, slots=True)
class EndLease:
    """Take back an offer of cached blocks that nobody was told of."""

    request: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended; `tokens` arrived, in `bytes` bytes of `blocks` blocks."""

    request: str
    tokens: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A load from tiers has ended; its first `blocks` blocks came.

    Where the read `failed`, the next one may still be in its store.
    """

    request: str
    blocks: int
    failed: bool


@dataclass(frozen=True, slots=True)
class OffloadDone:
    """A move has ended; `good` says which of its blocks arrived."""

    move: int
    good: list[bool]


@dataclass(frozen=True, slots=True)
class Recovered:
    """A tier's store has these blocks from before the start."""

    tier: int
    blocks: list[Block]


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Forget all cached prefixes."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command: TypeAlias = (
    Add
    | Abort
    | Release
    | LeaseCached
    | EndLease
    | Loaded
    | Restored
    | OffloadDone
    | Recovered
    | ClearCache
    | Stop
)


@dataclass(slots=True)
class Gauges:
    """The core's figures; counts since the start where it says "total".

    The engine thread alone writes them: all of them when a plan is made, load when it is done.
    Other threads read them at any time.
    """

    running: int = 0
    waiting: int = 0
    added_total: int = 0  # requests that the engine took up or refused, as of `waiting`
    loading: int = 0
    held: int = 0
    free: int = 0
    cached: int = 0
    table_blocks: int = 0
    table_tokens: int = 0
    usage: float = 0.0
    queries_total: int = 0
    hits_total: int = 0
    preemptions_total: int = 0
    swaps_total: int = 0
    price: float = 0.0
    missing: int = 0
    given_total: int = 0
    revived_total: int = 0
    steps_total: int = 0
    tokens_total: int = 0
    prefill_ns_total: int = 0
    prefill_tokens_total: int = 0
    blocks_received_total: int = 0
    bytes_received_total: int = 0
    blocks_leased_total: int = 0
    # what the steps took of the GPUs; None where the model's shape is not known.
    work: WorkEstimate | None = None

    def count_steps(self, plan: Plan, result: Result) -> None:
        """Count what was computed; chunks of prompts come last in a plan."""
        self.steps_total += result.steps
        self.tokens_total += plan.tokens * result.steps
        if self.work is not None:
            self.work.count(plan, result.steps)
        if plan and plan.counts.item(-1) > 1:
            self.prefill_ns_total += int(result.durations.sum())
            self.prefill_tokens_total += plan.chunk_tokens * result.steps

    def read_load(self, core: EngineCore, added: int) -> None:
        """Take what runs, waits and is kept in the core, which has taken `added` requests."""
        self.running, self.loading = core.running - core.loading, core.loading
        self.waiting, self.added_total = core.waiting, added
        self.free, self.usage = core.free_blocks, core.usage
        self.held, self.cached = core.held, core.cached_blocks

    def read(self, core: EngineCore, plan: Plan, added: int, warm_queries: int) -> None:
        """Take all figures of the core, which begins a plan: its tokens count as computed.

        `warm_queries` are prefix queries of the warm-up.
        """
        self.read_load(core, added)
        rows, used = core.rows, core.rows.length > 0
        self.table_blocks = int(rows.blocks[used].sum())
        self.table_tokens = int((rows.computed - rows.dropped)[used].sum())
        self.table_tokens += plan.tokens * plan.repeat
        self.queries_total = core.stats.queried_tokens - warm_queries
        self.hits_total = core.stats.hit_tokens
        self.preemptions_total, self.swaps_total = core.stats.preemptions, core.stats.swaps
        if core.config.eviction is not None:
            self.price, self.missing = core.price, core.missing_entries
            self.given_total, self.revived_total = (
                core.stats.evicted_tokens,
                core.stats.recomputed_tokens,
            )


@dataclass(frozen=True, slots=True)
class Failed:
    """A request was refused by the engine, or failed in it."""

    request: str  # its id
    status: int  # HTTP status that says so
    message: str
    type: str = ""  # of the error body; empty for that of the status


def failed_alone(why: str) -> str:
    """Return the message of a request that fails in the engine by itself."""
    return f"The engine failed on this request alone ({why}); change it before it is sent again."


@dataclass(frozen=True, slots=True)
class Begun:
    """A request took a row: for the first time, or again after a preemption."""

    request: str  # its id
    computed: int  # tokens that need not be computed
    loaded: int  # of those, tokens that another worker's blocks brought
    now: int  # when, in monotonic nanoseconds
    # when the transfer of its blocks began; 0 where it is not traced, or without one.
    loading: int = 0


@dataclass(slots=True)
class Report:
    """All that one step did, in one message."""

    now: int = 0  # when it ended, monotonic nanoseconds
    begun: list[Begun] = field(default_factory=list)  # requests that took a row
    # (request, token, log-probabilities where asked for), in order.
    tokens: list[tuple[str, int, RankedLogprobs | None]] = field(default_factory=list)
    # (request, log-probabilities of its prompt), in order.
    prompts: list[tuple[str, list[RankedLogprobs | None]]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)  # requests that left the engine
    # by request, `kv_transfer_params` of the blocks held.
    tickets: dict[str, dict[str, Any]] = field(default_factory=dict)
    # the same of cached blocks that were asked for; None where there are none.
    leases: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    failed: list[Failed] = field(default_factory=list)  # requests that were refused
    events: list[dict[str, Any]] = field(default_factory=list)  # KV events, as maps of the wire
    computed: int = 0  # tokens computed in each step of the plan; 0 in reports between its steps
    steps: int = 0
    # of prompts of traced requests: (request, begin, end, tokens), times as `now`.
    chunks: list[tuple[str, int, int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.begun
            or self.tokens
            or self.prompts
            or self.finished
            or self.failed
            or self.events
            or self.leases
        )


#: Is called after each step; returns whether the plan's next steps may go on.
OnStep: TypeAlias = Callable[[StepOutput], bool]


class Backend(Protocol):
    """Computes plans; called from the engine thread only. `TorchExecutor` is one."""

    def set_beat(self, beat: Callable[[], None]) -> None:
        """Call `beat` while a step makes progress, at least once a second where that is known."""

    def add(
        self,
        request: str,
        tokens: list[int],
        params: SamplingParams,
        *,
        seed: bytes,
        resume: int = 0,
        hashes: BlockHashes | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        """Take a request up, before it is planned.

        Args:
            hashes: that the core was told; None stands for all full blocks of `tokens`.
            grammar: state of `params.grammar` behind the resumed tokens; None without one.

        Raises:
            ValueError: a parameter cannot be honoured (a grammar, mostly); says which.
        """

    def drop(self, request: str) -> None:
        """Forget a request; nothing, if it is not known."""

    def execute(self, plan: Plan, on_step: OnStep | None = None) -> Result:
        """Do the plan's moves, then its steps; return early where a sequence ends."""
