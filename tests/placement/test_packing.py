"""Packing against brute force over all placements, on random clusters of up to six hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from random import Random

import pytest

from pigou.placement.gang import (
    Gang,
    GangPlacement,
    Pack,
    PlacementRefusal,
    Replica,
    RoleDemand,
    is_packed,
    placement_cost,
)
from pigou.placement.packing import free_gpus, pack_gang
from pigou.placement.topology import DistanceCosts, Node, TopologyLevel
from pigou.request import Role

COSTS = DistanceCosts()


def random_cluster(rng: Random) -> list[Node]:
    return [
        Node(
            host=f"h{i}", rack=rng.choice(["r0", "r1", "r2", ""]), zone=rng.choice(["a", "b", ""]),
            gpus=rng.randint(0, 4), kind=rng.choice(["h100", "l40"]),
        )
        for i in range(rng.randint(1, 6))
    ]  # fmt: skip


def random_gang(rng: Random, name: str = "g") -> Gang:
    roles = rng.choice([[Role.PREFILL, Role.DECODE], [Role.PREFILL, Role.DECODE], [Role.BOTH]])
    pack = rng.choice(
        [None, *(Pack(level=x, required=y) for x in TopologyLevel for y in (True, False))]
    )
    demands = [
        RoleDemand(
            role=role, replicas=rng.randint(1, 3), gpus=rng.choice([1, 1, 2]),
            kind=rng.choice(["", "", "", "h100"]),
        )
        for role in roles
    ]  # fmt: skip
    return Gang(name=name, roles=tuple(demands), pack=pack)


def all_placements(gang: Gang, nodes: list[Node]) -> Iterator[list[Replica]]:
    """Every way to give each replica a host, with no thought for room."""
    ways = [
        combinations_with_replacement([n.host for n in nodes if d.fits(n)], d.replicas)
        for d in gang.roles
    ]
    for hosts in product(*ways):
        yield [
            Replica(demand.role, host, demand.gpus)
            for demand, those in zip(gang.roles, hosts, strict=True)
            for host in those
        ]


def brute_force(gang: Gang, nodes: list[Node], stay: Sequence[Replica] = ()) -> float | None:
    by_host = {node.host: node for node in nodes}
    required = gang.pack is not None and gang.pack.required
    costs = [
        placement_cost(gang, replicas, by_host, COSTS)
        for replicas in all_placements(gang, nodes)
        if not Counter(stay) - Counter(replicas)
        and min(free_gpus(nodes, replicas).values(), default=0) >= 0
        and not (required and not is_packed(gang, [by_host[r.host] for r in replicas]))
    ]
    return min(costs, default=None)


def check_whole(gang: Gang, nodes: list[Node], placed: GangPlacement) -> None:
    assert min(free_gpus(nodes, placed.replicas).values()) >= 0
    for demand in gang.roles:
        hosts = [r.host for r in placed.replicas if r.role is demand.role]
        assert len(hosts) == demand.replicas
        assert all(demand.fits(node) for node in nodes if node.host in hosts)


@pytest.mark.parametrize("part", range(4))
def test_packing_is_the_cheapest_of_all_placements_on_250_random_clusters(part: int) -> None:
    refused = 0
    for seed in range(250 * part, 250 * (part + 1)):
        rng = Random(seed)
        nodes, gang = random_cluster(rng), random_gang(rng)
        free = free_gpus(nodes, ())
        packed, best = pack_gang(gang, nodes, free, gang.wanted, COSTS), brute_force(gang, nodes)
        if best is None:
            refused += 1
            assert isinstance(packed, PlacementRefusal), seed
            assert gang.name in packed.reason
            continue
        assert isinstance(packed, GangPlacement), (seed, packed)
        check_whole(gang, nodes, packed)
        assert packed.optimal
        assert packed.cost == pytest.approx(best, rel=1e-9), seed
    assert 0 < refused < 225


def test_what_a_gang_lacks_after_a_loss_is_packed_at_the_least_cost() -> None:
    repaired = 0
    for seed in range(250):
        rng = Random(seed)
        nodes, gang = random_cluster(rng), random_gang(rng)
        packed = pack_gang(gang, nodes, free_gpus(nodes, ()), gang.wanted, COSTS)
        if isinstance(packed, PlacementRefusal):
            continue
        lost = rng.choice(packed.replicas).host
        rest = [node for node in nodes if node.host != lost]
        stay = [replica for replica in packed.replicas if replica.host != lost]
        free = free_gpus(rest, stay)
        again = pack_gang(gang, rest, free, gang.wanted, COSTS, stay)
        best = brute_force(gang, rest, stay)
        if best is None:
            assert isinstance(again, PlacementRefusal), seed
            continue
        repaired += 1
        assert isinstance(again, GangPlacement), (seed, again)
        assert again.replicas[: len(stay)] == tuple(stay)
        check_whole(gang, rest, again)
        assert again.cost == pytest.approx(best, rel=1e-9), seed
    assert repaired > 20


def rack_of(number: int, hosts: int, gpus: int) -> list[Node]:
    return [
        Node(host=f"r{number}h{i}", rack=f"r{number}", zone="z", gpus=gpus) for i in range(hosts)
    ]


def pair_gang(pack: Pack | None = None, prefill: int = 2, decode: int = 2) -> Gang:
    return Gang(
        name="pd",
        roles=(
            RoleDemand(role=Role.PREFILL, replicas=prefill),
            RoleDemand(role=Role.DECODE, replicas=decode),
        ),
        pack=pack,
    )


def test_a_required_pack_is_refused_with_the_domain_that_came_closest() -> None:
    nodes = [*rack_of(0, 1, 2), *rack_of(1, 1, 3)]
    gang = pair_gang(Pack(level=TopologyLevel.RACK, required=True))
    packed = pack_gang(gang, nodes, free_gpus(nodes, ()), gang.wanted, COSTS)
    assert isinstance(packed, PlacementRefusal)
    assert "requires one rack with 4 GPUs" in packed.reason
    assert "z/r1: 3" in packed.reason


def test_a_preferred_pack_that_fits_nowhere_is_placed_and_says_so() -> None:
    nodes = [*rack_of(0, 1, 2), *rack_of(1, 1, 3)]
    gang = pair_gang(Pack(level=TopologyLevel.RACK))
    packed = pack_gang(gang, nodes, free_gpus(nodes, ()), gang.wanted, COSTS)
    assert isinstance(packed, GangPlacement)
    assert not packed.packed


def test_nodes_without_the_label_are_named_in_a_refusal() -> None:
    nodes = [Node(host="x", gpus=8)]
    gang = pair_gang(Pack(level=TopologyLevel.RACK, required=True))
    packed = pack_gang(gang, nodes, free_gpus(nodes, ()), gang.wanted, COSTS)
    assert isinstance(packed, PlacementRefusal)
    assert "1 nodes have no rack label" in packed.reason


def test_a_large_cluster_is_packed_into_one_rack_within_the_steps() -> None:
    nodes = [node for number in range(32) for node in rack_of(number, 8, 8)]
    gang = pair_gang(prefill=16, decode=48)
    packed = pack_gang(gang, nodes, free_gpus(nodes, ()), gang.wanted, COSTS, max_steps=500)
    assert isinstance(packed, GangPlacement)
    check_whole(gang, nodes, packed)
    assert len({r.host[:3] for r in packed.replicas}) == 1
