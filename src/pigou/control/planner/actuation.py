"""Actuation: carries out a planner's actions, or refuses them in the same words everywhere."""

from __future__ import annotations

from collections.abc import Collection
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
from pigou.control.planner.tenant_load import TenantLoad
from pigou.windows.planner_window import WorkerState

#: Failed starts in a row after which a worker counts as unplaceable.
UNPLACEABLE = 3


@dataclass(frozen=True, slots=True)
class ManagedWorker:
    """A worker of a changing fleet."""

    id: str  # unique in the fleet
    pool: str
    state: WorkerState


class ManagedFleet(Protocol):
    """A fleet whose workers can be added, drained, flipped and removed; calls only order it."""

    @property
    def size(self) -> int:
        """Workers in all states."""
        ...

    @property
    def pools(self) -> Collection[str]:
        """Names of all pools, empty ones included."""
        ...

    def worker(self, id: str) -> ManagedWorker | None:
        """Return a present worker; None for an unknown id."""
        ...

    def is_last_decoder(self, id: str) -> bool:
        """True if it is the only ready decode worker of its model."""
        ...

    def start_refusal(self, pool: str) -> str:
        """Return why a pool cannot start another worker; empty if it can."""
        ...

    def flip_refusal(self, id: str, pool: str) -> str:
        """Return why a worker cannot serve in another pool, its state aside; empty if it can."""
        ...

    def decodes(self, pool: str) -> bool:
        """True if a pool's workers decode."""
        ...

    def limits_refusal(self, pool: str) -> str:
        """Return why a pool's limits cannot change at runtime; empty if they can."""
        ...

    def set_limits(
        self, pool: str, max_seqs: int | None, max_batched_tokens: int | None, now: int
    ) -> None:
        """Set the limits of each worker of a pool; None keeps one."""
        ...

    def add(self, pool: str, now: int) -> str:
        """Order another worker; return its id."""
        ...

    def drain(self, id: str, now: int) -> None:
        """Let a ready worker finish its requests, then leave."""
        ...

    def remove(self, id: str, now: int) -> None:
        """Remove a worker at once; its requests move."""
        ...

    def flip(self, id: str, pool: str, now: int) -> None:
        """Drain a ready worker, then let it serve in another pool."""
        ...


def carry_out(
    action: Action, fleet: ManagedFleet, now: int, max_workers: int = 0,
    load: TenantLoad | None = None,
) -> str:  # fmt: skip
    """Carry out an action; return why not, or "". `max_workers` of 0 is no limit.

    The `load` of a tenant makes no more workers start than its share of `max_workers`.
    """
    refusal = ""
    match action:
        case AddWorkers(pool, count):
            limit, reason = max_workers, ""
            if load is not None and max_workers:
                wanted = min(fleet.size + count, max_workers)
                limit = load.max_workers(wanted, max_workers)
                reason = load.refusal(limit) if limit < wanted else ""
            refusal = add_workers(fleet, pool, count, now, limit)
            refusal += reason if refusal else ""
        case DrainWorker(worker):
            if not (refusal := drain_refusal(fleet, worker)):
                fleet.drain(worker, now)
        case RemoveWorker(worker):
            if not (refusal := removal_refusal(fleet, worker)):
                fleet.remove(worker, now)
        case FlipRole(worker, _, pool):
            if not (refusal := flip_refusal(fleet, worker, pool)):
                fleet.flip(worker, pool, now)
        case SetOperatingPoint():
            refusal = set_operating_point(fleet, action, now)
        case RebalancePool():
            pass  # advice to the operator: the router goes by what it sees itself
    return refusal


def add_workers(fleet: ManagedFleet, pool: str, count: int, now: int, max_workers: int = 0) -> str:
    """Start up to `count` workers as room allows; return why not all, or ""."""
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
    """Change a pool's limits; return why not, or ""."""
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


def drain_refusal(fleet: ManagedFleet, id: str) -> str:
    """Return why a worker cannot be drained now, or ""."""
    worker = fleet.worker(id)
    if worker is None or worker.state is not WorkerState.READY:
        return f"{id} is not ready"
    return _last_refusal(fleet, id)


def removal_refusal(fleet: ManagedFleet, id: str) -> str:
    """Return why a worker cannot be removed at once, or ""."""
    return _last_refusal(fleet, id) if fleet.worker(id) is not None else f"{id} is not there"


def flip_refusal(fleet: ManagedFleet, id: str, pool: str) -> str:
    """Return why a worker cannot be flipped now, or ""."""
    worker = fleet.worker(id)
    if worker is None or worker.state is not WorkerState.READY:
        return f"{id} is not ready"
    refusal = fleet.flip_refusal(id, pool)
    return refusal or ("" if fleet.decodes(pool) else _last_refusal(fleet, id))


def _last_refusal(fleet: ManagedFleet, id: str) -> str:
    return f"{id} is the last worker that decodes" if fleet.is_last_decoder(id) else ""
