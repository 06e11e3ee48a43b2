"""Who is in a pool, who is on the way, and who was changed by somebody else."""

from __future__ import annotations

from dataclasses import dataclass, field

from pigou.control.planner.messages import Action, AddWorkers, DrainWorker, FlipRole, RemoveWorker
from pigou.objectives import ProvisioningTimes
from pigou.request import SECOND
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState, WorkerWindow

#: Windows after which workers that were ordered and do not show were never started.
_CREDIT_WINDOWS = 3


@dataclass(slots=True)
class PoolMembers:
    """What is known of one pool beyond its window."""

    # workers that were ordered, and in how many windows they did not show.
    ordered: list[int] = field(default_factory=list)
    seen_ns: int = 0  # when it was first seen
    grown_ns: int = 0  # when it last grew since; 0 where it did not
    blocked_ns: int = 0  # until when nothing is started, because starts failed
    # workers that somebody else added (above 0) or drained (below 0) since the last window.
    foreign: int = 0


class PoolMembership:
    """Follows the workers of all pools from window to window.

    Args:
        times: how long a starting worker counts as supply.
    """

    def __init__(self, times: ProvisioningTimes) -> None:
        self._times = times
        self._pools: dict[str, PoolMembers] = {}
        self._known: set[str] = set()
        self._own_drains: set[str] = set()
        self._flips: dict[str, str] = {}
        self._drains: set[str] = set()
        self._is_first = True

    def observe(self, window: PlannerWindow) -> None:
        """Compare a window with the one before: who came, who drains, on whose order."""
        ids: set[str] = set()
        drains: set[str] = set()
        for pool in window.pools:
            members = self._pools.get(pool.name)
            if members is None:
                members = self._pools[pool.name] = PoolMembers(seen_ns=window.now_ns)
            own = {worker.id for worker in pool.workers}
            own_drains = {worker.id for worker in pool.in_state(WorkerState.DRAINING)}
            new = len(own - self._known)
            expected = min(new, len(members.ordered))
            del members.ordered[:expected]
            members.ordered = [n + 1 for n in members.ordered if n + 1 < _CREDIT_WINDOWS]
            members.foreign = 0
            if not self._is_first:
                members.foreign = new - expected
                members.foreign -= len(own_drains - self._drains - self._own_drains)
            if new > 0 and not self._is_first:
                members.grown_ns = window.now_ns
            self._flips = {w: p for w, p in self._flips.items() if p != pool.name or w not in own}
            ids |= own
            drains |= own_drains
        self._known, self._drains, self._is_first = ids, drains, False
        self._own_drains &= ids
        self._flips = {worker: pool for worker, pool in self._flips.items() if worker in ids}

    def note(self, actions: tuple[Action, ...], now_ns: int) -> None:
        """Note what was just ordered."""
        for action in actions:
            match action:
                case AddWorkers(pool=pool, count=count):
                    self._pools[pool].ordered += [0] * count
                    self._pools[pool].grown_ns = now_ns
                case DrainWorker(worker=worker) | RemoveWorker(worker=worker):
                    self._own_drains.add(worker)
                case FlipRole(worker=worker, pool=pool):
                    self._own_drains.add(worker)
                    self._flips[worker] = pool
                    self._pools[pool].grown_ns = now_ns

    def of(self, pool: str) -> PoolMembers:
        """Return what is known of a pool."""
        return self._pools[pool]

    def is_viable(self, worker: WorkerWindow, now_ns: int) -> bool:
        """Whether a starting worker can be expected to start."""
        age_s = (now_ns - worker.since_ns) / SECOND
        return not worker.unplaceable and age_s < self._times.patience_s

    def pending(self, pool: PoolWindow, now_ns: int) -> int:
        """Return the workers on their way: viable starts, flips, orders that do not show yet."""
        starting = pool.in_state(WorkerState.STARTING)
        viable = sum(self.is_viable(worker, now_ns) for worker in starting)
        flips = sum(target == pool.name for target in self._flips.values())
        return viable + flips + len(self._pools[pool.name].ordered)

    def stuck(self, pool: PoolWindow, now_ns: int) -> list[WorkerWindow]:
        """Return the starting workers that cannot start, the newest first."""
        starting = pool.in_state(WorkerState.STARTING)
        own = [worker for worker in starting if not self.is_viable(worker, now_ns)]
        return sorted(own, key=lambda worker: (-worker.since_ns, worker.id))

    def supply(self, pool: PoolWindow, now_ns: int) -> int:
        """Return the workers that serve or are on their way."""
        return pool.ready + self.pending(pool, now_ns)

    def can_start(self, pool: PoolWindow, now_ns: int) -> bool:
        """Whether further starts are worth trying."""
        return not (self.is_closed(pool, now_ns) or self.stuck(pool, now_ns))

    def is_closed(self, pool: PoolWindow, now_ns: int) -> bool:
        """Whether nothing can start: its provider says so, or the last starts failed."""
        return not pool.can_start or now_ns < self._pools[pool.name].blocked_ns

    def block(self, pool: str, now_ns: int) -> None:
        """Start nothing in a pool for as long as a start is waited for: its starts failed."""
        self._pools[pool].blocked_ns = now_ns + int(self._times.patience_s * SECOND)
