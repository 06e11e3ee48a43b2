"""NVIDIA Dynamo's planner (1.x): a predictive loop that sets a floor, and a reactive one."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

import msgspec
import numpy as np

from pigou.control.planner.messages import PlannerWindow, PoolWindow, WorkerState, WorkerWindow
from pigou.control.planner.performance.learning import prior_model
from pigou.control.planner.performance.model import PerformanceModel
from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.rivals.dynamo_budget import clamp_to_budget
from pigou.control.planner.rivals.dynamo_sla import LoadForecasts, interval_load
from pigou.control.planner.rivals.target_planner import (
    TargetPlanner,
    known_mean,
    prefill_and_decode,
    supply,
)
from pigou.request import SECOND, Role

#: Samples of a regression, their buckets, and the fewest that are fitted.
SAMPLES, BUCKETS, MIN_SAMPLES = 64, 16, 5
#: Prompt lengths and batches at which a measured model is sampled before anything was served.
_BOOT_TOKENS = (128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
_BOOT_STREAMS = (1.0, 8.0, 32.0, 64.0, 128.0)


class DynamoPlannerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `DynamoPlanner`, with its defaults but for the predictor.

    Attributes:
        predictive_interval_s: between two forecasts; 0 without that loop.
        reactive_interval_s: between two decisions; 0 without that loop.
        predictor: of requests, isl and osl; Dynamo's is `dynamo-arima` (extra `forecast`).
        sensitivity: share of the objective that survivors of a removal must stay below.
        consolidation: whether the load of a removed worker is counted on the survivors; it was not
            before pull request 9294.
        max_step: workers by which one pool changes at once.
        min_gpus: of both pools together.
    """

    predictive_interval_s: float = 180.0
    reactive_interval_s: float = 5.0
    predictor: str = "dynamo-kalman"
    sensitivity: float = 0.8
    consolidation: bool = True
    max_step: int = 8
    min_gpus: int = 0

    def __post_init__(self) -> None:
        if not (self.predictive_interval_s > 0 or self.reactive_interval_s > 0):
            raise ValueError("give predictive_interval_s or reactive_interval_s above 0")
        if not 0 < self.sensitivity <= 1 or self.max_step < 1 or self.min_gpus < 0:
            raise ValueError("give 0 < sensitivity <= 1, max_step >= 1 and min_gpus >= 0")


class BucketRegression:
    """Least squares of y over features, on the last samples of each bucket of the first feature.

    It takes samples of all workers, cold ones too (issue 12430).
    """

    def __init__(self, width: float) -> None:
        self._width = width
        self._buckets: dict[int, deque[tuple[float, ...]]] = {}

    def add(self, y: float, *features: float) -> None:
        """Add a sample."""
        bucket = min(int(features[0] / self._width), BUCKETS - 1)
        row = (y, 1.0, *features)
        self._buckets.setdefault(bucket, deque(maxlen=SAMPLES // BUCKETS)).append(row)

    def fit(self) -> np.ndarray | None:
        """Return (intercept, slopes...); None with too few samples."""
        rows = np.array([row for bucket in self._buckets.values() for row in bucket])
        if len(rows) < MIN_SAMPLES:
            return None
        solution: np.ndarray = np.linalg.lstsq(rows[:, 1:], rows[:, 0], rcond=None)[0]
        return solution


class EngineModel:
    """Dynamo's performance model of one pool: two regressions, begun with what was measured."""

    def __init__(self, measured: PerformanceModel | None) -> None:
        self.limits = measured or prior_model()
        self._prefill = BucketRegression(512.0)
        self._decode = BucketRegression(16.0)
        if measured is not None:
            for tokens in _BOOT_TOKENS:
                self._prefill.add(measured.prefill.seconds(tokens, tokens), tokens)
            for streams in _BOOT_STREAMS:
                for context in (500.0, 4000.0):
                    itl_s = measured.decode.itl_s(streams, context)
                    self._decode.add(itl_s, streams, streams * context)

    def observe(self, worker: WorkerWindow) -> None:
        """Add what one worker showed."""
        prompts, tokens, seconds = worker.computed_prompts, worker.computed_tokens, worker.prefill_s
        if prompts and tokens and seconds:
            self._prefill.add(seconds / prompts, tokens / prompts)
        if worker.mean_running and worker.mean_held_tokens is not None and worker.itl_s:
            self._decode.add(worker.itl_s, worker.mean_running, worker.mean_held_tokens)

    def ttft_s(self, tokens: float) -> float | None:
        """Return the seconds of so many prompt tokens; None while not fitted."""
        theta = self._prefill.fit()
        return None if theta is None else max(float(theta[0] + theta[1] * tokens), 1e-6)

    def itl_s(self, streams: float, held: float) -> float | None:
        """Return the seconds between tokens; None while not fitted."""
        theta = self._decode.fit()
        if theta is None:
            return None
        return max(float(theta @ np.array([1.0, streams, held])), 1e-6)

    def decode_rps(self, isl: float, osl: float, itl_s: float) -> float | None:
        """Return requests a second of one worker: b / (osl ITL(b)), b the largest within ITL."""
        context = isl + 0.5 * osl
        low, high = 1, max(int(min(self.limits.max_seqs, self.limits.kv_tokens / context)), 1)
        if self.itl_s(1.0, context) is None:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            value = self.itl_s(middle, middle * context)
            low, high = (
                (middle, high) if value is not None and value <= itl_s else (low, middle - 1)
            )
        value = self.itl_s(low, low * context)
        return None if value is None else low / (osl * value)


class DynamoPlanner(TargetPlanner):
    """Predictive floors and reactive steps, clamped to the budget.

    Predictive: demand = forecast requests / interval. Prefill engine_rps = 1 / wt(isl (1 - hits));
    decode engine_rps by `EngineModel.decode_rps`. replicas = ceil(demand / engine_rps), a floor of
    the reactive loop: planned up to 100% utilised, no queueing.

    Reactive, one worker at a time and only when the last change is over: up where *all* engines
    are estimated above the objective; down where the survivors, with the load of one more spread
    over them, stay below `sensitivity` of it. TTFT: seconds of the queued tokens and a mean prompt;
    T_own, of the prompt alone, cannot be shortened and is taken off both sides. ITL: at the streams
    and tokens of running and waiting requests.

    `core/throughput_scaling.py`, `core/load_scaling.py`, `core/budget.py` of Dynamo 1.x. Both pools
    move oppositely together or not at all.
    """

    name: ClassVar[str] = "dynamo"
    Params: ClassVar[type[msgspec.Struct]] = DynamoPlannerParams

    def __init__(self, setup: PlannerSetup, params: DynamoPlannerParams) -> None:
        super().__init__(setup, params.predictive_interval_s or 180.0)
        self.params = params
        loops = (params.reactive_interval_s, params.predictive_interval_s)
        self.interval_s = min(seconds for seconds in loops if seconds > 0)
        self._engines: dict[str, EngineModel] = {}
        self._forecasts: dict[str, LoadForecasts] = {}
        self._floors: dict[str, int] = {}
        self._predicted_ns: int | None = None

    def observe(self, window: PlannerWindow) -> None:
        """Note what one interval showed, and learn from all ready workers."""
        super().observe(window)
        if self._predicted_ns is None:
            self._predicted_ns = window.now_ns - int(window.seconds * SECOND)
        for pool in window.pools:
            engine = self._engine(pool)
            for worker in pool.in_state(WorkerState.READY):
                engine.observe(worker)

    def _engine(self, pool: PoolWindow) -> EngineModel:
        if pool.name not in self._engines:
            self._engines[pool.name] = EngineModel(self.setup.performance.get(pool.name))
        return self._engines[pool.name]

    def _targets(self, window: PlannerWindow, now_ns: int) -> tuple[dict[str, int], list[str]]:
        reasons: list[str] = []
        if self._predicts(now_ns):
            for model in window.models:
                reasons += self._predict(window, model)
        targets: dict[str, int] = {}
        for model in window.models:
            own = [pool for pool in prefill_and_decode(window, model) if pool is not None]
            wanted = {pool.name: self._wanted(window, pool) for pool in own}
            if len(own) == 2:
                prefill, decode = own
                limit = (self.params.min_gpus, self.setup.budget.max_gpus)
                gpus = (prefill.gpus, decode.gpus)
                counts = (wanted[prefill.name], wanted[decode.name])
                minimum = self.setup.budget.min_workers
                counts = clamp_to_budget(*counts, gpus, limit, minimum)
                wanted = dict(zip((prefill.name, decode.name), counts, strict=True))
            targets |= wanted
        return targets, reasons

    def _predicts(self, now_ns: int) -> bool:
        seconds = self.params.predictive_interval_s
        if seconds <= 0 or self._predicted_ns is None:
            return False
        if now_ns - self._predicted_ns < 0.99 * seconds * SECOND:
            return False
        self._predicted_ns = now_ns
        return True

    def _predict(self, window: PlannerWindow, model: str) -> list[str]:
        seconds = self.params.predictive_interval_s
        load = interval_load(self._history, model, seconds)
        forecasts = self._forecasts.setdefault(model, LoadForecasts(self.params.predictor))
        forecasts.observe(load.requests, load.isl, load.osl)
        requests, isl, osl = forecasts.forecast()
        rps = max(requests, 0.0) / seconds
        if isl <= 0 or osl <= 0:
            return [f"{model}: no requests were seen, no floor"]
        slo = self.setup.class_of("", model).slo
        for pool in prefill_and_decode(window, model):
            if pool is None:
                continue
            engine = self._engine(pool)
            if pool.role is Role.PREFILL:
                wall_s = engine.ttft_s(isl * (1.0 - (load.hit_rate or 0.0)))
                engine_rps = None if wall_s is None else 1.0 / wall_s
            else:
                engine_rps = engine.decode_rps(isl, osl, slo.itl_s)
            if engine_rps:
                floor = math.ceil(rps / engine_rps - 1e-9)
                self._floors[pool.name] = max(floor, self.setup.budget.min_of(pool.name))
        return [f"{model}: {rps:.2f} rps forecast, isl {isl:.0f}, osl {osl:.0f}"]

    def _wanted(self, window: PlannerWindow, pool: PoolWindow) -> int:
        current = supply(pool)
        wanted = current
        if not (pool.starting or pool.draining):
            if self.params.reactive_interval_s > 0:
                wanted += self._step(window, pool)
                wanted = max(wanted, self._floors.get(pool.name, 0))
            else:
                wanted = self._floors.get(pool.name, current)
        return min(max(wanted, current - self.params.max_step), current + self.params.max_step)

    def _step(self, window: PlannerWindow, pool: PoolWindow) -> int:
        loads = [load for load in window.loads if load.model == pool.model]
        isl, osl = known_mean(x.isl for x in loads), known_mean(x.osl for x in loads)
        hits = known_mean(x.hit_rate for x in loads) or 0.0
        ready = pool.in_state(WorkerState.READY)
        if not ready:
            return 0
        slo = self.setup.class_of("", pool.model).slo
        engine = self._engine(pool)
        if pool.role is Role.PREFILL:
            return self._prefill_step(engine, ready, (isl or 0.0) * (1.0 - hits), slo.ttft_s)
        return self._decode_step(engine, ready, (isl or 0.0) + 0.5 * (osl or 0.0), slo.itl_s)

    def _prefill_step(
        self, engine: EngineModel, ready: tuple[WorkerWindow, ...], own: float, sla: float
    ) -> int:
        count = len(ready)
        queues = [w.queued_prefill_tokens for w in ready if w.queued_prefill_tokens is not None]
        own_s = engine.ttft_s(own)
        if len(queues) < count or own_s is None:
            return 0
        estimates = [engine.ttft_s(queue + own) or 0.0 for queue in queues]
        if min(estimates) > sla:
            return 1
        if count == 1:
            return 0
        share = count / (count - 1) if self.params.consolidation else 1.0
        merged = [(engine.ttft_s(queue * share + own) or 0.0) - own_s for queue in queues]
        return -1 if max(merged) < (sla - own_s) * self.params.sensitivity else 0

    def _decode_step(
        self, engine: EngineModel, ready: tuple[WorkerWindow, ...], context: float, sla: float
    ) -> int:
        count = len(ready)
        loads = [self._streams(worker, context) for worker in ready]
        known = [load for load in loads if load is not None]
        estimates = [engine.itl_s(streams, held + context) for streams, held in known]
        values = [value for value in estimates if value is not None]
        if len(values) < count:
            return 0
        if min(values) > sla:
            return 1
        if count == 1:
            return 0
        share = count / (count - 1) if self.params.consolidation else 1.0
        for streams, held in known:
            itl_s = engine.itl_s(streams * share, held * share + context) or 0.0
            if itl_s >= sla * self.params.sensitivity or held * share >= engine.limits.kv_tokens:
                return 0
        return -1

    @staticmethod
    def _streams(worker: WorkerWindow, context: float) -> tuple[float, float] | None:
        if worker.running is None or worker.held_tokens is None:
            return None
        waiting = worker.waiting or 0
        return float(worker.running + waiting), worker.held_tokens + waiting * context
