"""Windows of load that a planner observes; None always means "not known" (a hole), never 0."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pigou.control.messages import Message
from pigou.request import UNKNOWN_LOCATION, Location, Role


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class WorkerWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker over one window; what follows `unplaceable` may be unknown (None).

    Means are over the window, other figures as of its end. A worker that flips is `draining` in
    its old pool, then `starting` in the new one.
    """

    id: str  # unique over all pools
    state: WorkerState = WorkerState.READY
    since_ns: int = 0  # when this state began
    unplaceable: bool = False  # a starting one that has no GPU, or fails again and again
    # uncached prompt tokens that wait or are computed there.
    queued_prefill_tokens: float | None = None
    waiting: int | None = None  # requests that wait there
    running: int | None = None  # requests that run there
    mean_running: float | None = None  # mean of that over the window
    kv_usage: float | None = None  # share of its KV blocks in use, 0 to 1
    kv_tokens: int | None = None  # capacity of its KV cache
    held_tokens: float | None = None
    mean_held_tokens: float | None = None  # mean of that over the window
    cached_tokens: float | None = None  # in its prefix cache, which a removal or a flip loses
    computed_prompts: int | None = None  # prompts that it ended to compute in the window
    computed_tokens: float | None = None  # uncached tokens of these
    # pairs of such a token and one before it (`estimates.pairs`), all prompts.
    computed_pairs: float | None = None
    prefill_s: float | None = None  # seconds in which it computed prompts
    itl_s: float | None = None  # mean seconds between tokens of its streams
    cpu_usage: float | None = None  # share of its CPU in use
    location: Location = UNKNOWN_LOCATION  # labels of its node, empty where they are not known


class PoolWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool: workers of one role, model and width. A pool without workers is given too."""

    name: str  # unique; budgets, performance models and actions go by it
    role: Role
    model: str = ""
    gpus: int = 1  # of each worker, at least 1
    workers: tuple[WorkerWindow, ...] = ()
    # whether further workers can be started now (False: no GPU, or no image).
    can_start: bool = True

    def in_state(self, state: WorkerState) -> tuple[WorkerWindow, ...]:
        """Return the workers that are in a state."""
        return tuple(worker for worker in self.workers if worker.state is state)

    @property
    def ready(self) -> int:
        """Workers that serve."""
        return len(self.in_state(WorkerState.READY))

    @property
    def starting(self) -> int:
        """Workers that were ordered and do not serve yet, unplaceable ones too."""
        return len(self.in_state(WorkerState.STARTING))

    @property
    def draining(self) -> int:
        """Workers that end their streams and then go."""
        return len(self.in_state(WorkerState.DRAINING))

    @property
    def unplaceable(self) -> int:
        """Starting workers that cannot start."""
        return sum(w.unplaceable for w in self.in_state(WorkerState.STARTING))

    @property
    def used_gpus(self) -> int:
        """GPUs of all its workers, in all states."""
        return self.gpus * len(self.workers)


class LatencySummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of one latency over a window, each None where it is not known."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    def percentile(self, percent: float) -> float | None:
        """Return the least percentile known that is at or above `percent`; else None."""
        known = ((50, self.p50), (90, self.p90), (95, self.p95), (99, self.p99))
        return next((s for at, s in known if at >= percent and s is not None), None)


class LoadWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests of one model (and workload class) over one window; None where not known."""

    model: str = ""
    workload: str = ""  # name of the class; "" where there are no classes
    arrivals: int | None = None  # requests that came, refused ones counted
    isl: float | None = None  # mean prompt tokens of these
    isl_scv: float | None = None  # variance of their prompt tokens over the squared mean
    osl: float | None = None  # mean output tokens of the requests that ended
    hit_rate: float | None = None  # share of prompt tokens that was cached, 0 to 1
    # variance of gaps between arrivals over the squared mean; 1 for Poisson.
    arrival_scv: float | None = None
    ttft: LatencySummary = msgspec.field(default_factory=LatencySummary)
    itl: LatencySummary = msgspec.field(default_factory=LatencySummary)
    request_s: float | None = None  # mean seconds from arrival to end
    completed: int | None = None  # requests that ended well
    # of the requests that ended, refused ones counted, those inside the objective.
    attained: int | None = None
    output_tokens: float | None = None  # tokens that were generated
    queued: int | None = None  # requests that wait at the gateway, at the end
    queued_tokens: float | None = None  # prompt tokens of these
    in_flight: int | None = None  # requests that are not ended, at the end


class PlannerWindow(Message, frozen=True, kw_only=True):
    """All that a planner sees of one interval."""

    now_ns: int  # end of the interval
    seconds: float
    loads: tuple[LoadWindow, ...] = ()  # one for each model and class; one that is absent is a hole
    # all pools as they are at the end, changes by others included.
    pools: tuple[PoolWindow, ...] = ()
    # observed over optimal cost of routing, by model, where it is estimated.
    price_of_anarchy: dict[str, float] = msgspec.field(default_factory=dict)
    # prefill workers of the calibrated optimum's better split, by model.
    better_prefill: dict[str, int] = msgspec.field(default_factory=dict)

    def load(self, model: str, workload: str = "") -> LoadWindow | None:
        """Return the load of a model and class; None for a hole."""
        for load in self.loads:
            if (load.model, load.workload) == (model, workload):
                return load
        return None

    @property
    def models(self) -> tuple[str, ...]:
        """Models that have a pool, each once, in the order of the pools."""
        return tuple(dict.fromkeys(pool.model for pool in self.pools))

    @property
    def used_gpus(self) -> int:
        """GPUs of all workers, in all states."""
        return sum(pool.used_gpus for pool in self.pools)
