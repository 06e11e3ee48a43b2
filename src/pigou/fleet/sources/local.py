"""Local workers: their arguments, members and provider."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import ClassVar, TypeAlias

import msgspec

from pigou.background import cancel
from pigou.config import ConfigError
from pigou.fleet.config import (
    FleetError,
    LocalWorker,
    ModelPoolConfig,
    RayConfig,
    WorkersConfig,
    sleeps,
    threads_each,
    threads_of,
)  # fmt: skip
from pigou.fleet.member import Member, MemberSetup, pool_name
from pigou.fleet.probe import probe
from pigou.fleet.provider import ProvidedPool, Provider
from pigou.fleet.worker_process import MemberProcess, WorkerProcess
from pigou.kv.tier_config import uri_below
from pigou.registry import require
from pigou.request import Role

#: Simulated (sleeping) workers per core.
_SLEEPERS = 4
#: Seconds that the process of a worker that was let go is given to end.
_LEAVE_S = 2.0
#: The same for one of a fleet that ends: its requests have ended or were cut off.
_END_S = 8.0
#: Starts the process of a member with these arguments of `pigou worker`.
StartProcess: TypeAlias = Callable[[Member, Sequence[str]], Awaitable[MemberProcess]]


class WorkerTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """What further workers of a local fleet are made from."""

    # `pigou worker` arguments, the same for all; each worker gets a part of a tier's place.
    arguments: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    model: str = ""  # model they serve; empty in a fleet of one model
    prefill_queue: str = ""  # URL of the queue that prefill workers pull from
    prefill_tensor_parallel_size: int = 0  # ranks of prefill workers; 0 for the same as others
    ray: RayConfig | None = None  # Ray cluster to run on; None for this machine

    @classmethod
    def of(
        cls,
        config: WorkersConfig,
        arguments: Sequence[str] = (),
        pool: ModelPoolConfig | None = None,
    ) -> WorkerTemplate:
        """Return the worker template of a fleet or model."""
        # On the other machines of a cluster one thread, unless more are asked for.
        threads = threads_each(sum(config.counts)) if config.ray is None else 1
        device = config.device if pool is None else pool.device or config.device
        return cls(
            arguments=(*config.arguments(threads, pool), *arguments),
            devices=tuple(device.split(",")),
            model="" if pool is None else pool.name,
            prefill_queue=config.prefill_queue,
            prefill_tensor_parallel_size=config.prefill_tensor_parallel_size,
            ray=config.ray,
        )

    @classmethod
    def of_models(
        cls, config: WorkersConfig, arguments: Sequence[str] = ()
    ) -> list[WorkerTemplate]:
        """Return a worker template for each locally started model."""
        if not config.model_pool:
            return [cls.of(config, arguments)]
        return [cls.of(config, arguments, pool) for pool in config.model_pool if pool.model]

    def worker(self, role: Role, number: int, device: str) -> LocalWorker:
        """Return a worker, named by its role and number within the role."""
        name = f"{role.value}-{number}"
        own = _apart(self.arguments, name)
        if self.prefill_queue and role is Role.PREFILL:
            own += ["--prefill-queue", self.prefill_queue]
        if (size := self.prefill_tensor_parallel_size) and role is Role.PREFILL:
            own += ["--tensor-parallel-size", str(size)]
        arguments = ("--device", device, *own)
        return LocalWorker(id=name, role=role, arguments=arguments, device=device, model=self.model)

    def refusal(self) -> str:
        """Return why no worker of this machine can run; empty where one can."""
        if sleeps(self.arguments) or self.ray is not None:
            return ""
        try:
            require("worker", "a worker that computes")
        except ConfigError as error:
            return str(error)
        return ""


def start_workers(
    templates: Sequence[WorkerTemplate], counts: Mapping[str, tuple[int, int, int]]
) -> list[LocalWorker]:
    """Return the initial local workers; counts are by model, (P, D, both)."""
    numbers, workers = Counter[Role](), list[LocalWorker]()
    for template in templates:
        prefill, decode, both = counts[template.model]
        for role in [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.BOTH] * both:
            device = template.devices[len(workers) % len(template.devices)]
            workers.append(template.worker(role, numbers[role], device))
            numbers[role] += 1
    return workers


def _apart(arguments: Sequence[str], name: str) -> list[str]:
    """Return the arguments, with separate tier paths for `name`."""
    own_arguments: list[str] = []
    for argument in arguments:
        option, equals, tier = argument.partition("=")
        if equals and option == "--tier":
            own_arguments.append(f"{option}={uri_below(tier, name)}")
        elif own_arguments and own_arguments[-1] == "--tier":
            own_arguments.append(uri_below(argument, name))
        else:
            own_arguments.append(argument)
    return own_arguments


def machine_room(templates: Sequence[WorkerTemplate]) -> int:
    """Return how many workers this machine has cores and GPUs for; sleepers share a core."""
    cores = len(os.sched_getaffinity(0))
    if templates and all(sleeps(template.arguments) for template in templates):
        return _SLEEPERS * cores
    devices = {device for template in templates for device in template.devices}
    on_cpu = [template for template in templates if "cpu" in template.devices]
    threads = max((threads_of(template.arguments) for template in on_cpu), default=0)
    return len(devices - {"cpu"}) + (cores // threads if threads else 0)


async def _start_here(member: Member, arguments: Sequence[str]) -> MemberProcess:
    forks = member.setup.forks
    if forks is not None and not forks.takes(arguments):
        forks = None
    return await WorkerProcess.start(member.id, arguments, member.setup.secret, forks=forks)


class ProcessSource:
    """Keeps one worker process going: starts it, and starts it again when it ends."""

    starts = True

    def __init__(
        self, spec: LocalWorker, kind: str = "local", start: StartProcess = _start_here
    ) -> None:
        self.kind = kind
        self._arguments, self._start = spec.arguments, start
        self._again = False

    async def live(self, member: Member) -> str:
        """Run one process from start to end; return why it ended."""
        row = member.row()
        if self._again:
            row.restarts += 1
            row.state = "starting"
        self._again = True
        member.report("starting its process")
        process = await self._start(member, ["--role", member.role.value, *self._arguments])
        row.pid = process.pid
        config, drain = member.setup.config, 0.0
        try:
            line = await process.ready(config.start, member.report)
            return await self._until_down(member, process, str(line["url"]))
        except asyncio.CancelledError:
            # The fleet ends, or the worker is let go: it has done nothing wrong.
            drain = min(config.drain, _LEAVE_S if member.leaving else _END_S)
            member.say("stopped", "")
            raise
        finally:
            await process.stop(drain)

    async def _until_down(self, member: Member, process: MemberProcess, url: str) -> str:
        key = "" if member.setup.secret is None else member.setup.secret.token
        probed = await probe(url, key)
        serving = asyncio.create_task(member.serve(url, probed, key, probed.sources, process))
        exiting = asyncio.create_task(process.exited())
        try:
            done, _ = await asyncio.wait((serving, exiting), return_when=asyncio.FIRST_COMPLETED)
            return exiting.result() if exiting in done else serving.result()
        finally:
            await cancel(serving, exiting)


class LocalProvider(Provider):
    """Starts worker processes in any role, from model templates, on the GPUs with room."""

    kind: ClassVar[str] = "local"

    def __init__(self, setup: MemberSetup, templates: Sequence[WorkerTemplate] = ()) -> None:
        self._setup = setup
        self._templates = {template.model: template for template in templates}
        self._members: dict[str, tuple[Member, str]] = {}  # members with their devices
        self._numbers: Counter[Role] = Counter()
        self._pools: set[tuple[Role, str]] = set()
        self._rooms: Counter[str] = Counter()
        self._start_up_s: dict[str, float] = {}

    def adopt(self, spec: LocalWorker) -> Member:
        """Return the member of an initial worker."""
        self._rooms[spec.device] += 1
        return self._make(spec)

    @property
    def room(self) -> int | None:
        """Workers by cores, or the initial ones if more."""
        return max(machine_room(list(self._templates.values())), self._rooms.total())

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """Pools by role and model, past ones included."""
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
        return pool_name(role, model)

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

    def make(self, pool: str) -> Member:
        """Return a new member of a role; its pool is there from now on. Raises FleetError."""
        role, model = _parts(pool)
        template = self._templates.get(model)
        device = None if template is None else self._device(template)
        refusal = self.start_refusal(pool)
        if refusal or template is None or device is None or role is None:
            raise FleetError(refusal)
        return self._make(template.worker(role, self._numbers[role], device))

    def flipped(self, member: Member) -> None:
        """Note a member's new pool."""
        self._pools.add((member.role, member.model))

    def discard(self, member: Member) -> None:
        """A member is gone for good: its device is free."""
        self._start_up_s[member.pool] = member.start_up_s or self._start_up(member.pool) or 0.0
        self._members.pop(member.id, None)

    def _make(self, spec: LocalWorker) -> Member:
        member = Member(spec.id, spec.role, self._setup, self._source(spec), spec.model)
        self._members[spec.id] = member, spec.device
        self._pools.add((spec.role, spec.model))
        self._numbers[spec.role] += 1
        return member

    def _source(self, spec: LocalWorker) -> ProcessSource:
        return ProcessSource(spec)

    def device(self, member: Member) -> str:
        """Return a member's device: cpu, cuda or cuda:N."""
        return self._members[member.id][1]

    def _device(self, template: WorkerTemplate) -> str | None:
        used = Counter(device for _, device in self._members.values())
        free = [
            device
            for device in template.devices
            if device == "cpu" or used[device] < max(1, self._rooms[device])
        ]
        return min(free, key=lambda device: used[device], default=None)

    def _start_up(self, pool: str) -> float | None:
        """Return a pool's median start-up seconds, or None."""
        seconds = [
            member.start_up_s
            for member, _ in self._members.values()
            if member.pool == pool and member.start_up_s is not None
        ]
        return median(seconds) if seconds else self._start_up_s.get(pool) or None


def _parts(pool: str) -> tuple[Role | None, str]:
    role, _, model = pool.partition(".")
    return (Role(role) if role in list(Role) else None), model
