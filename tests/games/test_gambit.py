"""Pure equilibria as Gambit finds them (McKelvey, McLennan and Turocy)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pigou.games.latency import LatencyLaw
from pigou_lab.games.atomic import AtomicGame
from pigou_lab.games.caching import CachingGame
from pigou_lab.games.routing import RoutingGame

pytestmark = pytest.mark.gambit
ORACLE = Path(__file__).with_name("gambit_oracle.py")


@pytest.fixture(scope="module")
def gambit() -> str:
    """The interpreter that has Gambit."""
    venv = os.environ.get("PIGOU_PEER_GAMBIT")
    if venv:
        return str(Path(venv) / "bin" / "python")
    if find_spec("pygambit"):
        return sys.executable
    pytest.skip("no pygambit: install it in a venv that PIGOU_PEER_GAMBIT names")


def pure_equilibria(gambit: str, games: list[list[Any]]) -> list[set[tuple[int, ...]]]:
    """Each game is one payoff array a player, a dimension a player."""
    done = subprocess.run(
        [gambit, str(ORACLE)],
        input=json.dumps(games),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [{tuple(p) for p in found} for found in json.loads(done.stdout)]


def rounded(cost: float) -> float:
    """Costs that are equal up to rounding are equal to Gambit, which computes exactly."""
    return -round(cost, 9)


def test_gambit_knows_the_two_games_that_everybody_knows(gambit: str) -> None:
    dilemma = [[[3, 0], [5, 1]], [[3, 5], [0, 1]]]
    sexes = [[[2, 0], [0, 1]], [[1, 0], [0, 2]]]
    assert pure_equilibria(gambit, [dilemma, sexes]) == [{(1, 1)}, {(0, 0), (1, 1)}]


def test_gambit_finds_the_same_equilibria_of_random_congestion_games(gambit: str) -> None:
    rng = np.random.default_rng(5)
    games, payoffs = [], []
    for index in range(60):
        resources = int(rng.integers(2, 5))
        table = rng.integers(0, 9, (resources, 8)).cumsum(axis=1)
        costs = {r: (lambda x, row=table[r]: float(row[round(x)])) for r in range(resources)}
        strategies = [
            [
                set(rng.permutation(resources)[: rng.integers(1, resources + 1)].tolist())
                for _ in range(rng.integers(1, 4))
            ]
            for _ in range(rng.integers(2, 4))
        ]
        weights = rng.integers(1, 3, len(strategies)).tolist() if index % 2 else None
        game = AtomicGame(costs, strategies, weights)
        shape = [len(mine) for mine in game.strategies]
        paid = np.empty((len(shape), *shape))
        for profile in game.profiles():
            for player in range(len(shape)):
                paid[(player, *profile)] = rounded(game.player_cost(profile, player))
        games.append(game)
        payoffs.append(paid.tolist())
    for game, found in zip(games, pure_equilibria(gambit, payoffs), strict=True):
        assert set(game.pure_equilibria()) == found


def test_gambit_finds_the_same_equilibria_of_random_routing_games(gambit: str) -> None:
    rng = np.random.default_rng(6)
    games, payoffs = [], []
    for _ in range(40):
        requests, workers = int(rng.integers(2, 5)), int(rng.integers(2, 4))
        laws = [LatencyLaw(*rng.uniform(0, 1, 3), n_sat=rng.uniform(2, 5)) for _ in range(workers)]
        game = RoutingGame(laws, rng.random((requests, workers)), 1.0)
        paid = np.empty((requests, *[workers] * requests))
        for profile in product(range(workers), repeat=requests):
            loads = game.loads(profile)
            for i, w in enumerate(profile):
                cost = game.latency[w, loads[w] - 1] - game.savings[i, w]
                paid[(i, *profile)] = rounded(cost)
        games.append(game)
        payoffs.append(paid.tolist())
    for game, found in zip(games, pure_equilibria(gambit, payoffs), strict=True):
        every = product(range(game.workers), repeat=game.requests)
        assert {p for p in every if game.is_equilibrium(p)} == found


def test_gambit_finds_the_same_equilibria_of_random_caching_games(gambit: str) -> None:
    rng = np.random.default_rng(7)
    games, payoffs = [], []
    for _ in range(30):
        nodes = int(rng.integers(2, 4))
        distance = rng.integers(1, 6, (nodes, nodes)).astype(float)
        np.fill_diagonal(distance, 0)
        game = CachingGame(
            distance, rng.integers(0, 4, (nodes, 2)), 0.5, rng.integers(1, 3, nodes), miss_cost=9.0
        )
        rows = [np.array(r) for r in product((-1, 0), repeat=2)]
        legal = [[r for r in rows if (r >= 0).sum() <= game.capacity[i, 0]] for i in range(nodes)]
        shape = [len(mine) for mine in legal]
        paid = np.empty((nodes, *shape))
        for profile in product(*map(range, shape)):
            held = np.stack([legal[i][c] for i, c in enumerate(profile)])
            paid[(slice(None), *profile)] = [rounded(c) for c in game.node_costs(held)]
        games.append((game, legal))
        payoffs.append(paid.tolist())
    for (game, legal), found in zip(games, pure_equilibria(gambit, payoffs), strict=True):
        expected = {
            np.stack([legal[i][c] for i, c in enumerate(profile)]).tobytes() for profile in found
        }
        assert {p.astype(legal[0][0].dtype).tobytes() for p in game.equilibria()} == expected
