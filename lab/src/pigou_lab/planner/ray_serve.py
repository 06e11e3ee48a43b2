"""Ray Serve's autoscaling of a deployment by its ongoing requests."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import supply
from pigou.request import SECOND
from pigou.windows.planner_window import PlannerWindow, PoolWindow
from pigou_lab.planner.history_planner import HistoryPlanner, NonNegativeParams, requests_of


class RayServeParams(NonNegativeParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `RayServe`, with its defaults (`AutoscalingConfig`)."""

    target_ongoing_requests: float = 2.0
    metrics_interval_s: float = 10.0  # between two decisions
    look_back_period_s: float = 30.0  # over which ongoing requests are averaged
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_ongoing_requests > 0:
            raise ValueError("target_ongoing_requests is 0; it must be above 0")


class RayServe(HistoryPlanner):
    """error = ongoing / (N target); desired = ceil(N (1 + (error - 1) factor)), after a delay."""

    name: ClassVar[str] = "ray"
    Params: ClassVar[type[msgspec.Struct]] = RayServeParams

    def __init__(self, setup: PlannerSetup, params: RayServeParams) -> None:
        super().__init__(setup, params.look_back_period_s)
        self.params = params
        self.interval_s = params.metrics_interval_s
        self._since: dict[str, tuple[int, int]] = {}

    def _targets(self, window: PlannerWindow, now_ns: int) -> tuple[dict[str, int], list[str]]:
        targets: dict[str, int] = {}
        for pool in window.pools:
            current = supply(pool)
            desired = self._desired(pool, current)
            direction = (desired > current) - (desired < current)
            since = self._since.get(pool.name, (0, now_ns))
            if direction == 0 or since[0] != direction:
                since = (direction, now_ns)
            self._since[pool.name] = since
            delay = self.params.upscale_delay_s if direction > 0 else self.params.downscale_delay_s
            if direction and now_ns - since[1] >= delay * SECOND:
                targets[pool.name] = desired
                self._since[pool.name] = (0, now_ns)
        return targets, []

    def _desired(self, pool: PoolWindow, current: int) -> int:
        ongoing = self._history.mean(lambda window: _ongoing(window, pool.name))
        if ongoing is None:
            return current
        if current == 0:
            return 1 if ongoing > 0 else 0
        error = ongoing / (current * self.params.target_ongoing_requests)
        up, down = self.params.upscaling_factor, self.params.downscaling_factor
        smooth = 1.0 + (error - 1.0) * (up if error > 1.0 else down)
        return max(math.ceil(current * smooth - 1e-9), 0)


def _ongoing(window: PlannerWindow, name: str) -> float | None:
    pool = next((pool for pool in window.pools if pool.name == name), None)
    if pool is None:
        return None
    counts = [requests_of(worker) for worker in pool.workers]
    known = [count for count in counts if count is not None]
    if known:
        return sum(known)
    queued = [load.queued for load in window.loads if load.model == pool.model]
    waiting = [count for count in queued if count is not None]
    return float(sum(waiting)) if waiting else None
