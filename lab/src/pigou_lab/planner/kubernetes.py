"""Horizontal pod autoscaling on requests a second and on CPU use."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import TargetPlanner, supply
from pigou.request import SECOND
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState
from pigou_lab.planner.history_planner import NonNegativeParams


class HpaParams(NonNegativeParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters that both share, with the controller's defaults."""

    tolerance: float = 0.1  # deviation of metric over target from 1 that is left alone
    period_s: float = 15.0  # between two decisions
    # scale-down takes the largest recommendation of the last seconds.
    down_window_s: float = 300.0
    up_pods: int = 4
    up_share: float = 1.0


class HpaQpsParams(HpaParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `HpaQps`."""

    target: float = 1.0  # requests a second of one worker, above 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target > 0:
            raise ValueError(f"target is {self.target}; it must be above 0")


class HpaCpuParams(HpaParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `HpaCpu`."""

    target: float = 0.8  # share of a worker's CPU in use, above 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target > 0:
            raise ValueError(f"target is {self.target}; it must be above 0")


class _Hpa(TargetPlanner):
    """desired = ceil(N metric / target), N the ready workers.

    Kubernetes, "Horizontal Pod Autoscaling", algorithm details. Unready workers count 0 on the way
    up. A missing metric counts as the target on the way down, as 0 on the way up.
    """

    def __init__(self, setup: PlannerSetup, params: HpaParams) -> None:
        super().__init__(setup)
        self.hpa = params
        self.interval_s = params.period_s
        self._past: dict[str, deque[tuple[int, int]]] = {}

    def _ratio(self, window: PlannerWindow, pool: PoolWindow) -> float | None:
        """Return metric over target, the mean of the ready workers; None where not known."""
        raise NotImplementedError

    def _targets(self, window: PlannerWindow, now_ns: int) -> tuple[dict[str, int], list[str]]:
        targets: dict[str, int] = {}
        for pool in window.pools:
            current = supply(pool)
            recommended = self._recommended(window, pool)
            past = self._past.setdefault(pool.name, deque())
            past.append((now_ns, recommended))
            while past[0][0] < now_ns - self.hpa.down_window_s * SECOND:
                past.popleft()
            if recommended < current:
                recommended = min(max(count for _, count in past), current)
            top = current + max(self.hpa.up_pods, math.floor(current * self.hpa.up_share))
            targets[pool.name] = min(recommended, top)
        return targets, []

    def _recommended(self, window: PlannerWindow, pool: PoolWindow) -> int:
        current = supply(pool)
        ratio = self._ratio(window, pool)
        if ratio is None or not math.isfinite(ratio) or pool.ready == 0:
            return current
        if abs(ratio - 1.0) <= self.hpa.tolerance:
            return current
        desired = math.ceil(pool.ready * ratio - 1e-9)
        if ratio > 1.0 and pool.starting:
            pending = ratio * pool.ready / current
            if pending <= 1.0 + self.hpa.tolerance:
                return current
            desired = max(math.ceil(current * pending - 1e-9), current)
        return desired


class HpaQps(_Hpa):
    """The metric is requests a second of the model over its ready workers."""

    name: ClassVar[str] = "hpa-qps"
    Params: ClassVar[type[msgspec.Struct]] = HpaQpsParams

    def __init__(self, setup: PlannerSetup, params: HpaQpsParams) -> None:
        super().__init__(setup, params)
        self.params = params

    def _ratio(self, window: PlannerWindow, pool: PoolWindow) -> float | None:
        counts = [load.arrivals for load in window.loads if load.model == pool.model]
        known = [count for count in counts if count is not None]
        if not known or not pool.ready:
            return None
        return sum(known) / window.seconds / pool.ready / self.params.target


class HpaCpu(_Hpa):
    """The metric is the share of CPU in use. GPUs may be full while it is low."""

    name: ClassVar[str] = "hpa-cpu"
    Params: ClassVar[type[msgspec.Struct]] = HpaCpuParams

    def __init__(self, setup: PlannerSetup, params: HpaCpuParams) -> None:
        super().__init__(setup, params)
        self.params = params

    def _ratio(self, window: PlannerWindow, pool: PoolWindow) -> float | None:  # noqa: ARG002
        ready = pool.in_state(WorkerState.READY)
        known = [w.cpu_usage / self.params.target for w in ready if w.cpu_usage is not None]
        if not known:
            return None
        missing = len(ready) - len(known)
        ratio = sum(known) / len(known)
        filler = 0.0 if ratio > 1.0 else 1.0
        filled = (sum(known) + missing * filler) / len(ready)
        return filled if (filled > 1.0) == (ratio > 1.0) else 1.0
