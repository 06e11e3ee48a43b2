"""Pigou's planner: adds a worker where it saves more delay than its GPU-seconds cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import msgspec

from pigou.control.planner.messages import Action, PlannerDecision, SetOperatingPoint
from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.price.explanation import DecisionExplanation, hot_workers
from pigou.control.planner.price.frontier import (
    FrontierPoint,
    ModelPlan,
    PoolOption,
    clear_budget,
    is_scarce,
)
from pigou.control.planner.price.model_state import ModelState
from pigou.control.planner.price.terms import PricePlannerParams, idle, lost
from pigou.control.planner.price.transition import MoveRates, PoolMembership, Transition
from pigou.performance.capacity import KNOTS
from pigou.request import Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerWindow


class PricePlanner:
    """Buys workers while the delay they save is worth more than their price (`terms`).

    When the load (`LoadBand`) or speeds (`PoolSpeed`) leave their bands, `ModelPlan.frontier`
    values each number of GPUs, `clear_budget` finds one price, and `Transition` carries it out.
    External changes are adopted until then. Starting workers count as supply, unplaceable ones do
    not.
    """

    name: ClassVar[str] = "price"
    Params: ClassVar[type[msgspec.Struct]] = PricePlannerParams

    def __init__(self, setup: PlannerSetup, params: PricePlannerParams) -> None:
        self.setup, self.params = setup, params
        self._hold_s = params.hold_seconds(setup.times.start_up_s)
        self._members = PoolMembership(setup.times)
        self._models: dict[str, ModelState] = {}
        self._wanted: dict[str, int] = {}
        self._adopted: dict[str, tuple[float, int]] = {}  # planned rps then, and workers
        self._limits: dict[str, int] = {}
        self._batches: dict[str, int] = {}
        self._window: PlannerWindow | None = None
        self._shadow_price = 0.0
        self._is_feasible = True
        self._explanation = DecisionExplanation(setup.times, params)

    def observe(self, window: PlannerWindow) -> None:
        """Take in one interval."""
        if self._window is not None and window.now_ns <= self._window.now_ns:
            return
        self._members.observe(window)
        self._window = window
        for model in window.models:
            if model not in self._models:
                self._models[model] = ModelState(model, self.setup, self.params, window.seconds)
            state = self._models[model]
            supply = sum(
                pool.gpus * self._members.supply(pool, window.now_ns)
                for pool in window.pools
                if pool.model == model
            )
            state.observe(window, supply, self._lacks(window, model))
        for pool in window.pools:
            self._adopt(pool, window.now_ns)

    def tick(self, now_ns: int) -> PlannerDecision:
        """Return the decision."""
        window, self._window = self._window, None
        if window is None:
            return PlannerDecision(now_ns=now_ns, planner=self.name)
        limits = {pool.name: self._max_workers(window, pool, now_ns) for pool in window.pools}
        stale = [state for state in self._models.values() if state.is_stale and state.is_ready]
        moved = {
            pool.model for pool in window.pools if limits[pool.name] != self._limits.get(pool.name)
        }
        if stale or (moved and any(state.plan is not None for state in self._models.values())):
            self._limits = limits
            self._plan(window, stale, moved, now_ns)
        unknown = [model for model in window.models if not self._models[model].is_ready]
        self._wake(window, unknown, now_ns)
        actions, reasons = self._act(window, now_ns)
        explained = self._explanation.explained(
            window, self._models, self._wanted, self._members, actions, self._shadow_price
        )
        reasons += explained.reasons
        reasons += [f"{model or 'model'}: load or speeds are not known yet" for model in unknown]
        reasons += [
            f"{state.name or 'model'}: one request alone breaks the objective; planned for less"
            for state in self._models.values()
            if state.plan is not None and state.plan.is_relaxed
        ]
        reasons += [
            f"{state.name or 'model'}: {state.late.reason}"
            for state in self._models.values()
            if state.late.reason
        ]
        if not self._is_feasible:
            reasons.append("the budget is below the minimum of all pools")
        return msgspec.structs.replace(explained, now_ns=now_ns, reasons=tuple(reasons))

    # --- planning --------------------------------------------------------------------------

    def _plan(
        self, window: PlannerWindow, stale: list[ModelState], moved: set[str], now_ns: int
    ) -> None:
        for state in stale:
            self._make_plan(state, window, now_ns)
        planned = [state for state in self._models.values() if state.plan is not None]
        for state in planned:
            assert state.plan is not None
            state.plan.set_pools(self._options(state, window, now_ns))
            state.frontier = self._within(state, state.plan)
        budget = self.setup.budget.max_gpus
        if budget is not None:
            unplanned = {s.name for s in self._models.values() if s.plan is None}
            budget -= sum(p.used_gpus for p in window.pools if p.model in unplanned)
            budget = max(budget, 0)
        if is_scarce([s.frontier for s in planned], budget, self.params.gpu_price):
            for state in planned:
                assert state.plan is not None
                state.frontier = self._within(state, state.plan, scarce=True)
        cleared = clear_budget([s.frontier for s in planned], budget, self.params.gpu_price)
        was_binding = self._shadow_price > 0
        self._shadow_price = cleared.price if math.isfinite(cleared.price) else 0.0
        self._is_feasible = cleared.is_feasible
        is_binding = was_binding or cleared.price > 0
        for state, point in zip(planned, cleared.points, strict=True):
            changed = state in stale or state.name in moved or is_binding
            for pool, count in point.counts.items():
                if changed or pool not in self._wanted:
                    self._wanted[pool] = self._unless_adopted(pool, state, count)

    def _make_plan(self, state: ModelState, window: PlannerWindow, now_ns: int) -> None:
        load = state.band.planned
        old = state.plan
        options = self._options(state, window, now_ns)
        models = {option.name: option.performance for option in options}
        state.planned_models = models
        plan = ModelPlan(
            self.params, load.rps, load.mix, options, state.slos, state.weight,
            state.plan_routes(load.mix), state.late.price,
        )  # fmt: skip
        if old is None:
            state.band.begin(plan.rps({option.name: option.supply for option in options}))
            plan.load_rps = state.band.planned.rps
        elif (old.mix, old.slos) == (plan.mix, plan.slos) and models == {
            pool.name: pool.performance for pool in old.pools
        }:
            plan.curves.update(old.curves)
            plan.set_pools(options)
        state.plan = plan
        state.is_stale = False

    def _within(
        self, state: ModelState, plan: ModelPlan, scarce: bool = False
    ) -> list[FrontierPoint]:
        points = plan.frontier(scarce)
        limit = self.setup.budget.model_gpus.get(state.name)
        if limit is None:
            return points
        return [point for point in points if point.gpus <= limit] or points[:1]

    def _options(self, state: ModelState, window: PlannerWindow, now_ns: int) -> list[PoolOption]:
        times, params = self.setup.times, self.params
        options = []
        for pool in window.pools:
            if pool.model != state.name:
                continue
            minimum = self.setup.budget.min_of(pool.name)
            loss_s = self._removal_costs(pool)
            loss = min((loss_s(worker) for worker in pool.workers), default=0.0)
            options.append(
                PoolOption(
                    name=pool.name,
                    role=pool.role,
                    gpus=pool.gpus,
                    performance=state.speeds[pool.name].model,
                    min_workers=minimum,
                    max_workers=max(self._limits.get(pool.name, minimum), minimum),
                    supply=self._members.supply(pool, now_ns),
                    start_cost=idle(params, pool.gpus, times.start_up_s),
                    removal_cost=loss + idle(params, pool.gpus, times.drain_s),
                )
            )
        return options

    def _max_workers(self, window: PlannerWindow, pool: PoolWindow, now_ns: int) -> int:
        budget = self.setup.budget
        gpus = [KNOTS[-1] * pool.gpus]
        if budget.max_gpus is not None:
            gpus.append(budget.max_gpus)
        gpus += [budget.model_gpus[pool.model]] if pool.model in budget.model_gpus else []
        gpus += [budget.pool_gpus[pool.name]] if pool.name in budget.pool_gpus else []
        limit = min(gpus) // pool.gpus
        if self._members.can_start(pool, now_ns):
            return limit
        stuck = 0 if self._members.is_closed(pool, now_ns) else pool.starting
        donors = 0
        if self.params.can_flip(self.setup.times):
            donors = sum(
                other.ready
                for other in window.pools
                if (other.model, other.gpus) == (pool.model, pool.gpus) and other is not pool
            )
        return min(limit, self._members.supply(pool, now_ns) + donors + stuck)

    def _wake(self, window: PlannerWindow, unknown: list[str], now_ns: int) -> None:
        """Want one worker for a model with requests but no workers and no estimate."""
        for model in unknown:
            load = next((x for x in window.loads if x.model == model and x.arrivals), None)
            pools = [pool for pool in window.pools if pool.model == model]
            if load is None or any(self._members.supply(pool, now_ns) for pool in pools):
                continue
            both = [pool for pool in pools if pool.role is Role.BOTH][:1]
            for pool in both or pools:
                self._wanted[pool.name] = 1

    # --- acting ----------------------------------------------------------------------------

    def _act(self, window: PlannerWindow, now_ns: int) -> tuple[tuple[Action, ...], list[str]]:
        transition = Transition(
            window, self._wanted, self._members, self.setup.budget, self.setup.times,
            self._hold_s, self.params.flips,
        )  # fmt: skip
        removal = {pool.name: self._removal_costs(pool) for pool in window.pools}
        rates = MoveRates(removal, self._values(window, now_ns))
        moves = transition.moves(rates, now_ns)
        self._members.note(moves, now_ns)
        advice = hot_workers(window)
        points = self._operating_points(window) if self.params.operating_points else ()
        return (*moves, *points, *advice), transition.reasons

    def _values(self, window: PlannerWindow, now_ns: int) -> dict[str, float]:
        values = {}
        for pool in window.pools:
            plan = self._models[pool.model].plan
            if plan is None:
                continue
            counts = {p.name: self._wanted.get(p.name, 0) for p in plan.pools}
            counts[pool.name] = self._members.supply(pool, now_ns)
            values[pool.name] = plan.marginal(counts, {pool.name: 1})
        return values

    def _removal_costs(self, pool: PoolWindow) -> Callable[[WorkerWindow], float]:
        state = self._models[pool.model]
        mix, weight = state.band.estimate.mix, state.weight
        if mix is None:
            return lambda worker: 0.0  # noqa: ARG005
        token_s = state.speeds[pool.name].model.service_s(mix) / max(mix.computed, 1.0)
        hit_rate = mix.hit_rate

        def loss_s(worker: WorkerWindow) -> float:
            cached_s = (worker.cached_tokens or 0.0) * token_s * hit_rate
            return lost(weight, cached_s, worker.running or 0)

        return loss_s

    def _operating_points(self, window: PlannerWindow) -> tuple[SetOperatingPoint, ...]:
        """Return the most streams per decode worker inside the objective, where changed."""
        points = []
        for pool in window.pools:
            plan = self._models[pool.model].plan
            if plan is None or pool.role is not Role.DECODE:
                continue
            itl_s = min(slo.itl_s for slo in plan.slos)
            model = plan.pool(pool.name).performance
            batch = max(math.floor(model.batch(plan.mix, itl_s)), 1)
            old = self._batches.get(pool.name)
            if old is None or abs(batch - old) > self.params.mix * old:
                self._batches[pool.name] = batch
                points.append(SetOperatingPoint(pool=pool.name, max_seqs=batch))
        return tuple(points)

    # --- what others do --------------------------------------------------------------------

    def _adopt(self, pool: PoolWindow, now_ns: int) -> None:
        foreign = self._members.of(pool.name).foreign
        if pool.name not in self._wanted or foreign == 0:
            return
        supply = self._members.supply(pool, now_ns)
        if foreign > 0:
            self._wanted[pool.name] = max(self._wanted[pool.name], supply)
        else:
            minimum = self.setup.budget.min_of(pool.name)
            self._wanted[pool.name] = max(min(self._wanted[pool.name], supply), minimum)
        planned = self._models[pool.model].band.planned
        self._adopted[pool.name] = (planned.rps, self._wanted[pool.name])

    def _unless_adopted(self, pool: str, state: ModelState, count: int) -> int:
        """Return the planned workers, or the adopted ones while the load is unchanged."""
        rps, adopted = self._adopted.get(pool, (0.0, count))
        if abs(state.band.planned.rps - rps) <= self.params.down * rps:
            return min(adopted, self._limits.get(pool, adopted))
        self._adopted.pop(pool, None)
        return count

    def _lacks(self, window: PlannerWindow, model: str) -> bool:
        pools = [pool for pool in window.pools if pool.model == model]
        return any(self._wanted.get(pool.name, 0) > pool.ready for pool in pools)
