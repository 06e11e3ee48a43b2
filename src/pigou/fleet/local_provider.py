"""The provider of local workers: processes of this machine, one pool a role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import ClassVar

from pigou.fleet.config import FleetError, LocalWorker
from pigou.fleet.local_member import LocalMember
from pigou.fleet.local_workers import WorkerTemplate
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.provider import ProvidedPool
from pigou.request import Role


class LocalProvider:
    """Starts worker processes; a process serves in any role, so a flip needs no restart.

    Further workers are made from a template. A GPU takes as many of them as it was given at the
    start, at least one.
    """

    kind: ClassVar[str] = LocalMember.kind

    def __init__(self, setup: MemberSetup, template: WorkerTemplate | None = None) -> None:
        """Begin without members; without a template none is added beside those of the start."""
        self._setup = setup
        self._template = template
        self._members: dict[str, LocalMember] = {}
        self._numbers: Counter[Role] = Counter()
        self._roles: set[Role] = set()
        self._rooms: Counter[str] = Counter()
        self._start_up_s: dict[Role, float] = {}

    def adopt(self, spec: LocalWorker) -> LocalMember:
        """Return the member of a worker that the fleet begins with."""
        self._rooms[spec.device] += 1
        return self._make(spec)

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """One pool for each role that a worker has or had."""
        return [
            ProvidedPool(name=role.value, role=role, start_up_s=self._start_up(role))
            for role in Role
            if role in self._roles
        ]

    def pool(self, role: Role) -> str:
        """Return the name of the pool of a role: the role's own."""
        return role.value

    def start_refusal(self, pool: str) -> str:
        """Return why no further worker of a role can be started now; empty where one can."""
        if pool not in list(Role):
            return f"local workers have no pool {pool!r}; they are prefill, decode or both"
        if self._template is None:
            return "this fleet starts no workers"
        if refusal := self._template.refusal():
            return refusal
        if self._device(self._template) is None:
            return f"no device is free of {', '.join(self._template.devices)}"
        return ""

    def make(self, pool: str) -> LocalMember:
        """Return a new member of a role; its pool is there from now on.

        Raises:
            FleetError: `start_refusal` says why not.
        """
        template = self._template
        device = None if template is None else self._device(template)
        if (refusal := self.start_refusal(pool)) or template is None or device is None:
            raise FleetError(refusal)
        role = Role(pool)
        return self._make(template.worker(role, self._numbers[role], device))

    def flip_refusal(self, member: FleetMember, pool: str) -> str:
        """Return why a member cannot serve in another pool; empty where it can."""
        if pool == member.pool or pool not in list(Role):
            return f"{member.id} cannot serve in pool {pool!r}"
        return ""

    def flipped(self, member: FleetMember) -> None:
        """A member is in another pool, which is there from now on."""
        self._roles.add(member.role)

    def discard(self, member: FleetMember) -> None:
        """A member is gone for good: its device is free."""
        self._start_up_s[member.role] = member.start_up_s or self._start_up(member.role) or 0.0
        self._members.pop(member.id, None)

    def _make(self, spec: LocalWorker) -> LocalMember:
        member = LocalMember(spec, self._setup)
        self._members[spec.id] = member
        self._roles.add(spec.role)
        self._numbers[spec.role] += 1
        return member

    def _device(self, template: WorkerTemplate) -> str | None:
        """Return the device with the fewest workers that has room; None for none."""
        used = Counter(member.device for member in self._members.values())
        free = [
            device
            for device in template.devices
            if device == "cpu" or used[device] < max(1, self._rooms[device])
        ]
        return min(free, key=lambda device: used[device], default=None)

    def _start_up(self, role: Role) -> float | None:
        """Return the median seconds of the last starts of its workers; None before one."""
        seconds = [
            member.start_up_s
            for member in self._members.values()
            if member.role is role and member.start_up_s is not None
        ]
        return median(seconds) if seconds else self._start_up_s.get(role) or None
