"""What the local workers of a fleet are told: the same for all, and what is each one's own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from pigou.config import ConfigError
from pigou.fleet.config import LocalWorker, WorkersConfig
from pigou.fleet.model_pools import ModelPoolConfig
from pigou.fleet.ray.config import RayConfig
from pigou.imports import require
from pigou.request import Role

#: Options of a worker that name a place which no other worker may use.
OWN = ("--disk-path", "--bucket-url")


class WorkerTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """What further workers of a local fleet are made from."""

    # of `pigou worker`, the same for all; but where one worker alone may keep its cache (`OWN`),
    # each gets a part that is named after it.
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
    """Return the arguments with a place of its own for each cache of the worker `name`."""
    own_arguments: list[str] = []
    for argument in arguments:
        option, equals, path = argument.partition("=")
        if equals and option in OWN and path:
            own_arguments.append(f"{option}={_below(path, name)}")
        elif own_arguments and own_arguments[-1] in OWN and argument:
            own_arguments.append(_below(argument, name))
        else:
            own_arguments.append(argument)
    return own_arguments


def _below(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}"


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
