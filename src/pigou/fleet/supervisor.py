"""The supervisor: all members of a fleet, from start to end, and those that join or leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pigou.background import cancel
from pigou.fleet.config import AttachedWorker, DeclaredModel, FleetError, LocalWorker, WatchConfig
from pigou.fleet.drain import Drain
from pigou.fleet.fork_server import ForkServer
from pigou.fleet.hang_detection import HangArbiter
from pigou.fleet.member import Member, MemberSetup
from pigou.fleet.provider import Provider
from pigou.fleet.registry.registry import Registry
from pigou.fleet.sources.attached import AttachedProvider
from pigou.fleet.sources.local import LocalProvider, WorkerTemplate
from pigou.fleet.sources.registered import RegistryProvider
from pigou.gateway.fleet_status import WorkerRow
from pigou.gateway.plane_driver import PlaneDriver
from pigou.request import Role
from pigou.windows.planner_window import WorkerState
from pigou.wire.fleet_secret import FleetSecret

if TYPE_CHECKING:
    from pigou.fleet.kubernetes.kubernetes_provider import FleetScales

_log = logging.getLogger("pigou.fleet")

#: Seconds that the start waits for attached servers.
_ATTACH_S = 15.0


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """What a fleet is made of."""

    workers: Sequence[LocalWorker | AttachedWorker] = ()
    watch: WatchConfig = field(default_factory=WatchConfig)
    secret: FleetSecret | None = None  # shared secret of its processes
    templates: Sequence[WorkerTemplate] = ()  # templates of further local workers, one per model
    registry: Registry | None = None  # where further workers register
    scales: FleetScales | None = None  # pools on Kubernetes, scaled by planners
    models: Sequence[DeclaredModel] = ()  # declared models; empty if the workers report one
    tokenizer: str = ""  # folder or hub id of the model's tokenizer; empty asks the workers
    prefill_queue: str = ""  # URL of the queue that prefill workers pull from
    forks: ForkServer | None = None  # forks local workers on the CPU


class Supervisor:
    """Runs the members of a fleet, each in its own task.

    Example:
        fleet = FleetSetup(workers=[LocalWorker(id="w0", role=Role.BOTH)])
        await Supervisor(plane_driver, fleet).start()
    """

    def __init__(
        self, plane_driver: PlaneDriver, fleet: FleetSetup | None = None,
        models: Mapping[str, PlaneDriver] | None = None,
    ) -> None:  # fmt: skip
        fleet = fleet or FleetSetup()
        self._plane_driver = plane_driver
        self.models = dict(models or {})
        self.drain_s = fleet.watch.drain  # seconds for requests of a draining worker to end
        arbiter = HangArbiter(fleet.watch.hang)
        setup = MemberSetup(
            plane_driver, fleet.watch, arbiter, fleet.secret, self.models, fleet.forks
        )
        self.local = _starter(setup, fleet.templates)
        self.attached = AttachedProvider(setup)
        self.registered = _registered(setup, fleet)
        self._following: asyncio.Task[None] | None = None
        self._members: dict[str, Member] = {}
        for worker in fleet.workers:
            if isinstance(worker, LocalWorker):
                self._members[worker.id] = self.local.adopt(worker)
            else:
                self._members[worker.id] = self.attached.adopt(worker)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._drains: dict[str, tuple[Drain, asyncio.Task[None]]] = {}
        self._listener: Callable[[str, str], None] | None = None
        self._runs = False

    def report_stages(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener` with a worker's id and start stage, at each change."""
        self._listener = listener
        for member in self._members.values():
            member.on_stage = listener

    def rows(self) -> list[WorkerRow]:
        """Return the members' rows of the status API."""
        return [member.row() for member in self._members.values()]

    @property
    def members(self) -> Sequence[Member]:
        """Live members."""
        return tuple(self._members.values())

    @property
    def providers(self) -> tuple[Provider, ...]:
        """Where members come from."""
        if self.registered is None:
            return self.local, self.attached
        return self.local, self.attached, self.registered

    def member(self, id: str) -> Member | None:
        """Return a live member, or None."""
        return self._members.get(id)

    def provider(self, member: Member) -> Provider:
        """Return the provider of a member."""
        return next(own for own in self.providers if own.kind == member.source.kind)

    # --- start and end ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all members and wait until all but absent servers are up; raises FleetError."""
        self._runs = True
        members = self.members
        for member in members:
            self._run(member)
        if (registered := self.registered) is not None:
            self._following = self._plane_driver.background.start(
                "registry", lambda: registered.follow(self)
            )
        ready_tasks = {asyncio.create_task(member.ready.wait()): member for member in members}
        local = [
            task
            for task, member in ready_tasks.items()
            if member.source.starts and not member.may_fail
        ]
        if local:
            await asyncio.wait(local, return_when=asyncio.ALL_COMPLETED)
        given = [task for task, member in ready_tasks.items() if not member.may_fail]
        if given:
            await asyncio.wait(given, timeout=_ATTACH_S)
        elif ready_tasks:  # members of a pool: one of them is enough
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait(ready_tasks, timeout=_ATTACH_S, return_when=first)
        for task in ready_tasks:
            task.cancel()
        for member in members:
            if member.failed and not member.may_fail:
                raise FleetError(member.failed, member.failed_status)
        await self._discovered()

    async def _discovered(self) -> None:
        """Wait briefly for the registry, and one worker that is up."""
        if self.registered is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_ATTACH_S):
                await self.registered.discovery.seen.wait()
                ready = [member.ready.wait() for member in self.members]
                await asyncio.gather(*ready)

    async def stop(self) -> None:
        """Stop all members, local workers in order."""
        self._runs = False
        if self._following is not None:
            await cancel(self._following)
        drains = [task for _, task in self._drains.values()]
        for task in (*drains, *self._tasks.values()):
            task.cancel()
        results = await asyncio.gather(*drains, *self._tasks.values(), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.error("a member of the fleet failed", exc_info=result)
        await self.local.close()

    def _run(self, member: Member) -> None:
        task = self._plane_driver.background.start(member.id, member.run)
        self._tasks[member.id] = task

    # --- changes ------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        """Start a provider's member; a failed start is retried."""
        member.may_fail = True
        member.on_stage = self._listener
        self._members[member.id] = member
        if self._runs:
            self._run(member)

    def drain(self, member: Member, limit_s: float | None = None) -> None:
        """Drain a member for at most `limit_s` (default `drain_s`), then release it."""
        if member.state is WorkerState.STARTING:
            self.remove(member)
        elif not member.leaving or member.id not in self._drains:
            self._order(member, limit_s, lambda: self.remove(member), None)
        else:
            self.limit_drain(member, limit_s)

    def limit_drain(self, member: Member, limit_s: float | None) -> None:
        """Set the seconds left for a draining member; None changes nothing."""
        drain, _ = self._drains.get(member.id, (None, None))
        if drain is not None and limit_s is not None:
            drain.limit(limit_s)

    def flip(self, member: Member, role: Role, pool: str, limit_s: float | None = None) -> None:
        """Let a ready member drain, then serve in another pool."""

        def change() -> None:
            member.change_role(role, pool)
            self.provider(member).flipped(member)
            _log.info("%s serves in pool %s, epoch %d", member.id, pool, member.epoch)

        self._order(member, limit_s, change, role)

    def restart(self, member: Member, limit_s: float | None = None) -> None:
        """Let a ready local member drain; its process then ends, and another takes its place."""

        def again() -> None:
            member.next_role = None
            task = self._tasks.get(member.id)
            if task is not None and member.id in member.plane_driver.upstreams:
                task.add_done_callback(lambda _: self._run_again(member))
                task.cancel()

        self._order(member, limit_s, again, member.role)

    def _run_again(self, member: Member) -> None:
        """Start a member anew whose process has ended, unless it is to go meanwhile."""
        if self._runs and not member.leaving:
            self._run(member)

    def remove(self, member: Member) -> None:
        """Remove a member at once; its requests migrate."""
        member.let_go()
        self._members.pop(member.id, None)
        self._cancel_drain(member)
        task = self._tasks.get(member.id)
        if task is None:
            self.provider(member).discard(member)
            return
        task.add_done_callback(lambda _: self._gone(member))
        task.cancel()

    def _order(
        self, member: Member, limit_s: float | None, then: Callable[[], None],
        next_role: Role | None,
    ) -> None:  # fmt: skip
        self._cancel_drain(member)
        member.begin_drain(next_role)
        stops = next_role in (None, member.role) and member.source.starts
        limit_s = self.drain_s if limit_s is None else limit_s
        drain = Drain(member.plane_driver, member.id, limit_s, stops=stops)
        task = asyncio.create_task(self._finish(member, drain, then), name=f"drain {member.id}")
        self._drains[member.id] = drain, task

    async def _finish(self, member: Member, drain: Drain, then: Callable[[], None]) -> None:
        try:
            await drain.run()
        except Exception as error:
            self._plane_driver.background.failed(f"drain of {member.id}", error)
        self._drains.pop(member.id, None)
        then()

    def _cancel_drain(self, member: Member) -> None:
        _, task = self._drains.pop(member.id, (None, None))
        if task is not None:
            task.cancel()

    def _gone(self, member: Member) -> None:
        self._tasks.pop(member.id, None)
        self.provider(member).discard(member)
        _log.info("%s has left", member.id)


def _registered(setup: MemberSetup, fleet: FleetSetup) -> RegistryProvider | None:
    """Return the provider of registered workers, scaling pools on Kubernetes."""
    if fleet.registry is None:
        return None
    if fleet.scales is None:
        return RegistryProvider(fleet.registry, setup)
    from pigou.fleet.kubernetes.kubernetes_provider import KubernetesProvider

    return KubernetesProvider(fleet.registry, setup, fleet.scales)


def _starter(setup: MemberSetup, templates: Sequence[WorkerTemplate]) -> LocalProvider:
    if not templates or templates[0].ray is None:
        return LocalProvider(setup, templates)
    from pigou.fleet.ray.ray_provider import RayProvider

    return RayProvider(setup, templates, templates[0].ray)
