"""The provider of workers on a Ray cluster: one gang of them, placed by what its transfers cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from pigou.control.placement.topology import Node
from pigou.fleet.config import LocalWorker
from pigou.fleet.local_member import LocalMember
from pigou.fleet.local_provider import LocalProvider
from pigou.fleet.local_workers import WorkerTemplate
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.placer import Placer
from pigou.fleet.ray.cluster import Bundle, RayCluster
from pigou.fleet.ray.config import RayConfig
from pigou.fleet.ray.ray_process import RayProcess
from pigou.request import Location, Role


class RayMember(LocalMember):
    """Keeps one worker process going on a Ray node; after the node is lost, on another."""

    kind: ClassVar[str] = "ray"

    def __init__(self, spec: LocalWorker, setup: MemberSetup, provider: RayProvider) -> None:
        super().__init__(spec, setup)
        self._provider = provider

    async def _start_process(self, arguments: Sequence[str]) -> RayProcess:
        self._report("waiting for its node")
        bundle, self.location = await self._provider.locate(self)
        labels = [f"{n}={v}" for n, v in self.location._asdict().items() if v]
        own = [*arguments, "--location", ",".join(labels)]
        return RayProcess(self.id, own, self._secret, self._provider.cluster, bundle)


#: Workers of a cluster that a planner may have by default.
_ROOM = 16


class RayProvider(LocalProvider):
    """Starts worker processes in actors of a Ray cluster.

    The workers of the start are a gang: all of them get nodes, or the fleet does not start. They
    are in one placement group; a worker that is added, or moves off a lost node, has its own. The
    gateway learns from its own watch by HTTP that a worker is gone, seconds before Ray does.
    """

    kind: ClassVar[str] = RayMember.kind

    def __init__(
        self, setup: MemberSetup, templates: Sequence[WorkerTemplate], config: RayConfig
    ) -> None:
        """Begin without members; the cluster is joined by the first start.

        Raises:
            ConfigError: Ray is not installed.
        """
        super().__init__(setup, templates)
        self.cluster = RayCluster(config.address, config.resources)
        self._placer = Placer(config.units, config.pack)
        self._bundles: dict[str, Bundle] = {}
        self._lock = asyncio.Lock()
        self._began = False

    @property
    def room(self) -> int | None:
        """Sixteen workers, or those that the fleet began with: a cluster tells no end."""
        return max(_ROOM, self._rooms.total())

    def start_refusal(self, pool: str) -> str:
        """Return why no further worker of a role can be started now; empty where one can."""
        if refusal := super().start_refusal(pool):
            return refusal
        return self._placer.refusal(Role(pool.partition(".")[0]))

    def flipped(self, member: FleetMember) -> None:
        """A member is in another pool, which is there from now on."""
        super().flipped(member)
        self._placer.flip(member.id, member.role)

    def discard(self, member: FleetMember) -> None:
        """A member is gone for good: its bundle is free for another one."""
        super().discard(member)
        self._placer.release(member.id)
        if (bundle := self._bundles.pop(member.id, None)) is not None:
            self.cluster.end_actor(bundle)
            self.cluster.give_back(bundle)

    async def close(self) -> None:
        """Give back what the fleet has of the cluster."""
        await self.cluster.close()

    async def locate(self, member: RayMember) -> tuple[Bundle, Location]:
        """Return the bundle that a member's process is to run in, and its labels.

        Raises:
            FleetError: the fleet does not fit the cluster, or no node has room for this worker.
        """
        async with self._lock:
            nodes = await self._nodes()
            if not self._began:
                await self._begin(nodes)
            self._placer.update(nodes)
            for id, other in self._bundles.items():  # those that are to move, too
                moved = self._placer.location(id)
                if moved is not None and moved.host != other.host and id != member.id:
                    self.cluster.end_actor(other)
            location = self._placer.location(member.id)
            if location is None:
                location = self._placer.add(member.id, member.role)
            bundle = self._bundles.get(member.id)
            if bundle is None or bundle.host != location.host:
                (bundle,) = await self.cluster.reserve([location.host])
                self._bundles[member.id] = bundle
            return bundle, location

    async def _nodes(self) -> list[Node]:
        await self.cluster.connect()
        return await self.cluster.nodes()

    async def _begin(self, nodes: Sequence[Node]) -> None:
        """Place the workers of the start, and reserve all of their bundles at once."""
        workers = {id: member.role for id, member in self._members.items()}
        self._placer.begin(nodes, workers)
        placed = {id: self._placer.location(id) for id in workers}
        hosts = [location.host for location in placed.values() if location is not None]
        bundles = await self.cluster.reserve(hosts)
        self._bundles = dict(zip(placed, bundles, strict=True))
        self._began = True

    def _member(self, spec: LocalWorker) -> RayMember:
        return RayMember(spec, self._setup, self)

    def _device(self, template: WorkerTemplate) -> str | None:
        """Return the device that a worker sees on its node."""
        return template.devices[0]
