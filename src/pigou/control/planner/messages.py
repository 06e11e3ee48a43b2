"""Planner output: actions, and decisions that explain them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pigou.control.messages import Message
from pigou.request import Role


class AddWorkers(Message, frozen=True):
    """Start `count` (at least 1) more workers in a pool."""

    pool: str
    count: int


class DrainWorker(Message, frozen=True):
    """A ready worker takes nothing new, finishes or migrates its streams, then leaves."""

    worker: str


class RemoveWorker(Message, frozen=True):
    """Remove a worker at once: one that has not started, or cannot."""

    worker: str


class FlipRole(Message, frozen=True):
    """Drain a ready worker, then let it serve in another pool of its model and width."""

    worker: str
    role: Role
    pool: str


class RebalancePool(Message, frozen=True):
    """Advise the router to spare a worker that is full while its pool is not."""

    pool: str
    worker: str


class SetOperatingPoint(Message, frozen=True, kw_only=True):
    """Set limits of each worker of a pool; None keeps one."""

    pool: str
    max_seqs: int | None = None  # most running requests per worker
    max_batched_tokens: int | None = None  # most tokens per step


Action: TypeAlias = (
    AddWorkers | DrainWorker | RemoveWorker | FlipRole | RebalancePool | SetOperatingPoint
)


# --- decisions -------------------------------------------------------------------------------


class LoadForecast(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The load of a model that the plan is for."""

    model: str
    rps: float  # observed requests a second
    planned_rps: float  # planned for, at the time a start would be ready
    low_rps: float  # interval of the forecast
    high_rps: float
    isl: float  # mean prompt and output tokens
    osl: float
    hit_rate: float = 0.0  # cached share of prompt tokens
    remote_share: float = 1.0  # share of the uncached ones that routes want prefill workers for
    # seconds of delay that a late request is charged; rises while fewer attain than shall
    late_price: float | None = None
    late_share: float | None = None  # late ones of the requests that ended, over a start-up


class PoolPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decision for one pool, and why; None where the planner has no model."""

    pool: str
    ready: int  # serving workers
    pending: int  # workers on their way, counted as supply
    wanted: int
    # requests a second that `wanted` workers serve inside the objective
    capacity_rps: float | None = None
    ttft_s: float | None = None  # predicted for `wanted`, at the objective's percentile
    itl_s: float | None = None
    utilisation: float | None = None  # predicted busy share
    value: float | None = None  # weighted seconds of delay that one more worker saves a second
    price: float | None = None  # price of one more worker's GPU-seconds, in the same unit


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A move that was considered."""

    move: str  # in words, as `add 1 decode`
    value: float  # weighted seconds of delay saved a second; negative if it costs
    price: float  # price of GPU-seconds and the lost prefix cache, in the same unit
    chosen: bool = False
    reason: str = ""  # why, or why not


class PlannerDecision(Message, frozen=True, kw_only=True):
    """Actions of one tick and their explanation."""

    now_ns: int  # time of the tick
    planner: str
    actions: tuple[Action, ...] = ()  # to be carried out now, in order
    forecasts: tuple[LoadForecast, ...] = ()  # one per loaded model
    pools: tuple[PoolPlan, ...] = ()
    alternatives: tuple[Alternative, ...] = ()  # considered moves, chosen ones first
    shadow_price: float = 0.0  # weighted seconds of delay per GPU-second; 0 if the budget is slack
    reasons: tuple[str, ...] = ()  # sentences for the operator, alerts included
