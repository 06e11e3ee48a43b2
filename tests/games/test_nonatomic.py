"""Laws of nonatomic routing: Wardrop equilibria, optima, and the tolls between them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou_lab.games.nonatomic import FlowNetwork, ParallelLinks


def pigou(degree: int) -> ParallelLinks:
    return ParallelLinks([lambda x: 1.0, lambda x: x**degree], 1.0)


@pytest.mark.parametrize(
    ("degree", "price"), [(1, 4 / 3), (2, 1.6258), (3, 1.8956), (4, 2.1505), (8, 3.0809)]
)
def test_pigous_two_roads_have_their_known_price(degree: int, price: float) -> None:
    game = pigou(degree)
    assert game.price_of_anarchy() == pytest.approx(price, rel=5e-5)
    closed_form = 1 / (1 - degree * (degree + 1) ** (-(degree + 1) / degree))
    assert game.price_of_anarchy() == pytest.approx(closed_form, rel=1e-9)


def test_pigous_toll_makes_the_optimum_the_equilibrium() -> None:
    game = pigou(1)
    np.testing.assert_allclose(game.wardrop(), [0, 1], atol=1e-9)
    np.testing.assert_allclose(game.optimum(), [0.5, 0.5], atol=1e-9)
    np.testing.assert_allclose(game.tolls(), [0, 0.5], atol=1e-6)
    tolled = game.with_tolls(game.tolls())
    assert game.cost(tolled.wardrop()) == pytest.approx(0.75, abs=1e-6)


def test_a_steep_and_a_flat_link_share_as_worked_out_by_hand() -> None:
    game = ParallelLinks([lambda x: 10 + x, lambda y: 2 * y], 10)
    np.testing.assert_allclose(game.wardrop(), [10 / 3, 20 / 3], rtol=1e-9)
    np.testing.assert_allclose(game.optimum(), [5, 5], rtol=1e-7)


def mm1(rate: float) -> Callable[[float], float]:
    return lambda x: 1 / (rate - x) if x < rate else math.inf


def bell_stidham(rates: list[float], demand: float) -> np.ndarray:
    """The social optimum of parallel M/M/1 queues (Bell and Stidham 1983)."""
    order = np.argsort(rates)[::-1]
    ranked = np.array(rates)[order]
    for used in range(len(rates), 0, -1):
        top = ranked[:used]
        flows = top - np.sqrt(top) * (top.sum() - demand) / np.sqrt(top).sum()
        if flows[-1] >= 0:
            break
    full = np.zeros(len(rates))
    full[order[:used]] = flows
    return full


def selfish(rates: list[float], demand: float) -> np.ndarray:
    """Used queues have equal spare rate, which no unused one exceeds."""
    order = np.argsort(rates)[::-1]
    ranked = np.array(rates)[order]
    for used in range(len(rates), 0, -1):
        spare = (ranked[:used].sum() - demand) / used
        if ranked[used - 1] >= spare:
            break
    full = np.zeros(len(rates))
    full[order[:used]] = ranked[:used] - spare
    return full


@given(st.lists(st.floats(0.5, 8), min_size=2, max_size=5), st.floats(0.05, 0.97))
@settings(max_examples=examples(40))
def test_queues_in_parallel_share_by_the_closed_forms(rates: list[float], load: float) -> None:
    demand = load * sum(rates)
    game = ParallelLinks([mm1(r) for r in rates], demand)
    best, alone = bell_stidham(rates, demand), selfish(rates, demand)
    assert game.cost(game.optimum()) == pytest.approx(game.cost(best), rel=1e-6)
    assert game.cost(game.wardrop()) == pytest.approx(game.cost(alone), rel=1e-6)
    np.testing.assert_allclose(game.wardrop(), alone, atol=1e-6 * demand)
    # Haviv and Roughgarden (2007): at most as many as there are servers, at every load.
    assert 1 - 1e-6 <= game.price_of_anarchy() <= len(rates) + 1e-6


def braess(bridge: bool) -> FlowNetwork:
    edges = [
        ("s", "a", lambda x: x),
        ("a", "t", lambda x: 1.0),
        ("s", "b", lambda x: 1.0),
        ("b", "t", lambda x: x),
    ]
    return FlowNetwork(edges + ([("a", "b", lambda x: 0.0)] if bridge else []), {("s", "t"): 1.0})


def test_braess_bridge_makes_everybody_slower() -> None:
    without, with_bridge = braess(False), braess(True)
    assert without.cost(without.wardrop()) == pytest.approx(1.5)
    assert with_bridge.cost(with_bridge.wardrop()) == pytest.approx(2.0)
    assert with_bridge.price_of_anarchy() == pytest.approx(4 / 3)
    np.testing.assert_allclose(with_bridge.tolls(), [0.5, 0, 0, 0.5, 0], atol=1e-6)


affine = st.tuples(st.floats(0, 5), st.floats(0.01, 5))


@given(st.lists(affine, min_size=2, max_size=5), st.floats(0.1, 10))
@settings(max_examples=examples(40))
def test_affine_links_cost_at_most_a_third_too_much(
    coefficients: list[tuple[float, float]], demand: float
) -> None:
    costs = [lambda x, a=a, b=b: a * x + b for a, b in coefficients]
    game = ParallelLinks(costs, demand)
    flows = game.wardrop()
    assert flows.sum() == pytest.approx(demand)
    assert 1 - 1e-7 <= game.price_of_anarchy() <= 4 / 3 + 1e-7
    levels = [c(x) for c, x in zip(costs, flows, strict=True)]
    used = [level for level, x in zip(levels, flows, strict=True) if x > 1e-6 * demand]
    assert max(used) <= min(levels) + 1e-6
    graph = FlowNetwork([("s", "t", c) for c in costs], {("s", "t"): demand})
    assert graph.cost(graph.wardrop()) == pytest.approx(game.cost(flows), rel=1e-6)
    assert graph.cost(graph.optimum()) == pytest.approx(game.cost(game.optimum()), rel=1e-6)


def test_flows_refuse_what_cannot_be_carried() -> None:
    with pytest.raises(ValueError, match="no finite cost carries"):
        ParallelLinks([mm1(1.0)], 2.0).wardrop()
    with pytest.raises(ValueError, match="demand > 0"):
        ParallelLinks([], 1.0)
    with pytest.raises(ValueError, match="no path"):
        FlowNetwork([("a", "b", lambda x: x)], {("b", "a"): 1.0})
    with pytest.raises(ValueError, match="flow above 0"):
        FlowNetwork([("a", "b", lambda x: x)], {("a", "b"): 0.0})


@pytest.mark.parametrize(
    ("cost", "word"),
    [
        (lambda x: x - 1.0, "must be at least 0"),
        (lambda x: -0.5, "must be at least 0"),
        (lambda x: math.nan, "must be at least 0"),
        (lambda x: 2.0 - x, "must never fall"),
    ],
)
def test_flows_refuse_costs_below_zero_and_costs_that_fall(
    cost: Callable[[float], float], word: str
) -> None:
    with pytest.raises(ValueError, match=rf"costs\[1\] .*{word}"):
        ParallelLinks([lambda x: 1.0, cost], 1.0)
    with pytest.raises(ValueError, match=word):
        FlowNetwork([("a", "b", lambda x: x), ("a", "b", cost)], {("a", "b"): 1.0})


def test_flows_refuse_tolls_that_pay_more_than_a_link_costs() -> None:
    game = pigou(1)
    with pytest.raises(ValueError, match="must be at least 0"):
        game.with_tolls(np.array([-2.0, 0.0]))
