"""The gang scheduler: all or nothing, no starvation, no deadlock of two halves."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from tests.placement.test_packing import random_cluster, random_gang

from pigou.config import ConfigError
from pigou.placement.gang import (
    Gang,
    GangEvicted,
    GangPlaced,
    GangPlacement,
    GangRefused,
    GangWaits,
    Pack,
    PlacementEffect,
    PlacementRefusal,
    Replica,
    RoleDemand,
    count_roles,
    is_packed,
)
from pigou.placement.gang_scheduler import GangScheduler
from pigou.placement.topology import Distance, Node, TopologyLevel
from pigou.request import Role


def both_gang(name: str, replicas: int, minimum: int | None = None) -> Gang:
    demand = RoleDemand(role=Role.BOTH, replicas=replicas, min_available=minimum)
    return Gang(name=name, roles=(demand,))


def pd_gang(name: str, prefill: int, decode: int, pack: Pack | None = None) -> Gang:
    return Gang(
        name=name,
        roles=(
            RoleDemand(role=Role.PREFILL, replicas=prefill),
            RoleDemand(role=Role.DECODE, replicas=decode),
        ),
        pack=pack,
    )


def hosts(count: int, gpus: int) -> list[Node]:
    return [Node(host=f"h{i}", rack=f"r{i // 2}", zone="z", gpus=gpus) for i in range(count)]


def names(effects: Iterable[PlacementEffect], kind: type[PlacementEffect]) -> list[str]:
    return [effect.gang for effect in effects if isinstance(effect, kind)]


def test_a_gang_that_does_not_fit_takes_nothing() -> None:
    scheduler = GangScheduler(hosts(2, 2))
    scheduler.submit(both_gang("a", 3))
    assert names(scheduler.submit(both_gang("b", 3)), GangWaits) == ["b"]
    assert sum(scheduler.free.values()) == 1
    assert scheduler.placement("b") is None
    assert "has room for 1 now" in scheduler.waiting["b"]


def test_a_gang_that_fits_no_empty_fleet_is_refused() -> None:
    scheduler = GangScheduler(hosts(2, 2))
    (effect,) = scheduler.submit(both_gang("a", 5))
    assert isinstance(effect, GangRefused)
    assert "has room for 4" in effect.reason
    assert not scheduler.waiting


def test_two_gangs_of_all_nodes_run_one_after_the_other() -> None:
    """Volcano 3373: two jobs of 100 pods on 100 nodes, each with a part."""
    scheduler = GangScheduler(hosts(100, 1), max_steps=50)
    assert names(scheduler.submit(both_gang("a", 100)), GangPlaced) == ["a"]
    assert names(scheduler.submit(both_gang("b", 100)), GangWaits) == ["b"]
    assert names(scheduler.release("a"), GangPlaced) == ["b"]


def test_a_role_is_never_admitted_without_the_other() -> None:
    """Kueue 2796: a master without its worker."""
    scheduler = GangScheduler(hosts(1, 2))
    scheduler.submit(both_gang("other", 1))
    assert names(scheduler.submit(pd_gang("pd", 1, 1)), GangWaits) == ["pd"]
    assert scheduler.free == {"h0": 1}


def test_a_gang_below_its_minimum_goes_before_fresh_ones_after_a_repair() -> None:
    """Volcano 5805: fair shares put a partly admitted gang behind fresh jobs for ever."""
    nodes = hosts(2, 2)
    scheduler = GangScheduler(nodes)
    scheduler.submit(both_gang("old", 4))
    scheduler.submit(both_gang("fresh", 2))
    assert names(scheduler.node_down("h1"), GangPlaced) == []
    assert list(scheduler.waiting) == ["old", "fresh"]
    assert names(scheduler.node_up(nodes[1]), GangPlaced) == ["old"]
    assert list(scheduler.waiting) == ["fresh"]


def test_two_halves_never_wait_for_each_other() -> None:
    nodes = hosts(2, 2)
    spread = Pack(level=TopologyLevel.ZONE)
    scheduler = GangScheduler(nodes)
    for name in ("a", "b"):
        scheduler.submit(pd_gang(name, 1, 1, spread))
    halves = [Replica(Role.PREFILL, "h0", 1), Replica(Role.DECODE, "h1", 1)]
    for entry in scheduler._entries.values():
        entry.replicas = list(halves)
    effects = scheduler.node_down("h1")
    assert names(effects, GangEvicted) == ["b"]
    assert names(effects, GangPlaced) == ["a"]
    assert count_roles(scheduler._entries["a"].replicas) == {Role.PREFILL: 1, Role.DECODE: 1}
    assert names(scheduler.node_up(nodes[1]), GangPlaced) == ["b"]


def test_a_gang_is_passed_a_bounded_number_of_times() -> None:
    scheduler = GangScheduler(hosts(1, 4), max_passed=2)
    scheduler.submit(both_gang("first", 2))
    scheduler.submit(both_gang("large", 4))
    placed = []
    for number in range(5):
        placed += names(scheduler.submit(both_gang(f"small{number}", 1)), GangPlaced)
    assert placed == ["small0", "small1"]
    scheduler.release("first")
    assert "large" in scheduler.waiting
    scheduler.release("small0")
    assert names(scheduler.release("small1"), GangPlaced) == ["large"]


def test_a_gang_gets_its_minimum_and_grows_when_nobody_waits() -> None:
    nodes = hosts(2, 2)
    scheduler = GangScheduler(nodes[:1])
    scheduler.submit(both_gang("a", 4, minimum=1))
    assert scheduler.free == {"h0": 0}
    (effect,) = scheduler.node_up(nodes[1])[:1]
    assert isinstance(effect, GangPlaced)
    assert effect.added == (Replica(Role.BOTH, "h1", 1),)
    assert scheduler.free == {"h0": 0, "h1": 0}


def test_a_gang_moves_as_a_whole_where_its_domain_is_too_small_now() -> None:
    nodes = [*hosts(2, 2), Node(host="x", rack="other", zone="z", gpus=4)]
    scheduler = GangScheduler(nodes)
    scheduler.submit(pd_gang("blocker", 2, 2, Pack(level=TopologyLevel.HOST, required=True)))
    scheduler.submit(pd_gang("pd", 2, 2, Pack(level=TopologyLevel.RACK, required=True)))
    scheduler.release("blocker")
    effects = scheduler.node_down("h1")
    assert names(effects, GangEvicted) == ["pd"]
    placement = scheduler.placement("pd")
    assert placement is not None
    assert {r.host for r in placement.replicas} == {"x"}


def test_scale_out_stays_within_the_distance_of_the_gang() -> None:
    nodes = [Node(host=f"h{i}", rack=f"r{i // 2}", zone="z", gpus=2) for i in range(6)]
    scheduler = GangScheduler(nodes)
    scheduler.submit(pd_gang("pd", 1, 1))
    before = scheduler.placement("pd")
    assert before is not None
    assert before.distance is Distance.HOST
    first = before.replicas[0].host
    assert first in ("h0", "h1")
    grown = [scheduler.scale_out("pd", Role.DECODE) for _ in range(2)]
    assert {r.host for r in grown if isinstance(r, Replica)} == {"h0", "h1"} - {first}
    after = scheduler.placement("pd")
    assert after is not None
    assert after.distance is Distance.RACK


def test_scale_out_never_leaves_a_required_pack() -> None:
    scheduler = GangScheduler(hosts(4, 1))
    scheduler.submit(pd_gang("pd", 1, 1, Pack(level=TopologyLevel.RACK, required=True)))
    refusal = scheduler.scale_out("pd", Role.DECODE)
    assert isinstance(refusal, PlacementRefusal)
    assert "requires one rack" in refusal.reason
    assert sum(scheduler.free.values()) == 2


def check_laws(scheduler: GangScheduler) -> None:
    """No GPU twice, no gang with a part of what it needs while it was never whole."""
    assert min(scheduler.free.values(), default=0) >= 0
    for entry in scheduler._entries.values():
        if not entry.admitted:
            assert not entry.replicas
        pack = entry.gang.pack
        if entry.replicas and pack is not None and pack.required:
            assert is_packed(entry.gang, [scheduler.nodes[r.host] for r in entry.replicas])


@pytest.mark.parametrize("part", range(2))
def test_any_history_ends_with_every_gang_that_fits_served_in_turn(part: int) -> None:
    """Gangs come, nodes fail and return; then gangs end in order, and each gets its turn."""
    for seed in range(60 * part, 60 * (part + 1)):
        rng = Random(seed)
        nodes = random_cluster(rng)
        scheduler = GangScheduler(nodes, max_steps=300)
        for number in range(12):
            event = rng.random()
            if event < 0.6:
                scheduler.submit(random_gang(rng, f"g{number}"))
            elif event < 0.75 and scheduler.nodes:
                scheduler.node_down(rng.choice(sorted(scheduler.nodes)))
            elif event < 0.9:
                scheduler.node_up(rng.choice(nodes))
            elif scheduler._entries:
                scheduler.release(rng.choice(sorted(scheduler._entries)))
            check_laws(scheduler)
        for node in nodes:
            if node.host not in scheduler.nodes:
                scheduler.node_up(node)
        while scheduler._entries:
            whole = [n for n in scheduler._entries if n not in scheduler.waiting]
            assert whole, f"seed {seed}: all wait: {scheduler.waiting}"
            assert isinstance(scheduler.placement(whole[0]), GangPlacement)
            scheduler.release(whole[0])
            check_laws(scheduler)


def test_a_name_is_used_once() -> None:
    scheduler = GangScheduler(hosts(1, 2))
    scheduler.submit(both_gang("a", 1))
    with pytest.raises(ConfigError, match="'a' is there already"):
        scheduler.submit(both_gang("a", 1))
