"""What is commonly claimed of these games and does not hold: a counterexample each.

The claims are those of Georgiou, "The Price of Anarchy in Disaggregated Inference" (2026);
``docs/internals/theory.md`` says what holds instead.
"""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest

from pigou.games.latency import LatencyLaw
from pigou.games.price_of_anarchy import legacy_index
from pigou.games.queueing import erlang_c
from pigou_lab.games.allocation import AllocationGame
from pigou_lab.games.caching import CachingGame
from pigou_lab.games.nonatomic import ParallelLinks
from pigou_lab.games.routing import RoutingGame


def identical(requests: int, workers: int, law: LatencyLaw) -> RoutingGame:
    return RoutingGame([law] * workers, np.zeros((requests, workers)), 1.0)


# Proposition 1: the variational equilibrium of prefill and decode is unique.


def test_p1_three_equilibria_coexist_with_strictly_convex_falling_rates() -> None:
    def v_itl(decode: float, prefill: float) -> float:
        return 0.1 * math.exp(-2 * math.tanh(prefill - 4)) * math.exp(-0.5 * decode)

    game = AllocationGame(lambda p: 0.1 * math.exp(-0.5 * p), v_itl, 8)
    assert [e.prefill for e in game.equilibria()] == pytest.approx([2.085, 4, 5.915], abs=1e-3)


def test_p1_the_equation_may_have_its_root_outside_the_budget() -> None:
    game = AllocationGame(lambda p: math.exp(-p), lambda d, p: math.exp(-0.1 * d), 2)
    assert [e.kind for e in game.equilibria()] == ["no decode"]


def test_p1_a_violation_rate_is_not_convex() -> None:
    """Prefill as M/M/c at 4 erlangs; violated: a wait of more than 2.4 services."""

    def rate(gpus: int) -> float:
        return 1.0 if gpus <= 4 else erlang_c(gpus, 4 / gpus) * math.exp(-(gpus - 4) * 2.4)

    assert [rate(3), rate(4), rate(5)] == pytest.approx([1, 1, 0.05], abs=1e-2)
    assert rate(4) > (rate(3) + rate(5)) / 2


def test_p1_every_split_of_the_budget_is_a_generalised_equilibrium() -> None:
    """With all GPUs in use, the shared constraint leaves a pool only smaller claims."""
    gpus = 8
    for prefill in range(gpus + 1):
        claims = range(gpus - (gpus - prefill) + 1)
        assert min(claims, key=lambda g: math.exp(-g)) == prefill


def test_p1_a_planner_that_moves_one_gpu_may_go_round_for_ever() -> None:
    """Every GPU that prefill gains makes decode's more valuable, and the other way."""
    game = AllocationGame(
        lambda p: 0.3 * math.exp(-0.5 * p),
        lambda d, p: (1.0 if p >= 4 else 0.2) * math.exp(-0.5 * d),
        8,
    )
    assert game.best_response_path(0) == [0, 1, 2, 3, 4, 3]


def test_remark_1_has_the_sign_right() -> None:
    """A helpful externality: the social optimum has more prefill than the equilibrium."""

    def v_itl(decode: float, prefill: float) -> float:
        return math.exp(-0.5 * decode) * (0.5 + 0.5 * math.exp(-0.1 * prefill))

    game = AllocationGame(lambda p: math.exp(-0.5 * p), v_itl, 8)
    (selfish,) = game.equilibria()
    best = game.social_optimum()
    assert best.prefill > selfish.prefill
    assert 1 < selfish.violations / best.violations < 1.01


# Proposition 2: on a complete graph, the Price of Anarchy of caching is 1; on a line, O(n).


def two_workers(miss: float, spare_wish: float) -> CachingGame:
    """Worker 0 wants a and b and has room for one; worker 1 prefers its own c, hardly wanted."""
    demand = [[1, 1, 0], [0, 0, spare_wish]]
    return CachingGame(1 - np.eye(2), demand, 0.0, capacity=1, miss_cost=miss)


def test_p2_two_workers_with_capacities_have_price_10_in_every_equilibrium() -> None:
    game = two_workers(miss=20.0, spare_wish=0.05)
    assert game.price_of_anarchy() == pytest.approx(10)
    assert game.price_of_stability() == pytest.approx(10)


def test_p2_the_price_grows_with_the_cost_of_a_miss() -> None:
    prices = [two_workers(miss, 1 / miss).price_of_anarchy() for miss in (20, 200, 2000)]
    assert prices == pytest.approx([10, 100, 1000])


def line_price(nodes: int) -> float:
    """One copy in the middle, against copies spaced for the least cost, where alpha = n / 2."""
    distance = np.abs(np.subtract.outer(range(nodes), range(nodes)))
    alpha = (nodes - 1) / 2
    game = CachingGame(distance, np.ones((nodes, 1)), alpha, restarts=0)
    single = np.full((nodes, 1), -1)
    single[nodes // 2] = 0
    assert game.is_equilibrium(single)
    spaced = []
    for copies in range(1, min(nodes // 2, 3 * math.isqrt(nodes))):
        placement = np.full((nodes, 1), -1)
        placement[((np.arange(copies) + 0.5) * nodes / copies).astype(int)] = 0
        spaced.append(game.social_cost(placement))
    return game.social_cost(single) / min(spaced)


def test_p2_a_line_grows_as_the_square_root_of_its_length() -> None:
    prices = [line_price(n) for n in (25, 101, 401)]
    for short, long in pairwise(prices):
        assert 1.7 < long / short < 2.2  # the length quadruples


def test_p2_growth_with_n_is_the_cluster_instances() -> None:
    def price(nodes: int, alpha: float = 100.0) -> float:
        cluster = np.arange(nodes) % 2
        apart = (cluster[:, None] != cluster[None]) * (alpha - 1)
        game = CachingGame(apart, np.ones((nodes, 1)), alpha)
        return game.price_of_anarchy()

    assert price(8) / price(4) == pytest.approx(2, rel=0.25)
    assert price(8) > 2


# Proposition 3: the routing game with overlaps has no potential, and a hard optimum.


def overlapping(seed: int = 0) -> RoutingGame:
    rng = np.random.default_rng(seed)
    laws = [LatencyLaw(*rng.uniform(0, 1, 2), d=0.1, n_sat=4.0) for _ in range(3)]
    return RoutingGame(laws, rng.random((5, 3)), 2.0)


def test_p3_fixed_overlaps_keep_an_exact_potential() -> None:
    game = overlapping()

    def paid(profile: tuple[int, ...], request: int) -> float:
        worker = profile[request]
        return game.laws[worker](profile.count(worker)) - 2.0 * game.overlaps[request, worker]

    violations = 0
    for profile in product(range(3), repeat=5):
        for request, worker in product(range(5), range(3)):
            moved = (*profile[:request], worker, *profile[request + 1 :])
            change = game.potential(moved) - game.potential(profile)
            violations += not math.isclose(
                change, paid(moved, request) - paid(profile, request), abs_tol=1e-9
            )
    assert violations == 0


@pytest.mark.parametrize("seed", range(5))
def test_p3_so_a_pure_equilibrium_exists_and_the_optimum_is_a_flow(seed: int) -> None:
    game = overlapping(seed)
    every = list(product(range(3), repeat=5))
    assert any(map(game.is_equilibrium, every))
    best = min(map(game.social_cost, every))
    assert game.social_cost(game.optimum()) == pytest.approx(best)


def test_p3_overlap_with_whoever_else_is_routed_there_can_leave_no_equilibrium() -> None:
    """One request gains by company (it reuses the other's prefix), the other only loses."""

    def paid(profile: tuple[int, int], request: int) -> float:
        together = profile[0] == profile[1]
        return 1.0 + (0.5 - (1.0 if request == 0 else 0.0)) * together

    for profile in product(range(2), repeat=2):
        moves = [
            paid((1 - profile[0], profile[1]), 0) < paid(profile, 0),
            paid((profile[0], 1 - profile[1]), 1) < paid(profile, 1),
        ]
        assert any(moves)


def test_p3_savings_can_make_the_cost_negative_and_the_ratio_meaningless() -> None:
    game = RoutingGame([LatencyLaw(1, 0)] * 2, np.ones((2, 2)), 5.0)
    assert game.social_cost([0, 1]) < 0
    with pytest.raises(ValueError, match="compare differences"):
        game.price_of_anarchy()


def test_greedy_is_not_an_equilibrium_once_overlaps_differ() -> None:
    game = RoutingGame([lambda n: n] * 2, [[0, 0], [1, 0]], 1.5)
    assignment = game.greedy()
    assert assignment.tolist() == [0, 0]
    assert not game.is_equilibrium(assignment)


def test_greedy_is_not_an_equilibrium_once_requests_have_left() -> None:
    """Four arrive and take turns; then both on worker 1 end."""
    before = identical(4, 2, LatencyLaw(1, 0))
    assert before.is_equilibrium(before.greedy())
    stayed = [w for w in before.greedy().tolist() if w == 0]
    assert not identical(2, 2, LatencyLaw(1, 0)).is_equilibrium(stayed)


# Proposition 4: the Price of Anarchy diverges at saturation.


@pytest.mark.parametrize(("workers", "most"), [(2, 140), (3, 60)])
def test_p4_identical_workers_have_price_1_at_every_load(workers: int, most: int) -> None:
    law = LatencyLaw(0.005, 0.020, 0.010, 64, 2)
    for requests in range(2, most, 7):
        price = identical(requests, workers, law).price_of_anarchy()
        assert price == pytest.approx(1, abs=1e-12)


def test_p4_unequal_workers_lose_two_percent_at_most_and_nothing_at_the_pole() -> None:
    """One pole at 64, one at 32, hardly softened: near both, only one assignment is left."""
    laws = [LatencyLaw(0.005, 0.020, 0.010, n, 2, floor=0.01) for n in (64, 32)]
    prices = [RoutingGame(laws, np.zeros((n, 2)), 1.0).price_of_anarchy() for n in range(2, 95)]
    assert max(prices[:61]) < 1.004
    assert 1.015 < max(prices) < 1.02
    assert prices[-1] == pytest.approx(1)


def test_p4_queues_in_parallel_stay_within_the_number_of_servers() -> None:
    """Haviv and Roughgarden's is a bound, at every load; it is nowhere near divergence."""
    rates = (9.0, 1.0)
    costs = [lambda x, r=r: 1 / (r - x) if x < r else math.inf for r in rates]
    prices = [ParallelLinks(costs, load * 10).price_of_anarchy() for load in (0.5, 0.79, 0.9, 0.99)]
    assert max(prices) <= 2
    assert prices[-1] < prices[1]


def test_p4_the_laws_curvature_is_not_the_curvature_over_offered_load() -> None:
    """A processor-sharing server: f(n) = n services has no curvature, L(lambda) no bound to its."""
    law = LatencyLaw(1.0, 0.0)
    assert law(3) - 2 * law(2) + law(1) == 0
    step = 1e-3
    response = lambda u: 1.0 / (1.0 - u)  # noqa: E731 (Kleinrock 1967)
    bend = [
        (response(u + step) - 2 * response(u) + response(u - step)) / step**2
        for u in (0.5, 0.9, 0.99)
    ]
    assert bend == pytest.approx([2 / (1 - u) ** 3 for u in (0.5, 0.9, 0.99)], rel=0.02)


# Proposition 5: below capacity, the Price of Anarchy of caching is 1.


def test_p5_room_in_the_fleet_hides_a_worker_that_is_full() -> None:
    """Three blocks, four slots: rho = 0.75. Worker 1 has room for b, and no wish to pay for it."""
    demand = [[1, 1, 0], [0, 0, 1]]
    game = CachingGame(1 - np.eye(2), demand, 0.01, capacity=[1, 3], miss_cost=20.0)
    assert game.price_of_stability() > 10


def test_p5_unlimited_room_does_not_make_it_1_either() -> None:
    distance = np.abs(np.subtract.outer(range(7), range(7)))
    game = CachingGame(distance, np.ones((7, 1)), 3.0)
    assert game.price_of_anarchy() == pytest.approx(1.25)


# Section 6.4: the estimator is an upper bound of the Price of Anarchy.


@pytest.mark.parametrize(("seconds", "index"), [(5.53, 18.7), (0.1, 0.338)])
def test_the_papers_index_is_no_bound(seconds: float, index: float) -> None:
    """A fleet that routes at best, slow or fast: its Price of Anarchy is 1 both times."""
    assert legacy_index([seconds] * 200, 2) == pytest.approx(index, rel=0.01)
