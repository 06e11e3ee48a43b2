"""Regret beside whoever knows the future."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.token_pd.regret_games import by_price, growth, optimum, regret, utility
from pigou.kv.memory_price import EvictionCurve, cheapest_evictions


@given(
    st.integers(0, 2**20),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.2]),
)
def test_nobody_does_better_than_the_optimum(
    seed: int, budget: int, risk: float, penalty: float
) -> None:
    rng = np.random.default_rng(seed)
    returns, variances = rng.random((3, 5)), rng.random((3, 5)) / 4
    there = rng.random((3, 5)) < 0.8
    best = optimum(returns, variances, there, budget, risk, penalty)
    found = np.full(3, -np.inf)
    for choice in itertools.product([False, True], repeat=5):
        kept = np.broadcast_to(np.array(choice), (3, 5))
        allowed = (kept & there).sum(axis=1) <= budget
        earned = utility(returns, variances, kept, there, risk, penalty)
        assert (earned[allowed] <= best[allowed] + 1e-12).all()
        found = np.where(allowed, np.maximum(found, earned), found)
    assert found == pytest.approx(best)


def priced(returns: np.ndarray, there: np.ndarray, budget: int) -> np.ndarray:
    """Play Token-PD's rule with a rate like 1 / sqrt(T)."""
    kept, _ = by_price(returns, there, budget, 4.0 / np.sqrt(len(returns)), capped=True)
    return kept


def by_cut(returns: np.ndarray, there: np.ndarray, budget: int) -> np.ndarray:
    """Keep what the exact cut leaves: all but the lowest returns beyond the budget."""
    kept = there.copy()
    for t in range(len(returns)):
        places = np.flatnonzero(there[t])
        order = places[np.argsort(returns[t, places])]
        over = max(0, len(order) - budget)
        chosen = cheapest_evictions([EvictionCurve(returns[t, order])], over, over)
        assert chosen is not None
        kept[t, order[: chosen.counts[0]]] = False
    return kept


def cost(kept: np.ndarray, returns: np.ndarray, there: np.ndarray, budget: int) -> np.ndarray:
    none = np.zeros(returns.shape)
    assert (kept.sum(axis=1) <= budget).all()
    return regret(
        optimum(returns, none, there, budget, 0.0, 0.0),
        utility(returns, none, kept, there, 0.0, 0.0),
    )


def sequence(steps: int, seed: int, steady: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return returns and presence of 60 tokens; the load falls by half half-way.

    Steady: who is there stays, and earns the same in each step. Else all is drawn anew.
    """
    rng = np.random.default_rng(seed)
    shape = (1, 60) if steady else (steps, 60)
    returns = np.broadcast_to(rng.random(shape) ** 4, (steps, 60))
    load = np.where(np.arange(steps) < steps // 2, 0.8, 0.4)[:, None]
    return returns, np.broadcast_to(rng.random(shape), (steps, 60)) < load


@given(st.integers(0, 2**20), st.booleans())
def test_a_price_keeps_what_is_worth_most_and_a_cap_no_more_than_the_budget(
    seed: int, capped: bool
) -> None:
    rng = np.random.default_rng(seed)
    returns, there = rng.random((6, 12)), rng.random((6, 12)) < 0.8
    kept, beyond = by_price(returns, there, 4, 0.5, capped)
    assert not (kept & ~there).any()
    for mine, around, worth, over in zip(kept, there, returns, beyond, strict=True):
        least = worth[mine].min(initial=np.inf)
        assert (worth[around & ~mine] <= least).all()
        assert mine.sum() == (min(4 + over, 4) if capped else 4 + over)


LENGTHS = np.array([125, 250, 500, 1000, 2000])


def slope(ends: list[float]) -> float:
    return float(np.polyfit(np.log(LENGTHS), np.log(ends), 1)[0])


@pytest.mark.parametrize("seed", range(3))
def test_regret_of_the_price_grows_like_the_root_of_time_while_the_load_is_steady(
    seed: int,
) -> None:
    ends = []
    for steps in LENGTHS.tolist():
        returns, there = sequence(steps, seed, steady=True)
        ends.append(float(cost(priced(returns, there, 20), returns, there, 20)[-1]))
    assert min(ends) > 0, "the price is not clairvoyant"
    assert slope(ends) <= 0.6


@pytest.mark.parametrize("seed", range(3))
def test_a_price_alone_has_linear_regret_where_the_load_fluctuates_and_the_cut_has_none(
    seed: int,
) -> None:
    """What the paper's bound leaves out: its optimum meets the budget in each step, too."""
    ends = []
    for steps in LENGTHS.tolist():
        returns, there = sequence(steps, seed, steady=False)
        ends.append(float(cost(priced(returns, there, 20), returns, there, 20)[-1]))
        assert cost(by_cut(returns, there, 20), returns, there, 20) == pytest.approx(0.0)
    assert slope(ends) > 0.8


def test_growth_is_the_exponent_of_a_power_law() -> None:
    steps = np.arange(1, 200)
    assert growth(3.0 * np.sqrt(steps)) == pytest.approx(0.5)
    assert growth(0.1 * steps**1.0, begin=10) == pytest.approx(1.0)
    assert growth(np.zeros(9)) == 0.0
