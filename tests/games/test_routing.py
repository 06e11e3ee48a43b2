"""Laws of the routing game: its potential, its exact optimum, its tolls."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from tests.lib.examples import examples

from pigou.games.latency import LatencyLaw
from pigou_lab.games.atomic import AtomicGame
from pigou_lab.games.routing import RoutingGame

GAMES = 300


def random_game(seed: int, *, equal: bool) -> RoutingGame:
    """2-6 unequal workers, 2-12 requests, savings of up to the fastest worker's base."""
    rng = np.random.default_rng((seed, equal))
    workers, requests = int(rng.integers(2, 7)), int(rng.integers(2, 13))
    laws = [
        LatencyLaw(
            rng.uniform(0, 0.05),
            rng.uniform(0.02, 0.1),
            rng.uniform(0, 0.5),
            rng.uniform(3, 20),
            rng.uniform(0.5, 2),
        )
        for _ in range(workers)
    ]
    overlaps = rng.random((1 if equal else requests, workers))
    overlaps = np.broadcast_to(overlaps, (requests, workers))
    return RoutingGame(laws, overlaps, min(law.b for law in laws))


def by_brute_force(game: RoutingGame) -> float:
    return min(map(game.social_cost, product(range(game.workers), repeat=game.requests)))


def by_slots(game: RoutingGame) -> float:
    """The k-th slot of a worker costs what the k-th request there adds."""
    counts = np.arange(1, game.requests + 1)
    slots = np.diff(game.latency * counts, axis=1, prepend=0.0)
    cost = slots[None] - game.savings[:, :, None]
    matrix = cost.reshape(game.requests, -1)
    rows, columns = linear_sum_assignment(matrix)
    return float(matrix[rows, columns].sum())


@pytest.mark.parametrize("equal", [True, False], ids=["equal overlaps", "unequal overlaps"])
def test_the_flow_is_the_optimum(equal: bool) -> None:
    brute = 0
    for seed in range(GAMES // 2):
        game = random_game(seed, equal=equal)
        best = game.social_cost(game.optimum())
        assert best == pytest.approx(by_slots(game), rel=1e-9)
        if game.workers**game.requests <= 1000:
            brute += 1
            assert best == pytest.approx(by_brute_force(game), rel=1e-9)
    assert brute >= 20


def test_greedy_with_tolls_reaches_the_optimum_where_overlaps_are_equal() -> None:
    plain = 0
    for seed in range(GAMES):
        game = random_game(seed, equal=True)
        best = game.social_cost(game.optimum())
        order = np.random.default_rng(seed).permutation(game.requests)
        tolled = game.social_cost(game.greedy(order, tolls=True))
        assert tolled == pytest.approx(best, rel=1e-9)
        plain += game.social_cost(game.greedy(order)) <= best * (1 + 1e-9)
    assert plain < 0.7 * GAMES


def test_with_unequal_overlaps_tolls_lower_the_mean_cost_of_greedy() -> None:
    ratios = []
    for seed in range(GAMES):
        game = random_game(seed, equal=False)
        best = game.social_cost(game.optimum())
        ratios.append([game.social_cost(game.greedy(tolls=t)) / best for t in (False, True)])
    plain, tolled = np.mean(ratios, axis=0)
    assert 1 <= tolled < plain


@given(st.integers(0, 10**6), st.booleans(), st.integers(0, 100))
@settings(max_examples=examples(40))
def test_best_responses_reach_an_equilibrium_down_the_potential(
    game_seed: int, equal: bool, seed: int
) -> None:
    game = random_game(game_seed, equal=equal)
    reached = game.equilibrium(seed)
    assert game.is_equilibrium(reached)
    here = game.potential(reached)
    for request, worker in product(range(game.requests), range(game.workers)):
        moved = reached.copy()
        moved[request] = worker
        assert game.potential(moved) >= here - 1e-6


def test_the_tolls_are_what_one_more_request_costs_those_there() -> None:
    game = random_game(3, equal=True)
    loads = np.arange(game.workers)
    for w, toll in enumerate(game.tolls(loads)):
        law, n = game.laws[w], float(loads[w])
        assert toll == pytest.approx(n * (law(n + 1) - law(n)))


def test_without_overlaps_it_is_the_congestion_game_of_parallel_links() -> None:
    laws = [LatencyLaw(1.0, 0.0), LatencyLaw(0.5, 1.0), LatencyLaw(0.1, 2.0, 1.0, 4)]
    game = RoutingGame(laws, np.zeros((4, 3)), 1.0)
    atomic = AtomicGame(dict(enumerate(laws)), [[{0}, {1}, {2}]] * 4)
    for profile in product(range(3), repeat=4):
        assert game.social_cost(profile) == pytest.approx(atomic.social_cost(profile))
        assert game.potential(profile) == pytest.approx(atomic.potential(profile))
        assert game.is_equilibrium(profile) == atomic.is_equilibrium(profile)
    assert game.price_of_anarchy() == pytest.approx(atomic.price_of_anarchy())


@pytest.mark.parametrize("seed", range(8))
def test_the_price_of_anarchy_is_that_of_every_profile_looked_at(seed: int) -> None:
    rng = np.random.default_rng(seed)
    laws = [LatencyLaw(*rng.uniform(0.1, 1, 3), n_sat=6.0) for _ in range(3)]
    rows = rng.random((2, 3))
    game = RoutingGame(laws, rows[rng.integers(0, 2, 5)], 0.3)
    every = list(product(range(3), repeat=5))
    worst = max(game.social_cost(p) for p in every if game.is_equilibrium(p))
    expected = worst / min(map(game.social_cost, every))
    assert game.price_of_anarchy() == pytest.approx(expected, rel=1e-9)


def test_a_game_too_large_to_enumerate_gives_a_lower_bound() -> None:
    rng = np.random.default_rng(0)
    laws = [LatencyLaw(a, 0.1) for a in (0.01, 0.02, 0.05)]
    game = RoutingGame(laws, rng.random((40, 3)), 0.1)
    assert 1 - 1e-9 <= game.price_of_anarchy(restarts=5) < 4 / 3


def test_the_routing_game_says_what_is_wrong_with_its_arguments() -> None:
    law = LatencyLaw(1, 1)
    with pytest.raises(ValueError, match=r"give \(requests, 2\)"):
        RoutingGame([law, law], np.zeros((3, 1)), 1.0)
    with pytest.raises(ValueError, match="finite"):
        RoutingGame([law], np.full((3, 1), np.nan), 1.0)
    with pytest.raises(ValueError, match="permutation"):
        RoutingGame([law], np.zeros((3, 1)), 1.0).greedy([0, 0, 1])
    with pytest.raises(ValueError, match="falls at load"):
        RoutingGame([lambda n: 1 / n**2], np.zeros((3, 1)), 1.0).optimum()
    with pytest.raises(ValueError, match="compare differences"):
        RoutingGame([law], np.ones((3, 1)), 50.0).price_of_anarchy()
