"""How many moves best responses take: what holds of the claim "at most n", and what does not.

Even-Dar, Kesselman and Mansour, "Convergence time to Nash equilibria" (ICALP 2003).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from pigou_lab.games.atomic import AtomicGame, Cost, Profile

#: Chooses who moves, of the players who gain by moving.
Turn = Callable[[AtomicGame, Sequence[int]], int]
MAX_MOVES = 100_000


def heaviest(game: AtomicGame, players: Sequence[int]) -> int:
    """Choose the player of largest weight; the first of several."""
    return max(players, key=lambda player: game.weights[player])


def lightest(game: AtomicGame, players: Sequence[int]) -> int:
    """Choose the player of least weight; the first of several."""
    return min(players, key=lambda player: game.weights[player])


def moves(game: AtomicGame, start: Profile, turn: Turn = heaviest) -> int:
    """Return the best responses until nobody gains; RuntimeError after 100,000."""
    profile = start
    for count in range(MAX_MOVES):
        gains = [i for i in range(len(profile)) if game.better_choice(profile, i) is not None]
        if not gains:
            return count
        profile = _moved(game, profile, turn(game, gains))
    raise RuntimeError(f"no equilibrium after {MAX_MOVES} moves")


def longest(game: AtomicGame, start: Profile) -> int:
    """Return the most best responses that any order takes; for games of few profiles."""

    @cache
    def most(profile: Profile) -> int:
        gains = [i for i in range(len(profile)) if game.better_choice(profile, i) is not None]
        return max((1 + most(_moved(game, profile, i)) for i in gains), default=0)

    return most(start)


def _moved(game: AtomicGame, profile: Profile, player: int) -> Profile:
    choice = game.better_choice(profile, player)
    assert choice is not None
    return (*profile[:player], choice, *profile[player + 1 :])


def machines(
    costs: Sequence[Cost], players: int, weights: Sequence[float] | None = None,
    private: Sequence[Sequence[float]] | None = None,
) -> AtomicGame:  # fmt: skip
    """Return the game of players who each choose one machine.

    ``private`` (players, machines) is what a player pays there besides, whoever else is there: a
    prompt's tokens that a worker lacks.
    """
    resources: dict[Hashable, Cost] = dict(enumerate(costs))
    every: list[list[tuple[Hashable, ...]]] = [[(m,) for m in range(len(costs))]] * players
    if private is not None:
        resources |= {(i, m): _constant(paid) for i, own in enumerate(private)
                      for m, paid in enumerate(own)}  # fmt: skip
        every = [[(m, (i, m)) for m in range(len(costs))] for i in range(players)]
    return AtomicGame(resources, every, weights)


def staircase(steps: int) -> AtomicGame:
    """Return two players whose best responses from (0, 0) take 2 `steps` moves, whatever n is.

    Strategy i of the first uses resources (i, .), strategy j of the second (., j). Resource (i, j)
    is free for one and costs P(i, j) for two, with P falling along (0, 0), (1, 0), (1, 1), ...
    and high elsewhere. So costs rise with load, as in any congestion game.
    """
    size = steps + 1

    def cost(i: int, j: int) -> Cost:
        stair = {0: 2.0 * (steps - i), 1: 2.0 * (steps - j) - 1.0}.get(i - j, 4.0 * size)
        return lambda load: stair if load > 1 else 0.0

    cells: dict[Hashable, Cost] = {(i, j): cost(i, j) for i in range(size) for j in range(size)}
    rows = [[(i, j) for j in range(size)] for i in range(size)]
    columns = [[(i, j) for i in range(size)] for j in range(size)]
    return AtomicGame(cells, [rows, columns])


@dataclass(frozen=True)
class Claim:
    """A claim about the moves of best responses, and the evidence of games."""

    games: str
    holds: bool  # whether n moves are enough
    most: float  # moves over players, at most in the games tried
    tried: int


def claims(trials: int = 200, seed: int = 0) -> list[Claim]:
    """Return where n best responses reach an equilibrium of n players, and where not.

    The first holds in any order: the least cost at which anybody could join a machine never falls
    while best responses are played, and whoever has moved pays no more than it. So nobody leaves a
    machine that somebody chose, and each moves once at most.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {"equal": [], "heaviest": [], "lightest": [], "own": []}
    for _ in range(trials):
        players, count = int(rng.integers(2, 7)), int(rng.integers(2, 4))
        start = tuple(rng.integers(count, size=players).tolist())
        tables = np.cumsum(rng.integers(0, 6, (count, players + 1)), axis=1).tolist()
        private = rng.integers(0, 12, (players, count)).tolist()
        alike = machines([float] * count, players, rng.integers(1, 30, players).tolist())
        costs = [_by_table(row) for row in tables]
        for name, most in (
            ("equal", longest(machines(costs, players), start)),
            ("heaviest", moves(alike, start)),
            ("lightest", moves(alike, start, lightest)),
            ("own", longest(machines(costs, players, private=private), start)),
        ):
            found[name].append(most / players)
    stairs = [moves(staircase(steps), (0, 0)) / 2 for steps in (1, 2, 4, 8)]
    named = (
        ("equal players, machines of any rising cost, any order", True, found["equal"]),
        ("unequal players, equal machines, the heaviest first", True, found["heaviest"]),
        ("unequal players, equal machines, the lightest first", False, found["lightest"]),
        ("equal players with overlaps of their own, any order", False, found["own"]),
        ("two players of any congestion game (a staircase)", False, stairs),
    )
    return [Claim(what, holds, max(ratios), len(ratios)) for what, holds, ratios in named]


def _constant(paid: float) -> Cost:
    return lambda _: paid


def _by_table(costs: Sequence[float]) -> Cost:
    return lambda load: costs[round(load)]
