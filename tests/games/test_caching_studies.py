"""Caching by topology, the cache paradox, and tiers that lead: closed forms and brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from pigou_lab.games.caching import CachingGame
from pigou_lab.games.caching_studies import (
    TIERS,
    SocialCosts,
    TierGame,
    cache_paradoxes,
    cluster_costs,
    costs_of,
    crowded,
    lead,
    line_costs,
    topology_costs,
    topology_distances,
)
from pigou_lab.games.hierarchy import two_levels


def enumerated(distance: np.ndarray, alpha: float) -> SocialCosts:
    return costs_of(CachingGame(distance, np.ones((len(distance), 1)), alpha))


@pytest.mark.parametrize(
    ("nodes", "alpha", "costs"), [(5, 2, (7, 7, 8)), (7, 3, (12, 12, 15)), (9, 4, (18, 18, 24))]
)
def test_lines_cost_what_is_known(nodes: int, alpha: float, costs: tuple[float, ...]) -> None:
    assert line_costs(nodes, alpha) == costs


@pytest.mark.parametrize("nodes", range(1, 8))
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 9.0])
def test_lines_cost_what_enumeration_says(nodes: int, alpha: float) -> None:
    line = topology_distances("line", nodes)
    assert line_costs(nodes, alpha) == pytest.approx(enumerated(line, alpha))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.5, 3.0, 4.0])
@pytest.mark.parametrize(("clusters", "size"), [(1, 5), (2, 3), (3, 2), (7, 1)])
@pytest.mark.parametrize(("near", "far"), [(1, 1), (0, 2), (1, 3), (0.5, 4)])
def test_clusters_cost_what_enumeration_says(
    alpha: float, clusters: int, size: int, near: float, far: float
) -> None:
    distance = two_levels(clusters, size, near, far)
    expected = enumerated(distance, alpha)
    assert cluster_costs(clusters, size, alpha, near, far) == pytest.approx(expected)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 7.0])
def test_a_complete_graph_loses_nothing(alpha: float) -> None:
    assert topology_costs("complete", 9, alpha).price_of_anarchy == 1


def test_a_lines_price_grows_as_the_root_of_its_length_and_clusters_as_their_size() -> None:
    lines = [topology_costs("line", n, (n - 1) / 2).price_of_anarchy for n in (25, 101, 401)]
    assert all(1.7 < long / short < 2.2 for short, long in pairwise(lines))
    clusters = [topology_costs("two-level", n, (n - 1) / 2).price_of_anarchy for n in (32, 64, 128)]
    assert all(1.8 < long / short < 2.1 for short, long in pairwise(clusters))


@pytest.mark.parametrize(("topology", "nodes"), [("complete", 2), ("line", 4), ("two-level", 4)])
def test_one_slot_a_node_costs_ten_times_the_optimum_on_any_topology(
    topology: str, nodes: int
) -> None:
    costs = costs_of(crowded(topology_distances(topology, nodes), 20.0))
    assert costs == pytest.approx((2, 20, 20))


def test_the_price_of_slots_grows_with_the_cost_of_a_miss() -> None:
    two = topology_distances("complete", 2)
    prices = [costs_of(crowded(two, miss)).price_of_stability for miss in (20, 200, 2000)]
    assert prices == pytest.approx([10, 100, 1000])


@pytest.mark.parametrize("miss", [4.0, 10.0, 100.0])
def test_more_room_or_a_link_makes_every_equilibrium_dearer(miss: float) -> None:
    slot, link = cache_paradoxes(miss)
    assert (slot.after.capacity >= slot.before.capacity).all()
    assert (slot.after.distance == slot.before.distance).all()
    assert (link.after.distance <= link.before.distance).all()
    assert (link.after.capacity == link.before.capacity).all()
    for one in (slot, link):
        before, after = costs_of(one.before), costs_of(one.after)
        assert (one.before.demand == one.after.demand).all()
        assert after.optimum <= before.optimum  # what was there is still there
        assert after.best > before.worst
        assert before.price_of_anarchy == 1


def test_the_paradox_costs_what_its_docs_say() -> None:
    (slot, _) = cache_paradoxes()
    before, after = costs_of(slot.before), costs_of(slot.after)
    assert before == pytest.approx((20.09, 20.09, 20.09))
    assert after == pytest.approx((19.09, 109.45, 109.45))


def test_hbm_that_leads_picks_its_best_equilibrium() -> None:
    found = lead(TIERS)
    assert found.equilibria == [(24, 37), (40, 53)]
    assert (found.leads.payoffs[0], found.held, found.worth) == (24, [(0,), (1,)], (0, 16))


def test_leading_may_cost_the_worker_more() -> None:
    """HBM saves 10 seconds, and DRAM pays 16 for the slot that it is made to use."""
    found = lead(TierGame((2, 4), (0, 1), (1, 1), (0, 16), 7))
    assert sorted(found.equilibria) == [(4, 20), (14, 14)]
    assert (found.leads.payoffs[0], found.leads.social) == (4, 20)


@pytest.mark.parametrize("seed", range(40))
def test_with_one_tier_below_the_best_commitment_is_hbms_best_equilibrium(seed: int) -> None:
    rng = np.random.default_rng(seed)
    demand = rng.integers(1, 12, rng.integers(2, 5)).tolist()
    slow = int(rng.integers(1, 6))
    slots, miss = rng.integers(1, 3, 2).tolist(), float(slow + rng.integers(1, 10))
    price = float(rng.integers(0, 30))
    found = lead(TierGame(demand, (0, slow), slots, (0, price), miss))
    assert found.worth is not None
    assert found.worth[0] == 0
    assert found.leads.payoffs[0] == pytest.approx(brute(demand, slow, slots, price, miss))


def brute(demand: list[int], slow: float, slots: list[int], price: float, miss: float) -> float:
    """HBM's cost, of its best set and the reply of DRAM that is the best for it among ties."""
    items, best = range(len(demand)), float("inf")
    for first in (set(c) for k in range(slots[0] + 1) for c in combinations(items, k)):
        replies = []
        for second in (set(c) for k in range(slots[1] + 1) for c in combinations(items, k)):
            passed = sum(
                demand[i] * (slow if i in second else miss) for i in items if i not in first
            )
            replies.append((passed + price * len(second), passed))
        least = min(own for own, _ in replies)
        best = min(best, min(passed for own, passed in replies if own <= least + 1e-9))
    return best


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: line_costs(0, 1.0), "0 nodes, alpha 1.0"),
        (lambda: line_costs(3, float("inf")), "finite alpha"),
        (lambda: cluster_costs(2, 2, 1.0, 3.0, 2.0), "0 <= near <= far"),
        (lambda: cluster_costs(12, 30, 1.0), "too many"),
        (lambda: topology_costs("ring", 4, 1.0), "topology is 'ring'"),
        (lambda: topology_costs("two-level", 5, 1.0), "a multiple of the clusters"),
        (lambda: cache_paradoxes(2.0), "a finite cost above 2"),
        (lambda: TierGame((1,), (0, 1), (1,), (0, 0), 2), "one of each a tier"),
        (lambda: TierGame((1,), (1, 0), (1, 1), (0, 0), 2), "cheap to dear"),
        (lambda: TierGame((), (0,), (1,), (0,), 2), "finite, at least 0"),
        (lambda: TierGame((1,) * 12, (0, 1), (6, 6), (0, 0), 2).normal_form(), "too many"),
        (lambda: costs_of(CachingGame(np.zeros((20, 20)), np.ones((20, 2)), 1.0)), "too large"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()  # type: ignore[operator]
