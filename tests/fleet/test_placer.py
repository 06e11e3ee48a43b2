"""The placer of a live fleet: all workers get nodes or none, and lost ones get others."""

from __future__ import annotations

import pytest

from pigou.fleet.config import FleetError
from pigou.fleet.ray.ray_provider import Placer
from pigou.placement.gang import Pack
from pigou.placement.topology import Node, TopologyLevel
from pigou.request import Role

WORKERS = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


def nodes(*gpus: int) -> list[Node]:
    return [
        Node(host=f"h{i}", rack=f"r{i // 2}", zone="z", gpus=count) for i, count in enumerate(gpus)
    ]


def hosts(placer: Placer) -> dict[str, str]:
    locations = {id: placer.location(id) for id in WORKERS}
    return {id: location.host for id, location in locations.items() if location is not None}


def test_all_workers_are_placed_near_each_other() -> None:
    placer = Placer()
    placer.begin(nodes(1, 1, 3, 1), WORKERS)
    assert set(hosts(placer).values()) == {"h2"}


def test_a_fleet_that_does_not_fit_takes_nothing_and_says_why() -> None:
    with pytest.raises(FleetError, match="3 workers of 1 GPUs do not fit the 2 nodes with 2"):
        Placer().begin(nodes(1, 1), WORKERS)
    rack = Pack(level=TopologyLevel.RACK, required=True)
    with pytest.raises(FleetError, match="within one rack"):
        Placer(pack=rack).begin(nodes(1, 1, 1), WORKERS)
    with pytest.raises(FleetError, match="has room for 0"):
        Placer(gpus=2).begin(nodes(1, 1, 1), WORKERS)


def test_a_worker_whose_node_is_lost_gets_another_and_the_rest_stay() -> None:
    placer, cluster = Placer(), nodes(2, 1, 1)
    placer.begin(cluster, WORKERS)
    before = hosts(placer)
    lost = [id for id, host in before.items() if host == "h1"]
    placer.update([cluster[0], cluster[2]])
    after = hosts(placer)
    assert lost
    assert {id: after[id] for id in lost} == dict.fromkeys(lost, "h2")
    assert all(after[id] == host for id, host in before.items() if id not in lost)


def test_a_worker_that_no_node_has_room_for_waits_for_one() -> None:
    placer, cluster = Placer(), nodes(2, 1)
    placer.begin(cluster, WORKERS)
    (lost,) = [id for id, host in hosts(placer).items() if host == "h1"]
    placer.update(cluster[:1])
    assert placer.location(lost) is None
    with pytest.raises(FleetError, match=f"no node has room for {lost} now"):
        placer.add(lost, WORKERS[lost])
    placer.update(cluster)
    assert hosts(placer)[lost] == "h1"


def test_workers_that_join_stay_near_and_those_that_go_make_room() -> None:
    placer = Placer()
    placer.begin(nodes(3, 1, 8), WORKERS)
    home = hosts(placer)["prefill-0"]
    assert placer.add("decode-2", Role.DECODE).rack == ("r1" if home == "h2" else "r0")
    for number in range(3, 11):
        placer.add(f"decode-{number}", Role.DECODE)
    assert "has room for 0" in placer.refusal(Role.DECODE)
    placer.release("decode-5")
    assert placer.refusal(Role.DECODE) == ""


def test_a_flip_keeps_the_node() -> None:
    placer = Placer()
    placer.begin(nodes(4), WORKERS)
    placer.flip("decode-1", Role.PREFILL)
    assert placer.location("decode-1") is not None
    placer.add("prefill-1", Role.PREFILL)
