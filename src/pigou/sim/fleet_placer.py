"""Places the workers of a simulated fleet on its hosts, when it begins and as it changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from pigou.config import ConfigError
from pigou.control.placement.effects import GangPlaced, GangRefused
from pigou.control.placement.gang import Gang, PlacementRefusal, Replica, RoleDemand
from pigou.control.placement.gang_scheduler import GangScheduler
from pigou.request import Location, Role
from pigou.sim.topology_config import TopologyConfig

_GANG = "fleet"


class FleetPlacer:
    """Hosts of the workers, by cost as one gang or at random."""

    def __init__(
        self, config: TopologyConfig, wanted: Sequence[tuple[Role, int]], seed: int
    ) -> None:
        self._config, self._rng = config, Random(f"{seed} placement")
        self._scheduler = GangScheduler(config.nodes, config.costs)
        self.nodes = self._scheduler.nodes
        self._free = {host: node.gpus for host, node in self.nodes.items()}
        self._gpus = dict(wanted)
        if set(wanted) != set(self._gpus.items()):
            raise ConfigError("topology: the workers of a role differ in their GPUs; give one tp")
        self._begin: dict[Role, list[Replica]] = {role: [] for role in self._gpus}
        if config.placement == "random":
            for role, _ in wanted:
                self._begin[role].append(self._draw(role))
        else:
            self._submit(Counter(role for role, _ in wanted))

    def _submit(self, counts: Counter[Role]) -> None:
        demands = [
            RoleDemand(role=role, replicas=count, gpus=self._gpus[role])
            for role, count in counts.items()
        ]
        gang = Gang(name=_GANG, roles=tuple(demands), pack=self._config.pack)
        (effect, *_) = self._scheduler.submit(gang)
        if isinstance(effect, GangRefused):
            raise ConfigError(f"topology: {effect.reason}")
        assert isinstance(effect, GangPlaced)
        for replica in effect.added:
            self._begin[replica.role].append(replica)

    def add(self, role: Role) -> Location:
        """Return the host of one more worker of a role."""
        if self._begin.get(role):
            return self._located(self._begin[role].pop(0))
        if self._config.placement == "random":
            return self._located(self._draw(role))
        replica = self._scheduler.scale_out(_GANG, role)
        if isinstance(replica, PlacementRefusal):
            raise ConfigError(f"topology: {replica.reason}")
        return self._located(replica)

    def refusal(self, role: Role) -> str:
        """Return why no further worker of a role can be placed now; empty where one can."""
        if self._config.placement == "random":
            gpus = self._gpus.get(role, 1)
            return "" if max(self._free.values()) >= gpus else f"no host has {gpus} GPUs free"
        addition = self._scheduler.addition(_GANG, role)
        return addition.reason if isinstance(addition, PlacementRefusal) else ""

    def remove(self, role: Role, location: Location) -> None:
        """A worker of a role is gone."""
        gpus = self._gpus.get(role, 1)
        if self._config.placement == "random":
            self._free[location.host] += gpus
        else:
            self._scheduler.remove(_GANG, Replica(role, location.host, gpus))

    def flip(self, role: Role, location: Location, next_role: Role) -> None:
        """A worker has another role now."""
        gpus = self._gpus.setdefault(next_role, self._gpus.get(role, 1))
        if self._config.placement == "cost":
            self._scheduler.flip(_GANG, Replica(role, location.host, gpus), next_role)

    def _draw(self, role: Role) -> Replica:
        """Return any host with room."""
        gpus = self._gpus.get(role, 1)
        able = [host for host, free in self._free.items() if free >= gpus]
        if not able:
            raise ConfigError(f"topology: no host has {gpus} GPUs free for a {role.value} worker")
        host = self._rng.choice(able)
        self._free[host] -= gpus
        return Replica(role, host, gpus)

    def _located(self, replica: Replica) -> Location:
        return self.nodes[replica.host].location
