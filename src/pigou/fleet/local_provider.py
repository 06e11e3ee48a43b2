"""The provider of local workers: processes of this machine, one pool a role and model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import ClassVar

from pigou.fleet.config import FleetError, LocalWorker
from pigou.fleet.local_member import LocalMember
from pigou.fleet.local_workers import WorkerTemplate, machine_room
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.provider import ProvidedPool
from pigou.request import Role


class LocalProvider:
    """Starts worker processes; a process serves in any role, so a flip needs no restart.

    Further workers are made from the template of their model. A GPU takes as many of them as it
    was given at the start, at least one, whatever their model: so models share the GPUs.
    """

    kind: ClassVar[str] = LocalMember.kind

    def __init__(self, setup: MemberSetup, templates: Sequence[WorkerTemplate] = ()) -> None:
        """Begin without members; without a template none is added beside those of the start.

        Args:
            setup: what members share.
        """
        self._setup = setup
        self._templates = {template.model: template for template in templates}
        self._members: dict[str, LocalMember] = {}
        self._numbers: Counter[Role] = Counter()
        self._pools: set[tuple[Role, str]] = set()
        self._rooms: Counter[str] = Counter()
        self._start_up_s: dict[str, float] = {}

    def adopt(self, spec: LocalWorker) -> LocalMember:
        """Return the member of a worker that the fleet begins with."""
        self._rooms[spec.device] += 1
        return self._make(spec)

    @property
    def room(self) -> int | None:
        """Workers that this machine has cores for, or those that the fleet began with."""
        return max(machine_room(list(self._templates.values())), self._rooms.total())

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """One pool for each role, and model, that a worker has or had."""
        models = dict.fromkeys((*self._templates, *sorted(model for _, model in self._pools)))
        return [
            ProvidedPool(name=name, role=role, start_up_s=self._start_up(name), model=model)
            for model in models
            for role in Role
            for name in [self.pool(role, model)]
            if (role, model) in self._pools
        ]

    def pool(self, role: Role, model: str = "") -> str:
        """Return the name of the pool of a role and model: `decode`, or `decode.MODEL`."""
        return f"{role.value}.{model}" if model else role.value

    def start_refusal(self, pool: str) -> str:
        """Return why no further worker of a role can be started now; empty where one can."""
        role, model = _parts(pool)
        if role is None:
            return f"local workers have no pool {pool!r}; they are prefill, decode or both"
        if not self._templates:
            return "this fleet starts no workers"
        template = self._templates.get(model)
        if template is None:
            known = ", ".join(self._templates) or "none"
            return f"no worker of model {model!r} is started here; models are: {known}"
        if refusal := template.refusal():
            return refusal
        if self._device(template) is None:
            return f"no device is free of {', '.join(template.devices)}"
        return ""

    def make(self, pool: str) -> LocalMember:
        """Return a new member of a role; its pool is there from now on.

        Raises:
            FleetError: `start_refusal` says why not.
        """
        role, model = _parts(pool)
        template = self._templates.get(model)
        device = None if template is None else self._device(template)
        refusal = self.start_refusal(pool)
        if refusal or template is None or device is None or role is None:
            raise FleetError(refusal)
        return self._make(template.worker(role, self._numbers[role], device))

    def flip_refusal(self, member: FleetMember, pool: str) -> str:
        """Return why a member cannot serve in another pool; empty where it can."""
        if pool == member.pool or pool not in [self.pool(role, member.model) for role in Role]:
            return f"{member.id} cannot serve in pool {pool!r}"
        return ""

    def flipped(self, member: FleetMember) -> None:
        """A member is in another pool, which is there from now on."""
        self._pools.add((member.role, member.model))

    def discard(self, member: FleetMember) -> None:
        """A member is gone for good: its device is free."""
        self._start_up_s[member.pool] = member.start_up_s or self._start_up(member.pool) or 0.0
        self._members.pop(member.id, None)

    async def close(self) -> None:
        """Give back what the fleet has beyond its members: nothing."""

    def _make(self, spec: LocalWorker) -> LocalMember:
        member = self._member(spec)
        member.pool = self.pool(spec.role, spec.model)
        self._members[spec.id] = member
        self._pools.add((spec.role, spec.model))
        self._numbers[spec.role] += 1
        return member

    def _member(self, spec: LocalWorker) -> LocalMember:
        return LocalMember(spec, self._setup)

    def _device(self, template: WorkerTemplate) -> str | None:
        """Return the device with the fewest workers that has room; None for none."""
        used = Counter(member.device for member in self._members.values())
        free = [
            device
            for device in template.devices
            if device == "cpu" or used[device] < max(1, self._rooms[device])
        ]
        return min(free, key=lambda device: used[device], default=None)

    def _start_up(self, pool: str) -> float | None:
        """Return the median seconds of the last starts of its workers; None before one."""
        seconds = [
            member.start_up_s
            for member in self._members.values()
            if member.pool == pool and member.start_up_s is not None
        ]
        return median(seconds) if seconds else self._start_up_s.get(pool) or None


def _parts(pool: str) -> tuple[Role | None, str]:
    """Return role and model of a pool, by its name; None for what is no role."""
    role, _, model = pool.partition(".")
    return (Role(role) if role in list(Role) else None), model
