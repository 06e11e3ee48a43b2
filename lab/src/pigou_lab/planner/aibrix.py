"""AIBrix's two pod autoscalers: APA and KPA."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import supply
from pigou.request import SECOND
from pigou.windows.planner_window import PlannerWindow, WorkerState
from pigou_lab.planner.history_planner import HistoryPlanner, WindowHistory, requests_of

Metric = Literal["kv-usage", "requests"]


class ApaParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `AibrixApa`, with AIBrix's defaults; the target is that of its examples."""

    # share of KV blocks in use, or requests that run or wait, of one worker.
    metric: Metric = "kv-usage"
    target: float = 0.5
    up_tolerance: float = 0.1
    down_tolerance: float = 0.1
    max_scale_up_rate: float = 2.0
    max_scale_down_rate: float = 2.0
    window_s: float = 180.0  # over which the metric is averaged
    up_cooldown_s: float = 0.0
    down_cooldown_s: float = 300.0

    def __post_init__(self) -> None:
        _check_above(self, 0, "target")
        _check_above(self, 1, "max_scale_up_rate", "max_scale_down_rate")
        for name in ("up_tolerance", "down_tolerance", "window_s", "up_cooldown_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")


class KpaParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `AibrixKpa`, with AIBrix's defaults; the target is that of its examples."""

    metric: Metric = "kv-usage"  # as of `ApaParams`
    target: float = 0.5
    stable_window_s: float = 180.0
    panic_window_s: float = 60.0
    # factor over the stable value, or over the ready workers, that is panic.
    panic_threshold: float = 2.0
    max_scale_up_rate: float = 2.0
    max_scale_down_rate: float = 2.0
    down_delay_s: float = 300.0  # scale-down takes the largest recommendation of this time

    def __post_init__(self) -> None:
        _check_above(self, 0, "target", "stable_window_s", "panic_window_s")
        _check_above(self, 1, "panic_threshold", "max_scale_up_rate", "max_scale_down_rate")
        if not self.down_delay_s >= 0:
            raise ValueError(f"down_delay_s is {self.down_delay_s}; it must be at least 0")


def _check_above(params: msgspec.Struct, minimum: float, *names: str) -> None:
    for name in names:
        if not minimum < getattr(params, name) < math.inf:
            raise ValueError(f"{name} is {getattr(params, name)}; it must be above {minimum}")


def pool_total(window: PlannerWindow, name: str, metric: Metric) -> float | None:
    """Return the sum of a metric over a pool's ready workers; None where no worker has it."""
    pool = next((pool for pool in window.pools if pool.name == name), None)
    if pool is None:
        return None
    ready = pool.in_state(WorkerState.READY)
    values = [w.kv_usage if metric == "kv-usage" else requests_of(w) for w in ready]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) * len(ready) / len(known) if known else None


class AibrixApa(HistoryPlanner):
    """r = use / target, use the mean metric of N workers.

        r > 1 + up_tolerance      min(ceil(N r), ceil(N max_scale_up_rate))
        r < 1 - down_tolerance    max(ceil(N r), floor(N / max_scale_down_rate))

    AIBrix `apa.go`. Workers that start count in N only when they are ready.
    """

    name: ClassVar[str] = "apa"
    Params: ClassVar[type[msgspec.Struct]] = ApaParams

    def __init__(self, setup: PlannerSetup, params: ApaParams) -> None:
        super().__init__(setup, params.window_s)
        self.params = params
        self._stepped_ns: dict[str, int] = {}

    def _targets(self, window: PlannerWindow, now_ns: int) -> tuple[dict[str, int], list[str]]:
        p = self.params
        targets: dict[str, int] = {}
        for pool in window.pools:
            total = self._history.mean(partial(pool_total, name=pool.name, metric=p.metric))
            if total is None or not pool.ready:
                continue
            count = supply(pool)
            desired = apa_desired(count, total / pool.ready / p.target, p)
            cooldown = p.up_cooldown_s if desired > count else p.down_cooldown_s
            since = now_ns - self._stepped_ns.get(pool.name, -(2**62))
            if desired != count and since >= cooldown * SECOND:
                targets[pool.name] = desired
                self._stepped_ns[pool.name] = now_ns
        return targets, []


def apa_desired(count: int, ratio: float, params: ApaParams) -> int:
    """Return APA's number of workers from their number and use over target."""
    wanted = math.ceil(count * ratio - 1e-9)
    if ratio > 1.0 + params.up_tolerance:
        return min(wanted, math.ceil(count * params.max_scale_up_rate))
    if ratio < 1.0 - params.down_tolerance:
        return max(wanted, math.floor(count / params.max_scale_down_rate))
    return count


class AibrixKpa(HistoryPlanner):
    """desired = ceil(total / target), on a stable and a panic window of the summed metric.

    Panic begins when the panic value exceeds `panic_threshold` times the stable one, or its desired
    number that many times the ready workers. For a stable window the number then never falls.
    AIBrix `kpa.go`, after Knative's autoscaler.
    """

    name: ClassVar[str] = "kpa"
    Params: ClassVar[type[msgspec.Struct]] = KpaParams

    def __init__(self, setup: PlannerSetup, params: KpaParams) -> None:
        super().__init__(setup, params.stable_window_s)
        self.params = params
        self._panic = WindowHistory(params.panic_window_s)
        self._panic_ns: dict[str, int] = {}
        self._panic_workers: dict[str, int] = {}
        self._past: dict[str, list[tuple[int, int]]] = {}

    def observe(self, window: PlannerWindow) -> None:
        """Observe one interval."""
        super().observe(window)
        self._panic.add(window)

    def _targets(self, window: PlannerWindow, now_ns: int) -> tuple[dict[str, int], list[str]]:
        p = self.params
        targets: dict[str, int] = {}
        for pool in window.pools:
            value = partial(pool_total, name=pool.name, metric=p.metric)
            stable, panic = self._history.mean(value), self._panic.mean(value)
            if stable is None or panic is None:
                continue
            ready = max(pool.ready, 1)
            desired = self._desired(pool.name, stable, panic, ready, now_ns)
            past = self._past.setdefault(pool.name, [])
            past.append((now_ns, desired))
            past[:] = [(at, n) for at, n in past if at > now_ns - p.down_delay_s * SECOND] or [
                (now_ns, desired)
            ]
            targets[pool.name] = max(n for _, n in past)
        return targets, []

    def _desired(self, name: str, stable: float, panic: float, ready: int, now_ns: int) -> int:
        p = self.params
        top, bottom = ready * p.max_scale_up_rate, math.floor(ready / p.max_scale_down_rate)
        wanted = [math.ceil(total / p.target - 1e-9) for total in (stable, panic)]
        on_stable, on_panic = (int(max(min(n, math.ceil(top)), bottom)) for n in wanted)
        is_panic = stable <= 0 or panic / stable > p.panic_threshold
        is_panic = is_panic or wanted[1] / ready >= p.panic_threshold
        if is_panic:
            self._panic_ns[name] = now_ns
        elif now_ns - self._panic_ns.get(name, -(2**62)) > p.stable_window_s * SECOND:
            self._panic_workers.pop(name, None)
            return on_stable
        held = max(self._panic_workers.get(name, 0), on_panic)
        self._panic_workers[name] = held
        return held
