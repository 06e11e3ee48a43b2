"""Planners with a target number of workers per pool: their base, and the static planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import msgspec

from pigou.config import check_bounds
from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    PlannerDecision,
    PoolPlan,
    RemoveWorker,
)
from pigou.control.planner.planner import PlannerSetup
from pigou.objectives import Budget
from pigou.request import SECOND
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState, WorkerWindow

#: Share of an interval that a tick may be early.
_EARLY = 0.01


class TargetPlanner:
    """Base of planners with target workers per pool, scaled as replica controllers do."""

    name: ClassVar[str]
    Params: ClassVar[type[msgspec.Struct]]
    interval_s: float = 0.0  # seconds between decisions; earlier ticks return nothing

    def __init__(self, setup: PlannerSetup) -> None:
        self.setup = setup
        self._window: PlannerWindow | None = None
        self._decided_ns: int | None = None

    def observe(self, window: PlannerWindow) -> None:
        """Take in one interval."""
        self._window = window

    def _targets(self, window: PlannerWindow, now_ns: int) -> tuple[dict[str, int], list[str]]:
        """Return target workers by pool (others stay), and reasons."""
        raise NotImplementedError

    def tick(self, now_ns: int) -> PlannerDecision:
        """Return the decision."""
        window, self._window = self._window, None
        if window is None or not self._is_due(now_ns):
            self._window = window
            return PlannerDecision(now_ns=now_ns, planner=self.name)
        self._decided_ns = now_ns
        targets, reasons = self._targets(window, now_ns)
        actions, refusals = carry_out(window, targets, self.setup.budget)
        plans = tuple(
            PoolPlan(
                pool=pool.name,
                ready=pool.ready,
                pending=pool.starting,
                wanted=targets.get(pool.name, supply(pool)),
            )
            for pool in window.pools
        )
        return PlannerDecision(
            now_ns=now_ns,
            planner=self.name,
            actions=actions,
            pools=plans,
            reasons=(*reasons, *refusals),
        )

    def _is_due(self, now_ns: int) -> bool:
        if self._decided_ns is None:
            return True
        return now_ns - self._decided_ns >= (1.0 - _EARLY) * self.interval_s * SECOND


def supply(pool: PoolWindow) -> int:
    """Return workers that serve or are on their way."""
    return pool.ready + pool.starting


def carry_out(
    window: PlannerWindow, targets: Mapping[str, int], budget: Budget
) -> tuple[tuple[Action, ...], list[str]]:
    """Return actions towards the targets (workers by pool; others stay), and budget refusals."""
    actions: list[Action] = []
    reasons: list[str] = []
    used = {pool.name: pool.used_gpus for pool in window.pools}
    changed = [pool for pool in window.pools if pool.name in targets]
    for pool in changed:
        surplus = supply(pool) - max(targets[pool.name], budget.min_of(pool.name))
        for worker in victims(pool)[: max(surplus, 0)]:
            if worker.state is WorkerState.STARTING:
                actions.append(RemoveWorker(worker.id))
                used[pool.name] -= pool.gpus
            else:
                actions.append(DrainWorker(worker.id))
    for pool in changed:
        wanted = max(targets[pool.name], budget.min_of(pool.name)) - supply(pool)
        room = free_gpus(window.pools, used, pool, budget) // pool.gpus
        count = min(wanted, room)
        if wanted > max(count, 0):
            reasons.append(f"{pool.name}: the budget has no GPUs for {wanted - max(count, 0)} more")
        if count > 0:
            actions.append(AddWorkers(pool.name, count))
            used[pool.name] += count * pool.gpus
    return tuple(actions), reasons


def victims(pool: PoolWindow) -> list[WorkerWindow]:
    """Return workers in ReplicaSet removal order: not ready, then youngest."""
    ready = sorted(pool.in_state(WorkerState.READY), key=lambda w: (-w.since_ns, w.id))
    starting = sorted(pool.in_state(WorkerState.STARTING), key=lambda w: (-w.since_ns, w.id))
    return [*starting, *ready]


def free_gpus(
    pools: Iterable[PoolWindow], used: Mapping[str, int], pool: PoolWindow, budget: Budget
) -> int:
    """Return GPUs left to a pool by all budgets; `used` has GPUs by pool in all states."""
    limits = [2**31]
    if budget.max_gpus is not None:
        limits.append(budget.max_gpus - sum(used.values()))
    if pool.model in budget.model_gpus:
        own = sum(used[other.name] for other in pools if other.model == pool.model)
        limits.append(budget.model_gpus[pool.model] - own)
    if pool.name in budget.pool_gpus:
        limits.append(budget.pool_gpus[pool.name] - used[pool.name])
    return max(min(limits), 0)


class StaticParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `StaticPlanner`."""

    workers: int = 0  # per pool; 0 for the initial number
    repair: bool = True  # replace failed workers

    def __post_init__(self) -> None:
        check_bounds("workers", self.workers, ge=0)


class StaticPlanner(TargetPlanner):
    """A fleet without autoscaling: `workers` per pool, or the initial (or enlarged) number."""

    name: ClassVar[str] = "static"
    Params: ClassVar[type[msgspec.Struct]] = StaticParams

    def __init__(self, setup: PlannerSetup, params: StaticParams) -> None:
        super().__init__(setup)
        self.params = params
        self._sizes: dict[str, int] = {}

    def _targets(
        self,
        window: PlannerWindow,
        now_ns: int,  # noqa: ARG002
    ) -> tuple[dict[str, int], list[str]]:
        for pool in window.pools:
            size = self.params.workers or max(supply(pool), self._sizes.get(pool.name, 0))
            self._sizes[pool.name] = size
        return (dict(self._sizes) if self.params.repair else {}), []
