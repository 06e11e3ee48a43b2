"""A simulated fleet on hosts: transfers take the way of their distance, workers are placed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from setups import FleetConfig, WorkerGroup, open_loop, simulation

from pigou.config import ConfigError
from pigou.placement.topology import Distance, distance
from pigou.request import Role
from pigou.sim.fleet_config import TopologyConfig
from pigou.sim.network import LinkConfig, Network, Way
from pigou.sim.virtual_clock import EPOCH, Clock

RACKS = [{"count": 2, "gpus": 4, "rack": f"r{rack}", "zone": "z"} for rack in range(2)]


def topology(**rest: Any) -> TopologyConfig:
    return msgspec.convert({"hosts": RACKS} | rest, TopologyConfig)


def fleet(prefill: int = 2, decode: int = 2, **rest: Any) -> FleetConfig:
    groups = (
        WorkerGroup(role=Role.PREFILL, count=prefill), WorkerGroup(role=Role.DECODE, count=decode),
    )  # fmt: skip
    return FleetConfig(workers=groups, topology=topology(**rest))


def arrival_ns(way: Way, size: int, transfers: int = 1) -> list[int]:
    """When transfers arrive; without latency that is a nanosecond after the last byte."""
    clock, ends = Clock(), []
    network = Network(LinkConfig(gbps=8.0, latency_us=0.0), clock, lambda _a, _b: way)
    for _ in range(transfers):
        network.send(0, 1, size, EPOCH, lambda at: ends.append(at - EPOCH))
    while clock.step():
        pass
    return ends


def test_a_transfer_is_as_quick_as_the_slower_of_link_and_way() -> None:
    assert arrival_ns(Way(0.5, 0), 1000) == [1001]
    assert arrival_ns(Way(3.0, 70), 1000) == [3070]
    assert arrival_ns(Way(3.0, 0), 1000, transfers=2) == [3001, 3001]
    assert arrival_ns(Way(1.5, 0), 1000, transfers=2) == [2001, 2001]


def test_within_a_host_the_links_of_workers_are_not_used() -> None:
    assert arrival_ns(Way(0.1, 5, own_links=False), 1000, transfers=2) == [105, 105]


def locations(run: Any) -> dict[str, Any]:
    return {worker.name: worker.info.location for worker in run.fleet.workers}


def test_workers_are_placed_as_one_gang_on_the_nearest_hosts() -> None:
    run = simulation(open_loop(), fleet())
    assert len({location.host for location in locations(run).values()}) == 1


def test_random_placement_is_seeded_and_keeps_to_the_room() -> None:
    runs = [simulation(open_loop(), fleet(8, 8, placement="random"), seed=s) for s in (1, 1, 2)]
    first, again, other = (locations(run) for run in runs)
    assert first == again != other
    hosts = [location.host for location in first.values()]
    assert max(hosts.count(host) for host in set(hosts)) <= 4


def test_a_fleet_that_its_hosts_have_no_room_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 17 GPUs, and 16 are free"):
        simulation(open_loop(), fleet(8, 9))
    pack = {"level": "rack", "required": True}
    with pytest.raises(ConfigError, match="requires one rack with 10 GPUs"):
        simulation(open_loop(), fleet(5, 5, pack=pack))


def test_costs_must_grow_with_the_distance() -> None:
    with pytest.raises(ConfigError, match="costs by distance"):
        simulation(open_loop(), fleet(rack={"gbps": 1.0, "latency_us": 1.0}))


def test_a_worker_that_joins_stays_near_and_one_that_goes_frees_its_host() -> None:
    run = simulation(open_loop(), fleet(2, 2))
    home = run.fleet.workers[0].info.location
    joined = run.membership.add("decode", EPOCH)
    assert distance(joined.info.location, home) <= Distance.RACK
    run.membership.remove(joined, EPOCH)
    placer = run.fleet.placer
    assert placer is not None
    for _ in range(12):
        run.membership.add("decode", EPOCH)
    assert "has room for 0" in run.membership.start_refusal("decode")


def test_far_pairs_take_longer_to_the_first_token_than_near_ones() -> None:
    ttft_s = {}
    for placement in ("cost", "random"):
        config = fleet(4, 4, placement=placement, zone={"gbps": 100.0, "latency_us": 50_000.0})
        figures = simulation(open_loop(count=100), config).run().document()
        ttft_s[placement] = figures["ttft_s"]["mean"]
    assert ttft_s["cost"] < ttft_s["random"] - 0.005
