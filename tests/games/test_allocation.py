"""Laws of the prefill/decode game: interior, corner, flat and several equilibria."""

from __future__ import annotations

import math
from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou_lab.games.allocation import AllocationGame


def exponential(gpus: float, k1: float, k2: float) -> AllocationGame:
    return AllocationGame(lambda p: exp(-k1 * p), lambda d, p: exp(-k2 * d), gpus)


def starved() -> AllocationGame:
    """Decode's violations fall steeply as prefill passes 4 GPUs."""
    return AllocationGame(
        lambda p: 0.1 * exp(-0.5 * p),
        lambda d, p: 0.1 * exp(-2 * math.tanh(p - 4)) * exp(-0.5 * d),
        8,
    )


@pytest.mark.parametrize(
    ("gpus", "k1", "k2", "prefill"), [(8, 0.5, 0.5, 4.0), (8, 1.0, 0.5, 3.128765)]
)
def test_exponential_rates_meet_where_the_formula_says(
    gpus: float, k1: float, k2: float, prefill: float
) -> None:
    (only,) = exponential(gpus, k1, k2).equilibria()
    assert only.prefill == pytest.approx(prefill, abs=1e-6)
    assert only.prefill == pytest.approx((k2 * gpus + log(k1 / k2)) / (k1 + k2), abs=1e-6)
    assert (only.kind, only.stable) == ("interior", True)


def test_a_corner_is_found_where_the_formula_leaves_the_budget() -> None:
    (only,) = exponential(2, 1.0, 0.1).equilibria()
    assert (0.1 * 2 + log(10)) / 1.1 == pytest.approx(2.275, abs=1e-3)
    assert (only.prefill, only.decode, only.kind) == (2, 0, "no decode")
    (other,) = exponential(2, 0.1, 1.0).equilibria()
    assert (other.prefill, other.decode, other.kind) == (0, 2, "no prefill")


@given(st.floats(0.1, 2), st.floats(0.1, 2), st.integers(1, 24))
@settings(max_examples=examples(30))
def test_without_externality_the_equilibrium_is_the_social_optimum(
    k1: float, k2: float, gpus: int
) -> None:
    game = exponential(gpus, k1, k2)
    found = game.equilibria()
    best = game.social_optimum()
    assert min(e.violations for e in found) == pytest.approx(best.violations, rel=1e-6, abs=1e-9)
    raw = min(max((k2 * gpus + log(k1 / k2)) / (k1 + k2), 0), gpus)
    assert any(e.prefill - 1e-3 <= raw <= e.until + 1e-3 for e in found)


def test_an_externality_makes_three_equilibria_two_of_them_stable() -> None:
    found = starved().equilibria()
    assert [e.kind for e in found] == ["interior"] * 3
    assert [e.stable for e in found] == [True, False, True]
    assert found[1].prefill == pytest.approx(4.0, abs=1e-6)
    assert found[0].prefill + found[2].prefill == pytest.approx(8.0, abs=1e-6)
    costs = [e.violations for e in found]
    assert costs[0] > 6 * costs[2]


def test_rates_that_are_flat_give_a_stretch_of_equilibria() -> None:
    def rate(gpus: float) -> float:
        return min(1.0, max(0.0, (6 - gpus) / 2))

    found = AllocationGame(rate, lambda d, p: rate(d), 8).equilibria()
    assert [e.kind for e in found] == ["flat", "flat"]
    np.testing.assert_allclose([found[0].prefill, found[0].until], [0, 2], atol=0.01)
    np.testing.assert_allclose([found[1].prefill, found[1].until], [6, 8], atol=0.01)


def test_rates_with_a_corner_of_their_own_meet_at_a_kink() -> None:
    game = AllocationGame(lambda p: max(0, 1 - p / 3), lambda d, p: max(0, 1 - d / 4), 6)
    (only,) = game.equilibria()
    assert only.kind == "kink"
    assert only.prefill == pytest.approx(3, abs=1e-3)


@pytest.mark.parametrize("start", range(9))
def test_whole_gpus_settle_next_to_an_equilibrium(start: int) -> None:
    assert exponential(8, 0.5, 0.5).best_response_path(start)[-1] == 4
    assert starved().best_response_path(start)[-1] in (2, 4, 6)


def test_a_step_moves_as_many_gpus_as_it_says() -> None:
    assert exponential(8, 0.5, 0.5).best_response_path(0, step=2) == [0, 2, 4]


def test_the_allocation_game_says_what_is_wrong_with_its_arguments() -> None:
    with pytest.raises(ValueError, match="above 0"):
        exponential(0, 1, 1)
    for game, start, step in (
        (exponential(8, 1, 1), 9, 1),
        (exponential(8, 1, 1), 0, 0),
        (exponential(7.5, 1, 1), 0, 1),
    ):
        with pytest.raises(ValueError, match="whole GPUs"):
            game.best_response_path(start, step)
