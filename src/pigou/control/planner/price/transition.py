"""From the present pools to the wanted ones: cancel, flip, start, drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    RemoveWorker,
)
from pigou.control.planner.price.terms import CREDIT_WINDOWS
from pigou.control.planner.target_planner import free_gpus
from pigou.objectives import Budget, ProvisioningTimes
from pigou.placement.gang import removal_costs
from pigou.placement.topology import DistanceCosts
from pigou.request import SECOND, Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState, WorkerWindow


@dataclass(slots=True)
class PoolMembers:
    """State of one pool beyond its window."""

    # ordered workers that do not show, by windows waited
    ordered: list[int] = field(default_factory=list)
    seen_ns: int = 0  # first seen
    grown_ns: int = 0  # last grown since; 0 if never
    blocked_ns: int = 0  # no starts until then, because starts failed
    foreign: int = 0  # workers added (above 0) or drained externally since the last window


class PoolMembership:
    """Tracks the workers of all pools from window to window."""

    def __init__(self, times: ProvisioningTimes) -> None:
        self._times = times
        self._pools: dict[str, PoolMembers] = {}
        self._known: set[str] = set()
        self._own_drains: set[str] = set()
        self._flips: dict[str, str] = {}
        self._drains: set[str] = set()
        self._is_first = True

    def observe(self, window: PlannerWindow) -> None:
        """Compare a window with the last one: arrivals and drains, ordered ones apart."""
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
            members.ordered = [n + 1 for n in members.ordered if n + 1 < CREDIT_WINDOWS]
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
        """Record ordered actions."""
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
        """Return a pool's state."""
        return self._pools[pool]

    def is_viable(self, worker: WorkerWindow, now_ns: int) -> bool:
        """True if a starting worker can be expected to start."""
        age_s = (now_ns - worker.since_ns) / SECOND
        return not worker.unplaceable and age_s < self._times.patience_s

    def pending(self, pool: PoolWindow, now_ns: int) -> int:
        """Return workers on their way: viable starts, flips, orders not yet visible."""
        starting = pool.in_state(WorkerState.STARTING)
        viable = sum(self.is_viable(worker, now_ns) for worker in starting)
        flips = sum(target == pool.name for target in self._flips.values())
        return viable + flips + len(self._pools[pool.name].ordered)

    def stuck(self, pool: PoolWindow, now_ns: int) -> list[WorkerWindow]:
        """Return starting workers that cannot start, newest first."""
        starting = pool.in_state(WorkerState.STARTING)
        own = [worker for worker in starting if not self.is_viable(worker, now_ns)]
        return sorted(own, key=lambda worker: (-worker.since_ns, worker.id))

    def supply(self, pool: PoolWindow, now_ns: int) -> int:
        """Return workers that serve or are on their way."""
        return pool.ready + self.pending(pool, now_ns)

    def can_start(self, pool: PoolWindow, now_ns: int) -> bool:
        """True if further starts are worth trying."""
        return not (self.is_closed(pool, now_ns) or self.stuck(pool, now_ns))

    def is_closed(self, pool: PoolWindow, now_ns: int) -> bool:
        """True if nothing can start: by its provider, or after failed starts."""
        return not pool.can_start or now_ns < self._pools[pool.name].blocked_ns

    def block(self, pool: str, now_ns: int) -> None:
        """Start nothing in a pool for the patience of a start."""
        self._pools[pool].blocked_ns = now_ns + int(self._times.patience_s * SECOND)


@dataclass(frozen=True, slots=True)
class MoveRates:
    """Costs and values of moves."""

    # one-time removal cost by pool, in weighted seconds of delay: lost prefix cache and stream
    # waits
    loss_s: Mapping[str, Callable[[WorkerWindow], float]]
    value: Mapping[str, float]


class Transition:
    """The moves of one tick, towards the `wanted` workers by pool.

    1. Give up starts that cannot succeed, once surplus or out of patience; start no others before.
    2. Cancel surplus starts, newest first: they have no cache and no streams.
    3. Flip surplus workers of the same model and width if quicker than a start, cheapest first.
    4. Start the rest within the budget (GPUs of all states count), by value per GPU.
    5. Drain the surplus, cheapest first (ties: shortest remaining KV paths), `hold_s` after growth
       or first sight. A pool that never grew gives what another lacks at once.
    """

    def __init__(
        self,
        window: PlannerWindow,
        wanted: Mapping[str, int],
        members: PoolMembership,
        budget: Budget,
        times: ProvisioningTimes,
        hold_s: float,
        flips: bool = True,
    ) -> None:
        self._window, self._wanted, self._members = window, wanted, members
        self._budget, self._times, self._hold_s = budget, times, hold_s
        self._flips = flips and times.flip_s < times.start_up_s
        self._now_ns = window.now_ns
        self._pools = [pool for pool in window.pools if pool.name in wanted]
        self._supply = {pool.name: members.supply(pool, self._now_ns) for pool in window.pools}
        self._used = {
            pool.name: pool.used_gpus + pool.gpus * len(members.of(pool.name).ordered)
            for pool in window.pools
        }
        self._gone: set[str] = set()
        self._short_gpus = 0
        self.actions: list[Action] = []
        self.reasons: list[str] = []

    def moves(self, rates: MoveRates, now_ns: int) -> tuple[Action, ...]:
        """Return the actions in order; `reasons` lists what was held back."""
        self._now_ns = now_ns
        for pool in self._pools:
            self._give_up(pool)
            self._cancel(pool)
        lacking = [pool for pool in self._pools if self._missing(pool) > 0]
        lacking.sort(key=lambda pool: (-rates.value.get(pool.name, 0.0) / pool.gpus, pool.name))
        for pool in lacking:
            self._flip_into(pool, rates)
        for pool in lacking:
            self._start(pool)
        for pool in self._pools:
            self._drain(pool, rates)
        return tuple(self.actions)

    # --- steps -----------------------------------------------------------------------------

    def _give_up(self, pool: PoolWindow) -> None:
        stuck = self._members.stuck(pool, self._now_ns)
        needed = self._missing(pool)
        for index, worker in enumerate(stuck):
            age_s = (self._now_ns - worker.since_ns) / SECOND
            is_late = age_s >= self._times.patience_s
            if is_late or len(stuck) - index > needed:
                self._remove(pool, worker, counted=False)
                if is_late:
                    self._members.block(pool.name, self._now_ns)
                    self.reasons.append(
                        f"{pool.name}: {worker.id} did not start in {age_s:.0f} s, given up"
                    )

    def _cancel(self, pool: PoolWindow) -> None:
        starting = [
            worker
            for worker in pool.in_state(WorkerState.STARTING)
            if worker.id not in self._gone and self._members.is_viable(worker, self._now_ns)
        ]
        surplus = -self._missing(pool)
        if surplus > 0 and starting and not self._may_shrink(pool):
            return
        for worker in sorted(starting, key=lambda w: (-w.since_ns, w.id))[: max(surplus, 0)]:
            self._remove(pool, worker, counted=True)

    def _flip_into(self, pool: PoolWindow, rates: MoveRates) -> None:
        if not self._flips:
            return
        while self._missing(pool) > 0:
            donors = [
                (rates.loss_s[other.name](worker), worker.id, other, worker)
                for other in self._pools
                if self._can_give(other, pool)
                for worker in self._drainable(other)
            ]
            if not donors:
                return
            _, _, other, worker = min(donors, key=lambda item: item[:2])
            self.actions.append(FlipRole(worker.id, pool.role, pool.name))
            self._gone.add(worker.id)
            self._supply[other.name] -= 1
            self._supply[pool.name] += 1
            self._used[other.name] -= pool.gpus
            self._used[pool.name] += pool.gpus

    def _can_give(self, other: PoolWindow, pool: PoolWindow) -> bool:
        same = (other.model, other.gpus) == (pool.model, pool.gpus) and other.role != pool.role
        return same and self._missing(other) < 0 and self._did_not_grow(other)

    def _start(self, pool: PoolWindow) -> None:
        missing = self._missing(pool)
        if missing <= 0:
            return
        if not self._members.can_start(pool, self._now_ns):
            self.reasons.append(f"{pool.name}: {missing} more are needed, and none can start now")
            return
        free = free_gpus(self._window.pools, self._used, pool, self._budget)
        count = min(missing, free // pool.gpus)
        if count < missing:
            self._short_gpus += (missing - count) * pool.gpus
            self.reasons.append(
                f"{pool.name}: the budget has no GPUs now for {missing - count} more"
            )
        if count > 0:
            self.actions.append(AddWorkers(pool.name, count))
            self._supply[pool.name] += count
            self._used[pool.name] += count * pool.gpus

    def _drain(self, pool: PoolWindow, rates: MoveRates) -> None:
        surplus = -self._missing(pool)
        if surplus <= 0:
            return
        if not self._may_shrink(pool):
            needed = -(-self._short_gpus // pool.gpus) if self._did_not_grow(pool) else 0
            held = surplus - needed
            surplus = min(surplus, needed)
            if held > 0:
                self.reasons.append(f"{pool.name}: {held} too many, held since it grew")
        drainable = self._drainable(pool)
        distances = self._distances(pool, drainable)
        loss_s = rates.loss_s[pool.name]
        drainable.sort(key=lambda worker: (loss_s(worker), distances[worker.id], worker.id))
        for worker in drainable[:surplus]:
            self.actions.append(DrainWorker(worker.id))
            self._gone.add(worker.id)
            self._supply[pool.name] -= 1
            self._short_gpus = max(self._short_gpus - pool.gpus, 0)

    def _distances(self, pool: PoolWindow, workers: Sequence[WorkerWindow]) -> dict[str, float]:
        """Return the KV distance without each worker, for models with both roles."""
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(pool.role)
        others = [
            worker.location
            for one in self._window.pools
            if one.model == pool.model and one.role is other
            for worker in one.in_state(WorkerState.READY)
        ]
        costs = removal_costs([worker.location for worker in workers], others, DistanceCosts())
        return {worker.id: cost for worker, cost in zip(workers, costs, strict=True)}

    # --- parts -----------------------------------------------------------------------------

    def _missing(self, pool: PoolWindow) -> int:
        return self._wanted[pool.name] - self._supply[pool.name]

    def _may_shrink(self, pool: PoolWindow) -> bool:
        seen_s = (self._now_ns - self._members.of(pool.name).seen_ns) / SECOND
        return seen_s >= self._hold_s and self._did_not_grow(pool)

    def _did_not_grow(self, pool: PoolWindow) -> bool:
        grown_ns = self._members.of(pool.name).grown_ns
        return not grown_ns or (self._now_ns - grown_ns) / SECOND >= self._hold_s

    def _drainable(self, pool: PoolWindow) -> list[WorkerWindow]:
        ready = pool.in_state(WorkerState.READY)
        return [worker for worker in ready if worker.id not in self._gone]

    def _remove(self, pool: PoolWindow, worker: WorkerWindow, counted: bool) -> None:
        self.actions.append(RemoveWorker(worker.id))
        self._gone.add(worker.id)
        self._used[pool.name] -= pool.gpus
        self._supply[pool.name] -= counted
