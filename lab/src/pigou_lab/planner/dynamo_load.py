"""NVIDIA Dynamo's first planner: one worker more or less by thresholds."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import supply
from pigou.request import Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState
from pigou_lab.planner.history_planner import HistoryPlanner, NonNegativeParams, known_mean


class DynamoLoadParams(NonNegativeParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `DynamoLoad`, with its defaults."""

    adjustment_interval_s: float = 30.0  # between two decisions
    decode_up: float = 0.9
    decode_down: float = 0.5
    prefill_up: float = 0.5
    prefill_down: float = 0.2
    decode_grace_intervals: int = 3  # after an addition, in which no decode worker is removed
    # intervals within which a trend must take the queue below its threshold to hold an addition
    # back.
    prefill_buffer_intervals: int = 3


class DynamoLoad(HistoryPlanner):
    """+1 above the upper threshold, -1 below the lower (Dynamo 0.x `load_planner.md`)."""

    name: ClassVar[str] = "dynamo-load"
    Params: ClassVar[type[msgspec.Struct]] = DynamoLoadParams

    def __init__(self, setup: PlannerSetup, params: DynamoLoadParams) -> None:
        super().__init__(setup, params.adjustment_interval_s)
        self.params = params
        self.interval_s = params.adjustment_interval_s
        self._grace: dict[str, int] = {}

    def _targets(
        self,
        window: PlannerWindow,
        now_ns: int,  # noqa: ARG002
    ) -> tuple[dict[str, int], list[str]]:
        targets: dict[str, int] = {}
        for pool in window.pools:
            grace = self._grace.get(pool.name, 0)
            self._grace[pool.name] = max(grace - 1, 0)
            if pool.starting or pool.draining:
                continue
            step = (
                self._prefill_step(pool) if pool.role is Role.PREFILL else self._decode_step(pool)
            )
            if step < 0 and pool.role is not Role.PREFILL and grace:
                continue
            if step > 0:
                self._grace[pool.name] = self.params.decode_grace_intervals
            if step:
                targets[pool.name] = supply(pool) + step
        return targets, []

    def _decode_step(self, pool: PoolWindow) -> int:
        usage = self._history.mean(lambda w: _mean_of(w, pool.name, "kv_usage"))
        if usage is None:
            return 0
        return (usage > self.params.decode_up) - (usage < self.params.decode_down)

    def _prefill_step(self, pool: PoolWindow) -> int:
        queue = self._history.mean(lambda w: _mean_of(w, pool.name, "waiting"))
        if queue is None:
            return 0
        if queue < self.params.prefill_down:
            return -1
        if queue <= self.params.prefill_up:
            return 0
        windows = [_mean_of(w, pool.name, "waiting") for w in self._history]
        known = [value for value in windows if value is not None]
        trend = known[-1] + (known[-1] - known[0]) * self.params.prefill_buffer_intervals
        falls = len(known) > 1 and known[-1] < known[0] and trend < self.params.prefill_up
        return 0 if falls else 1


def _mean_of(window: PlannerWindow, name: str, field: str) -> float | None:
    for pool in window.pools:
        if pool.name == name:
            return known_mean(getattr(w, field) for w in pool.in_state(WorkerState.READY))
    return None
