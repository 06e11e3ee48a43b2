"""NVIDIA Dynamo's SLA planner (0.x): replicas from profiled speeds and correction factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import msgspec

from pigou.config import ConfigError
from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.predictors.predictor import LoadPredictor
from pigou.control.planner.predictors.predictor import load as load_predictor
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import largest_batch
from pigou.windows.planner_window import LoadWindow, PlannerWindow, PoolWindow
from pigou_lab.planner.dynamo_budget import clamp_to_budget
from pigou_lab.planner.history_planner import HistoryPlanner, known_mean, prefill_and_decode


class DynamoSlaParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `DynamoSla`, with its defaults but for the predictor."""

    adjustment_interval_s: float = 180.0  # between two decisions
    # predictor of requests, ISL and OSL, each by itself; Dynamo's is `dynamo-arima`, which needs
    # the extra `forecast`.
    predictor: str = "dynamo-kalman"
    correction: bool = True  # whether correction factors are used

    def __post_init__(self) -> None:
        if not 0 < self.adjustment_interval_s < math.inf:
            raise ValueError("adjustment_interval_s must be above 0")


class LoadForecasts:
    """Forecasts requests, isl and osl of one model; an empty interval repeats isl and osl."""

    def __init__(self, predictor: str, params: dict[str, Any] | None = None) -> None:
        self._series: tuple[LoadPredictor, ...] = tuple(
            load_predictor(predictor, params) for _ in range(3)
        )
        self._last = (0.0, 0.0)

    def observe(self, requests: float | None, isl: float | None, osl: float | None) -> None:
        """Take in one interval."""
        self._last = (isl or self._last[0], osl or self._last[1])
        for series, value in zip(self._series, (requests, *self._last), strict=True):
            series.observe(value)

    def forecast(self) -> tuple[float, float, float]:
        """Return requests, isl and osl of the next interval."""
        requests, isl, osl = (series.forecast().mean for series in self._series)
        return requests, isl, osl


class IntervalLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one model over an adjustment interval: requests, and means; None where not known."""

    requests: float | None
    isl: float | None
    osl: float | None
    hit_rate: float | None
    ttft_s: float | None
    itl_s: float | None
    request_s: float | None


def interval_load(windows: Iterable[PlannerWindow], model: str, seconds: float) -> IntervalLoad:
    """Return the load of a model over windows, its requests scaled to `seconds`."""
    loads, requests, spent_s = [], 0, 0.0
    for window in windows:
        own = [load for load in window.loads if load.model == model]
        known = [load.arrivals for load in own if load.arrivals is not None]
        loads += own
        requests += sum(known)
        spent_s += window.seconds if known else 0.0

    def mean(value: Callable[[LoadWindow], float | None], count: str) -> float | None:
        pairs = [(value(load), getattr(load, count) or 0) for load in loads]
        known = [(v, n) for v, n in pairs if v is not None and math.isfinite(v)]
        total = sum(n for _, n in known)
        if total:
            return sum(v * n for v, n in known) / total
        return known_mean(v for v, _ in known)

    return IntervalLoad(
        requests=requests / spent_s * seconds if spent_s else None,
        isl=mean(lambda load: load.isl, "arrivals"),
        osl=mean(lambda load: load.osl, "completed"),
        hit_rate=mean(lambda load: load.hit_rate, "arrivals"),
        ttft_s=mean(lambda load: load.ttft.mean, "arrivals"),
        itl_s=mean(lambda load: load.itl.mean, "completed"),
        request_s=mean(lambda load: load.request_s, "completed"),
    )


class DynamoSla(HistoryPlanner):
    """Replicas for the next interval's forecast.

        c_p = TTFT / expected TTFT,  c_d = ITL / expected ITL
        P = ceil(requests isl / T min(1, c_p) / prefill tokens a second of one worker)
        D = ceil(requests osl / T / decode tokens a second of one worker at ITL_sla / c_d)
    `sla_planner.md`, Dynamo 0.x. Because of min(1, c_p), queueing never adds a prefill worker.
    Means only. `clamp_to_budget` applies to each model apart.
    """

    name: ClassVar[str] = "dynamo-sla"
    Params: ClassVar[type[msgspec.Struct]] = DynamoSlaParams

    def __init__(self, setup: PlannerSetup, params: DynamoSlaParams) -> None:
        super().__init__(setup, params.adjustment_interval_s)
        if not setup.performance:
            raise ConfigError(f"planner {self.name} needs measured performance of its pools")
        self.params = params
        self.interval_s = params.adjustment_interval_s
        self._forecasts: dict[str, LoadForecasts] = {}

    def tick(self, now_ns: int) -> Any:
        """Return the actions; none before the first interval ends."""
        if self._decided_ns is None:
            self._decided_ns = now_ns
        return super().tick(now_ns)

    def _targets(
        self,
        window: PlannerWindow,
        now_ns: int,  # noqa: ARG002
    ) -> tuple[dict[str, int], list[str]]:
        targets: dict[str, int] = {}
        reasons: list[str] = []
        for model in window.models:
            load = interval_load(self._history, model, self.interval_s)
            forecasts = self._forecasts.setdefault(model, LoadForecasts(self.params.predictor))
            forecasts.observe(load.requests, load.isl, load.osl)
            prefill, decode = prefill_and_decode(window, model)
            requests, isl, osl = forecasts.forecast()
            if decode is None or isl <= 0 or osl <= 0 or requests <= 0:
                reasons.append(f"{model}: no requests were seen, no change")  # NaN: skipped
                continue
            c_p, c_d = self._factors(load, prefill, decode)
            reasons.append(f"{model}: {requests:.0f} requests, c_p {c_p:.2f}, c_d {c_d:.2f}")
            slo = self.setup.class_of("", model).slo
            itl_s = slo.itl_s / c_d
            d = decode_replicas(self._model_of(decode), requests / self.interval_s, isl, osl, itl_s)
            if prefill is None:
                targets[decode.name] = max(d, 1)
                continue
            speed = self._model_of(prefill)
            p = prefill_replicas(speed, requests / self.interval_s, isl, min(1.0, c_p))
            limit = (0, self.setup.budget.max_gpus)
            gpus = (prefill.gpus, decode.gpus)
            targets[prefill.name], targets[decode.name] = clamp_to_budget(
                max(p, 1), max(d, 1), gpus, limit, self.setup.budget.min_workers
            )
        return targets, reasons

    def _model_of(self, pool: PoolWindow) -> PerformanceModel:
        performance = self.setup.performance.get(pool.name)
        if performance is None:
            raise ConfigError(f"planner {self.name} needs measured performance of {pool.name}")
        return performance

    def _factors(
        self, load: IntervalLoad, prefill: PoolWindow | None, decode: PoolWindow
    ) -> tuple[float, float]:
        if not self.params.correction or not load.isl or not load.osl:
            return 1.0, 1.0
        c_p = c_d = 1.0
        if prefill is not None and load.ttft_s:
            c_p = load.ttft_s / self._model_of(prefill).prefill.seconds(load.isl, load.isl)
        if load.itl_s and load.request_s and load.requests:
            streams = load.requests / max(decode.ready, 1) * load.request_s / self.interval_s
            context = load.isl + 0.5 * load.osl
            expected = self._model_of(decode).decode.itl_s(max(streams, 1.0), context)
            c_d = load.itl_s / expected
        return c_p, c_d


def prefill_replicas(
    performance: PerformanceModel, rps: float, isl: float, factor: float = 1.0
) -> int:
    """Return ceil(rps isl factor / tokens a second of one worker): up to 100% utilised."""
    tokens_per_s = isl / performance.prefill.seconds(isl, isl)
    return math.ceil(rps * isl * factor / tokens_per_s - 1e-9)


def decode_replicas(
    performance: PerformanceModel, rps: float, isl: float, osl: float, itl_s: float
) -> int:
    """Return ceil(rps osl / tokens a second of one worker whose ITL is within `itl_s`)."""
    context = isl + 0.5 * osl
    top = min(float(performance.max_seqs), performance.kv_tokens / context)
    batch = largest_batch(performance.decode, context, itl_s, top)
    batch = max(math.floor(batch + 1e-5), 1)
    tokens_per_s = batch / performance.decode.itl_s(batch, context)
    return math.ceil(rps * osl / tokens_per_s - 1e-9)
