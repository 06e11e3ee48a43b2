"""A gang: workers of several roles placed together or not at all, and their transfer cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from pigou.config import ConfigError, check_bounds
from pigou.placement.topology import (
    Distance,
    DistanceCosts,
    Node,
    TopologyLevel,
    distance,
    domain,
)
from pigou.request import Location, Role


class Pack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Locality constraint of a gang."""

    level: TopologyLevel  # one domain of this level shall hold all workers
    required: bool = False  # refuse rather than spread; else the cheapest placement counts


class RoleDemand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers of one role in a gang. A replica fits on one node."""

    role: Role
    replicas: int
    gpus: int = 1
    min_available: int | None = None  # fewest replicas to place; None for all
    kind: str = ""  # GPU kind; empty for any
    labels: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        role = f"role {self.role.value}"
        check_bounds(f"{role}: replicas", self.replicas, ge=1)
        check_bounds(f"{role}: gpus", self.gpus, ge=1)
        minimum = f"{role}: min_available"
        check_bounds(minimum, self.minimum, ge=1, le=self.replicas, unit=", the replicas")

    @property
    def minimum(self) -> int:
        """Fewest replicas to place."""
        return self.replicas if self.min_available is None else self.min_available

    def fits(self, node: Node) -> bool:
        """True if a node has the kind and labels; room is not checked."""
        right = not self.kind or self.kind == node.kind
        return right and all(node.labels.get(name) == v for name, v in self.labels.items())


class Gang(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers that are placed together."""

    name: str
    roles: tuple[RoleDemand, ...]
    pack: Pack | None = None  # None for the cheapest placement
    kv_bytes_per_s: float = 1e9  # from prefill to decode workers, spread evenly over all pairs

    def __post_init__(self) -> None:
        names = [demand.role for demand in self.roles]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"gang {self.name}: give each of its roles once, at least one")
        check_bounds(f"gang {self.name}: kv_bytes_per_s", self.kv_bytes_per_s, ge=0)

    def demand(self, role: Role) -> RoleDemand | None:
        """Return the demand of a role; None if the gang has none."""
        return next((demand for demand in self.roles if demand.role is role), None)

    @property
    def minimum(self) -> dict[Role, int]:
        """Fewest replicas to place, by role."""
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
    """Nodes of a gang's workers."""

    replicas: tuple[Replica, ...]
    # mean KV transfers in flight: bytes a second times seconds a byte, over pairs
    cost: float = 0.0
    distance: Distance = Distance.HOST
    packed: bool = True  # whether one domain of the gang's level holds all
    optimal: bool = True  # whether proven cheapest


class PlacementRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a gang cannot be placed now; it takes nothing."""

    reason: str


def count_roles(replicas: Sequence[Replica]) -> dict[Role, int]:
    """Return the number of replicas by role."""
    counts: dict[Role, int] = {}
    for replica in replicas:
        counts[replica.role] = counts.get(replica.role, 0) + 1
    return counts


def placement_cost(
    gang: Gang, replicas: Sequence[Replica], nodes: Mapping[str, Node], costs: DistanceCosts
) -> float:
    """Return mean KV transfers in flight: B / (P D) times seconds a byte, summed over pairs."""
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
    """Return the placement of replicas with cost, distance and packing."""
    return GangPlacement(
        replicas=tuple(replicas),
        cost=placement_cost(gang, replicas, nodes, costs),
        distance=farthest(replicas, nodes),
        packed=is_packed(gang, [nodes[r.host] for r in replicas]),
        optimal=optimal,
    )


def farthest(replicas: Sequence[Replica], nodes: Mapping[str, Node]) -> Distance:
    """Return the largest distance of a prefill-decode pair; 0 without one."""
    prefill = {nodes[r.host].location for r in replicas if r.role is Role.PREFILL}
    decode = {nodes[r.host].location for r in replicas if r.role is Role.DECODE}
    return max((distance(p, d) for p in prefill for d in decode), default=Distance.HOST)


def is_packed(gang: Gang, nodes: Iterable[Node]) -> bool:
    """True if nodes are in one domain of the gang's level."""
    if gang.pack is None:
        return True
    domains = {domain(node.location, gang.pack.level) for node in nodes}
    return len(domains) <= 1 and "" not in domains


def removal_costs(
    own: Sequence[Location], others: Sequence[Location], costs: DistanceCosts
) -> list[float]:
    """Return mean KV seconds a byte to `others` without each worker of `own`; 0 if none stay."""
    sums = [sum(costs.seconds(one, other) for other in others) for one in own]
    pairs = (len(own) - 1) * len(others)
    return [(sum(sums) - one) / pairs if pairs else 0.0 for one in sums]


# --- effects of the scheduler, for a driver to carry out ------------------------------------------


class GangPlaced(msgspec.Struct, frozen=True):
    """A gang got nodes: start `added`; all of `placement` run then."""

    gang: str
    placement: GangPlacement
    added: tuple[Replica, ...]


class GangEvicted(msgspec.Struct, frozen=True):
    """A gang below its minimum gives up its replicas and waits again."""

    gang: str
    removed: tuple[Replica, ...]
    reason: str


class GangWaits(msgspec.Struct, frozen=True):
    """A gang waits for nodes."""

    gang: str
    reason: str


class GangRefused(msgspec.Struct, frozen=True):
    """A gang that would not fit an empty fleet is refused."""

    gang: str
    reason: str


PlacementEffect: TypeAlias = GangPlaced | GangEvicted | GangWaits | GangRefused
