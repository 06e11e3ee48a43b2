"""Equilibria of caching on hierarchies: constructed in polynomial time, checked by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pigou.games import Floats
from pigou_lab.games.caching import CachingGame
from pigou_lab.games.hierarchy import check_hierarchy, hierarchy_equilibrium, two_levels


def random_hierarchy(rng: np.random.Generator, nodes: int) -> Floats:
    """Random merges at rising heights: an ultrametric."""
    distance = np.zeros((nodes, nodes))
    groups, height = [[node] for node in range(nodes)], 0.0
    while len(groups) > 1:
        height += float(rng.choice([0.0, 0.5, 1.0, 3.0]))
        first, second = sorted(rng.choice(len(groups), 2, replace=False).tolist())
        other = groups.pop(second)
        for one in groups[first]:
            distance[one, other] = distance[other, one] = height
        groups[first] = groups[first] + other
    return distance


def random_game(seed: int, nodes: int, objects: int) -> CachingGame:
    rng = np.random.default_rng(seed)
    return CachingGame(
        random_hierarchy(rng, nodes),
        rng.integers(0, 6, (nodes, objects)) * rng.choice([1.0, rng.random()]),
        rng.choice([0.0, 1.0, 2.5]) * rng.random(nodes),
        rng.integers(0, 3, nodes),
        miss_cost=[2.0, 20.0, None][rng.integers(3)],
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_construction_is_one_of_the_equilibria_that_enumeration_finds(seed: int) -> None:
    game = random_game(seed, 3, 3)
    found = hierarchy_equilibrium(game)
    assert game.exact
    assert found.placement.tobytes() in {p.tobytes() for p in game.equilibria()}
    assert found.swaps <= found.bound


@pytest.mark.parametrize("seed", range(15))
def test_no_node_of_a_larger_hierarchy_gains_by_leaving(seed: int) -> None:
    game = random_game(100 + seed, 12, 8)
    found = hierarchy_equilibrium(game)
    assert game.is_equilibrium(found.placement)
    assert found.swaps <= found.bound


def test_nodes_in_turns_hold_what_their_cluster_lacks() -> None:
    """Two clusters of two, two objects, a slot each: every cluster holds both, and none crosses."""
    game = CachingGame(two_levels(2, 2, 1, 10), np.ones((4, 2)), 0.0, capacity=1, miss_cost=50)
    placement = hierarchy_equilibrium(game).placement
    assert [sorted(np.argwhere(placement[i : i + 2] == 0)[:, 1].tolist()) for i in (0, 2)] == [
        [0, 1], [0, 1],
    ]  # fmt: skip
    assert game.social_cost(placement) == 4


def test_the_work_grows_as_a_polynomial() -> None:
    swaps = []
    for size in (4, 8, 16):
        game = CachingGame(
            two_levels(size // 2, 2, 1, 4), np.random.default_rng(size).random((size, size)), 0.0,
            capacity=2, miss_cost=20,
        )  # fmt: skip
        found = hierarchy_equilibrium(game)
        assert game.is_equilibrium(found.placement)
        swaps.append(found.swaps)
    assert math.log2(swaps[2] / swaps[0]) / 2 < 3  # no more than cubic here


def test_what_is_no_hierarchy_is_refused() -> None:
    line = np.abs(np.subtract.outer(range(3), range(3)))
    with pytest.raises(ValueError, match="0 to 2 is 2, and over 1 1 and 1"):
        hierarchy_equilibrium(CachingGame(line, np.ones((3, 1)), 1.0))
    with pytest.raises(ValueError, match="symmetric"):
        check_hierarchy([[0, 1], [2, 0]])
    with pytest.raises(ValueError, match="takes one, of cost 0"):
        hierarchy_equilibrium(CachingGame(np.zeros((1, 1)), [[1]], 0.0, tiers=(0.0, 1.0)))
