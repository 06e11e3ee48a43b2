"""Equilibria and optimum of the prefill/decode split, by brute force."""

from __future__ import annotations

import pytest

from pigou_lab.experiments.equilibria import SplitGame, planned_run, split_game, verdict
from pigou_lab.experiments.fleets import fleet


@pytest.fixture(scope="module", params=[30, 90, 120])
def game(request: pytest.FixtureRequest) -> SplitGame:
    return split_game(planned_run(fleet("340b-1p2d"), request.param))


def test_no_pool_gains_by_leaving_an_equilibrium_alone(game: SplitGame) -> None:
    for prefill, decode in game.equilibria():
        own = game.payoffs((prefill, decode))
        for other in range(1, game.workers):
            if other + decode <= game.workers:
                assert game.payoffs((other, decode))[0] <= own[0] + 1e-6
            if prefill + other <= game.workers:
                assert game.payoffs((prefill, other))[1] <= own[1] + 1e-6


def test_no_split_is_better_than_the_optimum(game: SplitGame) -> None:
    best = game.welfare(game.optimum())
    assert all(game.welfare(split) <= best for split in game.splits)
    assert all(sum(split) <= game.workers for split in game.splits)


def test_decode_gets_no_more_than_prefill_lets_through() -> None:
    saturated = split_game(planned_run(fleet("340b-1p2d"), 120))
    assert saturated.shares((1, 3))[1] > saturated.shares((4, 2))[1]


def test_the_verdict_is_the_worst_of_all_loads() -> None:
    rows = [{"anarchy": 1.0, "rest_welfare": 0.9}, {"anarchy": None, "rest_welfare": 0.8},
            {"anarchy": None, "rest_welfare": None}]  # fmt: skip
    assert verdict(rows) == {"worst_price_of_anarchy": 1.0, "worst_rest_welfare": 0.8}
