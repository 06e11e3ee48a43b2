"""Laws of the caching game, with and without capacities and tiers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pigou_lab.games import caching
from pigou_lab.games.caching import CachingGame


def line(nodes: int, alpha: float) -> CachingGame:
    """One object that everybody wants, on a line with unit spacing."""
    distance = np.abs(np.subtract.outer(range(nodes), range(nodes)))
    return CachingGame(distance, np.ones((nodes, 1)), alpha)


def random_game(seed: int, **more: float) -> CachingGame:
    rng = np.random.default_rng(seed)
    distance = rng.random((3, 3))
    distance = distance + distance.T
    np.fill_diagonal(distance, 0)
    return CachingGame(
        distance,
        rng.random((3, 3)),
        0.1 * rng.random(),
        rng.integers(1, 3, (3, 2)),
        miss_cost=3.0,
        tiers=(0.0, 0.3),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("nodes", "alpha", "costs"), [(5, 2, (7, 7, 8)), (7, 3, (12, 12, 15)), (9, 4, (18, 18, 24))]
)
def test_a_line_costs_what_brute_force_says(
    nodes: int, alpha: float, costs: tuple[float, float, float]
) -> None:
    game = line(nodes, alpha)
    found = [game.social_cost(p) for p in game.equilibria()]
    assert (game.social_cost(game.optimum()), min(found), max(found)) == costs
    assert game.price_of_anarchy() == pytest.approx(costs[2] / costs[0])
    assert game.price_of_stability() == 1


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_without_capacities_a_complete_graph_loses_nothing(alpha: float) -> None:
    assert CachingGame(1 - np.eye(5), np.ones((5, 1)), alpha).price_of_anarchy() == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_best_response_is_the_best_of_all_rows(seed: int) -> None:
    game = random_game(seed)
    rng = np.random.default_rng(seed)
    placement = np.array([[0, 1, -1], [-1, 0, 1], [1, -1, -1]])[rng.permutation(3)]
    for node in range(3):
        answer = placement.copy()
        answer[node] = game.best_response(node, placement)
        offers = []
        for row in product((-1, 0, 1), repeat=3):
            counts = [row.count(t) for t in (0, 1)]
            if all(c <= k for c, k in zip(counts, game.capacity[node], strict=True)):
                other = placement.copy()
                other[node] = row
                offers.append(game.node_costs(other)[node])
        assert game.node_costs(answer)[node] == pytest.approx(min(offers))
        assert all((answer[node] == t).sum() <= game.capacity[node, t] for t in (0, 1))


@pytest.mark.parametrize("seed", range(3))
def test_search_finds_no_more_than_enumeration_and_as_good_an_optimum(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = random_game(seed)
    monkeypatch.setattr(caching, "MAX_PROFILES", 10)
    searched = random_game(seed, restarts=10)
    assert game.exact
    assert not searched.exact
    every = {p.tobytes() for p in game.equilibria()}
    assert {p.tobytes() for p in searched.equilibria()} <= every
    best = game.social_cost(game.optimum())
    assert searched.social_cost(searched.optimum()) == pytest.approx(best)


def test_a_large_instance_is_searched() -> None:
    rng = np.random.default_rng(1)
    where = rng.random((6, 2))
    distance = np.linalg.norm(where[:, None] - where[None], axis=2)
    game = CachingGame(
        distance, rng.random((6, 8)), 0.0, capacity=2, miss_cost=4.0, restarts=4, seed=2
    )
    assert not game.exact
    assert all(map(game.is_equilibrium, game.equilibria()))
    assert game.price_of_anarchy() >= game.price_of_stability() >= 1 - 1e-9


def test_what_nobody_wants_costs_nothing_even_where_a_miss_is_infinite() -> None:
    game = CachingGame([[0, 1], [1, 0]], [[1, 0], [0, 0]], 0.5)
    assert game.social_cost([[0, -1], [-1, -1]]) == 0.5
    assert game.social_cost(game.optimum()) == 0.5


def test_the_nearest_copy_counts_with_its_tier() -> None:
    game = CachingGame([[0, 2], [2, 0]], [[1], [1]], 0.0, tiers=(0.0, 1.0), miss_cost=9.0)
    assert game.node_costs([[1], [-1]]).tolist() == [1.0, 3.0]
    assert game.node_costs([[-1], [-1]]).tolist() == [9.0, 9.0]


def test_the_caching_game_says_what_is_wrong_with_its_arguments() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        CachingGame(np.eye(2), np.ones((3, 1)), 1.0)
    with pytest.raises(ValueError, match="finite and >= 0"):
        CachingGame(-np.eye(2), np.ones((2, 1)), 1.0)
    with pytest.raises(ValueError, match="cheap to dear"):
        CachingGame(np.eye(2), np.ones((2, 1)), 1.0, tiers=(1.0, 0.0))
    with pytest.raises(ValueError, match="capacity has shape"):
        CachingGame(np.eye(2), np.ones((2, 1)), 1.0, capacity=[[1, 2]], tiers=(0.0, 1.0))
    with pytest.raises(ValueError, match="miss_cost"):
        CachingGame(np.eye(2), np.ones((2, 1)), 1.0, miss_cost=-1.0)
