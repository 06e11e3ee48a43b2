"""A live fleet as planners change it: workers join, drain, change their role and leave."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from pigou.control.planner.actuation import (
    ManagedWorker,
    drain_refusal,
    flip_refusal,
    removal_refusal,
)
from pigou.fleet.config import FleetError
from pigou.fleet.member import Member, check_fit
from pigou.fleet.provider import ProvidedPool, Provider
from pigou.fleet.supervisor import Supervisor
from pigou.gateway.fleet_status import ChangeRefused, UnknownWorker, WorkerRow
from pigou.request import EngineLimits, Role
from pigou.windows.planner_window import WorkerState

_log = logging.getLogger("pigou.fleet")


class LiveFleet:
    """A live fleet as planners change it (a `ManagedFleet`); calls return at once."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._limits: dict[str, EngineLimits] = {}  # by pool

    @property
    def members(self) -> Sequence[Member]:
        """Live members: id, role, pool, state, epoch and more."""
        return self.supervisor.members

    @property
    def size(self) -> int:
        """Workers in all states."""
        return len(self.members)

    @property
    def room(self) -> int:
        """Default worker limit of a planner; attached servers count as they run."""
        running = Counter(member.source.kind for member in self.members)
        providers = self.supervisor.providers
        return sum(running[own.kind] if own.room is None else own.room for own in providers)

    @property
    def provided(self) -> dict[str, ProvidedPool]:
        """The pools by name."""
        return {
            pool.name: pool for provider in self.supervisor.providers for pool in provider.pools
        }

    @property
    def pools(self) -> Sequence[str]:
        """Names of the pools, those without workers too."""
        return tuple(self.provided)

    def worker(self, id: str) -> ManagedWorker | None:
        """Return a live worker, or None."""
        member = self.supervisor.member(id)
        return None if member is None else ManagedWorker(id, member.pool, member.state)

    def is_last_decoder(self, id: str) -> bool:
        """True if a worker is its model's only ready decoder."""
        own = self.supervisor.member(id)
        ready = (member for member in self.members if member.state is WorkerState.READY)
        return own is not None and [
            member.id for member in ready if member.role.decodes and member.model == own.model
        ] == [id]

    def start_refusal(self, pool: str) -> str:
        """Return why no further worker of a pool can be started now; empty where one can."""
        return self._provider(pool).start_refusal(pool)

    def limits_refusal(self, pool: str) -> str:  # noqa: ARG002
        """Return nothing: workers change their limits, or are sent fewer streams."""
        return ""

    def set_limits(
        self,
        pool: str,
        max_seqs: int | None,
        max_batched_tokens: int | None,
        now: int,  # noqa: ARG002
    ) -> None:
        """Set running limits of a pool's workers, later ones too; None keeps one."""
        limits = EngineLimits(max_seqs, max_batched_tokens)
        self._limits[pool] = limits.over(self._limits.get(pool, EngineLimits()))
        self.keep_limits()

    def keep_limits(self) -> None:
        """Set the limits of their pools at workers that have joined since."""
        for member in self.members if self._limits else ():
            if (limits := self._limits.get(member.pool)) is not None:
                member.plane_driver.limits.plan(member.id, limits)

    def flip_refusal(self, id: str, pool: str) -> str:
        """Return why a worker cannot serve in another pool; empty where it can."""
        member = self._member(id)
        refusal = self.supervisor.provider(member).flip_refusal(member, pool)
        if refusal:
            return refusal
        try:
            ups, role = member.plane_driver.upstreams.values(), _role(pool)
            check_fit([(role if up.worker.id == id else up.worker.role, up.engine) for up in ups])
        except FleetError as error:
            return str(error)
        return ""

    def decodes(self, pool: str) -> bool:
        """Whether workers of a pool decode."""
        return _role(pool).decodes

    def add(self, pool: str, now: int) -> str:  # noqa: ARG002 (the clock is the wall's)
        """Start one more worker of a pool; return its id."""
        member = self._provider(pool).make(pool)
        self.supervisor.add(member)
        return member.id

    def drain(self, id: str, now: int) -> None:  # noqa: ARG002
        """Drain a ready worker, then remove it."""
        self.supervisor.drain(self._member(id))

    def remove(self, id: str, now: int) -> None:  # noqa: ARG002
        """Remove a worker at once; its requests migrate."""
        self.supervisor.remove(self._member(id))

    def flip(self, id: str, pool: str, now: int) -> None:  # noqa: ARG002
        """Let a ready worker drain, then serve in another pool."""
        self.supervisor.flip(self._member(id), _role(pool), pool)

    def _member(self, id: str) -> Member:
        member = self.supervisor.member(id)
        if member is None:
            raise KeyError(id)
        return member

    def _provider(self, pool: str) -> Provider:
        for provider in self.supervisor.providers:
            if any(pool == provided.name for provided in provider.pools):
                return provider
        return self.supervisor.local


def _role(pool: str) -> Role:
    return Role(pool.partition(".")[0])


class OperatorChanges:
    """Adds, drains, flips and removes workers; repeating a request changes nothing."""

    def __init__(self, live_fleet: LiveFleet) -> None:
        self._fleet = live_fleet
        self._supervisor = live_fleet.supervisor

    def start(self, role: Role, count: int, model: str = "") -> tuple[list[WorkerRow], str]:
        """Start local workers; return their rows, and why not all. Raises ChangeRefused."""
        rows: list[WorkerRow] = []
        pool = self._supervisor.local.pool(role, model)
        for _ in range(count):
            if refusal := self._fleet.start_refusal(pool):
                if not rows:
                    raise ChangeRefused(f"no worker is started: {refusal}")
                return rows, f"{count - len(rows)} workers are not started: {refusal}"
            rows.append(self._member(self._fleet.add(pool, time.monotonic_ns())).row())
        _log.info("an operator adds %s", ", ".join(row.id for row in rows))
        return rows, ""

    def attach(self, text: str) -> WorkerRow:
        """Use a server as `AttachedWorker.parse` reads it. Raises ConfigError, ChangeRefused."""
        try:
            member = self._supervisor.attached.attach(text)
        except FleetError as error:
            raise ChangeRefused(str(error)) from None
        self._supervisor.add(member)
        _log.info("an operator attaches %s", member.id)
        return member.row()

    def drain(self, id: str, limit_s: float | None) -> WorkerRow:
        """Drain and remove a worker; raises UnknownWorker or ChangeRefused."""
        member = self._member(id)
        if member.state is WorkerState.READY:
            _check(drain_refusal(self._fleet, id))
        _log.info("an operator drains %s", id)
        self._supervisor.drain(member, limit_s)
        return member.row()

    def flip(self, id: str, role: Role, limit_s: float | None) -> WorkerRow:
        """Let a worker drain, then serve in another role. Raises as `drain`."""
        member = self._member(id)
        if role is (member.next_role or member.role) and not member.leaving:
            self._supervisor.limit_drain(member, limit_s)
            return member.row()
        pool = self._supervisor.provider(member).pool(role, member.model)
        _check(flip_refusal(self._fleet, id, pool))
        _log.info("an operator flips %s to %s", id, role.value)
        self._supervisor.flip(member, role, pool, limit_s)
        return member.row()

    def restart(self, id: str, limit_s: float | None) -> WorkerRow:
        """Let a local worker drain, then start again. Raises as `drain`."""
        member = self._member(id)
        if not member.source.starts:
            raise ChangeRefused(f"{id} is not started here; start it again where it runs")
        if member.next_role is member.role:
            self._supervisor.limit_drain(member, limit_s)
            return member.row()
        _check(drain_refusal(self._fleet, id))
        _log.info("an operator restarts %s", id)
        self._supervisor.restart(member, limit_s)
        return member.row()

    def remove(self, id: str) -> WorkerRow:
        """Remove a worker at once; its streams migrate. Raises as `drain`."""
        member = self._member(id)
        _check(removal_refusal(self._fleet, id))
        _log.info("an operator removes %s", id)
        self._supervisor.remove(member)
        return member.row()

    def _member(self, id: str) -> Member:
        member = self._supervisor.member(id)
        if member is None:
            raise UnknownWorker(id)
        return member


def _check(refusal: str) -> None:
    if refusal:
        raise ChangeRefused(refusal)
