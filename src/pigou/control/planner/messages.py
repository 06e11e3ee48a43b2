"""Messages of a planner: windows that it observes, actions and decisions that it returns.

A driver calls `observe` with one `PlannerWindow` for each interval, and `tick` as often as it
wants decisions. None always means "not known" (a hole in the metrics), never 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

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

    Attributes:
        id: unique over all pools.
        state: of its life.
        since_ns: when this state began.
        unplaceable: a starting one that has no GPU, or fails again and again.
        queued_prefill_tokens: uncached prompt tokens that wait or are computed there.
        waiting: requests that wait there.
        running: requests that run there.
        mean_running: mean of that over the window.
        kv_usage: share of its KV blocks in use, 0 to 1.
        kv_tokens: capacity of its KV cache.
        held_tokens: that its running requests hold.
        mean_held_tokens: mean of that over the window.
        cached_tokens: in its prefix cache, which a removal or a flip loses.
        computed_prompts: prompts that it ended to compute in the window.
        computed_tokens: uncached tokens of these.
        computed_pairs: pairs of such a token and one before it (`estimates.pairs`), all prompts.
        prefill_s: seconds in which it computed prompts.
        itl_s: mean seconds between tokens of its streams.
        cpu_usage: share of its CPU in use.
        location: labels of its node, empty where they are not known.
    """

    id: str
    state: WorkerState = WorkerState.READY
    since_ns: int = 0
    unplaceable: bool = False
    queued_prefill_tokens: float | None = None
    waiting: int | None = None
    running: int | None = None
    mean_running: float | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None
    held_tokens: float | None = None
    mean_held_tokens: float | None = None
    cached_tokens: float | None = None
    computed_prompts: int | None = None
    computed_tokens: float | None = None
    computed_pairs: float | None = None
    prefill_s: float | None = None
    itl_s: float | None = None
    cpu_usage: float | None = None
    location: Location = UNKNOWN_LOCATION


class PoolWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool: workers of one role, model and width. A pool without workers is given too.

    Attributes:
        name: unique; budgets, performance models and actions go by it.
        role: of its workers.
        model: that they serve.
        gpus: of each worker, at least 1.
        workers: of the pool, in all states.
        can_start: whether further workers can be started now (False: no GPU, or no image).
    """

    name: str
    role: Role
    model: str = ""
    gpus: int = 1
    workers: tuple[WorkerWindow, ...] = ()
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
    """Requests of one model (and workload class) over one window; None where not known.

    Attributes:
        model: that was asked for.
        workload: name of the class; "" where there are no classes.
        arrivals: requests that came, refused ones counted.
        isl: mean prompt tokens of these.
        isl_scv: variance of their prompt tokens over the squared mean.
        osl: mean output tokens of the requests that ended.
        hit_rate: share of prompt tokens that was cached, 0 to 1.
        arrival_scv: variance of gaps between arrivals over the squared mean; 1 for Poisson.
        ttft, itl: latencies of the requests that had a first token, or ended.
        request_s: mean seconds from arrival to end.
        completed: requests that ended well.
        attained: of the requests that ended, refused ones counted, those inside the objective.
        output_tokens: tokens that were generated.
        queued: requests that wait at the gateway, at the end.
        queued_tokens: prompt tokens of these.
        in_flight: requests that are not ended, at the end.
    """

    model: str = ""
    workload: str = ""
    arrivals: int | None = None
    isl: float | None = None
    isl_scv: float | None = None
    osl: float | None = None
    hit_rate: float | None = None
    arrival_scv: float | None = None
    ttft: LatencySummary = msgspec.field(default_factory=LatencySummary)
    itl: LatencySummary = msgspec.field(default_factory=LatencySummary)
    request_s: float | None = None
    completed: int | None = None
    attained: int | None = None
    output_tokens: float | None = None
    queued: int | None = None
    queued_tokens: float | None = None
    in_flight: int | None = None


class PlannerWindow(Message, frozen=True, kw_only=True):
    """All that a planner sees of one interval.

    Attributes:
        now_ns: end of the interval.
        seconds: of the interval, above 0.
        loads: one for each model and class; one that is absent is a hole.
        pools: all pools as they are at the end, changes by others included.
        price_of_anarchy: observed over optimal cost of routing, by model, where it is estimated.
        better_prefill: prefill workers of the calibrated optimum's better split, by model.
    """

    now_ns: int
    seconds: float
    loads: tuple[LoadWindow, ...] = ()
    pools: tuple[PoolWindow, ...] = ()
    price_of_anarchy: dict[str, float] = msgspec.field(default_factory=dict)
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


# --- actions ---------------------------------------------------------------------------------


class AddWorkers(Message, frozen=True):
    """Start `count` more workers in a pool, at least 1."""

    pool: str
    count: int


class DrainWorker(Message, frozen=True):
    """A ready worker takes nothing new, ends or migrates its streams, then goes."""

    worker: str


class RemoveWorker(Message, frozen=True):
    """A worker goes at once: one that has not started, or cannot."""

    worker: str


class FlipRole(Message, frozen=True):
    """A ready worker drains, then serves in another pool of its model and width.

    Attributes:
        worker: that changes its role.
        role: that it has then.
        pool: that it is in then.
    """

    worker: str
    role: Role
    pool: str


class RebalancePool(Message, frozen=True):
    """One worker is full while its pool is not: the router shall spare it. Advice, no order."""

    pool: str
    worker: str


class SetOperatingPoint(Message, frozen=True, kw_only=True):
    """Limits of each worker of a pool; None leaves one as it is.

    Attributes:
        pool: whose workers they hold for.
        max_seqs: most requests that run at once on one worker.
        max_batched_tokens: most tokens of one step.
    """

    pool: str
    max_seqs: int | None = None
    max_batched_tokens: int | None = None


Action: TypeAlias = (
    AddWorkers | DrainWorker | RemoveWorker | FlipRole | RebalancePool | SetOperatingPoint
)


# --- decisions -------------------------------------------------------------------------------


class LoadForecast(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The load of a model that was planned for.

    Attributes:
        model: whose load.
        rps: requests a second, as observed.
        planned_rps: that the plan is made for, at the time when a start would be ready.
        low_rps, high_rps: interval of the forecast.
        isl, osl: mean tokens of prompt and output.
        hit_rate: share of prompt tokens that is cached.
    """

    model: str
    rps: float
    planned_rps: float
    low_rps: float
    high_rps: float
    isl: float
    osl: float
    hit_rate: float = 0.0


class PoolPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was decided for one pool, and why.

    Attributes:
        pool: name.
        ready, pending: workers that serve, and that are on their way and count as supply.
        wanted: workers that it should have.
        capacity_rps: requests a second that `wanted` workers serve inside the objective; None
            where the planner has no model of it.
        ttft_s, itl_s: predicted for `wanted`, at the objective's percentile; None as above.
        utilisation: share of time that its servers are busy then.
        value: of one more worker: weighted seconds of delay saved a second.
        price: of one more worker: the same unit, by the price of its GPU-seconds.
    """

    pool: str
    ready: int
    pending: int
    wanted: int
    capacity_rps: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    utilisation: float | None = None
    value: float | None = None
    price: float | None = None


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A move that was weighed.

    Attributes:
        move: in words, as `add 1 decode`.
        value: weighted seconds of delay that it saves a second; negative where it costs.
        price: of GPU-seconds, of the move and of the prefix cache lost, the same unit.
        chosen: whether it was made.
        reason: why, or why not.
    """

    move: str
    value: float
    price: float
    chosen: bool = False
    reason: str = ""

    @property
    def net(self) -> float:
        """Value less price."""
        return self.value - self.price


class PlannerDecision(Message, frozen=True, kw_only=True):
    """Actions of one tick and their explanation.

    Attributes:
        now_ns: time of the tick.
        planner: its name.
        actions: to be done now, in this order.
        forecasts: one a model that has a load.
        pools: one a pool.
        alternatives: moves that were weighed, those made first.
        shadow_price: of the budget, weighted seconds of delay a GPU-second; 0 where it is slack.
        reasons: sentences for the operator, alerts too.
    """

    now_ns: int
    planner: str
    actions: tuple[Action, ...] = ()
    forecasts: tuple[LoadForecast, ...] = ()
    pools: tuple[PoolPlan, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    shadow_price: float = 0.0
    reasons: tuple[str, ...] = ()
