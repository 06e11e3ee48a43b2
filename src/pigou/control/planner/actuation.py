"""Actuation: a planner's actions are carried out, or refused in the same words everywhere."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    RebalancePool,
    RemoveWorker,
    SetOperatingPoint,
)
from pigou.windows.planner_window import WorkerState

#: Failed starts in a row after which a worker counts as one that cannot start.
UNPLACEABLE = 3


@dataclass(frozen=True, slots=True)
class ManagedWorker:
    """A worker of a fleet that changes."""

    id: str  # unique in the fleet
    pool: str
    state: WorkerState


class ManagedFleet(Protocol):
    """A fleet whose workers can be added, drained, flipped and removed.

    A change is ordered by these calls, and goes on after they return.
    """

    @property
    def size(self) -> int:
        """Workers in all states."""
        ...

    @property
    def pools(self) -> Collection[str]:
        """Names of the pools, those without workers too."""
        ...

    def worker(self, id: str) -> ManagedWorker | None:
        """Return a worker that is not gone; None where there is none of that id."""
        ...

    def is_last_decoder(self, id: str) -> bool:
        """Whether a worker decodes, and no other one of its model that is ready does."""
        ...

    def start_refusal(self, pool: str) -> str:
        """Return why no further worker of a pool can be started now; empty where one can."""
        ...

    def flip_refusal(self, id: str, pool: str) -> str:
        """Return why a worker cannot serve in another pool; empty where it can.

        It is not asked whether the worker is ready, or the last one that decodes.
        """
        ...

    def decodes(self, pool: str) -> bool:
        """Whether workers of a pool decode."""
        ...

    def limits_refusal(self, pool: str) -> str:
        """Return why limits of a pool's workers cannot change while they run; empty if they can."""
        ...

    def set_limits(
        self, pool: str, max_seqs: int | None, max_batched_tokens: int | None, now: int
    ) -> None:
        """Let each worker of a pool run no more at once; None leaves a limit as it is."""
        ...

    def add(self, pool: str, now: int) -> str:
        """Order one more worker of a pool; return its id."""
        ...

    def drain(self, id: str, now: int) -> None:
        """Let a ready worker end what it has, then go."""
        ...

    def remove(self, id: str, now: int) -> None:
        """Let a worker go at once; what runs there goes elsewhere."""
        ...

    def flip(self, id: str, pool: str, now: int) -> None:
        """Let a ready worker drain, then serve in another pool."""
        ...


def carry_out(action: Action, fleet: ManagedFleet, now: int, max_workers: int = 0) -> str:
    """Carry out an action of a planner; return why not, empty where it was.

    Args:
        max_workers: of the fleet, in all states; 0 for no limit.
    """
    match action:
        case AddWorkers(pool, count):
            return add_workers(fleet, pool, count, now, max_workers)
        case DrainWorker(worker):
            return drain_worker(fleet, worker, now)
        case RemoveWorker(worker):
            return remove_worker(fleet, worker, now)
        case FlipRole(worker, _, pool):
            return flip_worker(fleet, worker, pool, now)
        case SetOperatingPoint():
            return set_operating_point(fleet, action, now)
        case RebalancePool():
            return ""  # advice to the operator: the router goes by what it sees itself


def tenants_limit(
    max_workers: int, wanted: int, work: Mapping[str, float], weights: Mapping[str, float]
) -> int:
    """Return how many of the `wanted` workers a planner may have for the load of its tenants.

    Tenant t has a part d_t of the load, and a share s_t of the M = `max_workers`: its weight over
    those of all tenants that have a weight or a load. For its part of N = `wanted` workers it
    gets at most its share: ceil(sum of min(N d_t, M s_t)).

    Args:
        work: recent load by tenant, in any unit.
        weights: by tenant; 1 for the others.
    """
    tenants = {name: weights.get(name, 1.0) for name in (*weights, *work)}
    total, load = sum(tenants.values()), sum(work.values())
    if not load:
        return min(wanted, max_workers)
    limits = (
        min(wanted * part / load, max_workers * tenants[name] / total)
        for name, part in work.items()
    )
    return math.ceil(sum(limits) - 1e-9)


def add_workers(fleet: ManagedFleet, pool: str, count: int, now: int, max_workers: int = 0) -> str:
    """Start workers, as many as there is room for; return why not all, empty where all were."""
    if pool not in fleet.pools:
        return f"there is no pool {pool!r}"
    room = max(max_workers - fleet.size, 0) if max_workers else count
    for started in range(min(count, room)):
        if refusal := fleet.start_refusal(pool):
            return f"{pool}: {count - started} workers are not started: {refusal}"
        fleet.add(pool, now)
    if room < count:
        return f"{pool}: {count - room} workers more than max_workers allows"
    return ""


def set_operating_point(fleet: ManagedFleet, point: SetOperatingPoint, now: int) -> str:
    """Change limits of a pool's workers; return why not, empty where it is done."""
    if point.pool not in fleet.pools:
        return f"there is no pool {point.pool!r}"
    for name in ("max_seqs", "max_batched_tokens"):
        value = getattr(point, name)
        if value is not None and value < 1:
            return f"{point.pool}: {name} is {value}; it must be at least 1"
    if refusal := fleet.limits_refusal(point.pool):
        return f"{point.pool}: {refusal}"
    fleet.set_limits(point.pool, point.max_seqs, point.max_batched_tokens, now)
    return ""


def drain_worker(fleet: ManagedFleet, id: str, now: int) -> str:
    """Drain a ready worker; return why not, empty where it is done."""
    if refusal := drain_refusal(fleet, id):
        return refusal
    fleet.drain(id, now)
    return ""


def drain_refusal(fleet: ManagedFleet, id: str) -> str:
    """Return why a worker cannot be drained now; empty where it can."""
    worker = fleet.worker(id)
    if worker is None or worker.state is not WorkerState.READY:
        return f"{id} is not ready"
    return _last_refusal(fleet, id)


def remove_worker(fleet: ManagedFleet, id: str, now: int) -> str:
    """Remove a worker at once; return why not, empty where it is done."""
    if refusal := removal_refusal(fleet, id):
        return refusal
    fleet.remove(id, now)
    return ""


def removal_refusal(fleet: ManagedFleet, id: str) -> str:
    """Return why a worker cannot go at once; empty where it can."""
    return _last_refusal(fleet, id) if fleet.worker(id) is not None else f"{id} is not there"


def flip_worker(fleet: ManagedFleet, id: str, pool: str, now: int) -> str:
    """Flip a ready worker into another pool; return why not, empty where it is done."""
    if refusal := flip_refusal(fleet, id, pool):
        return refusal
    fleet.flip(id, pool, now)
    return ""


def flip_refusal(fleet: ManagedFleet, id: str, pool: str) -> str:
    """Return why a worker cannot change to another pool now; empty where it can."""
    worker = fleet.worker(id)
    if worker is None or worker.state is not WorkerState.READY:
        return f"{id} is not ready"
    refusal = fleet.flip_refusal(id, pool)
    return refusal or ("" if fleet.decodes(pool) else _last_refusal(fleet, id))


def _last_refusal(fleet: ManagedFleet, id: str) -> str:
    return f"{id} is the last worker that decodes" if fleet.is_last_decoder(id) else ""
