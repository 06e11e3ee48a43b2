"""The placer of a live fleet: which node each of its workers runs on, as nodes come and go."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from pigou.control.placement.effects import GangEvicted, GangPlaced, GangRefused, PlacementEffect
from pigou.control.placement.gang import Gang, Pack, PlacementRefusal, Replica, RoleDemand
from pigou.control.placement.gang_scheduler import GangScheduler
from pigou.control.placement.topology import Node, label_warning
from pigou.fleet.config import FleetError
from pigou.request import Location, Role

_log = logging.getLogger("pigou.fleet")

_GANG = "fleet"


class Placer:
    """Gives each worker of a fleet a node: all of them at the start, or none.

    After that it keeps a fleet alive: a worker whose node is lost gets another one as soon as there
    is room, whatever the others do.

    Example:
        placer = Placer(gpus=1)
        placer.begin(nodes, {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE})
        placer.location("decode-0")
    """

    def __init__(self, gpus: int = 1, pack: Pack | None = None) -> None:
        """Begin without nodes.

        Args:
            pack: how near to each other the workers must be.
        """
        self._gpus, self._pack = gpus, pack
        self._scheduler = GangScheduler()
        self._replicas: dict[str, Replica] = {}
        self._lost: dict[str, Role] = {}

    def begin(self, nodes: Sequence[Node], workers: Mapping[str, Role]) -> None:
        """Place the workers that a fleet begins with.

        Raises:
            FleetError: they do not fit; the message says why.
        """
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
        """Take in which nodes are there now."""
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
        """Place one more worker.

        Raises:
            FleetError: no node has room.
        """
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
        """Give new places to the workers that have none."""
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
