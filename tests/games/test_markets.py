"""Markets, partial allocation, auctions and bargaining: known answers, and laws of random ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pigou.games.auctions import double_dutch, themis_round
from pigou.games.ceei import ceei
from pigou.games.fisher import fisher, volatile_market
from pigou.games.nash_bargaining import nash_bargaining
from pigou.games.partial_allocation import partial_allocation

DEMANDS, CAPACITIES = [[1, 4], [3, 1]], [9, 18]


def test_a_linear_market_s_known_prices() -> None:
    made = fisher([[2, 1], [1, 3]], [1, 2])
    assert made.prices == pytest.approx([1, 2])
    assert made.utilities == pytest.approx([2, 3])
    assert made.spent == pytest.approx([1, 2])


def test_buyers_buy_only_the_best_value_and_the_market_clears() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        n, m = rng.integers(1, 6, 2)
        values = rng.integers(0, 5, (n, m)) * 10.0 ** rng.integers(-2, 3, (n, 1))
        budgets, supplies = rng.uniform(0, 4, n), rng.integers(0, 3, m).astype(float)
        made = fisher(values, budgets, supplies)
        buys = made.utilities > 0
        assert (made.allocation.sum(axis=0) <= supplies + 1e-6).all()
        assert made.spent[buys] == pytest.approx(budgets[buys], rel=1e-5)
        assert made.prices @ supplies == pytest.approx(budgets[buys].sum(), rel=1e-6)
        best = made.utilities[buys, None] * made.prices / budgets[buys, None]
        assert (values[buys] <= best * (1 + 1e-6)).all()  # nothing is better value for money


def test_a_large_market_clears_with_nothing_better_to_buy() -> None:
    values = np.random.default_rng(0).uniform(0, 1, (20, 25))
    made = fisher(values, supplies=np.arange(1.0, 26.0))
    assert made.spent == pytest.approx([1] * 20)
    assert (values / made.prices).max(axis=1) == pytest.approx(made.utilities)


def test_ceei_s_known_answers_and_that_a_lie_pays() -> None:
    made = ceei(DEMANDS, CAPACITIES)
    assert made.tasks == pytest.approx([45 / 11, 18 / 11])
    assert made.spent == pytest.approx([1, 1])
    assert ceei([[1, 4], [3, 2]], CAPACITIES).tasks[1] == pytest.approx(1.8)
    richer = ceei(DEMANDS, CAPACITIES, budgets=[3, 1], limits=[1, math.inf])
    assert richer.tasks == pytest.approx([1, 8 / 3])
    idle = ceei([[0, 0], [1, 0], [0, 2]], [4, 0], limits=[5, 9, 9])
    assert idle.tasks == pytest.approx([5, 4, 0])


def test_a_volatile_market_runs_a_job_when_it_progresses_and_favours_the_late() -> None:
    even = volatile_market([[1, 1, 0], [0, 1, 2]], 1)
    assert even.allocation == pytest.approx(np.array([[1, 1, 0], [0, 0, 1]]), abs=1e-4)
    late = volatile_market([[1, 1], [1, 1]], 1, unfairness=[2, 1], power=2)
    assert late.utilities == pytest.approx([1.6, 0.4])
    sized = volatile_market([[1], [1]], 4, workers=[2, 3], done=[0, 0])
    assert sized.allocation[:, 0] @ [2, 3] == pytest.approx(4)
    ahead = volatile_market([[1], [1]], 1, done=[1, 0])
    assert ahead.allocation[:, 0] == pytest.approx([0, 1], abs=1e-6)


def test_partial_allocation_s_known_fractions() -> None:
    for n in (1, 2, 3, 4, 40):
        want = ((n - 1) / n) ** (n - 1) if n > 1 else 1.0
        assert partial_allocation([[1.0]] * n).fractions == pytest.approx([want] * n)
    two = partial_allocation([[2, 1], [1, 3]])
    assert two.fair_utilities == pytest.approx([2, 3])
    assert two.fractions == pytest.approx([0.75, 2 / 3])
    assert two.utilities == pytest.approx([1.5, 2])
    assert two.burnt == pytest.approx([0.25, 1 / 3])
    tasks = partial_allocation(DEMANDS, CAPACITIES, leontief=True)
    assert tasks.fair_utilities == pytest.approx([45 / 11, 18 / 11])
    assert tasks.fractions == pytest.approx([(18 / 11) / 3, (45 / 11) / 4.5])


def test_partial_allocation_leaves_no_lie_that_pays() -> None:
    rng = np.random.default_rng(7)
    for _ in range(15):
        values = rng.integers(1, 6, (3, 2)).astype(float)
        honest = partial_allocation(values)
        assert (honest.fractions >= 1 / math.e).all()
        for _ in range(4):
            lie = values.copy()
            lie[0] = rng.integers(0, 6, 2)
            assert partial_allocation(lie).allocation[0] @ values[0] <= honest.utilities[0] + 1e-6


def test_themis_offers_to_the_worst_off_and_hands_the_remainder_on() -> None:
    made = themis_round([[2, 1], [1, 3], [1, 0]], [1, 5, 4], fairness=0.0)
    assert made.bidders == (1, 2, 0)
    one = themis_round([[2, 1], [1, 3], [1, 1]], [1, 5, 4], fairness=0.4)
    assert one.bidders == (1, 2)
    assert math.isnan(one.fractions[0])
    assert one.allocation.sum(axis=0) == pytest.approx([1, 1])  # 0 takes all that is burnt
    lone = themis_round([[1.0], [0.0]], [2, 1], [3], fairness=1.0)
    assert lone.allocation[:, 0] == pytest.approx([3, 0])


def test_double_dutch_clocks_cross_at_one_price() -> None:
    made = double_dutch([4, 10, 6, 8], [3, 9, 5, 7])
    assert made.pairs == ((1, 0), (3, 2))
    assert (made.price, made.surplus) == (6, 10)
    assert double_dutch([10, 8], [1, 2, 3]).price == 2  # buyers are used up
    assert double_dutch([10, 8, 6], [1, 2]).price == 6
    assert double_dutch([1], [2]).price is None
    assert double_dutch([], [2]).pairs == ()
    assert double_dutch([7.4], [6.6], tick=1.0).price == 7
    rng = np.random.default_rng(1)
    for _ in range(50):
        bids, asks = rng.integers(0, 9, 5).tolist(), rng.integers(0, 9, 4).tolist()
        made = double_dutch(bids, asks)
        ranked = zip(sorted(bids, reverse=True), sorted(asks), strict=False)
        assert made.surplus == sum(max(0, bid - ask) for bid, ask in ranked)
        assert all(asks[s] <= made.price <= bids[b] for b, s in made.pairs)


def test_the_known_bargain_and_its_like() -> None:
    for made in (
        nash_bargaining([2, 3], matrix=[[1, 1]], limits=[10]),
        nash_bargaining([2, 3], points=[[10, 0], [0, 10], [1, 1]]),
    ):
        assert made.utilities == pytest.approx([4.5, 5.5])
        assert made.product == pytest.approx(6.25)
    slices = nash_bargaining([2.25, 1.5], matrix=np.transpose(DEMANDS), limits=CAPACITIES)
    assert (slices.utilities >= [2.25, 1.5]).all()
    strong = nash_bargaining([0, 0], matrix=[[1, 1]], limits=[1], powers=[3, 1])
    assert strong.utilities == pytest.approx([0.75, 0.25])
    owed = nash_bargaining([-2, -3], matrix=[[1, 1]], limits=[0])
    assert owed.utilities == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fisher([[1, -1]]), r"values\[0, 1\] is -1"),
        (lambda: fisher([[1]], [1, 2]), "budgets has shape"),
        (lambda: ceei([[1]], [1, 2]), "capacities has shape"),
        (lambda: partial_allocation([[1]], weights=[-1]), "weights"),
        (lambda: themis_round([[1]], [1], fairness=2), "fairness is 2"),
        (lambda: double_dutch([1], [1], tick=-1), "tick is -1"),
        (lambda: nash_bargaining([5, 5], matrix=[[1, 1]], limits=[10]), "nothing to agree on"),
        (lambda: nash_bargaining([0, 0], matrix=[[1, -1]], limits=[10]), "do not bound player 0"),
        (lambda: nash_bargaining([0, 0]), "matrix and limits, or points"),
        (lambda: volatile_market([[1]], 1, workers=[0]), r"workers\[0\] is 0"),
        (lambda: volatile_market([[1, 1]], [1, 1, 1]), r"capacity has shape \(3,\)"),
    ],
)
def test_what_no_market_takes_is_refused_by_its_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
