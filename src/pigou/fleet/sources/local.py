"""Local workers: what they are told, their members and their provider."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

import msgspec

from pigou.config import ConfigError
from pigou.fleet.config import FleetError, LocalWorker, ModelPoolConfig, RayConfig, WorkersConfig
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.probe import ProbeFailed, probe
from pigou.fleet.provider import ProvidedPool
from pigou.fleet.worker_process import MemberProcess, WorkerProcess
from pigou.imports import require
from pigou.kv.tier_config import uri_below
from pigou.request import Role


class WorkerTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """What further workers of a local fleet are made from."""

    # of `pigou worker`, the same for all; but each gets a part of a tier's place, by its name.
    arguments: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    model: str = ""  # that they serve, of several; empty where there is one
    prefill_queue: str = ""  # that those for prefill pull from; empty for none
    ray: RayConfig | None = None  # the Ray cluster that they run on; None for this machine

    @classmethod
    def of(
        cls,
        config: WorkersConfig,
        arguments: Sequence[str] = (),
        pool: ModelPoolConfig | None = None,
    ) -> WorkerTemplate:
        """Return the template of a fleet, or of one of its models.

        Args:
            arguments: further ones for all workers.
        """
        device = config.device if pool is None else pool.device or config.device
        return cls(
            arguments=(*config.arguments(_threads(config), pool), *arguments),
            devices=tuple(device.split(",")),
            model="" if pool is None else pool.name,
            prefill_queue=config.prefill_queue,
            ray=config.ray,
        )

    @classmethod
    def of_models(
        cls, config: WorkersConfig, arguments: Sequence[str] = ()
    ) -> list[WorkerTemplate]:
        """Return the templates of a fleet, one for each model that is started here."""
        if not config.model_pool:
            return [cls.of(config, arguments)]
        return [cls.of(config, arguments, pool) for pool in config.model_pool if pool.model]

    def worker(self, role: Role, number: int, device: str) -> LocalWorker:
        """Return a worker, named by its role and number within the role."""
        name = f"{role.value}-{number}"
        own = _apart(self.arguments, name)
        if self.prefill_queue and role is Role.PREFILL:
            own += ["--prefill-queue", self.prefill_queue]
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


def local_workers(
    prefill: int, decode: int, both: int, arguments: Iterable[str], devices: Iterable[str]
) -> list[LocalWorker]:
    """Return the workers of a local fleet, named by role and number.

    Args:
        arguments, devices: as `WorkerTemplate` has them.
    """
    template = WorkerTemplate(arguments=tuple(arguments), devices=tuple(devices))
    return start_workers([template], {"": (prefill, decode, both)})


def start_workers(
    templates: Sequence[WorkerTemplate], counts: Mapping[str, tuple[int, int, int]]
) -> list[LocalWorker]:
    """Return the local workers that a fleet begins with; no two have one id.

    Args:
        counts: workers for prefill, for decode and for both, by model.
    """
    numbers, workers = Counter[Role](), list[LocalWorker]()
    for template in templates:
        prefill, decode, both = counts[template.model]
        for role in [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.BOTH] * both:
            device = template.devices[len(workers) % len(template.devices)]
            workers.append(template.worker(role, numbers[role], device))
            numbers[role] += 1
    return workers


def sleeps(arguments: Sequence[str]) -> bool:
    """Whether workers are told to sleep in place of computing."""
    return any(text.startswith(("--timing", "--executor=sleep")) for text in arguments) or (
        ("--executor", "sleep") in pairwise(arguments)
    )


def _apart(arguments: Sequence[str], name: str) -> list[str]:
    """Return the arguments with a place of its own for each tier of the worker `name`."""
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


def threads_each(workers: int) -> int:
    """Return compute threads for each of so many workers, so that together they fill the cores."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


#: Workers for each core that sleep in place of computing.
_SLEEPERS = 4


def machine_room(templates: Sequence[WorkerTemplate]) -> int:
    """Return how many workers this machine has cores and GPUs for.

    Each takes a GPU, or the cores of its threads; four that sleep in place of computing share one.
    """
    cores = len(os.sched_getaffinity(0))
    if templates and all(sleeps(template.arguments) for template in templates):
        return _SLEEPERS * cores
    devices = {device for template in templates for device in template.devices}
    on_cpu = [template for template in templates if "cpu" in template.devices]
    threads = max((threads_of(template.arguments) for template in on_cpu), default=0)
    return len(devices - {"cpu"}) + (cores // threads if threads else 0)


def threads_of(arguments: Sequence[str]) -> int:
    """Return the compute threads that a worker is told to use; 1 where it is told nothing."""
    given = [value for name, value in pairwise(arguments) if name == "--threads"]
    given += [text.partition("=")[2] for text in arguments if text.startswith("--threads=")]
    return max(int(given[-1]), 1) if given and given[-1].isdecimal() else 1


def _threads(config: WorkersConfig) -> int:
    """Return compute threads of each worker; on other machines one, unless more are asked for."""
    return threads_each(sum(config.counts)) if config.ray is None else 1


#: Seconds that the process of a worker that was let go is given to end.
_LEAVE_S = 2.0
#: The same for one of a fleet that ends: its requests have ended or were cut off.
_END_S = 8.0


class LocalMember(FleetMember):
    """Keeps one worker process going: starts it, and starts it again when it ends."""

    kind: ClassVar[str] = "local"

    def __init__(self, spec: LocalWorker, setup: MemberSetup) -> None:
        super().__init__(spec.id, spec.role, setup, spec.model)
        self._spec = spec

    @property
    def device(self) -> str:
        """What it computes on: cpu, cuda or cuda:N."""
        return self._spec.device

    async def run(self) -> None:
        """Start the process again and again until cancelled, or until it ends and is leaving."""
        while True:
            self._begin_start()
            try:
                why = await self._live()
            except (FleetError, ProbeFailed, OSError) as error:
                why = str(error)
                if self._never_up(why):
                    return
            except Exception as error:
                self.plane_driver.background.failed(self.id, error)
                why = f"{type(error).__name__}: {error}"
                if self._never_up(why):
                    return
            if self.leaving:
                return
            wait_s = self._ended(why, "backoff")
            self._row.pid = 0
            await asyncio.sleep(wait_s)
            self._row.restarts += 1
            self._row.state = "starting"

    async def _live(self) -> str:
        """Run one process from start to end; return why it ended."""
        self._report("starting its process")
        process = await self._start_process(["--role", self.role.value, *self._spec.arguments])
        self._row.pid = process.pid
        drain = 0.0
        try:
            line = await process.ready(self._config.start, self._report)
            return await self._until_down(process, line)
        except asyncio.CancelledError:
            # The fleet ends, or the worker is let go: it has done nothing wrong.
            drain = min(self._config.drain, _LEAVE_S if self.leaving else _END_S)
            self._say("stopped", "")
            raise
        finally:
            await process.stop(drain)

    async def _start_process(self, arguments: Sequence[str]) -> MemberProcess:
        """Start a process with these arguments of `pigou worker`."""
        return await WorkerProcess.start(self.id, arguments, self._secret)

    async def _until_down(self, process: MemberProcess, line: dict[str, Any]) -> str:
        url = str(line["url"])
        key = "" if self._secret is None else self._secret.token
        probed = await probe(url, key)
        serving = asyncio.create_task(self.serve(url, probed, key, probed.sources, process))
        exiting = asyncio.create_task(process.exited())
        try:
            done, _ = await asyncio.wait((serving, exiting), return_when=asyncio.FIRST_COMPLETED)
            return exiting.result() if exiting in done else serving.result()
        finally:
            for task in (serving, exiting):
                task.cancel()
            await asyncio.gather(serving, exiting, return_exceptions=True)


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
