"""A gang: workers of several roles that are placed together or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pigou.config import ConfigError
from pigou.control.placement.topology import Distance, Node, TopologyLevel
from pigou.request import Role


class Pack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How near to each other the workers of a gang must be."""

    level: TopologyLevel  # whose domain is to have them all
    # whether a gang that fits no such domain is refused; where it is not, the cheapest placement
    # counts, and says whether one domain has it.
    required: bool = False


class RoleDemand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers of one role in a gang. A replica is on one node."""

    role: Role
    replicas: int
    gpus: int = 1
    min_available: int | None = None  # replicas without which the gang is not placed; None for all
    kind: str = ""  # of GPU; empty for any
    labels: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.gpus < 1:
            raise ConfigError(
                f"role {self.role.value}: replicas is {self.replicas} and gpus {self.gpus}; both "
                "must be at least 1"
            )
        if not 1 <= self.minimum <= self.replicas:
            raise ConfigError(
                f"role {self.role.value}: min_available is {self.minimum}; it must be 1 to "
                f"{self.replicas}, the replicas"
            )

    @property
    def minimum(self) -> int:
        """Replicas without which the gang is not placed."""
        return self.replicas if self.min_available is None else self.min_available

    def fits(self, node: Node) -> bool:
        """Whether a node is of the right kind and has the labels; its room does not matter."""
        right = not self.kind or self.kind == node.kind
        return right and all(node.labels.get(name) == v for name, v in self.labels.items())


class Gang(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers that are placed together."""

    name: str
    roles: tuple[RoleDemand, ...]
    pack: Pack | None = None  # how near to each other they must be; None for the cheapest placement
    # that flow from its prefill workers to its decode workers, in equal parts over all pairs.
    kv_bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        names = [demand.role for demand in self.roles]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"gang {self.name}: give each of its roles once, at least one")
        if not 0.0 <= self.kv_bytes_per_s < math.inf:
            raise ConfigError(
                f"gang {self.name}: kv_bytes_per_s is {self.kv_bytes_per_s}; it must be at least 0"
            )

    def demand(self, role: Role) -> RoleDemand | None:
        """Return what is wanted of a role; None where the gang has none of it."""
        return next((demand for demand in self.roles if demand.role is role), None)

    @property
    def minimum(self) -> dict[Role, int]:
        """Replicas of each role without which it is not placed."""
        return {demand.role: demand.minimum for demand in self.roles}

    @property
    def wanted(self) -> dict[Role, int]:
        """Replicas of each role."""
        return {demand.role: demand.replicas for demand in self.roles}


class Replica(NamedTuple):
    """One worker of a gang on its node."""

    role: Role
    host: str
    gpus: int


class GangPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers of a gang are, or are to be."""

    replicas: tuple[Replica, ...]
    # of its KV transfers: the sum over pairs of KV bytes a second times seconds a byte, so the
    # transfers that are under way in the mean.
    cost: float = 0.0
    distance: Distance = Distance.HOST
    packed: bool = True  # whether one domain of the level that the gang asks for has them all
    optimal: bool = True  # whether it is proven that nothing is cheaper


class PlacementRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a gang cannot be placed now; it takes nothing."""

    reason: str


def count_roles(replicas: Sequence[Replica]) -> dict[Role, int]:
    """Return how many replicas there are of each role that occurs."""
    counts: dict[Role, int] = {}
    for replica in replicas:
        counts[replica.role] = counts.get(replica.role, 0) + 1
    return counts
