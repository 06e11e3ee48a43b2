"""What the planner knows of one model: its load, its pools' speeds, and its plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.price.frontier import FrontierPoint, ModelPlan
from pigou.control.planner.price.load_tracker import LoadTracker
from pigou.control.planner.price.params import PricePlannerParams
from pigou.objectives import Slo
from pigou.performance.learning import (
    MIN_SAMPLES,
    Corrections,
    SpeedLearner,
    prior_model,
)
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import RequestMix
from pigou.request import SECOND, Role
from pigou.windows.planner_window import LoadWindow, PlannerWindow, PoolWindow, WorkerState

#: A pool's backlog counts from so many times the objective of TTFT on.
_BACKLOG_LIMITS = 3.0
#: Requests that are seen before their attainment is believed.
_MIN_ATTAINED = 50.0


class PoolSpeed:
    """The performance model of one pool: measured and corrected, or learned."""

    def __init__(self, setup: PlannerSetup, pool: PoolWindow) -> None:
        self._measured = setup.performance.get(pool.name)
        self._corrections = Corrections(setup.times)
        self._learner: SpeedLearner | None = None
        self._kv_tokens = math.inf
        self._role = pool.role
        self._model: PerformanceModel | None = None
        if self._measured is None:
            self._learner = SpeedLearner(prior_model(pool.role), setup.times)

    @property
    def is_ready(self) -> bool:
        """Whether enough is known to plan with it."""
        if self._learner is None:
            return True
        prefill = self._learner.prefill_samples >= MIN_SAMPLES or not self._role.prefills
        return prefill and (self._learner.decode_samples >= MIN_SAMPLES or not self._role.decodes)

    @property
    def model(self) -> PerformanceModel:
        """The model as it is now."""
        if self._model is None:
            own = self._corrections
            if self._measured is not None:
                self._model = self._measured.corrected(
                    own.prefill_factor, own.decode_factor, own.wait_factor, own.overhead_s
                )
            else:  # speeds are learned; only what is not of a worker's work is corrected
                self._model = self._learned().corrected(1.0, 1.0, own.wait_factor, own.overhead_s)
        return self._model

    def _learned(self) -> PerformanceModel:
        assert self._learner is not None
        return replace(self._learner.model, kv_tokens=self._kv_tokens)

    def observe(
        self, window: PlannerWindow, pool: PoolWindow, load: LoadWindow | None, tracker: LoadTracker
    ) -> None:
        """Learn from one window."""
        self._model = None
        sizes = [w.kv_tokens for w in pool.in_state(WorkerState.READY) if w.kv_tokens]
        if sizes:
            self._kv_tokens = float(min(sizes))
        base = self._measured
        if self._learner is not None:
            siblings = [
                other
                for other in window.pools
                if (other.model, other.gpus) == (pool.model, pool.gpus) and other.role.decodes
            ]
            self._learner.observe(window, pool, siblings if not pool.role.decodes else ())
            base = self._learned() if self.is_ready else None
        if base is not None and tracker.mix is not None:
            rps = tracker.observed_rps if load is not None and load.arrivals is not None else None
            ttft = load.ttft.mean if load is not None else None
            self._corrections.observe(window, pool, base, tracker.mix, rps, ttft)


class ModelState:
    """Load, speeds, objectives and plan of one model.

    Attributes:
        plan: the last one; None before the first.
        is_stale: whether load, speeds or objectives left the plan's.
    """

    def __init__(self, name: str, setup: PlannerSetup, params: PricePlannerParams) -> None:
        self.name = name
        self._setup, self._params = setup, params
        self.tracker: LoadTracker | None = None
        self.plan: ModelPlan | None = None
        self.frontier: list[FrontierPoint] = []
        self.is_stale = False
        self.speeds: dict[str, PoolSpeed] = {}
        self._planned_models: dict[str, PerformanceModel] = {}
        self._classes: dict[str, float] = {}
        self._attained = self._ended = 0.0
        self._idle_s = 0.0
        self._steady_ns = 0
        self._is_backlogged = False
        self._backlog = 0.0

    def observe(self, window: PlannerWindow, is_settled: bool, lacks: bool = False) -> None:
        """Take in one window.

        Args:
            is_settled: whether no pool of this model changes, so that attainment is the plan's.
            lacks: whether workers are wanted that do not serve yet.
        """
        if self.tracker is None:
            self.tracker = LoadTracker(self._params, self._setup.times, window.seconds)
        pools = [pool for pool in window.pools if pool.model == self.name]
        load = self._merged(window)
        arrivals = self._arrivals(window, load, pools)
        backlog = self._backlog_rps(pools, load, lacks)
        lag_s = max(self._setup.times.start_up_s, 30.0)
        if self._is_backlogged:
            self._steady_ns = window.now_ns + int(lag_s * SECOND)
        if self.tracker.observe(arrivals, window.seconds, load, backlog):
            self.is_stale = True
        for pool in pools:
            if pool.name not in self.speeds:
                self.speeds[pool.name] = PoolSpeed(self._setup, pool)
            is_steady = window.now_ns >= self._steady_ns and not streams_wait(pools)
            steady = load if is_steady else None
            self.speeds[pool.name].observe(window, pool, steady, self.tracker)
        believed = is_settled and window.now_ns >= self._steady_ns
        self._learn_attainment(load, window.seconds, believed)
        if self.plan is not None and self._speeds_moved():
            self.is_stale = True

    # --- what is planned with --------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether load and speeds are known."""
        known = self.tracker is not None and self.tracker.is_known and self.tracker.planned.rps >= 0
        return known and bool(self.speeds) and all(s.is_ready for s in self.speeds.values())

    @property
    def slos(self) -> tuple[Slo, ...]:
        """Objectives of the classes that were seen, each once."""
        classes = [self._setup.class_of(name, self.name) for name in self._classes] or [
            self._setup.class_of("", self.name)
        ]
        return tuple(dict.fromkeys(workload_class.slo for workload_class in classes))

    @property
    def weight(self) -> float:
        """Mean weight of its requests."""
        total = sum(self._classes.values())
        if total <= 0:
            return self._setup.class_of("", self.name).weight
        return (
            sum(
                share * self._setup.class_of(name, self.name).weight
                for name, share in self._classes.items()
            )
            / total
        )

    def use_models(self, models: dict[str, PerformanceModel]) -> None:
        """Note the performance models that a plan is made with."""
        self._planned_models = models

    def _speeds_moved(self) -> bool:
        mix = self.plan.mix if self.plan is not None else None
        if mix is None:
            return False
        limit = 1.0 + self._params.mix
        for name, old in self._planned_models.items():
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
        """Return the loads of all classes as one; None for a hole."""
        loads = [load for load in window.loads if load.model == self.name]
        if not loads:
            return None
        counts = [_number(load.arrivals) for load in loads]
        if any(count is None for count in counts):
            return None
        total = sum(count for count in counts if count is not None)
        for load, count in zip(loads, counts, strict=True):
            if count or load.workload in self._classes:
                old = self._classes.get(load.workload, 0.0)
                self._classes[load.workload] = 0.95 * old + 0.05 * (count or 0.0)
                self.is_stale |= load.workload not in self._planned_classes()
        if len(loads) == 1:
            return loads[0]
        return LoadWindow(
            model=self.name,
            arrivals=int(total),
            isl=_mean(loads, counts, "isl"),
            isl_scv=_mean(loads, counts, "isl_scv"),
            osl=_mean(loads, counts, "osl"),
            hit_rate=_mean(loads, counts, "hit_rate"),
            arrival_scv=_mean(loads, counts, "arrival_scv"),
            completed=_sum(load.completed for load in loads),
            attained=_sum(load.attained for load in loads),
            queued=_sum(load.queued for load in loads),
        )

    def _planned_classes(self) -> set[str]:
        if self.plan is None:
            return set(self._classes)
        planned = set(self.plan.slos)
        return {n for n in self._classes if self._setup.class_of(n, self.name).slo in planned}

    def _arrivals(
        self, window: PlannerWindow, load: LoadWindow | None, pools: Sequence[PoolWindow]
    ) -> float | None:
        """Return arrivals of a window; None for a hole.

        A hole is not zero traffic. But where every worker says that it has nothing to do, for as
        long as a start takes, holes count as windows without requests.
        """
        count = None if load is None else _number(load.arrivals)
        if count is not None:
            self._idle_s = 0.0
            return count
        workers = [w for pool in pools for w in pool.in_state(WorkerState.READY)]
        idle = all(w.running == 0 and not w.waiting and not w.computed_prompts for w in workers)
        self._idle_s = self._idle_s + window.seconds if workers and idle else 0.0
        return 0.0 if self._idle_s > max(self._setup.times.start_up_s, 30.0) else None

    def _backlog_rps(
        self, pools: Sequence[PoolWindow], load: LoadWindow | None, lacks: bool
    ) -> float:
        """Return the requests a second that a backlog adds to the load: the most of any pool.

        B requests are to be worked off in T = max(recovery_s, two start-ups): a worker that comes
        later than the queue is gone is of no use. What the ready workers have to spare is taken
        off: max(B / T - max(throughput - lambda, 0), 0). A queue counts from three times the
        objective on (shorter ones are the percentile's business). While workers are on their way,
        or wanted, which will work it off, it counts as it did before.
        """
        assert self.tracker is not None
        mix = self.tracker.mix
        self._is_backlogged = False
        if mix is None:
            return 0.0
        limit_s = _BACKLOG_LIMITS * min(slo.ttft_s for slo in self.slos)
        recovery_s = max(self._params.recovery_s, 2.0 * self._setup.times.start_up_s)
        gateway = (_number(load.queued) or 0.0) if load is not None else 0.0
        extra, is_growing = 0.0, lacks
        for pool in pools:
            is_growing |= bool(pool.starting)
            speed = self.speeds.get(pool.name)
            if not pool.ready or speed is None or not speed.is_ready:
                continue
            rps = pool.ready * throughput_rps(speed.model, pool.role, mix)
            requests = queued_requests(pool, mix) + (gateway if pool.role.prefills else 0.0)
            if requests > rps * limit_s:
                self._is_backlogged = True
                spare = max(rps - self.tracker.observed_rps, 0.0)
                extra = max(extra, requests / recovery_s - spare)
        if not self._is_backlogged:
            self._backlog = 0.0
        elif not is_growing:
            self._backlog = extra
        return self._backlog

    def _learn_attainment(self, load: LoadWindow | None, seconds: float, settled: bool) -> None:
        assert self.tracker is not None
        ended = None if load is None else _number(load.completed)
        inside = None if load is None else _number(load.attained)
        lag_s = max(self._setup.times.start_up_s, 30.0)
        decay = math.exp(-seconds / lag_s)
        if not settled:
            self._attained = self._ended = 0.0
            return
        if ended is None or inside is None:
            return
        self._attained = decay * self._attained + inside
        self._ended = decay * self._ended + max(ended, inside)
        if self._ended < _MIN_ATTAINED:
            return
        share = max(slo.share for slo in self.slos)
        gain = min(0.25 * math.pi / lag_s, 0.01) * seconds
        self.tracker.learn_attainment(share - self._attained / self._ended, gain)


def throughput_rps(model: PerformanceModel, role: Role, mix: RequestMix) -> float:
    """Return the most requests a second of one worker, whatever they wait."""
    prefill = 1.0 / model.service_s(mix) if role.prefills else math.inf
    if not role.decodes:
        return prefill
    batch = model.batch(mix, math.inf)
    return min(prefill, batch / (mix.osl * model.itl_at(batch, mix)))


def queued_requests(pool: PoolWindow, mix: RequestMix) -> float:
    """Return the requests that wait in a pool: prompts by their tokens, streams by number."""
    ready = pool.in_state(WorkerState.READY)
    if pool.role is Role.DECODE:
        return sum(_number(worker.waiting) or 0.0 for worker in ready)
    tokens = sum(_number(worker.queued_prefill_tokens) or 0.0 for worker in ready)
    return tokens / max(mix.computed, 1.0)


def streams_wait(pools: Sequence[PoolWindow]) -> bool:
    """Whether streams wait for a decode worker: then TTFT says nothing of prefill."""
    workers = [w for p in pools if p.role is Role.DECODE for w in p.in_state(WorkerState.READY)]
    return any(worker.waiting for worker in workers)


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _mean(loads: Sequence[LoadWindow], counts: Sequence[float | None], name: str) -> float | None:
    pairs = [(_number(getattr(x, name)), c or 0.0) for x, c in zip(loads, counts, strict=True)]
    total = sum(count for value, count in pairs if value is not None)
    if total <= 0:
        return None
    return sum(value * count for value, count in pairs if value is not None) / total


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
