"""NVIDIA Dynamo's planner (1.6.1): a predictive loop that sets a floor, and a reactive one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import supply
from pigou.objectives import Slo
from pigou.performance.learning import prior_model
from pigou.request import SECOND, Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState
from pigou_lab.planner.dynamo_budget import (
    clamp_to_budget,
    fit_to_budget,
    guard_pair,
    guard_single,
)
from pigou_lab.planner.dynamo_engine import EngineModel
from pigou_lab.planner.dynamo_passes import ForwardPass, forward_pass
from pigou_lab.planner.dynamo_sla import LoadForecasts, interval_load
from pigou_lab.planner.history_planner import HistoryPlanner, prefill_and_decode


class DynamoPlannerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `DynamoPlanner`, with its defaults but for the predictor."""

    predictive_interval_s: float = 180.0  # between two forecasts; 0 without that loop
    reactive_interval_s: float = 5.0  # between two decisions; 0 without that loop
    # predictor of requests, ISL and OSL; Dynamo's is `dynamo-arima` (extra `forecast`).
    predictor: str = "dynamo-kalman"
    sensitivity: float = 0.8  # share of the objective that survivors of a removal must stay below
    # whether the load of a removed worker is counted on the survivors; it was not before pull
    # request 9294.
    consolidation: bool = True
    max_step: int = 8  # workers by which a forecast changes one pool at once
    min_gpus: int = 0

    def __post_init__(self) -> None:
        if not (self.predictive_interval_s > 0 or self.reactive_interval_s > 0):
            raise ValueError("give predictive_interval_s or reactive_interval_s above 0")
        if not 0 < self.sensitivity <= 1 or self.max_step < 1 or self.min_gpus < 0:
            raise ValueError("give 0 < sensitivity <= 1, max_step >= 1 and min_gpus >= 0")


@dataclass(slots=True)
class _Side:
    pool: PoolWindow
    engine: EngineModel
    passes: list[ForwardPass]
    min_workers: int

    @property
    def ready(self) -> int:
        return len(self.passes)

    @property
    def pending(self) -> int:
        return self.pool.starting


@dataclass(slots=True)
class _ModelState:
    forecasts: LoadForecasts
    engines: dict[str, EngineModel] = field(default_factory=dict)
    floors: dict[str, int] = field(default_factory=dict)
    hit_rate: float | None = None
    # targets that would interrupt a start-up, and since when they are proposed.
    reduction: tuple[dict[str, int], tuple[int, ...], int] | None = None


class DynamoPlanner(HistoryPlanner):
    """Predictive floors and reactive steps, within the budget.

    Predictive: replicas = ceil(forecast requests / interval / engine_rps), at 100% utilisation.
    Reactive, one worker per pool: up if *all* engines exceed the objective; down if the survivors
    stay below `sensitivity` of it. A worker that drains blocks changes.
    `core/throughput_scaling.py`, `core/load_scaling.py`, `core/budget.py`, and `_project_scale_to`
    of `plugins/orchestrator/engine_adapter.py`; `tests/peers/test_dynamo_planner.py` compares them.
    """

    name: ClassVar[str] = "dynamo"
    Params: ClassVar[type[msgspec.Struct]] = DynamoPlannerParams

    def __init__(self, setup: PlannerSetup, params: DynamoPlannerParams) -> None:
        super().__init__(setup, params.predictive_interval_s or 180.0)
        self.params = params
        loops = (params.reactive_interval_s, params.predictive_interval_s)
        self.interval_s = min(seconds for seconds in loops if seconds > 0)
        self._models: dict[str, _ModelState] = {}
        self._predicted_ns: int | None = None

    def observe(self, window: PlannerWindow) -> None:
        """Observe one interval."""
        super().observe(window)
        if self._predicted_ns is None:
            self._predicted_ns = window.now_ns - int(window.seconds * SECOND)

    def _targets(self, window: PlannerWindow, now_ns: int) -> tuple[dict[str, int], list[str]]:
        reasons: list[str] = []
        targets: dict[str, int] = {}
        predicts = self._predicts(now_ns)
        for model in window.models:
            state = self._models.setdefault(
                model, _ModelState(LoadForecasts(self.params.predictor))
            )
            sides = self._sides(window, model, state)
            wanted: list[int] | None = None
            if predicts:
                wanted, why = self._predict(model, state, sides)
                reasons.append(why)
            if self.params.reactive_interval_s > 0:
                wanted = self._react(model, state, sides)
            targets |= self._projected(state, sides, wanted, now_ns)
        return targets, reasons

    def _sides(self, window: PlannerWindow, model: str, state: _ModelState) -> list[_Side]:
        """Return the pools of a model, prefill before decode, and let their engines learn."""
        pools = [pool for pool in prefill_and_decode(window, model) if pool is not None]
        load = interval_load([window], model, window.seconds)
        context = (load.isl or 0.0) + 0.5 * (load.osl or 0.0)
        if not self._is_predictive and load.hit_rate is not None:
            state.hit_rate = load.hit_rate
        sides = []
        for pool in pools:
            role = Role.DECODE if len(pools) == 2 and pool.role.decodes else pool.role
            if pool.name not in state.engines:
                measured = self.setup.performance.get(pool.name)
                state.engines[pool.name] = EngineModel(
                    measured or prior_model(), role, is_profiled=measured is not None
                )
            engine = state.engines[pool.name]
            chunk = engine.limits.chunk_tokens
            passes = [
                forward_pass(worker, role, window.seconds, chunk, context, load.hit_rate)
                for worker in pool.in_state(WorkerState.READY)
            ]
            for step in passes:
                engine.observe(step)
            sides.append(_Side(pool, engine, passes, self.setup.budget.min_of(pool.name)))
        return sides

    def _predicts(self, now_ns: int) -> bool:
        seconds = self.params.predictive_interval_s
        if not self._is_predictive or self._predicted_ns is None:
            return False
        if now_ns - self._predicted_ns < 0.99 * seconds * SECOND:
            return False
        self._predicted_ns = now_ns
        return True

    # --- predictive ------------------------------------------------------------------------------

    def _predict(
        self, model: str, state: _ModelState, sides: list[_Side]
    ) -> tuple[list[int] | None, str]:
        """Return the workers for the forecast, and set the reactive loop's floors."""
        seconds = self.params.predictive_interval_s
        load = interval_load(self._history, model, seconds)
        state.forecasts.observe(load.requests, load.isl, load.osl)
        requests, isl, osl = state.forecasts.forecast()
        if load.hit_rate is not None:
            state.hit_rate = load.hit_rate
        wanted = [
            self._replicas(model, state, side, requests / seconds, isl, osl) for side in sides
        ]
        known = [count for count in wanted if count is not None]
        is_known = len(known) == len(sides) and isl > 0 and osl > 0
        counts = known if is_known else [side.ready for side in sides]
        step = self.params.max_step
        counts = [
            max(min(max(count, side.ready - step), side.ready + step), side.min_workers)
            for count, side in zip(counts, sides, strict=True)
        ]
        counts = self._under_ceiling(sides, counts)
        state.floors = {side.pool.name: n for side, n in zip(sides, counts, strict=True)}
        if not is_known:
            return None, f"{model}: no requests were seen, or the engine is not known"
        rps = max(requests, 0.0) / seconds
        why = f"{model}: {rps:.2f} rps forecast, isl {isl:.0f}, osl {osl:.0f}"
        return self._guarded(sides, counts), why

    def _replicas(
        self, model: str, state: _ModelState, side: _Side, rps: float, isl: float, osl: float
    ) -> int | None:
        if isl <= 0 or osl <= 0:
            return None
        slo, role = self.setup.class_of("", model).slo, side.engine.role
        ttft_s = slo.ttft_s if role.prefills else math.inf
        itl_s = slo.itl_s if role.decodes else math.inf
        capacity = side.engine.capacity(isl, osl, ttft_s, itl_s, state.hit_rate)
        if capacity is None or capacity.rps <= 0:
            return None
        return max(math.ceil(rps / capacity.rps), side.min_workers)

    @property
    def _is_predictive(self) -> bool:
        return self.params.predictive_interval_s > 0

    # --- reactive --------------------------------------------------------------------------------

    def _react(self, model: str, state: _ModelState, sides: list[_Side]) -> list[int] | None:
        pending = any(side.pending for side in sides)
        if any(side.pool.draining for side in sides):
            return None
        slo = self.setup.class_of("", model).slo
        steps = [self._step(state, side, slo) for side in sides]
        if pending:
            steps = [step if step is not None and step <= 0 else None for step in steps]
        counts = [side.ready + (step or 0) for side, step in zip(sides, steps, strict=True)]
        lifted = [
            max(count, state.floors.get(side.pool.name, 1)) if self._is_predictive else count
            for side, count in zip(sides, counts, strict=True)
        ]
        wanted = [max(count, side.min_workers) for side, count in zip(sides, lifted, strict=True)]
        if pending:
            return [
                supply(side.pool) if step is None else count
                for side, step, count in zip(sides, steps, wanted, strict=True)
            ]
        if lifted != counts and len(sides) == 2:
            wanted = self._under_ceiling(sides, wanted)
        return self._guarded(sides, wanted)

    def _step(self, state: _ModelState, side: _Side, slo: Slo) -> int | None:
        if not side.passes:
            return None
        role = side.engine.role
        if role is Role.PREFILL:
            return self._ttft_step(state, side, slo.ttft_s)
        if role is Role.DECODE:
            return self._itl_step(side, slo.itl_s)
        steps = (self._ttft_step(state, side, slo.ttft_s), self._itl_step(side, slo.itl_s))
        if 1 in steps:
            return 1
        return -1 if steps == (-1, -1) else None

    def _share(self, side: _Side) -> float:
        is_counted = self.params.consolidation and side.ready > 1
        return side.ready / (side.ready - 1) if is_counted else 1.0

    def _ttft_step(self, state: _ModelState, side: _Side, ttft_s: float) -> int | None:
        engine, hits, both = side.engine, state.hit_rate, side.engine.role.decodes
        share = self._share(side)
        removable = side.ready > 1 or side.pending > 0
        estimates = []
        for seen in side.passes:
            estimate = engine.ttft_s(seen, hits)
            if estimate is None:
                return None
            estimates.append(estimate)
            after = share if both else 1.0
            own = engine.ttft_s(seen, hits, queue=0.0, streams=after, waiting_streams=both)
            then = engine.ttft_s(seen, hits, queue=share, streams=after, waiting_streams=both)
            left = (ttft_s - (own or 0.0)) * self.params.sensitivity
            removable = removable and left > 0 and (then or 0.0) - (own or 0.0) < left
        return _decided(min(estimates) > ttft_s, removable, side)

    def _itl_step(self, side: _Side, itl_s: float) -> int | None:
        engine, both = side.engine, side.engine.role.prefills
        share = self._share(side)
        removable = side.ready > 1 or side.pending > 0
        estimates = []
        for seen in side.passes:
            estimate = engine.itl_s(seen)
            if estimate is None:
                return None
            estimates.append(estimate)
            held = seen.stream_tokens + seen.queued_stream_tokens
            held += seen.queued_prompt_tokens if both else 0
            then = engine.itl_s(seen, streams=share, queued_prompts=both) or 0.0
            inside = then < itl_s * self.params.sensitivity
            removable = removable and inside and int(held * share) < engine.limits.kv_tokens
        return _decided(min(estimates) > itl_s, removable, side)

    # --- budget ----------------------------------------------------------------------------------

    def _limits(self, sides: list[_Side]) -> tuple[int, int | None]:
        budget, low = self.setup.budget, self.params.min_gpus
        limits = [budget.max_gpus, budget.model_gpus.get(sides[0].pool.model)]
        known = [limit for limit in limits if limit is not None]
        return low, min(known, default=None)

    def _under_ceiling(self, sides: list[_Side], counts: list[int]) -> list[int]:
        _, high = self._limits(sides)
        if len(sides) == 1:
            (side,) = sides
            count, _ = guard_single(
                side.ready, counts[0], side.pool.gpus, (0, high), side.min_workers
            )
            return [count]
        ready, gpus, minimum = _pairs(sides)
        if ready[0] < minimum[0] or ready[1] < minimum[1]:
            return [*clamp_to_budget(counts[0], counts[1], gpus, (0, high), minimum)]
        pair = counts[0], counts[1]
        return [*fit_to_budget(ready, pair, gpus, (0, high), minimum)]

    def _guarded(self, sides: list[_Side], counts: list[int]) -> list[int]:
        limits = self._limits(sides)
        if len(sides) == 1:
            (side,) = sides
            count, _ = guard_single(side.ready, counts[0], side.pool.gpus, limits, side.min_workers)
            return [count]
        ready, gpus, minimum = _pairs(sides)
        if ready[0] < minimum[0] or ready[1] < minimum[1]:
            floored = [max(n, low) for n, low in zip(counts, minimum, strict=True)]
            return [*clamp_to_budget(floored[0], floored[1], gpus, limits, minimum)]
        final, _ = guard_pair(ready, (counts[0], counts[1]), gpus, limits, minimum)
        return [*final]

    def _projected(
        self, state: _ModelState, sides: list[_Side], wanted: list[int] | None, now_ns: int
    ) -> dict[str, int]:
        """Return the targets by pool: none in a drain, only reductions while workers start."""
        if wanted is None or any(side.pool.draining for side in sides):
            state.reduction = None
            return {}
        if not any(side.pending for side in sides):
            state.reduction = None
            return {
                side.pool.name: count
                for side, count in zip(sides, wanted, strict=True)
                if count != side.ready
            }
        targets = {
            side.pool.name: count
            for side, count in zip(sides, wanted, strict=True)
            if count <= side.ready and count < supply(side.pool)
        }
        inventory = tuple(n for side in sides for n in (side.ready, side.pending))
        if not targets:
            state.reduction = None
            return {}
        before = state.reduction
        if before is None or before[:2] != (targets, inventory):
            state.reduction = (targets, inventory, now_ns)
            return {}
        waited_s = (now_ns - before[2]) / SECOND
        return targets if waited_s >= 0.99 * self.params.reactive_interval_s else {}


def _decided(is_above: bool, is_removable: bool, side: _Side) -> int | None:
    if is_above:
        return 1
    if is_removable:
        return max(side.ready - 1, side.min_workers) - side.ready
    return None


def _pairs(sides: list[_Side]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return ready workers, GPUs per worker and minimum workers, of both pools."""
    prefill, decode = sides
    return (
        (prefill.ready, decode.ready),
        (prefill.pool.gpus, decode.pool.gpus),
        (prefill.min_workers, decode.min_workers),
    )
