"""Membership of a simulated fleet: workers that join, drain, go and change their role."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import msgspec

from pigou.control.messages import CacheLost, WorkerDraining
from pigou.request import SECOND, EngineLimits, Role
from pigou.sim.fleet import TICK, SimulatedFleet
from pigou.sim.fleet_config import FleetConfig, StartUpConfig, WorkerGroup
from pigou.sim.timing import Slowed
from pigou.sim.virtual_clock import Clock, Event, Phase
from pigou.sim.worker_spec import FleetWorker, WorkerSpec
from pigou.windows.planner_window import WorkerState

#: Names of the states in figures.
_STATES = {
    WorkerState.STARTING: "starting", WorkerState.READY: "active",
    WorkerState.DRAINING: "draining",
}  # fmt: skip
#: Key of the looks at draining workers, after the control plane's ticks.
_DRAIN_KEY = -4
_DEFAULTS = {"count": 1, "starts": 0.0, "slow": (), "fails": ()}


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """A pool of equal workers of one role."""

    name: str  # the role, numbered if several pools share it
    role: Role
    spec: WorkerSpec  # spec of added workers, without scheduled failures
    make: WorkerGroup  # the group without its role; equal groups can exchange workers


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A worker's new state; None once gone."""

    at_ns: int
    worker: str
    pool: str
    state: WorkerState | None


@dataclass(slots=True)
class _Drain:
    since_ns: int
    then: Event = field(repr=False)


class Membership:
    """Changes a running fleet, by a live gateway's messages; leaving workers drain first."""

    def __init__(
        self, fleet: SimulatedFleet, config: FleetConfig, specs: Sequence[WorkerSpec],
        clock: Clock, seed: int = 0,
    ) -> None:  # fmt: skip
        self.pools: dict[str, WorkerPool] = {}
        self.changes: list[MembershipChange] = []
        self._fleet, self._config, self._clock = fleet, config, clock
        self._rng = Random(f"{seed} starts")
        self._drains: dict[str, _Drain] = {}
        self._looks = False
        names = self._make_pools(config, specs)
        workers = iter(fleet.workers)
        for group, name in zip(config.workers, names, strict=True):
            for _ in range(group.count):
                next(workers).pool = name

    @property
    def size(self) -> int:
        """Workers in all states."""
        return sum(worker.state is not None for worker in self._fleet.workers)

    def members(self, pool: str) -> list[FleetWorker]:
        """Return the workers of a pool, in all states."""
        return [w for w in self._fleet.workers if w.pool == pool and w.state is not None]

    def counts(self, pool: str) -> dict[str, int]:
        """Return how many workers of a pool are starting, active and draining."""
        states = [worker.state for worker in self.members(pool)]
        return {name: states.count(state) for state, name in _STATES.items()}

    def worker(self, name: str) -> FleetWorker | None:
        """Return a live worker, or None."""
        for worker in self._fleet.workers:
            if worker.name == name and worker.state is not None:
                return worker
        return None

    def can_flip(self, source: str, target: str) -> bool:
        """Whether workers of one pool can serve in another."""
        if source == target or not {source, target} <= self.pools.keys():
            return False
        return self.pools[source].make == self.pools[target].make

    def start_refusal(self, pool: str) -> str:
        """Return why no worker of a pool can be placed now, or ""."""
        placer = self._fleet.placer
        return "" if placer is None else placer.refusal(self.pools[pool].role)

    def is_last_decoder(self, worker: FleetWorker) -> bool:
        """True for the last ready decoder."""
        ready = [w for w in self._fleet.workers if w.state is WorkerState.READY]
        return [w for w in ready if w.info.role.decodes] == [worker]

    def gpu_seconds(self, now: int) -> dict[str, dict[str, float]]:
        """Return the GPU-seconds so far, by role: starting, active and draining."""
        total: Counter[tuple[Role, WorkerState]] = Counter()
        for worker in self._fleet.workers:
            total.update(worker.gpu_ns_until(now))
        roles = dict.fromkeys(role for role, _ in sorted(total))
        return {
            role.value: {name: total[role, state] / SECOND for state, name in _STATES.items()}
            for role in roles
        }

    # --- changes ------------------------------------------------------------------------------

    def add(self, pool: str, now: int) -> FleetWorker:
        """Order one more worker of a pool."""
        worker = self._fleet.add_worker(self.pools[pool].spec)
        worker.pool = pool
        self._note(worker, now)
        self._order_start(worker, now)
        return worker

    def drain(self, worker: FleetWorker, now: int) -> None:
        """Drain a ready worker, then remove it."""
        self._drain(worker, lambda at: self.remove(worker, at), now)

    def remove(self, worker: FleetWorker, now: int) -> None:
        """Remove a worker at once; its requests migrate."""
        self._drains.pop(worker.name, None)
        self._fleet.remove(worker, now)
        self._note(worker, now)

    def set_limits(
        self, pool: str, max_seqs: int | None, max_batched_tokens: int | None, now: int
    ) -> None:
        """Set running limits of a pool's present and future workers; None keeps one."""
        limits = EngineLimits(max_seqs, max_batched_tokens)
        planned = self._fleet.limits.get(pool, EngineLimits())
        self._fleet.limits[pool] = limits.over(planned)
        self._fleet.limited = True
        for worker in self.members(pool):
            self._fleet.limit(worker, now)

    def flip(self, worker: FleetWorker, pool: str, now: int) -> None:
        """Flip a ready worker to another pool, after a drain if flips need one."""
        if self._config.flip.drains:
            self._drain(worker, lambda at: self._change_role(worker, pool, at), now)
        else:
            self._change_role(worker, pool, now)

    def _make_pools(self, config: FleetConfig, specs: Sequence[WorkerSpec]) -> list[str]:
        names = []
        for group, spec in zip(config.workers, specs, strict=True):
            steady = msgspec.structs.replace(group, **_DEFAULTS)
            make = msgspec.structs.replace(steady, role=Role.BOTH)
            equal = [p for p in self.pools.values() if (p.role, p.make) == (group.role, make)]
            if not equal:
                number = sum(pool.role is group.role for pool in self.pools.values())
                name = f"{group.role.value}.{number + 1}" if number else group.role.value
                pool = WorkerPool(name, group.role, replace(spec, group=steady), make)
                equal = [self.pools.setdefault(name, pool)]
            names.append(equal[0].name)
        return names

    def _order_start(self, worker: FleetWorker, now: int) -> None:
        config = self._config.start_up
        took_s = _start_seconds(config, self._rng)
        fails = self._rng.random() < config.failures

        def ended(at: int) -> None:
            if worker.state is not WorkerState.STARTING:
                return  # it was removed meanwhile
            if fails:
                worker.failed_starts += 1
                self._order_start(worker, at)
                return
            worker.failed_starts = 0
            self._fleet.start(worker, at)
            self._note(worker, at)
            self._warm_up(worker, at)
            self._expect_loss(worker, at)

        self._at(now + round(took_s * SECOND), worker, ended)

    def _warm_up(self, worker: FleetWorker, now: int) -> None:
        config, sim = self._config.start_up, worker.sim
        if sim is None or not config.warm_up_s or config.warm_up_factor == 1.0:
            return
        sim.retime(Slowed(worker.spec.timing, config.warm_up_factor), now)
        warm_ns = now + round(config.warm_up_s * SECOND)
        self._at(warm_ns, worker, lambda at: sim.retime(worker.spec.timing, at))

    def _expect_loss(self, worker: FleetWorker, now: int) -> None:
        rate = self._config.start_up.losses_per_hour
        if not rate:
            return

        def lose(at: int) -> None:
            if worker.state is not None:
                self._fleet.lose(worker, at)
                self._note(worker, at)

        self._at(now + round(self._rng.expovariate(rate / 3600) * SECOND), worker, lose)

    def _drain(self, worker: FleetWorker, then: Event, now: int) -> None:
        worker.enter(WorkerState.DRAINING, now)
        self._note(worker, now)
        self._drains[worker.name] = _Drain(now, then)
        self._fleet.dispatcher.observe(WorkerDraining(worker.name), now)
        if not self._looks:
            self._looks = True
            self._clock.at(now + TICK, Phase.TICK, _DRAIN_KEY, self._look)

    def _look(self, now: int) -> None:
        for name, drain in list(self._drains.items()):
            worker = self.worker(name)
            if worker is None or worker.state is not WorkerState.DRAINING:  # it died
                del self._drains[name]
                if worker is not None and worker.sim is None:
                    self.remove(worker, now)
            elif self._is_drained(worker, now) or self._is_overdue(drain, now):
                del self._drains[name]
                drain.then(now)
        self._looks = bool(self._drains)
        if self._looks:
            self._clock.at(now + TICK, Phase.TICK, _DRAIN_KEY, self._look)

    def _is_drained(self, worker: FleetWorker, now: int) -> bool:
        """Whether nothing weighs on a worker, runs there, or is held there for others."""
        sim = worker.sim
        drained = (plane.state.is_drained(worker.name) for plane in self._fleet.planes)
        if sim is None or not all(drained):
            return False
        running, waiting, _ = sim.load(now)
        return not (running or waiting or sim.core.held or worker.held_ids)

    def _is_overdue(self, drain: _Drain, now: int) -> bool:
        limit_s = self._config.drain_s
        return bool(limit_s) and now - drain.since_ns >= limit_s * SECOND

    def _change_role(self, worker: FleetWorker, pool: str, now: int) -> None:
        flip, role = self._config.flip, self.pools[pool].role
        if not flip.keeps_cache and worker.sim is not None:
            core = worker.sim.core
            worker.sim.call_core(lambda _: core.clear_cache(), now)
            self._fleet.dispatcher.observe(CacheLost(worker.name), now)
        if flip.seconds and not flip.drains:  # it gets nothing while it changes
            self._fleet.dispatcher.observe(WorkerDraining(worker.name), now)
        worker.enter(WorkerState.STARTING, now)
        if self._fleet.placer is not None:
            self._fleet.placer.flip(worker.info.role, worker.info.location, role)
        worker.info = replace(worker.info, role=role)
        worker.pool = pool
        worker.epoch += 1

        def serve(at: int) -> None:
            if worker.state is WorkerState.STARTING and worker.sim is not None:
                if self._config.drain_s:
                    self._migrate(worker, at)
                self._fleet.readmit(worker, at)
                self._note(worker, at)
                self._fleet.limit(worker, at)

        if flip.seconds:
            self._note(worker, now)
            self._at(now + round(flip.seconds * SECOND), worker, serve)
        else:
            serve(now)

    def _migrate(self, worker: FleetWorker, now: int) -> None:
        for leg in self._fleet.dispatcher.legs_on(worker.name):
            self._fleet.dispatcher.broken(leg, now)

    def _note(self, worker: FleetWorker, now: int) -> None:
        self.changes.append(MembershipChange(now, worker.name, worker.pool, worker.state))

    def _at(self, time: int, worker: FleetWorker, event: Callable[[int], None]) -> None:
        self._clock.at(time, Phase.FAULT, worker.number, event)


def _start_seconds(config: StartUpConfig, rng: Random) -> float:
    """Return the seconds of one start: lognormal with the mean and variation of `config`."""
    if not config.cv or not config.seconds:
        return config.seconds
    variance = math.log1p(config.cv**2)
    return rng.lognormvariate(math.log(config.seconds) - variance / 2, math.sqrt(variance))
