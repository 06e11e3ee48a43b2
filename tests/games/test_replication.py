"""Laws of the caching game with objects of any size: its optimum is that of the plain game."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.games.replication import ReplicationGame
from pigou_lab.games.caching import CachingGame


def random_game(seed: int, nodes: int, objects: int) -> tuple[np.ndarray, np.ndarray, float, float]:
    rng = np.random.default_rng(seed)
    demand = rng.integers(0, 5, (nodes, objects)).astype(float)
    return demand, rng.integers(0, 3, nodes), float(rng.choice([0.5, 1.0, 4.0])), 3.0


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_the_enumerated_caching_game(seed: int) -> None:
    demand, capacity, link, miss = random_game(seed, 3, 3)
    plain = CachingGame(link * (1 - np.eye(3)), demand, 0.0, capacity, miss_cost=miss)
    assert plain.exact
    shape = np.full(demand.shape, 1.0)
    game = ReplicationGame(demand, np.ones(3), capacity, miss * shape, link * shape)
    held, cost = game.optimum()
    assert cost == pytest.approx(plain.social_cost(plain.optimum()))
    assert (held @ np.ones(3) <= capacity + 1e-9).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_placement_costs_what_the_plain_game_says(seed: int) -> None:
    demand, _, link, miss = random_game(seed, 3, 4)
    rng = np.random.default_rng(seed)
    held = rng.integers(0, 2, demand.shape)
    plain = CachingGame(link * (1 - np.eye(3)), demand, 0.0, 4, miss_cost=miss, restarts=1)
    game = ReplicationGame(
        demand, np.ones(4), np.full(3, 4), np.full((3, 4), miss), np.full((3, 4), link)
    )
    assert game.social_cost(held) == pytest.approx(plain.social_cost(held - 1))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("link", [np.inf, 0.3])
def test_no_placement_that_fits_costs_less_than_the_optimum(seed: int, link: float) -> None:
    rng = np.random.default_rng(seed)
    demand, size = rng.random((4, 6)), rng.integers(1, 9, 6)
    capacity = rng.integers(2, 15, 4)
    game = ReplicationGame(demand, size, capacity, rng.random((4, 6)), link)
    _, best = game.optimum()
    for _ in range(200):
        held = rng.random((4, 6)) ** 2
        held *= np.minimum(1.0, capacity / (held @ size))[:, None]
        assert game.social_cost(held) >= best - 1e-9


def test_where_all_fits_the_optimum_costs_nothing() -> None:
    game = ReplicationGame(np.ones((2, 3)), [1, 2, 3], [6, 6], np.full((2, 3), 5.0), 1.0)
    assert game.optimum()[1] == pytest.approx(0.0)


def test_the_price_of_two_workers_grows_with_miss_over_link() -> None:
    """Worker 1 hardly wants c but holds it; worker 0 misses b for it (docs/internals/theory.md)."""
    prices = []
    for miss in (5.0, 20.0, 80.0):
        demand = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.1]])
        game = ReplicationGame(demand, [1, 1, 1], [1, 1], np.full((2, 3), miss), 1.0)
        prices.append(game.social_cost([[1, 0, 0], [0, 0, 1]]) / game.optimum()[1])
    assert prices == sorted(prices)
    assert prices[1] == pytest.approx(20 / 3)  # b comes over the link, c is missed: 1 + 0.1 * 20


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="size has shape"):
        ReplicationGame(np.ones((2, 3)), [1, 2], [1, 1], np.ones((2, 3)))
    with pytest.raises(ValueError, match="size must be above 0"):
        ReplicationGame(np.ones((2, 1)), [0], [1, 1], np.ones((2, 1)))
    with pytest.raises(ValueError, match="remote must be at least 0"):
        ReplicationGame(np.ones((2, 1)), [1], [1, 1], np.ones((2, 1)), -1.0)
