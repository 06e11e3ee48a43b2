"""Workers on a Ray cluster: one gang of them, placed by what its transfers cost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pigou.fleet.config import FleetError, LocalWorker, RayConfig
from pigou.fleet.member import Member, MemberSetup
from pigou.fleet.ray.cluster import Bundle, RayCluster, RayProcess
from pigou.fleet.sources.local import LocalProvider, ProcessSource, WorkerTemplate
from pigou.fleet.worker_process import MemberProcess
from pigou.placement.gang import (
    Gang,
    GangEvicted,
    GangPlaced,
    GangRefused,
    Pack,
    PlacementEffect,
    PlacementRefusal,
    Replica,
    RoleDemand,
)
from pigou.placement.gang_scheduler import GangScheduler
from pigou.placement.topology import Node, label_warning
from pigou.request import Location, Role

_log = logging.getLogger("pigou.fleet")

_GANG = "fleet"
#: Workers of a cluster that a planner may have by default.
_ROOM = 16


class Placer:
    """Places a fleet's workers on nodes: all at the start, or none; later one by one.

    Example:
        placer = Placer(gpus=1)
        placer.begin(nodes, {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE})
        placer.location("decode-0")
    """

    def __init__(self, gpus: int = 1, pack: Pack | None = None) -> None:
        self._gpus, self._pack = gpus, pack
        self._scheduler = GangScheduler()
        self._replicas: dict[str, Replica] = {}
        self._lost: dict[str, Role] = {}

    def begin(self, nodes: Sequence[Node], workers: Mapping[str, Role]) -> None:
        """Place the initial workers; raises FleetError."""
        self._scheduler = GangScheduler(nodes)
        if warning := label_warning(nodes):
            _log.warning("%s", warning)
        roles = list(workers.values())
        demands = [
            RoleDemand(role=role, replicas=roles.count(role), gpus=self._gpus, min_available=1)
            for role in dict.fromkeys(roles)
        ]
        gang = Gang(name=_GANG, roles=tuple(demands), pack=self._pack)
        self._lost = dict(workers)
        effects = self._scheduler.submit(gang)
        for effect in effects:
            if isinstance(effect, GangRefused):
                raise FleetError(f"placement: {effect.reason}")
        self._follow(effects)
        if self._lost:
            total = sum(node.gpus for node in nodes)
            raise FleetError(
                f"placement: {len(workers)} workers of {self._gpus} GPUs do not fit the "
                f"{len(nodes)} nodes with {total}"
                + (f" within one {self._pack.level.value}" if self._pack else "")
            )

    def update(self, nodes: Sequence[Node]) -> None:
        """Update the live nodes."""
        now, before = {node.host: node for node in nodes}, dict(self._scheduler.nodes)
        for host in before.keys() - now.keys():
            _log.warning("node %s is lost", host)
            for id, replica in list(self._replicas.items()):
                if replica.host == host:
                    self._lost[id] = self._replicas.pop(id).role
            self._follow(self._scheduler.node_down(host))
        for host in now.keys() - before.keys():
            self._follow(self._scheduler.node_up(now[host]))

    def location(self, id: str) -> Location | None:
        """Return where a worker is to run; None where no node has room for it now."""
        replica = self._replicas.get(id)
        return None if replica is None else self._scheduler.nodes[replica.host].location

    def add(self, id: str, role: Role) -> Location:
        """Place one more worker. Raises FleetError: no node has room."""
        if id in self._lost:
            raise FleetError(f"placement: no node has room for {id} now: {self.refusal(role)}")
        replica = self._scheduler.scale_out(_GANG, role)
        if isinstance(replica, PlacementRefusal):
            raise FleetError(f"placement: {replica.reason}")
        self._replicas[id] = replica
        return self._scheduler.nodes[replica.host].location

    def refusal(self, role: Role) -> str:
        """Return why no further worker of a role can be placed now; empty where one can."""
        if not self._replicas:
            return "no worker is placed yet"
        addition = self._scheduler.addition(_GANG, role)
        return addition.reason if isinstance(addition, PlacementRefusal) else ""

    def release(self, id: str) -> None:
        """A worker is gone for good."""
        self._lost.pop(id, None)
        replica = self._replicas.pop(id, None)
        if replica is not None:
            self._follow(self._scheduler.remove(_GANG, replica))

    def flip(self, id: str, role: Role) -> None:
        """A worker has another role now."""
        replica = self._replicas.get(id)
        if replica is not None and replica.role is not role:
            self._replicas[id] = self._scheduler.flip(_GANG, replica, role)

    def _follow(self, effects: Sequence[PlacementEffect]) -> None:
        for effect in effects:
            if isinstance(effect, GangEvicted):  # it moves as a whole
                self._lost |= {id: replica.role for id, replica in self._replicas.items()}
                self._replicas.clear()
            elif isinstance(effect, GangPlaced):
                for replica in effect.added:
                    ids = [id for id, role in self._lost.items() if role is replica.role]
                    for id in ids[:1]:
                        del self._lost[id]
                        self._replicas[id] = replica


class RayProvider(LocalProvider):
    """Starts worker processes in Ray actors; the first share a placement group: all or none."""

    kind: ClassVar[str] = "ray"

    def __init__(
        self, setup: MemberSetup, templates: Sequence[WorkerTemplate], config: RayConfig
    ) -> None:
        """Raise ConfigError where Ray is not installed; the first start joins the cluster."""
        super().__init__(setup, templates)
        self.cluster = RayCluster(config.address, config.resources)
        self._placer = Placer(config.units, config.pack)
        self._bundles: dict[str, Bundle] = {}
        self._lock = asyncio.Lock()
        self._began = False

    @property
    def room(self) -> int | None:
        """Sixteen workers, or the initial ones if more."""
        return max(_ROOM, self._rooms.total())

    def start_refusal(self, pool: str) -> str:
        """Return why no further worker of a role can be started now; empty where one can."""
        if refusal := super().start_refusal(pool):
            return refusal
        return self._placer.refusal(Role(pool.partition(".")[0]))

    def flipped(self, member: Member) -> None:
        """Note a member's new pool."""
        super().flipped(member)
        self._placer.flip(member.id, member.role)

    def discard(self, member: Member) -> None:
        """A member is gone for good: its bundle is free for another one."""
        super().discard(member)
        self._placer.release(member.id)
        if (bundle := self._bundles.pop(member.id, None)) is not None:
            self.cluster.end_actor(bundle)
            self.cluster.give_back(bundle)

    async def close(self) -> None:
        """Release the cluster's resources."""
        await self.cluster.close()

    async def locate(self, member: Member) -> tuple[Bundle, Location]:
        """Return the bundle of a member's process, and its labels. Raises FleetError: no room."""
        async with self._lock:
            await self.cluster.connect()
            nodes = await self.cluster.nodes()
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

    async def _begin(self, nodes: Sequence[Node]) -> None:
        """Place the workers of the start, and reserve all of their bundles at once."""
        workers = {id: member.role for id, (member, _) in self._members.items()}
        self._placer.begin(nodes, workers)
        placed = {id: self._placer.location(id) for id in workers}
        hosts = [location.host for location in placed.values() if location is not None]
        bundles = await self.cluster.reserve(hosts)
        self._bundles = dict(zip(placed, bundles, strict=True))
        self._began = True

    def _source(self, spec: LocalWorker) -> ProcessSource:
        return ProcessSource(spec, self.kind, self._start_there)

    async def _start_there(self, member: Member, arguments: Sequence[str]) -> MemberProcess:
        member.report("waiting for its node")
        bundle, member.location = await self.locate(member)
        labels = [f"{n}={v}" for n, v in member.location._asdict().items() if v]
        own = [*arguments, "--location", ",".join(labels)]
        return RayProcess(member.id, own, member.setup.secret, self.cluster, bundle)

    def _device(self, template: WorkerTemplate) -> str | None:
        return template.devices[0]
