"""What a planner returns: actions, and decisions that explain them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pigou.control.messages import Message
from pigou.request import Role


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
    """A ready worker drains, then serves in another pool of its model and width."""

    worker: str
    role: Role
    pool: str


class RebalancePool(Message, frozen=True):
    """One worker is full while its pool is not: the router shall spare it. Advice, no order."""

    pool: str
    worker: str


class SetOperatingPoint(Message, frozen=True, kw_only=True):
    """Limits of each worker of a pool; None leaves one as it is."""

    pool: str
    max_seqs: int | None = None  # most requests that run at once on one worker
    max_batched_tokens: int | None = None  # most tokens of one step


Action: TypeAlias = (
    AddWorkers | DrainWorker | RemoveWorker | FlipRole | RebalancePool | SetOperatingPoint
)


# --- decisions -------------------------------------------------------------------------------


class LoadForecast(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The load of a model that was planned for."""

    model: str
    rps: float  # requests a second, as observed
    planned_rps: float  # that the plan is made for, at the time when a start would be ready
    low_rps: float  # interval of the forecast
    high_rps: float
    isl: float  # mean tokens of prompt and output
    osl: float
    hit_rate: float = 0.0  # share of prompt tokens that is cached


class PoolPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was decided for one pool, and why; None where the planner has no model of it."""

    pool: str
    ready: int  # workers that serve
    pending: int  # workers on their way, which count as supply
    wanted: int  # workers that it should have
    # requests a second that `wanted` workers serve inside the objective.
    capacity_rps: float | None = None
    ttft_s: float | None = None  # predicted for `wanted`, at the objective's percentile
    itl_s: float | None = None
    utilisation: float | None = None  # share of time that its servers are busy then
    value: float | None = None  # of one more worker: weighted seconds of delay saved a second
    price: float | None = None  # of one more worker: the same unit, by the price of its GPU-seconds


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A move that was weighed."""

    move: str  # in words, as `add 1 decode`
    value: float  # weighted seconds of delay that it saves a second; negative where it costs
    price: float  # of GPU-seconds, of the move and of the prefix cache lost, the same unit
    chosen: bool = False  # whether it was made
    reason: str = ""  # why, or why not

    @property
    def net(self) -> float:
        """Value less price."""
        return self.value - self.price


class PlannerDecision(Message, frozen=True, kw_only=True):
    """Actions of one tick and their explanation."""

    now_ns: int  # time of the tick
    planner: str
    actions: tuple[Action, ...] = ()  # to be done now, in this order
    forecasts: tuple[LoadForecast, ...] = ()  # one a model that has a load
    pools: tuple[PoolPlan, ...] = ()
    alternatives: tuple[Alternative, ...] = ()  # moves that were weighed, those made first
    # of the budget, weighted seconds of delay a GPU-second; 0 where it is slack.
    shadow_price: float = 0.0
    reasons: tuple[str, ...] = ()  # sentences for the operator, alerts too
