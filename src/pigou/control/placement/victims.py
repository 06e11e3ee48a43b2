"""Victims by topology: which worker goes, or changes its role, so that KV has the shortest way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pigou.control.placement.cost import placement_cost
from pigou.control.placement.gang import Gang, Replica
from pigou.control.placement.topology import DistanceCosts, Node
from pigou.request import Role


def removal_victim(
    gang: Gang,
    replicas: Sequence[Replica],
    role: Role,
    nodes: Mapping[str, Node],
    costs: DistanceCosts,
) -> Replica | None:
    """Return the replica of a role without which the rest costs least; None where there is none.

    Of equals it is the one on the host with the fewest others, so that hosts come free.
    """

    def rank(replica: Replica) -> tuple[float, int, str]:
        rest = list(replicas)
        rest.remove(replica)
        others = sum(r.gpus for r in rest if r.host == replica.host)
        return placement_cost(gang, rest, nodes, costs), others, replica.host

    return min((r for r in replicas if r.role is role), key=rank, default=None)


def flip_victim(
    gang: Gang,
    replicas: Sequence[Replica],
    role: Role,
    next_role: Role,
    nodes: Mapping[str, Node],
    costs: DistanceCosts,
) -> Replica | None:
    """Return the replica of a role that costs least with another role; None where there is none."""

    def rank(replica: Replica) -> tuple[float, str]:
        rest = list(replicas)
        rest[rest.index(replica)] = Replica(next_role, replica.host, replica.gpus)
        return placement_cost(gang, rest, nodes, costs), replica.host

    return min((r for r in replicas if r.role is role), key=rank, default=None)
