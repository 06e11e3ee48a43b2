"""Simulated fleets that a planner changes: each with its names, windows and moves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pigou.control.planner.actuation import ManagedWorker
from pigou.sim.membership import Membership
from pigou.sim.scaling_summary import OfferedRate, ScalingMove
from pigou.sim.window_meter import WindowMeter
from pigou.sim.worker_spec import FleetWorker
from pigou.windows.planner_window import WorkerState


@dataclass(frozen=True, slots=True)
class ScaledFleet:
    """A fleet of one model that a planner changes."""

    prefix: str  # of the names of its pools and workers before the planner; "" where it is alone
    membership: Membership
    meter: WindowMeter
    arrivals: OfferedRate  # the arrival rate, by which moves are judged
    moves: list[ScalingMove] = field(default_factory=list)  # of its workers, in order

    def own_name(self, name: str) -> str | None:
        """Return a name without the prefix; None for one of another fleet."""
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def note(self, worker: str, pool: str, sign: int, now: int) -> None:
        """Note a move."""
        self.moves.append(ScalingMove(now, worker, pool, sign))


class ScaledFleets:
    """Several such fleets as one that is changed (a `ManagedFleet`)."""

    def __init__(self, fleets: Sequence[ScaledFleet]) -> None:
        """Take charge of fleets, one of each model; their prefixes tell them apart."""
        self._fleets = tuple(fleets)

    @property
    def size(self) -> int:
        """Workers in all states."""
        return sum(fleet.membership.size for fleet in self._fleets)

    @property
    def pools(self) -> Collection[str]:
        """Names of the pools, with their prefixes."""
        return [fleet.prefix + pool for fleet in self._fleets for pool in fleet.membership.pools]

    def worker(self, id: str) -> ManagedWorker | None:
        """Return a worker that is not gone; None where there is none of that id."""
        fleet, worker = self._find(id)
        if fleet is None or worker is None or worker.state is None:
            return None
        return ManagedWorker(id, fleet.prefix + worker.pool, worker.state)

    def is_last_decoder(self, id: str) -> bool:
        """Whether a worker decodes, and no other one of its model that is ready does."""
        fleet, worker = self._at(id)
        return fleet.membership.is_last_decoder(worker)

    def start_refusal(self, pool: str) -> str:
        """Return why a pool cannot grow: no host has room; empty where it can."""
        fleet, own = self._pool(pool)
        return fleet.membership.start_refusal(own)

    def flip_refusal(self, id: str, pool: str) -> str:
        """Return why a worker cannot serve in another pool; empty where it can."""
        fleet, worker = self._at(id)
        own = fleet.own_name(pool)
        if own is None or not fleet.membership.can_flip(worker.pool, own):
            return f"{id} cannot serve in pool {pool!r}"
        return ""

    def decodes(self, pool: str) -> bool:
        """Whether workers of a pool decode."""
        fleet, own = self._pool(pool)
        return fleet.membership.pools[own].role.decodes

    def limits_refusal(self, pool: str) -> str:  # noqa: ARG002
        """Return nothing: simulated engines change their limits between two steps."""
        return ""

    def set_limits(
        self, pool: str, max_seqs: int | None, max_batched_tokens: int | None, now: int
    ) -> None:
        """Let each worker of a pool, and those that join it, run no more at once."""
        fleet, own = self._pool(pool)
        fleet.membership.set_limits(own, max_seqs, max_batched_tokens, now)

    def add(self, pool: str, now: int) -> str:
        """Order one more worker of a pool; return its id."""
        fleet, own = self._pool(pool)
        worker = fleet.membership.add(own, now)
        fleet.note(worker.name, own, 1, now)
        return fleet.prefix + worker.name

    def drain(self, id: str, now: int) -> None:
        """Let a ready worker end what it has, then go."""
        fleet, worker = self._at(id)
        fleet.note(worker.name, worker.pool, -1, now)
        fleet.membership.drain(worker, now)

    def remove(self, id: str, now: int) -> None:
        """Let a worker go at once; what runs there goes elsewhere."""
        fleet, worker = self._at(id)
        if worker.state is not WorkerState.DRAINING:
            fleet.note(worker.name, worker.pool, -1, now)
        fleet.membership.remove(worker, now)

    def flip(self, id: str, pool: str, now: int) -> None:
        """Let a ready worker serve in another pool, after a drain where flips take one."""
        fleet, worker = self._at(id)
        _, own = self._pool(pool)
        fleet.note(worker.name, worker.pool, -1, now)
        fleet.note(worker.name, own, 1, now)
        fleet.membership.flip(worker, own, now)

    def _pool(self, name: str) -> tuple[ScaledFleet, str]:
        """Return the fleet of a pool, and the pool's name there."""
        for fleet in self._fleets:
            own = fleet.own_name(name)
            if own is not None and own in fleet.membership.pools:
                return fleet, own
        raise KeyError(name)

    def _find(self, name: str) -> tuple[ScaledFleet | None, FleetWorker | None]:
        """Return a worker that is not gone, and its fleet."""
        for fleet in self._fleets:
            own = fleet.own_name(name)
            worker = None if own is None else fleet.membership.worker(own)
            if worker is not None:
                return fleet, worker
        return None, None

    def _at(self, name: str) -> tuple[ScaledFleet, FleetWorker]:
        """Return a worker that must be there, and its fleet."""
        fleet, worker = self._find(name)
        if fleet is None or worker is None:
            raise KeyError(name)
        return fleet, worker
