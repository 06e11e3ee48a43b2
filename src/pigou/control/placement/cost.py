"""The cost of a placement: the sum over prefill-decode pairs of KV bytes/s times seconds/byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pigou.control.placement.gang import Gang, GangPlacement, Replica
from pigou.control.placement.topology import (
    Distance,
    DistanceCosts,
    Node,
    distance,
    domain,
)
from pigou.request import Location, Role


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
