"""Best responses: where n moves are enough for n players, and where they are not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from pigou_lab.games.dynamics import claims, heaviest, lightest, longest, machines, moves, staircase


def rising(rng: np.random.Generator, players: int) -> Callable[[float], float]:
    table = np.cumsum(rng.choice([0, 0, 1, 2, 7], players + 1))
    return lambda load: float(table[round(load)])


@pytest.mark.parametrize("seed", range(60))
def test_equal_players_need_n_moves_at_most_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    players, count = int(rng.integers(2, 7)), int(rng.integers(2, 5))
    game = machines([rising(rng, players) for _ in range(count)], players)
    assert longest(game, tuple(rng.integers(count, size=players).tolist())) <= players


@pytest.mark.parametrize("seed", range(60))
def test_the_heaviest_first_needs_n_moves_at_most_on_equal_machines(seed: int) -> None:
    """Even-Dar, Kesselman and Mansour (2003)."""
    rng = np.random.default_rng(seed)
    players, count = int(rng.integers(2, 12)), int(rng.integers(2, 5))
    game = machines([float] * count, players, rng.integers(1, 40, players).tolist())
    assert moves(game, tuple(rng.integers(count, size=players).tolist()), heaviest) <= players


def test_the_lightest_first_may_need_more() -> None:
    game = machines([float] * 3, 6, [22, 5, 27, 26, 1, 18])
    start = (2, 2, 2, 2, 1, 1)
    assert moves(game, start, lightest) == 12
    assert moves(game, start, heaviest) <= 6


def test_overlaps_may_need_more() -> None:
    """A prompt's private cost of each worker makes some of three players move twice and more."""
    rng = np.random.default_rng(0)
    most = 0
    for _ in range(200):
        private = rng.integers(0, 12, (3, 3)).tolist()
        game = machines([rising(rng, 3) for _ in range(3)], 3, private=private)
        starts = product(range(3), repeat=3)
        most = max(most, *(longest(game, start) for start in starts))
    assert most > 3


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_two_players_may_need_any_number(steps: int) -> None:
    game = staircase(steps)
    assert moves(game, (0, 0)) == longest(game, (0, 0)) == 2 * steps
    assert (steps, steps) in game.pure_equilibria()
    for cost in game.costs.values():
        assert 0 <= cost(1) <= cost(2)


def test_the_longest_order_is_no_shorter_than_any_other() -> None:
    rng = np.random.default_rng(3)
    game = machines([float] * 3, 5, rng.integers(1, 30, 5).tolist())
    start = (0, 0, 0, 0, 0)
    assert longest(game, start) >= max(moves(game, start, heaviest), moves(game, start, lightest))


def test_the_evidence_agrees_with_what_is_claimed() -> None:
    found = claims(trials=100)
    assert [claim.holds for claim in found] == [True, True, False, False, False]
    assert all((claim.most <= 1) == claim.holds for claim in found)
