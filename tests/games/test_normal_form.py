"""Laws of games in normal form, with known answers."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest

from pigou.games import Floats
from pigou_lab.games.normal_form import KNOWN, MixedEquilibrium, NormalFormGame


def known(name: str) -> NormalFormGame:
    return NormalFormGame(KNOWN[name][0])


def mixes(game: NormalFormGame) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    return sorted(
        (tuple(np.round(e.rows, 6).tolist()), tuple(np.round(e.columns, 6).tolist()))
        for e in game.equilibria
    )


def thirds(*parts: tuple[tuple[float, ...], tuple[float, ...]]) -> list[object]:
    return sorted(tuple(tuple(round(p, 6) for p in one) for one in pair) for pair in parts)


@pytest.mark.parametrize(
    ("name", "pure", "mixed"),
    [
        ("prisoners-dilemma", [(1, 1)], [((0, 1), (0, 1))]),
        ("matching-pennies", [], [((1 / 2, 1 / 2), (1 / 2, 1 / 2))]),
        ("battle-of-the-sexes", [(0, 0), (1, 1)],
         [((1, 0), (1, 0)), ((0, 1), (0, 1)), ((2 / 3, 1 / 3), (1 / 3, 2 / 3))]),
        ("rock-paper-scissors", [], [((1 / 3,) * 3, (1 / 3,) * 3)]),
        ("stag-hunt", [(0, 0), (1, 1)],
         [((1, 0), (1, 0)), ((0, 1), (0, 1)), ((3 / 4, 1 / 4), (3 / 4, 1 / 4))]),
        ("chicken", [(0, 1), (1, 0)],
         [((1, 0), (0, 1)), ((0, 1), (1, 0)), ((9 / 10, 1 / 10), (9 / 10, 1 / 10))]),
        ("commitment", [(0, 0)], [((1, 0), (1, 0))]),
    ],
)  # fmt: skip
def test_known_games_have_their_known_equilibria(name: str, pure: list, mixed: list) -> None:
    game = known(name)
    assert game.pure_equilibria() == pure
    assert mixes(game) == thirds(*mixed)


def test_von_stengels_game_has_three_equilibria() -> None:
    """Algorithmic Game Theory (2007), chapter 3: one pure, two mixed."""
    game = NormalFormGame([[[3, 3], [2, 5], [0, 6]], [[3, 2], [2, 6], [3, 1]]])
    assert mixes(game) == thirds(
        ((1, 0, 0), (1, 0)),
        ((4 / 5, 1 / 5, 0), (2 / 3, 1 / 3)),
        ((0, 1 / 3, 2 / 3), (1 / 3, 2 / 3)),
    )


def test_a_degenerate_game_has_its_extreme_equilibria() -> None:
    """The same with one payoff changed: a whole edge of mixtures answers the first row."""
    game = NormalFormGame([[[3, 3], [2, 5], [0, 6]], [[3, 3], [2, 6], [3, 1]]])
    assert mixes(game) == thirds(
        ((1, 0, 0), (1, 0)),
        ((1, 0, 0), (2 / 3, 1 / 3)),
        ((0, 1 / 3, 2 / 3), (1 / 3, 2 / 3)),
    )


def test_where_nothing_matters_all_pure_profiles_are_the_extreme_equilibria() -> None:
    game = NormalFormGame([np.zeros((2, 3)), np.zeros((2, 3))])
    assert len(game.pure_equilibria()) == len(game.equilibria) == 6
    assert all(max(e.rows) == max(e.columns) == 1 for e in game.equilibria)


def by_supports(first: Floats, second: Floats) -> list[tuple[Floats, Floats]]:
    """Support enumeration (equal sizes): all equilibria of a game that is not degenerate."""
    found = []
    for size in range(1, min(first.shape) + 1):
        for rows in combinations(range(first.shape[0]), size):
            for columns in combinations(range(first.shape[1]), size):
                x = indifferent(second[np.ix_(rows, columns)].T, rows, first.shape[0])
                y = indifferent(first[np.ix_(rows, columns)], columns, first.shape[1])
                if x is None or y is None:
                    continue
                if (first @ y).max() <= x @ first @ y + 1e-9 and (
                    (x @ second).max() <= x @ second @ y + 1e-9
                ):
                    found.append((x, y))
    return found


def indifferent(payoffs: Floats, support: tuple[int, ...], size: int) -> Floats | None:
    """The mixture over a support that makes all rows of the other's payoffs equal."""
    k = len(support)
    matrix = np.vstack([np.hstack([payoffs, -np.ones((k, 1))]), [*[1.0] * k, 0.0]])
    mix = np.linalg.solve(matrix, [*[0.0] * k, 1.0])[:k]
    if (mix <= 0).any():
        return None
    whole = np.zeros(size)
    whole[list(support)] = mix
    return whole


@pytest.mark.parametrize("seed", range(30))
def test_random_games_have_the_equilibria_that_their_supports_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(2, 6, 2))
    first, second = rng.normal(size=(2, *shape)) * 10.0 ** rng.integers(-2, 3)
    game = NormalFormGame([first, second])
    expected = by_supports(first, second)
    assert len(expected) % 2 == 1  # Wilson (1971)
    assert len(game.equilibria) == len(expected)
    for x, y in expected:
        assert any(np.allclose(x, e.rows) and np.allclose(y, e.columns) for e in game.equilibria)
    pure = [e for e in game.equilibria if max(e.rows) > 1 - 1e-9 and max(e.columns) > 1 - 1e-9]
    assert len(pure) == len(game.pure_equilibria())


@pytest.mark.parametrize("seed", range(10))
def test_equilibria_of_degenerate_random_games_are_equilibria(seed: int) -> None:
    first, second = np.random.default_rng(seed).integers(0, 3, (2, 4, 4)).astype(float)
    game = NormalFormGame([first, second])
    assert len(game.equilibria) >= 1
    for e in game.equilibria:
        assert (first @ e.columns).max() == pytest.approx(e.payoffs[0], abs=1e-8)
        assert (e.rows @ second).max() == pytest.approx(e.payoffs[1], abs=1e-8)
    found = {(int(e.rows.argmax()), int(e.columns.argmax())) for e in game.equilibria if one(e)}
    assert set(game.pure_equilibria()) == found


def one(e: MixedEquilibrium) -> bool:
    return bool(e.rows.max() > 1 - 1e-9 and e.columns.max() > 1 - 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_pure_equilibria_of_three_players_are_those_that_nobody_leaves(seed: int) -> None:
    payoffs = np.random.default_rng(seed).integers(0, 5, (3, 2, 3, 2))
    game = NormalFormGame(payoffs)
    stays = []
    for profile in product(range(2), range(3), range(2)):
        gains = [
            payoffs[i][(*profile[:i], other, *profile[i + 1 :])] > payoffs[i][profile]
            for i, size in enumerate((2, 3, 2))
            for other in range(size)
        ]
        if not any(gains):
            stays.append(profile)
    assert game.pure_equilibria() == stays


def test_prices_of_the_known_games() -> None:
    assert known("prisoners-dilemma").price_of_anarchy() == 3  # 6 over 2
    assert known("prisoners-dilemma").price_of_stability() == 3
    sexes = known("battle-of-the-sexes")
    assert sexes.price_of_anarchy() == pytest.approx(3 / (4 / 3))  # the mixed one is the worst
    assert sexes.price_of_anarchy(pure=True) == sexes.price_of_stability() == 1
    assert known("stag-hunt").price_of_anarchy() == pytest.approx(8 / 6)
    years = NormalFormGame([[[1, 10], [0, 5]], [[1, 0], [10, 5]]], costs=True)
    assert years.pure_equilibria() == [(1, 1)]
    assert years.price_of_anarchy() == 5  # ten years in all, two at best


def test_a_price_is_refused_where_a_ratio_means_nothing() -> None:
    with pytest.raises(ValueError, match="a ratio needs more than 0"):
        known("chicken").price_of_anarchy()
    with pytest.raises(ValueError, match="no pure equilibrium"):
        known("matching-pennies").price_of_anarchy(pure=True)
    assert known("matching-pennies").price_of_anarchy() == 1  # 0 over 0: nothing is lost


def test_commitment_is_worth_what_conitzer_and_sandholm_say() -> None:
    game = known("commitment")
    assert [e.payoffs for e in game.equilibria] == [(2, 1)]
    assert game.commitment().payoffs == (3, 1)
    mixed = game.mixed_commitment()
    assert mixed.payoffs[0] == pytest.approx(3.5)
    assert mixed.strategy.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("seed", range(10))
def test_a_leader_gets_at_least_its_best_equilibrium(seed: int) -> None:
    """Von Stengel and Zamir (2010): mixed commitment; pure commitment beats pure equilibria."""
    payoffs = np.random.default_rng(seed).normal(size=(2, 3, 4))
    game = NormalFormGame(payoffs)
    best = max(e.payoffs[0] for e in game.equilibria)
    assert game.mixed_commitment().payoffs[0] >= max(best, game.commitment().payoffs[0]) - 1e-9
    replies = [max(range(4), key=lambda j, i=i: payoffs[1][i, j]) for i in range(3)]
    pure = max(payoffs[0][i, j] for i, j in enumerate(replies))
    assert game.commitment().payoffs[0] == pytest.approx(pure)
    assert all(game.payoffs(p)[0] <= pure + 1e-9 for p in game.pure_equilibria())


@pytest.mark.parametrize(
    ("payoffs", "message"),
    [
        ([], "0 players"),
        ([[[1, 2], [3]], [[1, 2], [3, 4]]], "rows of equal length"),
        ([[[1, 2]], [[1], [2]]], "all alike"),
        ([[1, 2], [1, 2]], "one dimension a player"),
        ([[[math.nan]], [[1]]], "finite"),
        ([np.zeros((0, 2)), np.zeros((0, 2))], "needs a strategy"),
    ],
)
def test_wrong_payoffs_are_refused(payoffs: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormalFormGame(payoffs)


def test_what_takes_two_players_says_so() -> None:
    three = NormalFormGame(np.zeros((3, 2, 2, 2)))
    with pytest.raises(ValueError, match="3 players: mixed equilibria are enumerated for two"):
        _ = three.equilibria
    with pytest.raises(ValueError, match="3 players: a mixed commitment"):
        three.mixed_commitment()
    with pytest.raises(ValueError, match="needs a follower"):
        NormalFormGame([[1, 2]]).commitment()
    with pytest.raises(ValueError, match="give at most 200000"):
        _ = NormalFormGame(np.zeros((2, 12, 12))).equilibria
    with pytest.raises(ValueError, match="social has shape"):
        NormalFormGame(np.zeros((2, 2, 2)), social=[1, 2])
