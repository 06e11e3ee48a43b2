"""How a worker registers itself: options, lease, and the driver that keeps it registered."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from pigou.background import Background, wait_for
from pigou.config import ConfigError, key_values, option
from pigou.fleet.nats_connection import ReconnectBackoff
from pigou.fleet.registry.entry import KVShape, Topology, WorkerEntry
from pigou.fleet.registry.registry import EntryConflict, LeaseLost, Registry, open_registry
from pigou.request import SECOND, Role
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import advertised, deployment_version, reachable, url_host

#: Heading of options.
_GROUP = "Registry"
#: Labels that are fields of a topology.
_FIELDS = ("host", "rack", "zone")
_log = logging.getLogger("pigou.registry")
#: Seconds that a call may take, at most; of a short lease a fourth.
_CALL_S = 5.0


class RegistrationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Registration of a worker: registry, id and labels; without `registry` there is none."""

    registry: Annotated[
        str,
        option(
            "Registry that gateways find this worker in: file:///FOLDER, etcd://HOST:PORT/PREFIX, "
            "nats://HOST:PORT[/BUCKET] or k8s://NAMESPACE?selector=LABELS.",
            _GROUP,
        ),
    ] = ""
    worker_id: Annotated[
        str, option("Id in the fleet; by default the host's name and one of this process.", _GROUP)
    ] = ""
    label: Annotated[
        tuple[str, ...],
        option("Label of the worker: NAME=VALUE, as host, rack, zone or gpus. Repeatable.", _GROUP),
    ] = ()
    advertise: Annotated[
        str, option("Host that others reach this worker at; by default --host.", _GROUP)
    ] = ""
    lease: Annotated[
        float, option("Seconds without a renewal after which the worker counts as lost.", _GROUP)
    ] = 15.0

    def __post_init__(self) -> None:
        for name in ("worker_id", "label", "advertise"):
            if getattr(self, name) and not self.registry:
                raise ConfigError(f"{name} is given, and registry is not; give it")
        if self.lease != 15.0 and not self.registry:
            raise ConfigError(f"lease is {self.lease}, and registry is not given; give it")
        if not 1 <= self.lease <= 3600:
            raise ConfigError(f"lease is {self.lease}; it must be 1 to 3600 seconds")
        self.topology("")

    def topology(
        self, host: str, gpus: int = 0, location: Mapping[str, str] | None = None
    ) -> Topology:
        """Return where the worker runs: its labels, else `--location`, else the arguments."""
        labels = key_values("label", self.label, "NAME=VALUE, like rack=r1")
        for name, value in labels.items():
            if not value or max(len(name), len(value)) > 512:
                raise ConfigError(f"label {name[:80]} is {value[:80]!r}; give 1 to 512 characters")
        number = labels.pop("gpus", str(gpus))
        if not number.isdecimal() or len(number) > 6:
            raise ConfigError(f"label: gpus is {number[:20]!r}; it must be a number")
        fields = {"host": host}
        fields |= {name: value for name, value in (location or {}).items() if value}
        fields |= {name: labels.pop(name) for name in _FIELDS if name in labels}
        return Topology(**fields, gpus=int(number), labels=labels)


class LeaseStep(NamedTuple):
    """The next call to the registry."""

    action: Literal["register", "renew"]
    at_ns: int  # time, by the caller's clock


class LeaseKeeper:
    """Keeps one worker registered; pure: the clock is an argument, calls are returned.

    A renewal falls due at half of the remaining lease. A worker that lost its lease serves on, and
    registers again after a random wait.
    """

    def __init__(
        self, ttl_s: float, seed: int = 0, backoff: ReconnectBackoff | None = None
    ) -> None:
        self._ttl_ns = round(ttl_s * SECOND)
        self._rng = random.Random(seed)
        self._backoff = backoff or ReconnectBackoff()
        self._expires_ns = self._due_ns = 0
        self._failures = 0
        self.registered = False  # whether the lease is believed alive
        self.lapses = 0  # count of lost leases

    def step(self, now: int) -> LeaseStep:
        """Return the next call; due now where its time is in the past."""
        if self.registered and now >= self._expires_ns:
            self.lost(now)
        return LeaseStep("renew" if self.registered else "register", max(now, self._due_ns))

    def succeeded(self, sent: int, now: int) -> None:
        """Note an answered call; the lease lasts from when it was sent."""
        self.registered, self._failures = True, 0
        self._expires_ns = sent + self._ttl_ns
        self._due_ns = now + max(0, self._expires_ns - now) // 2

    def failed(self, now: int) -> None:
        """Note a failed or refused call."""
        self._failures += 1
        wait_ns = self._backoff.wait_ns(self._failures, self._rng)
        if self.registered and now < self._expires_ns:
            min_ns = round(self._backoff.min_s * SECOND)
            wait_ns = max((self._expires_ns - now) // 2, min_ns)
        self._due_ns = now + wait_ns

    def lost(self, now: int) -> None:
        """Note a lost lease; re-register soon, at a random time."""
        self.lapses += self.registered
        self.registered = False
        self._due_ns = now + round(self._backoff.min_s * SECOND * self._rng.random())


class Registration:
    """Keeps one worker registered while it serves; `on_change` gets entries that others changed."""

    def __init__(
        self,
        registry: Registry,
        entry: WorkerEntry,
        on_change: Callable[[WorkerEntry], None] | None = None,
        keeper: LeaseKeeper | None = None,
    ) -> None:
        self.entry = entry
        self.keeper = keeper or LeaseKeeper(entry.ttl_s, random.getrandbits(32))
        self._registry = registry
        self._on_change = on_change
        self._wake = asyncio.Event()
        self._calls = asyncio.Lock()
        self._call_s = min(_CALL_S, max(entry.ttl_s / 4, 0.1))
        self._why = ""
        self._unwritten: dict[str, object] = {}

    async def run(self) -> None:
        """Keep the worker registered until cancelled."""
        while True:
            self._wake.clear()
            if self._unwritten:
                fields, self._unwritten = self._unwritten, {}
                await self.change(**fields)
            now = time.monotonic_ns()
            step = self.keeper.step(now)
            if step.at_ns > now:
                await wait_for(self._wake, (step.at_ns - now) / SECOND)
                continue
            await self._call(renews=step.action == "renew")

    async def change(self, **fields: object) -> None:
        """Change fields of the entry, in a new epoch; while the registry is away, later."""
        async with self._calls:
            epoch = self.entry.epoch + 1
            self.entry = msgspec.structs.replace(self.entry, epoch=epoch, **fields)
            if self.keeper.registered:
                try:
                    async with asyncio.timeout(self._call_s):
                        await self._registry.update(self.entry)
                    return
                except (EntryConflict, LeaseLost, TimeoutError, OSError) as error:
                    _log.warning("the registry did not take a change: %s", error or "no answer")
                    self.keeper.lost(time.monotonic_ns())  # to register is to write the change
        self._wake.set()

    async def leave(self) -> None:
        """Remove the entry, if the registry answers; its lease ends by itself otherwise."""
        with suppress(TimeoutError, OSError):
            async with self._calls, asyncio.timeout(self._call_s):
                await self._registry.leave(self.entry)

    async def _call(self, *, renews: bool) -> None:
        sent = time.monotonic_ns()
        try:
            async with self._calls, asyncio.timeout(self._call_s):
                call = self._registry.renew if renews else self._registry.register
                entry = await call(self.entry)
        except LeaseLost as error:
            self.keeper.lost(time.monotonic_ns())
            self._say(str(error))
        except (EntryConflict, TimeoutError, OSError) as error:
            self.keeper.failed(time.monotonic_ns())
            self._say(str(error) or "it does not answer")
        else:
            self.keeper.succeeded(sent, time.monotonic_ns())
            self._say("")
            self._take(entry)

    def _take(self, entry: WorkerEntry) -> None:
        """Merge another writer's entry; newer fields here win."""
        own = self.entry
        if entry.epoch < own.epoch:  # changed here while the call was under way
            self.keeper.lost(time.monotonic_ns())
        elif entry != own:
            self.entry = entry
            if own.draining and not entry.draining:  # the other change of this epoch came first
                self._unwritten = {"draining": True}
                self._wake.set()
            if self._on_change is not None:
                self._on_change(entry)

    def _say(self, why: str) -> None:
        if why and why != self._why:
            _log.warning("%s serves on, and is not renewed: %s", self.entry.identity, why)
        elif self._why and not why:
            _log.info("%s is registered again", self.entry.identity)
        self._why = why


class WorkerRegistrar:
    """Keeps a worker registered from ready to its end; an entry marked draining ends it."""

    def __init__(
        self, config: RegistrationConfig, secret: FleetSecret | None, gpus: int = 0, tp: int = 1
    ) -> None:
        """`tp`: GPUs that the model's heads are split over. Raises ConfigError for the URL."""
        self._config = config
        self._gpus, self._tp = gpus, tp
        self._registry: Registry = open_registry(config.registry, secret)
        self._registration: Registration | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop: Callable[[], None] | None = None

    async def ready(self, about: dict[str, Any], stop: Callable[[], None]) -> None:
        """Register the worker in the background; `stop` drains it. Raises ConfigError."""
        self._stop = stop
        self._registration = Registration(self._registry, self._entry(about), self._changed)
        run = self._registration.run
        self._task = Background().start("registration", run)

    async def draining(self) -> None:
        """Publish that the worker is draining."""
        if self._registration is not None and not self._registration.entry.draining:
            await self._registration.change(draining=True)

    async def leave(self) -> None:
        """Remove the worker's entry."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._registration is not None:
            await self._registration.leave()
        await self._registry.close()

    def _changed(self, entry: WorkerEntry) -> None:
        _log.info("epoch %d: role %s%s", entry.epoch, entry.role.value,
                  ", draining" if entry.draining else "")  # fmt: skip
        if entry.draining and self._stop is not None:
            _log.warning("the fleet lets this worker go: it drains, and ends")
            self._stop()

    def _entry(self, about: dict[str, Any]) -> WorkerEntry:
        url = urlsplit(str(about["url"]))
        host = advertised(url.hostname or "", self._config.advertise)
        topology = self._config.topology(socket.gethostname(), self._gpus, about.get("location"))
        in_pod = self._config.registry.startswith("k8s:")
        incarnation = str(about["incarnation"])
        try:
            return WorkerEntry(
                worker=self._config.worker_id
                or default_id(topology.host, "" if in_pod else incarnation),
                incarnation=incarnation,
                role=Role(about["role"]),
                model=str(about["model"]),
                version=deployment_version(about),
                shape=KVShape(tp=self._tp, kv_layout=str(about.get("kv_layout") or "")),
                url=f"http://{url_host(host)}:{url.port}",
                kv_events=reachable(str(about.get("kv_events") or ""), host),
                kv_replay=reachable(str(about.get("kv_replay") or ""), host),
                transfer=str(about.get("kv_transfer") or ""),
                kv_address=host,
                topology=topology,
                ttl_s=self._config.lease,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"registry: the worker's entry is not valid: {error}") from error


def default_id(host: str, incarnation: str = "") -> str:
    """Return a worker's name: its host and incarnation; in a pod of Kubernetes the pod's name."""
    if not incarnation:
        return os.environ.get("HOSTNAME") or socket.gethostname()
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', host.partition('.')[0])}-{incarnation[:8]}"
