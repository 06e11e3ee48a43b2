"""Nested games of experts: bounds at any depth, and activation, which has none."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou_lab.games.atomic import AtomicGame, Cost
from pigou_lab.games.experts import (
    ActivationGame,
    activation_rows,
    herding,
    nested_pigou,
    worst_nested,
)


def test_the_known_nested_game_has_pigou_s_price() -> None:
    game = nested_pigou()
    assert game.cost(game.wardrop()) == pytest.approx(2.0)
    assert game.cost(game.optimum()) == pytest.approx(1.5)
    assert game.price_of_anarchy() == pytest.approx(4 / 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_nesting_does_not_compound_the_price_of_affine_games(depth: int) -> None:
    assert 1.1 < worst_nested(depth, 30, 7) <= 4 / 3 + 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.data())
def test_nesting_does_not_compound_the_price_of_atomic_affine_games(
    depth: int, players: int, data: st.DataObject
) -> None:
    """A request picks a GPU, an expert's copy there, and so on: a path of a binary tree."""
    numbers = st.integers(0, 3)
    paths = list(product(range(2), repeat=depth))
    costs: dict[Hashable, Cost] = {}
    for path in paths:
        for level in range(1, depth + 1):
            if path[:level] not in costs:
                slope, fixed = data.draw(numbers), data.draw(numbers)
                costs[path[:level]] = partial(_affine, slope, fixed)
    strategies = [[path[:level] for level in range(1, depth + 1)] for path in paths]
    game = AtomicGame(costs, [strategies] * players)
    if game.social_cost(game.optimum()) > 0:
        assert 1 - 1e-9 <= game.price_of_anarchy() <= 2.5 + 1e-9


def _affine(slope: int, fixed: int, load: float) -> float:
    return slope * load + fixed


@pytest.mark.parametrize("copies", [2, 3])
def test_activation_s_price_is_the_number_of_copies_and_tolls_bring_it_to_one(copies: int) -> None:
    game = herding(copies)
    even = game.even()
    selfish = game.settled(even, tolled=False)
    assert (selfish == even).all()
    assert game.layer_s(selfish) / game.optimum() == copies
    assert game.layer_s(game.settled(even, tolled=True)) == game.optimum()


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    st.integers(0, 1000),
)
def test_tokens_stay_with_copies_of_their_expert_and_no_token_gains_by_moving(
    tokens: list[int], read_s: float, seed: int
) -> None:
    slots = np.random.default_rng(seed).permutation(np.tile(np.arange(3), 2))
    game = ActivationGame(np.array(tokens), slots, 3, token_s=1.0, read_s=read_s)
    even = game.even()
    for way in (even, game.settled(even, tolled=False), game.settled(even, tolled=True)):
        assert np.bincount(slots, way, 3).tolist() == tokens
        assert game.layer_s(way) >= game.optimum() - 1e-9
    counts = game.settled(even, tolled=False)
    seconds = game.rank_s(counts)
    for slot in np.flatnonzero(counts):
        for other in np.flatnonzero(slots == slots[slot]):
            moved = counts.copy()
            moved[slot] -= 1
            moved[other] += 1
            assert game.rank_s(moved)[other // 2] >= seconds[slot // 2] - 1e-9


def test_experts_that_pay_tolls_halve_decode_with_copies_and_cost_prefill_nothing() -> None:
    decode, prefill = activation_rows("deepseek-v3", "H100", 32, [256], [64, 4096], "uniform")
    assert decode["saved"] > 0.3
    assert decode["selfish"] == pytest.approx(decode["even"])
    assert 0.0 <= prefill["saved"] < 0.05
