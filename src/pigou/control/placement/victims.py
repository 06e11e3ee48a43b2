"""Victims by topology: which worker goes, or changes its role, so that KV has the shortest way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pigou.control.placement.cost import placement_cost
from pigou.control.placement.gang import Gang, Replica
from pigou.control.placement.topology import DistanceCosts, Node
from pigou.request import Location, Role


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


def removal_costs(
    own: Sequence[Location], others: Sequence[Location], costs: DistanceCosts
) -> list[float]:
    """Return for each worker of a role the seconds a byte of KV takes in the mean without it.

    The mean is over all pairs of one that stays and a worker of the other role; 0 where none stays.

    Args:
        own: of the workers of the role that shrinks.
        others: of those that they exchange KV with.
        costs: seconds a byte by distance.
    """
    sums = [sum(costs.seconds(one, other) for other in others) for one in own]
    pairs = (len(own) - 1) * len(others)
    return [(sum(sums) - one) / pairs if pairs else 0.0 for one in sums]
