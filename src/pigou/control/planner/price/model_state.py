"""The planner's state of one model: load, pool speeds, and plan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.price.frontier import FrontierPoint, ModelPlan
from pigou.control.planner.price.late_price import LatePrice
from pigou.control.planner.price.load_band import LoadBand
from pigou.control.planner.price.terms import (
    BACKLOG_OBJECTIVES,
    MIN_LAG_S,
    MIN_ROUTED,
    RISE_ERRORS,
    ROUTES_FALL,
    ROUTES_RISE,
    PricePlannerParams,
)
from pigou.objectives import Slo
from pigou.performance.learning import PoolSpeed
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import RequestMix
from pigou.request import SECOND, Role
from pigou.windows.planner_window import LoadWindow, PlannerWindow, PoolWindow, WorkerState


class ModelState:
    """Load, speeds, objectives and plan of one model, over windows of `seconds`."""

    def __init__(
        self, name: str, setup: PlannerSetup, params: PricePlannerParams, seconds: float
    ) -> None:
        self.name = name
        self.band = LoadBand(params, setup.times, seconds)
        self.late = LatePrice(params.late_s, setup.times.start_up_s)
        self.plan: ModelPlan | None = None  # the last one; None before the first
        self.frontier: list[FrontierPoint] = []
        self.is_stale = False  # whether load, speeds or objectives left the plan's
        self.speeds: dict[str, PoolSpeed] = {}
        self.planned_models: dict[str, PerformanceModel] = {}  # inputs of the plan
        self._setup, self._params = setup, params
        self._lag_s = max(setup.times.start_up_s, MIN_LAG_S)
        self._routed_tokens = self._routed = 0.0  # moving sums over a lag
        hold_s = params.hold_seconds(setup.times.start_up_s)
        self._remote_tokens = deque[float](maxlen=max(math.ceil(hold_s / seconds), 1))
        self._planned_tokens = math.inf
        self._classes: dict[str, float] = {}  # requests by class, a moving mean
        self._idle_s = 0.0
        self._steady_ns = self._lacked_ns = self._explained_ns = 0
        self._is_backlogged = False
        self._backlog_rps = 0.0

    def observe(self, window: PlannerWindow, supply: int, lacks: bool = False) -> None:
        """Take in a window; `supply` is the GPUs of workers that serve or are on their way."""
        pools = [pool for pool in window.pools if pool.model == self.name]
        load = self._merged(window)
        arrivals = self._arrivals(window, load, pools)
        backlog_rps = self._observe_backlog(pools, load, lacks)
        if self._is_backlogged:
            self._steady_ns = window.now_ns + int(self._lag_s * SECOND)
        if self.band.observe(arrivals, window.seconds, load, backlog_rps):
            self.is_stale = True
        is_steady = window.now_ns >= self._steady_ns
        # While streams wait for a decode worker, TTFT does not measure prefill.
        shown = load if is_steady and not _streams_wait(pools) else None
        estimate = self.band.estimate
        for pool in pools:
            if pool.name not in self.speeds:
                measured = self._setup.performance.get(pool.name)
                self.speeds[pool.name] = PoolSpeed(measured, pool.role, self._setup.times)
            self.speeds[pool.name].observe(window, pool, shown, estimate.mix, estimate.rps)
        self._learn_attainment(load, window, supply)
        if self.plan is not None and self._speeds_moved(self.plan.mix):
            self.is_stale = True
        self._observe_routes(pools, load, window.seconds)

    # --- what is planned with --------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True if load and speeds are known."""
        known = self.band.estimate.is_known and bool(self.speeds)
        return known and all(speed.is_ready for speed in self.speeds.values())

    @property
    def slos(self) -> tuple[Slo, ...]:
        """Distinct objectives of the classes seen."""
        return tuple(dict.fromkeys(self._slo_of(name) for name in self._classes or ("",)))

    def _slo_of(self, workload: str) -> Slo:
        return self._setup.class_of(workload, self.name).slo

    @property
    def weight(self) -> float:
        """Mean weight of its requests."""
        total = sum(self._classes.values())
        if total <= 0:
            return self._setup.class_of("", self.name).weight
        weights = (
            share * self._setup.class_of(name, self.name).weight
            for name, share in self._classes.items()
        )
        return sum(weights) / total

    def _speeds_moved(self, mix: RequestMix) -> bool:
        limit = 1.0 + self._params.mix
        for name, old in self.planned_models.items():
            speed = self.speeds.get(name)
            if speed is None or not speed.is_ready:
                continue
            new = speed.model
            ratios = (
                new.service_s(mix) / max(old.service_s(mix), 1e-12),
                new.itl_at(16.0, mix) / old.itl_at(16.0, mix),
                new.wait_factor / old.wait_factor,
            )
            overhead_s = abs(new.overhead_s - old.overhead_s)
            if max(ratios) > limit or min(ratios) < 1.0 / limit:
                return True
            if overhead_s > 2.0 * self._params.mix * old.service_s(mix):
                return True
        return False

    # --- what is observed ------------------------------------------------------------------

    def _merged(self, window: PlannerWindow) -> LoadWindow | None:
        loads = [load for load in window.loads if load.model == self.name]
        counts = [count for load in loads if (count := _number(load.arrivals)) is not None]
        if not loads or len(counts) < len(loads):
            return None
        for load, count in zip(loads, counts, strict=True):
            if count or load.workload in self._classes:
                old = self._classes.get(load.workload, 0.0)
                self._classes[load.workload] = 0.95 * old + 0.05 * count
                if self.plan is not None and self._slo_of(load.workload) not in self.plan.slos:
                    self.is_stale = True
        if len(loads) == 1:
            return loads[0]
        return LoadWindow(
            model=self.name,
            arrivals=int(sum(counts)),
            isl=_mean(loads, counts, "isl"),
            isl_scv=_mean(loads, counts, "isl_scv"),
            osl=_mean(loads, counts, "osl"),
            hit_rate=_mean(loads, counts, "hit_rate"),
            arrival_scv=_mean(loads, counts, "arrival_scv"),
            longest_s=max((x.longest_s for x in loads if x.longest_s is not None), default=None),
            completed=_sum(load.completed for load in loads),
            attained=_sum(load.attained for load in loads),
            ended=_sum(load.ended for load in loads),
            queued=_sum(load.queued for load in loads),
        )

    def _arrivals(
        self, window: PlannerWindow, load: LoadWindow | None, pools: Sequence[PoolWindow]
    ) -> float | None:
        """Return arrivals of a window; holes are zero traffic only if all workers stay idle."""
        count = None if load is None else _number(load.arrivals)
        if count is not None:
            self._idle_s = 0.0
            return count
        workers = [w for pool in pools for w in pool.in_state(WorkerState.READY)]
        idle = all(w.running == 0 and not w.waiting and not w.computed_prompts for w in workers)
        self._idle_s = self._idle_s + window.seconds if workers and idle else 0.0
        return 0.0 if self._idle_s > self._lag_s else None

    def _observe_backlog(
        self, pools: Sequence[PoolWindow], load: LoadWindow | None, lacks: bool
    ) -> float:
        """Return max(B / T - max(throughput - lambda, 0), 0) of the pool with most backlog."""
        mix = self.band.estimate.mix
        self._is_backlogged = False
        if mix is None:
            return 0.0
        limit_s = BACKLOG_OBJECTIVES * min(slo.ttft_s for slo in self.slos)
        recovery_s = max(self._params.recovery_s, 2.0 * self._setup.times.start_up_s)
        gateway = (_number(load.queued) or 0.0) if load is not None else 0.0
        extra, is_growing = 0.0, lacks
        for pool in pools:
            is_growing |= bool(pool.starting)
            speed = self.speeds.get(pool.name)
            if not pool.ready or speed is None or not speed.is_ready:
                continue
            rps = pool.ready * speed.model.throughput_rps(pool.role, mix)
            requests = _queued_requests(pool, mix) + (gateway if pool.role.prefills else 0.0)
            if requests > rps * limit_s:
                self._is_backlogged = True
                spare = max(rps - self.band.estimate.rps, 0.0)
                extra = max(extra, requests / recovery_s - spare)
        if not self._is_backlogged:
            self._backlog_rps = 0.0
        elif not is_growing:
            self._backlog_rps = extra
        return self._backlog_rps

    def _observe_routes(
        self, pools: Sequence[PoolWindow], load: LoadWindow | None, seconds: float
    ) -> None:
        arrivals = None if load is None else _number(load.arrivals)
        tokens = [
            worker.routed_tokens
            for pool in pools
            if pool.role is Role.PREFILL
            for worker in pool.workers
            if worker.routed_tokens is not None
        ]
        if arrivals is not None and tokens:
            decay = math.exp(-seconds / self._lag_s)
            self._routed = decay * self._routed + arrivals
            self._routed_tokens = decay * self._routed_tokens + sum(tokens)
            if self._routed >= MIN_ROUTED:
                self._remote_tokens.append(self._routed_tokens / self._routed)
        now, planned = max(self._remote_tokens, default=math.inf), self._planned_tokens
        if self.plan is not None and not planned / ROUTES_FALL <= now <= planned * ROUTES_RISE:
            self.is_stale = True

    def plan_routes(self, mix: RequestMix) -> float:
        """Return x of the plan of a mix (`terms`), which holds until routes change."""
        self._planned_tokens = max(self._remote_tokens, default=math.inf)
        return min(self._planned_tokens / max(mix.computed, 1.0), 1.0)

    def _learn_attainment(
        self, load: LoadWindow | None, window: PlannerWindow, supply: int
    ) -> None:
        plan = self.plan
        if plan is None or load is None:
            return
        ended, inside = _number(load.ended), _number(load.attained)
        if ended is None or inside is None:
            return
        ready = {pool.name: pool.ready for pool in window.pools if pool.model == self.name}
        gpus = sum(ready[pool.name] * pool.gpus for pool in plan.pools if pool.name in ready)
        # Within the error of the rate, only workers on their way show that capacity lacks.
        rate = self.band.estimate.rate
        error = 0.0 if supply > gpus else RISE_ERRORS * rate.standard_error
        if plan.rps(ready) < rate.rate.mean - error:
            self._lacked_ns = self._explained_ns = window.now_ns
        elif self._is_backlogged:
            self._explained_ns = window.now_ns  # the backlog is worked off
        arrived_ns = window.now_ns - (_number(load.longest_s) or 0.0) * SECOND
        is_explained = arrived_ns - self._explained_ns <= self._lag_s * SECOND
        self.late.observe(
            inside, max(ended, inside), window.seconds, max(slo.share for slo in self.slos),
            gpus, supply, plan.is_relaxed or is_explained,
        )  # fmt: skip
        self.band.margin = self.late.margin


def _queued_requests(pool: PoolWindow, mix: RequestMix) -> float:
    """Return waiting requests of a pool: prompts by tokens, streams by number."""
    ready = pool.in_state(WorkerState.READY)
    if pool.role is Role.DECODE:
        return sum(_number(worker.waiting) or 0.0 for worker in ready)
    tokens = sum(_number(worker.queued_prefill_tokens) or 0.0 for worker in ready)
    return tokens / max(mix.computed, 1.0)


def _streams_wait(pools: Sequence[PoolWindow]) -> bool:
    workers = [w for p in pools if p.role is Role.DECODE for w in p.in_state(WorkerState.READY)]
    return any(worker.waiting for worker in workers)


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _mean(loads: Sequence[LoadWindow], counts: Sequence[float], name: str) -> float | None:
    pairs = [(_number(getattr(x, name)), c) for x, c in zip(loads, counts, strict=True)]
    total = sum(count for value, count in pairs if value is not None)
    if total <= 0:
        return None
    return sum(value * count for value, count in pairs if value is not None) / total


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
