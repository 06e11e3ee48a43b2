"""Base of planners of other systems that decide by means over their last windows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import TargetPlanner
from pigou.request import SECOND, Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerWindow


class NonNegativeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters that are numbers, finite and at least 0."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 0")


class WindowHistory:
    """The windows of the last `seconds`, at least one."""

    def __init__(self, seconds: float) -> None:
        self._ns = int(seconds * SECOND)
        self._windows: deque[PlannerWindow] = deque()

    def __iter__(self) -> Iterator[PlannerWindow]:
        return iter(self._windows)

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, window: PlannerWindow) -> None:
        """Add the newest window; drop those that began before the span."""
        self._windows.append(window)
        while len(self._windows) > 1 and self._windows[0].now_ns <= window.now_ns - self._ns:
            self._windows.popleft()

    def mean(self, value: Callable[[PlannerWindow], float | None]) -> float | None:
        """Return a value's mean weighted by window seconds; None if unknown."""
        pairs = [(value(window), window.seconds) for window in self._windows]
        known = [(v, seconds) for v, seconds in pairs if v is not None and math.isfinite(v)]
        total = sum(seconds for _, seconds in known)
        return sum(v * seconds for v, seconds in known) / total if total > 0 else None


class HistoryPlanner(TargetPlanner):
    """Base of planners with target workers per pool that remember the last `history_s` seconds."""

    def __init__(self, setup: PlannerSetup, history_s: float) -> None:
        super().__init__(setup)
        self._history = WindowHistory(history_s)

    def observe(self, window: PlannerWindow) -> None:
        """Observe one interval."""
        super().observe(window)
        self._history.add(window)


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None without any."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return sum(numbers) / len(numbers) if numbers else None


def requests_of(worker: WorkerWindow) -> float | None:
    """Return running and waiting requests of a worker; None if unknown."""
    if worker.running is None and worker.waiting is None:
        return None
    return float((worker.running or 0) + (worker.waiting or 0))


def prefill_and_decode(
    window: PlannerWindow, model: str
) -> tuple[PoolWindow | None, PoolWindow | None]:
    """Return the pools of a model that prefill and decode; a mixed pool decodes."""
    own = [pool for pool in window.pools if pool.model == model]
    prefill = next((pool for pool in own if pool.role is Role.PREFILL), None)
    decode = next((pool for pool in own if pool.role is not Role.PREFILL), None)
    return prefill, decode
