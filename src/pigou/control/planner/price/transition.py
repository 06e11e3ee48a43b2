"""From the pools as they are to the pools as they should be: cancel, flip, start, drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pigou.control.placement.cost import removal_costs
from pigou.control.placement.topology import DistanceCosts
from pigou.control.planner.messages import Action, AddWorkers, DrainWorker, FlipRole, RemoveWorker
from pigou.control.planner.price.membership import PoolMembership
from pigou.objectives import Budget, ProvisioningTimes
from pigou.request import SECOND, Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState, WorkerWindow


@dataclass(frozen=True, slots=True)
class MoveRates:
    """What moves cost and bring."""

    # weighted seconds of delay that the removal of a worker costs once, by its pool: the prefix
    # cache that is computed again, and what its streams wait.
    loss_s: Mapping[str, Callable[[WorkerWindow], float]]
    value: Mapping[str, float]


class Transition:
    """The moves of one tick.

    1. Starts that cannot succeed are given up: when they are not needed any more, or after the
       patience for them. Nothing is started in such a pool until then.
    2. Surplus starts are cancelled, the newest first: they have no cache and no streams.
    3. A pool that lacks workers takes them from one of its model and width with surplus, where a
       flip is quicker than a start: the worker whose removal costs least.
    4. It starts the others, as far as the budget allows; GPUs of all states count, so the budget
       holds while workers drain. Pools with the largest value a GPU come first.
    5. What is surplus still is drained, cheapest victims first (of equals that without which KV
       has the shortest way), but not before `hold_s` since the pool last grew, or was first seen.
       What another pool lacks for want of GPUs, or by a flip,
       a pool gives that did not grow for so long: its first sight is no reason to starve others.

    Args:
        wanted: workers by pool.
        hold_s: after growth, in which a pool does not shrink.
        flips: whether roles may change.
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
        """Return the actions in order; `reasons` says what was held back."""
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
        count = min(missing, self._free_gpus(pool) // pool.gpus)
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
        """Return how far KV has to go without each worker, where its model has both roles."""
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
        """Return the workers that a pool lacks; below 0 for its surplus."""
        return self._wanted[pool.name] - self._supply[pool.name]

    def _may_shrink(self, pool: PoolWindow) -> bool:
        seen_s = (self._now_ns - self._members.of(pool.name).seen_ns) / SECOND
        return seen_s >= self._hold_s and self._did_not_grow(pool)

    def _did_not_grow(self, pool: PoolWindow) -> bool:
        """Whether a pool did not grow for `hold_s`."""
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

    def _free_gpus(self, pool: PoolWindow) -> int:
        """Return the GPUs that a pool may still take, by each limit of the budget."""
        budget = self._budget
        limits = [2**31]
        if budget.max_gpus is not None:
            limits.append(budget.max_gpus - sum(self._used.values()))
        if pool.model in budget.model_gpus:
            own = [p.name for p in self._window.pools if p.model == pool.model]
            limits.append(budget.model_gpus[pool.model] - sum(self._used[name] for name in own))
        if pool.name in budget.pool_gpus:
            limits.append(budget.pool_gpus[pool.name] - self._used[pool.name])
        return max(min(limits), 0)
