"""Windows of load for planners; None always means unknown (a hole), never 0."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pigou.control.messages import Message
from pigou.request import UNKNOWN_LOCATION, Location, Role


class WorkerState(StrEnum):
    """Lifecycle state of a worker."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class ExpertWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Routed experts of a worker over one window, in the layer whose ranks are most uneven."""

    loads: tuple[float, ...]  # tokens of each expert
    placement: tuple[int, ...]  # expert of each slot; ranks have as many each, in order
    ranks: int
    busy: float  # seconds a second that the slowest rank spends on experts, over all layers
    move_s: float  # seconds in which a rank fetches an expert, of all layers


class WorkerWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker over one window: means over it, else values at its end; None if unknown."""

    id: str  # unique over all pools
    state: WorkerState = WorkerState.READY
    since_ns: int = 0  # start of this state
    unplaceable: bool = False  # starting without a GPU, or failing repeatedly
    queued_prefill_tokens: float | None = None  # uncached prompt tokens waiting or in computation
    waiting: int | None = None  # requests
    running: int | None = None  # requests
    mean_running: float | None = None
    kv_usage: float | None = None  # share of KV blocks in use, 0 to 1
    kv_tokens: int | None = None  # KV cache capacity
    held_tokens: float | None = None
    mean_held_tokens: float | None = None
    cached_tokens: float | None = None  # in its prefix cache, lost by removal or flip
    computed_prompts: int | None = None  # prompts completed in the window
    computed_tokens: float | None = None  # their uncached tokens
    computed_pairs: float | None = None  # attention pairs of these tokens (`estimates.pairs`)
    prefill_s: float | None = None  # seconds spent on prefill
    itl_s: float | None = None  # mean ITL of its streams
    cpu_usage: float | None = None  # share of its CPU in use
    # uncached tokens of prompts that are cheapest there while no prefill worker has a queue
    routed_tokens: float | None = None
    location: Location = UNKNOWN_LOCATION  # node labels; empty if unknown
    experts: ExpertWindow | None = None  # with expert parallelism, where known
    rank_imbalance: float | None = None  # (max - mean) / mean of its ranks' tokens for experts


class PoolWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool: workers of one role, model and width. Empty pools are included."""

    name: str  # unique; key of budgets, performance models and actions
    role: Role
    model: str = ""
    gpus: int = 1  # per worker, at least 1
    workers: tuple[WorkerWindow, ...] = ()
    can_start: bool = True  # whether more workers can start now (False: no GPU, or no image)

    def in_state(self, state: WorkerState) -> tuple[WorkerWindow, ...]:
        """Return the workers in a state."""
        return tuple(worker for worker in self.workers if worker.state is state)

    @property
    def ready(self) -> int:
        """Workers that serve."""
        return len(self.in_state(WorkerState.READY))

    @property
    def starting(self) -> int:
        """Workers ordered but not ready, unplaceable ones included."""
        return len(self.in_state(WorkerState.STARTING))

    @property
    def draining(self) -> int:
        """Workers that finish their streams and leave."""
        return len(self.in_state(WorkerState.DRAINING))

    @property
    def used_gpus(self) -> int:
        """GPUs of its workers in all states."""
        return self.gpus * len(self.workers)


class LatencySummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of one latency over a window; None if unknown."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class LoadWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests of one model (and class) over one window; None if unknown."""

    model: str = ""
    workload: str = ""  # class name; "" without classes
    arrivals: int | None = None  # requests, refused ones included
    isl: float | None = None  # mean prompt tokens
    isl_scv: float | None = None  # variance of prompt tokens over the squared mean
    osl: float | None = None  # mean output tokens of ended requests
    hit_rate: float | None = None  # cached share of prompt tokens, 0 to 1
    # index of dispersion of arrivals in a quarter of the TTFT objective; 1: Poisson
    arrival_scv: float | None = None
    ttft: LatencySummary = msgspec.field(default_factory=LatencySummary)
    itl: LatencySummary = msgspec.field(default_factory=LatencySummary)
    request_s: float | None = None  # mean end-to-end seconds
    longest_s: float | None = None  # longest of those that ended
    completed: int | None = None  # requests that ended successfully
    attained: int | None = None  # ended requests inside the objective
    ended: int | None = None  # offered requests that ended; refused and given up ones are late
    output_tokens: float | None = None  # generated tokens
    queued: int | None = None  # requests queued at the gateway, at the end
    queued_tokens: float | None = None  # their prompt tokens
    in_flight: int | None = None  # unfinished requests, at the end


class PlannerWindow(Message, frozen=True, kw_only=True):
    """All that a planner sees of one interval."""

    now_ns: int  # end of the interval
    seconds: float
    loads: tuple[LoadWindow, ...] = ()  # per model and class; an absent one is a hole
    pools: tuple[PoolWindow, ...] = ()  # all pools at the end, external changes included
    # Price of Anarchy of routing by model, where estimated
    price_of_anarchy: dict[str, float] = msgspec.field(default_factory=dict)
    # prefill workers of the calibrated optimum's better split, by model
    better_prefill: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """Models with a pool, in pool order."""
        return tuple(dict.fromkeys(pool.model for pool in self.pools))

    @property
    def used_gpus(self) -> int:
        """GPUs of all workers in all states."""
        return sum(pool.used_gpus for pool in self.pools)
