"""Laws of the choice among costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.routing.selection import Pick, Softmax, probabilities, select

INF = np.inf


def shares(costs: list[float], temperature: float, softmax: Softmax) -> np.ndarray:
    generator = np.random.default_rng(3)
    array = np.array(costs)
    drawn = [select(array, generator, temperature, softmax) for _ in range(20_000)]
    return np.bincount([each.index for each in drawn if each], minlength=len(costs)) / 20_000


def test_temperature_zero_takes_the_cheapest_and_says_its_cost() -> None:
    assert select(np.array([3.0, 1.5, 2.0]), np.random.default_rng(0)) == Pick(1, 1.5)


def test_temperature_zero_breaks_ties_uniformly() -> None:
    found = shares([2.0, 1.0, 1.0, INF, 1.0], 0.0, "min-max")
    assert found == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3], abs=0.02)


@pytest.mark.parametrize(
    ("temperature", "worse"), [(0.3, 3.4), (0.7, 19.3), (0.8, 22.3), (1, 26.9)]
)
@pytest.mark.parametrize("gap", [1e-6, 1.0, 1e9])
def test_min_max_ignores_the_size_of_the_gap(temperature: float, worse: float, gap: float) -> None:
    costs = np.array([5.0, 5.0 + gap])
    found = probabilities(costs, temperature, "min-max")
    assert 100 * found[1] == pytest.approx(worse, abs=0.05)
    assert shares(list(costs), temperature, "min-max")[1] == pytest.approx(found[1], abs=0.015)


@pytest.mark.parametrize("softmax", ["raw", "min-max"])
def test_draws_follow_equation_2(softmax: Softmax) -> None:
    costs = np.array([1.0, 2.0, 4.0])
    scale = 1.0 if softmax == "raw" else 3.0
    weight = np.exp(-costs / (scale * 0.8))
    expected = weight / weight.sum()
    assert probabilities(costs, 0.8, softmax) == pytest.approx(expected)
    assert shares(list(costs), 0.8, softmax) == pytest.approx(expected, abs=0.015)


def test_raw_follows_the_size_of_the_gap() -> None:
    small = probabilities(np.array([0.0, 0.1]), 1.0, "raw")[1]
    large = probabilities(np.array([0.0, 10.0]), 1.0, "raw")[1]
    assert small == pytest.approx(0.475, abs=1e-3)
    assert large == pytest.approx(4.54e-5, rel=1e-2)


@pytest.mark.parametrize("softmax", ["raw", "min-max"])
def test_equal_costs_are_drawn_uniformly_at_any_temperature(softmax: Softmax) -> None:
    assert shares([7.0] * 4, 2.0, softmax) == pytest.approx([0.25] * 4, abs=0.02)


@given(
    costs=st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(INF)), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
    softmax=st.sampled_from(["raw", "min-max"]),
    seed=st.integers(0, 99),
)
def test_infinity_is_never_chosen(
    costs: list[float], temperature: float, softmax: Softmax, seed: int
) -> None:
    pick = select(np.array(costs), np.random.default_rng(seed), temperature, softmax)
    if min(costs) == INF:
        assert pick is None
    else:
        assert pick is not None
        assert pick.cost == costs[pick.index] < INF


def test_no_candidate_is_no_choice() -> None:
    assert select(np.empty(0), np.random.default_rng(0), 1.0) is None


@pytest.mark.parametrize("wrong", [np.nan, -INF])
def test_a_cost_that_is_no_number_is_an_error(wrong: float) -> None:
    with pytest.raises(ValueError, match="not a number"):
        select(np.array([1.0, wrong]), np.random.default_rng(0))
