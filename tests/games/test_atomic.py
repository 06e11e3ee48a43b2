"""Laws of atomic congestion games, on the textbook's worst cases and on random games."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou_lab.games.atomic import AtomicGame

GOLDEN = (1 + math.sqrt(5)) / 2


def identity(load: float) -> float:
    return load


def free(load: float) -> float:
    return 0.0


def christodoulou_koutsoupias() -> AtomicGame:
    costs = {f"{kind}{i}": identity for kind in "gh" for i in range(3)}
    strategies = [
        [{f"h{i}", f"g{i}"}, {f"g{(i + 1) % 3}", f"h{(i - 1) % 3}", f"h{(i + 1) % 3}"}]
        for i in range(3)
    ]
    return AtomicGame(costs, strategies)


def awerbuch(weights: list[float] | None) -> AtomicGame:
    """Awerbuch, Azar and Epstein (STOC 2005): edges u-v, u-w, v-w, w-v cost their load."""
    costs = {"uv": identity, "uw": identity, "vw": identity, "wv": identity, "vu": free, "wu": free}
    strategies = [
        [{"uv"}, {"uw", "wv"}],
        [{"uw"}, {"uv", "vw"}],
        [{"vw"}, {"vu", "uw"}],
        [{"wv"}, {"wu", "uv"}],
    ]
    return AtomicGame(costs, strategies, weights)


def test_the_worst_affine_game_of_three_has_price_5_over_2() -> None:
    game = christodoulou_koutsoupias()
    assert game.social_cost(game.optimum()) == 6
    assert max(game.social_cost(p) for p in game.pure_equilibria()) == 15
    assert game.price_of_anarchy() == pytest.approx(2.5)
    assert game.price_of_stability() == pytest.approx(1.0)


def test_the_worst_affine_network_has_price_5_over_2() -> None:
    assert awerbuch(None).price_of_anarchy() == pytest.approx(2.5)


def test_weights_raise_the_worst_price_to_the_golden_ratio_squared() -> None:
    game = awerbuch([GOLDEN, GOLDEN, 1.0, 1.0])
    assert game.is_equilibrium((1, 1, 1, 1))
    assert game.price_of_anarchy() == pytest.approx((3 + math.sqrt(5)) / 2, abs=1e-9)


@st.composite
def affine_games(draw: st.DrawFn) -> AtomicGame:
    resources = list(range(draw(st.integers(2, 4))))
    slope = draw(st.lists(st.integers(0, 4), min_size=4, max_size=4))
    fixed = draw(st.lists(st.integers(1, 6), min_size=4, max_size=4))
    costs = {r: (lambda x, a=slope[r], b=fixed[r]: a * x + b) for r in resources}
    sets = st.sets(st.sampled_from(resources), min_size=1, max_size=len(resources))
    strategies = draw(st.lists(st.lists(sets, min_size=1, max_size=3), min_size=2, max_size=4))
    return AtomicGame(costs, strategies)


@given(affine_games(), st.data())
@settings(max_examples=examples(60))
def test_a_move_changes_the_potential_by_what_it_changes_the_movers_cost(
    game: AtomicGame, data: st.DataObject
) -> None:
    profile = tuple(data.draw(st.integers(0, len(mine) - 1)) for mine in game.strategies)
    for player, mine in enumerate(game.strategies):
        for choice in range(len(mine)):
            moved = (*profile[:player], choice, *profile[player + 1 :])
            change = game.player_cost(moved, player) - game.player_cost(profile, player)
            assert game.potential(moved) - game.potential(profile) == pytest.approx(change)


@given(affine_games(), st.integers(0, 2**16))
@settings(max_examples=examples(60))
def test_best_responses_end_in_an_equilibrium_within_the_bound_of_5_over_2(
    game: AtomicGame, seed: int
) -> None:
    reached = game.best_response((0,) * len(game.strategies), seed)
    assert game.is_equilibrium(reached)
    assert reached in game.pure_equilibria()
    assert 1 - 1e-9 <= game.price_of_stability() <= game.price_of_anarchy() <= 2.5 + 1e-9


def test_the_social_cost_is_what_the_players_pay() -> None:
    game = awerbuch([2.0, 1.0, 3.0, 1.0])
    for profile in game.profiles():
        paid = sum(w * game.player_cost(profile, i) for i, w in enumerate(game.weights))
        assert game.social_cost(profile) == pytest.approx(paid)


def test_a_game_says_what_is_wrong_with_its_arguments() -> None:
    with pytest.raises(ValueError, match="'b', which has no cost"):
        AtomicGame({"a": identity}, [[{"b"}]])
    with pytest.raises(ValueError, match="no strategy"):
        AtomicGame({"a": identity}, [[]])
    with pytest.raises(ValueError, match="1 weights for 2 players"):
        AtomicGame({"a": identity}, [[{"a"}], [{"a"}]], [1.0])
    with pytest.raises(ValueError, match="above 0"):
        AtomicGame({"a": identity}, [[{"a"}]], [0.0])
    with pytest.raises(ValueError, match="too many to enumerate"):
        AtomicGame({"a": identity, "b": identity}, [[{"a"}, {"b"}]] * 30).optimum()
    with pytest.raises(ValueError, match="no exact potential"):
        awerbuch([2.0, 1.0, 1.0, 1.0]).potential((0, 0, 0, 0))


def test_a_price_over_an_optimum_that_costs_nothing_is_refused() -> None:
    game = AtomicGame({"a": lambda x: x - 1.0}, [[{"a"}]])
    assert game.price_of_anarchy() == 1.0
    herd = AtomicGame({"a": free, "b": lambda x: -1.0}, [[{"b"}]])
    with pytest.raises(ValueError, match="ratio needs a cost above 0"):
        herd.price_of_anarchy()
