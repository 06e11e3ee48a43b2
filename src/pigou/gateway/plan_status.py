"""Plan status: a planner's decisions, reasons, and effects on the fleet."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.core import Metric

from pigou.control.planner.messages import Action, AddWorkers, PlannerDecision, RebalancePool
from pigou.gateway.metrics import MODEL
from pigou.gateway.prices import json_number
from pigou.gateway.request_meter import RequestMeter
from pigou.metric_rows import counter_family, gauge_family
from pigou.objectives import class_label
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState

#: Decisions that are remembered, and samples of the replicas.
MAX_DECISIONS, MAX_SAMPLES = 100, 720
#: Requests of five minutes from which on their attainment means anything.
_MIN_REQUESTS = 20
_STATES = tuple(WorkerState)


class PlanStatus:
    """A planner's decisions, moves and replicas, for `/plan` and metrics."""

    def __init__(
        self, meter: RequestMeter, meters: Mapping[str, RequestMeter] | None = None
    ) -> None:
        self.planner = ""
        self.max_workers = 0  # most workers; 0 for no limit
        self.failures = 0
        self.moves: Counter[str] = Counter()
        self.latest: PlannerDecision | None = None
        self._meter = meter
        self._meters = dict(meters or {})
        self._error = ""
        self._refusals: tuple[str, ...] = ()
        self._pools: tuple[PoolWindow, ...] = ()
        self._decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)

    def begin(self, planner: str, max_workers: int) -> None:
        """Record that a planner started."""
        self.planner, self.max_workers = planner, max_workers

    def record(
        self, window: PlannerWindow, decision: PlannerDecision, refusals: Sequence[str]
    ) -> None:
        """Record a decision, and why some of its actions were not carried out."""
        self._error = ""
        self.latest, self._pools, self._refusals = decision, window.pools, tuple(refusals)
        now = round(time.time(), 3)
        if any(not isinstance(action, RebalancePool) for action in decision.actions):
            self._decisions.append(_entry(now, decision, refusals))
        self._sample(now, window, decision)

    def carried_out(self, action: Action) -> None:
        """Count an applied action."""
        count = action.count if isinstance(action, AddWorkers) else 1
        self.moves[_kind(action)] += count

    def failed(self, window: PlannerWindow, error: Exception) -> None:
        """Record that the planner raised; the fleet stays as it is."""
        self.failures += 1
        self._error = f"{type(error).__name__}: {error}"
        self._pools = window.pools
        self._sample(round(time.time(), 3), window, None)

    # --- what is shown ------------------------------------------------------------------------

    @property
    def replicas(self) -> dict[str, dict[str, int]]:
        """Workers of each pool by state, as of the last window."""
        return replicas_of(self._pools)

    def view(self) -> dict[str, Any]:
        """Return the status as JSON builtins; `planner` is None without one."""
        latest = self.latest
        models = {"slo_models": {name: meter.view() for name, meter in self._meters.items()}}
        return (models if self._meters else {}) | {
            "planner": self.planner or None,
            "max_workers": self.max_workers,
            "slo": self._meter.view(),
            "shadow_price": None if latest is None else json_number(latest.shadow_price),
            "latest": None if latest is None else _entry(None, latest, self._refusals),
            "decisions": list(self._decisions),
            "replicas": self.replicas,
            "moves": dict(self.moves),
            "failures": self.failures,
            "error": self._error or None,
            "alerts": self.alerts(),
            "series": self._series(),
        }

    def alerts(self) -> list[dict[str, str]]:
        """Return current alerts for operators: `kind` and `text`."""
        alerts = [*self._attainment_alerts()]
        for pool in self._pools:
            stuck = [worker.id for worker in pool.workers if worker.unplaceable]
            if stuck:
                text = f"{', '.join(stuck)} of pool {pool.name} fails to start again and again"
                alerts.append({"kind": "start", "text": text})
        if self._error:
            text = f"the planner failed, and the fleet stays as it is: {self._error}"
            alerts.append({"kind": "planner", "text": text})
        alerts += ({"kind": "refused", "text": text} for text in self._refusals)
        return alerts

    def _attainment_alerts(self) -> Iterator[dict[str, str]]:
        workers = sum(len(pool.workers) for pool in self._pools)
        latest = self.latest
        is_exhausted = bool(self.max_workers) and workers >= self.max_workers
        is_exhausted |= latest is not None and latest.shadow_price > 0
        for model, meter in (self._meters or {"": self._meter}).items():
            for name, (count, inside) in meter.recent().items():
                slo = meter.objectives.slo_of(name)
                if slo is None or count < _MIN_REQUESTS or inside / count >= slo.share:
                    continue
                words = " and the budget is exhausted" if self.planner and is_exhausted else ""
                text = (
                    f"{inside / count:.1%} of the requests of class {class_label(name)}"
                    f"{model and f' for {model}'} attained in the last five minutes, "
                    f"{slo.percentile:g}% shall{words}"
                )
                kind = "budget" if words else "attainment"
                yield {"kind": kind, "text": text}

    def _sample(self, now: float, window: PlannerWindow, decision: PlannerDecision | None) -> None:
        forecasts = () if decision is None else decision.forecasts
        loads = [load for load in window.loads if load.arrivals is not None]
        arrivals = sum(load.arrivals or 0 for load in loads)
        ended = sum(load.completed or 0 for load in loads)
        attained = [load.attained for load in loads if load.attained is not None]
        self._samples.append(
            {
                "time": now,
                "pools": replicas_of(window.pools),
                "rps": round(arrivals / window.seconds, 3) if loads else None,
                "planned_rps": _sum(forecast.planned_rps for forecast in forecasts),
                "low_rps": _sum(forecast.low_rps for forecast in forecasts),
                "high_rps": _sum(forecast.high_rps for forecast in forecasts),
                "shadow_price": None if decision is None else json_number(decision.shadow_price),
                "attained": sum(attained) / ended if attained and ended else None,
            }
        )

    def _series(self) -> dict[str, Any]:
        """Return the samples as columns, one per pool and state."""
        samples = list(self._samples)
        names = ("time", "rps", "planned_rps", "low_rps", "high_rps", "shadow_price", "attained")
        pools = dict.fromkeys(pool for sample in samples for pool in sample["pools"])
        return {
            **{name: [sample[name] for sample in samples] for name in names},
            "pools": {
                pool: {
                    state.value: [sample["pools"].get(pool, {}).get(state.value, 0)
                                  for sample in samples]
                    for state in _STATES
                }
                for pool in pools
            },
        }  # fmt: skip


def plan_families(status: PlanStatus) -> Iterator[Metric]:
    """Yield `pigou_planner_*`; nothing without a planner."""
    if not status.planner:
        return
    replicas = [
        ((pool, state), count)
        for pool, states in status.replicas.items()
        for state, count in states.items()
    ]
    yield gauge_family(
        "pigou_planner_replicas", "Workers of a pool by state.", replicas, "pool", "state"
    )
    yield counter_family(
        "pigou_planner_moves", "Actions of the planner that were carried out.",
        [((action,), count) for action, count in status.moves.items()], "action",
    )  # fmt: skip
    yield counter_family(
        "pigou_planner_failures", "Times that the planner raised.", status.failures
    )
    latest = status.latest
    if latest is None:
        return
    yield gauge_family(
        "pigou_planner_shadow_price",
        "Weighted seconds of delay that one more GPU-second of the budget would save.",
        latest.shadow_price,
    )
    yield gauge_family(
        "pigou_planner_wanted", "Workers that the planner wants in a pool.",
        [((plan.pool,), plan.wanted) for plan in latest.pools], "pool",
    )  # fmt: skip
    labels = (MODEL,) if len(latest.forecasts) > 1 else ()
    planned = [((one.model,) * len(labels), one.planned_rps) for one in latest.forecasts]
    text = "Requests a second that the plan is made for."
    yield gauge_family("pigou_planner_planned_rps", text, planned, *labels)
    prices = [
        ((one.model,) * len(labels), one.late_price)
        for one in latest.forecasts
        if one.late_price is not None
    ]
    text = "Seconds of delay that a late request is charged."
    yield gauge_family("pigou_planner_late_price", text, prices, *labels)


def replicas_of(pools: Iterable[PoolWindow]) -> dict[str, dict[str, int]]:
    """Return the workers of each pool by state."""
    return {
        pool.name: {state.value: len(pool.in_state(state)) for state in _STATES} for pool in pools
    }


def _entry(now: float | None, decision: PlannerDecision, refusals: Sequence[str]) -> dict[str, Any]:
    """Return a decision for display, without unknown values."""
    entry: dict[str, Any] = _known(msgspec.to_builtins(decision))
    del entry["kind"], entry["now_ns"]
    return ({} if now is None else {"time": now}) | entry | {"refused": list(refusals)}


def _known(value: Any) -> Any:
    """Return builtins without None; non-finite numbers become None."""
    match value:
        case float():
            return json_number(value)
        case Mapping():
            return {key: _known(entry) for key, entry in value.items() if entry is not None}
        case list() | tuple():
            return [_known(entry) for entry in value]
    return value


def _kind(action: Action) -> str:
    return str(action.__struct_config__.tag)


def _sum(values: Iterable[float]) -> float | None:
    known = [value for value in values if abs(value) < float("inf")]
    return round(sum(known), 3) if known else None
