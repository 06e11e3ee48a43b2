"""A gang: workers of several roles that are placed together or not at all, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from pigou.config import ConfigError
from pigou.control.placement.topology import (
    Distance,
    DistanceCosts,
    Node,
    TopologyLevel,
    distance,
    domain,
)
from pigou.request import Location, Role


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


def placement_cost(
    gang: Gang, replicas: Sequence[Replica], nodes: Mapping[str, Node], costs: DistanceCosts
) -> float:
    """Return the transfers of a gang that are under way in the mean.

    Its KV bytes a second flow in equal parts over all pairs of a prefill and a decode worker:
    B / (P D) times the sum over pairs of the seconds a byte. Without pairs it is 0.
    """
    prefill = [nodes[r.host].location for r in replicas if r.role is Role.PREFILL]
    decode = [nodes[r.host].location for r in replicas if r.role is Role.DECODE]
    if not prefill or not decode:
        return 0.0
    seconds = sum(costs.seconds(p, d) for p in prefill for d in decode)
    return gang.kv_bytes_per_s * seconds / (len(prefill) * len(decode))


def placement_of(
    gang: Gang,
    replicas: Sequence[Replica],
    nodes: Mapping[str, Node],
    costs: DistanceCosts,
    *,
    optimal: bool = True,
) -> GangPlacement:
    """Return the placement of replicas with its cost, and what else is known of it."""
    return GangPlacement(
        replicas=tuple(replicas),
        cost=placement_cost(gang, replicas, nodes, costs),
        distance=farthest(replicas, nodes),
        packed=is_packed(gang, [nodes[r.host] for r in replicas]),
        optimal=optimal,
    )


def farthest(replicas: Sequence[Replica], nodes: Mapping[str, Node]) -> Distance:
    """Return the distance of the prefill-decode pair that is farthest apart; 0 without one."""
    prefill = {nodes[r.host].location for r in replicas if r.role is Role.PREFILL}
    decode = {nodes[r.host].location for r in replicas if r.role is Role.DECODE}
    return max((distance(p, d) for p in prefill for d in decode), default=Distance.HOST)


def is_packed(gang: Gang, nodes: Iterable[Node]) -> bool:
    """Whether nodes are in one domain of the level that a gang asks for."""
    if gang.pack is None:
        return True
    domains = {domain(node.location, gang.pack.level) for node in nodes}
    return len(domains) <= 1 and "" not in domains


def removal_costs(
    own: Sequence[Location], others: Sequence[Location], costs: DistanceCosts
) -> list[float]:
    """Return for each worker of a role the seconds a byte of KV takes in the mean without it.

    The mean is over all pairs of one that stays and a worker of the other role; 0 where none stays.

    Args:
        costs: seconds a byte by distance.
    """
    sums = [sum(costs.seconds(one, other) for other in others) for one in own]
    pairs = (len(own) - 1) * len(others)
    return [(sum(sums) - one) / pairs if pairs else 0.0 for one in sums]


# --- effects of the scheduler, for a driver to carry out ------------------------------------------


class GangPlaced(msgspec.Struct, frozen=True):
    """A gang got nodes: `added` are to be started, and all of `placement` run then."""

    gang: str
    placement: GangPlacement
    added: tuple[Replica, ...]


class GangEvicted(msgspec.Struct, frozen=True):
    """A gang below its minimum gives up what it has, for the given reason, and waits again."""

    gang: str
    removed: tuple[Replica, ...]
    reason: str


class GangWaits(msgspec.Struct, frozen=True):
    """A gang waits for nodes, for the given reason."""

    gang: str
    reason: str


class GangRefused(msgspec.Struct, frozen=True):
    """A gang is refused: it would not fit if nobody else were there."""

    gang: str
    reason: str


PlacementEffect: TypeAlias = GangPlaced | GangEvicted | GangWaits | GangRefused
