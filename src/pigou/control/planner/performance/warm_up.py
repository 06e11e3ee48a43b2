"""Which workers are warm, so that their windows are samples of speed."""

from __future__ import annotations

from pigou.control.planner.messages import PlannerWindow, PoolWindow, WorkerState, WorkerWindow
from pigou.control.planner.objectives import ProvisioningTimes
from pigou.request import SECOND


class WarmUp:
    """Finds the warm workers of one pool, window after window.

    A worker is warm when it was ready for `warm_up_s` before the window, and has worked in windows
    of so many seconds: one that nobody asked yet has its slow first passes before it, however old
    it is. Cold samples are left out of every fit: they made a planner ask for many more workers
    than it needed.

    Args:
        times: of the warm-up; at 0 every worker that was ready all the window is warm.
    """

    def __init__(self, times: ProvisioningTimes) -> None:
        self._warm_up_s = times.warm_up_s
        self._worked_s: dict[tuple[str, int], float] = {}

    def warm(self, window: PlannerWindow, pool: PoolWindow) -> list[WorkerWindow]:
        """Take in a window; return the workers of the pool that were warm in all of it."""
        ready = pool.in_state(WorkerState.READY)
        keys = [(worker.id, worker.since_ns) for worker in ready]
        before = {key: self._worked_s.get(key, 0.0) for key in keys}
        self._worked_s = {
            key: before[key] + window.seconds * _works(worker)
            for key, worker in zip(keys, ready, strict=True)
        }
        return [
            worker
            for key, worker in zip(keys, ready, strict=True)
            if before[key] >= self._warm_up_s and self._is_old(worker, window)
        ]

    def _is_old(self, worker: WorkerWindow, window: PlannerWindow) -> bool:
        age_s = (window.now_ns - worker.since_ns) / SECOND
        return age_s >= self._warm_up_s + window.seconds


def _works(worker: WorkerWindow) -> bool:
    """Whether a worker had something to do in a window; one without figures counts as so."""
    figures = (worker.computed_prompts, worker.running, worker.mean_running)
    return any(figures) or all(figure is None for figure in figures)
