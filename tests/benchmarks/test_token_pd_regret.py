"""What the regret is made of: future shares, the fixed optimum, when a price has settled."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.token_pd.optimum import Recorded, earned, fixed_optimum, settling
from benchmarks.token_pd.record import Step, lay_out, shares


def test_shares_are_means_over_the_queries_to_come() -> None:
    attention = np.tril(np.random.default_rng(0).random((2, 6, 6))).astype(np.float32)
    found = shares(attention)
    assert found.shape == (2, 7, 6)
    for t in range(6):
        np.testing.assert_allclose(found[:, t], attention[:, t:].mean(axis=1), rtol=1e-5)
    assert not found[:, 6].any()


def intervals(seed: int) -> Recorded:
    """Draw tokens that are there for an interval of steps each."""
    rng = np.random.default_rng(seed)
    there = np.zeros((6, 7), dtype=np.bool_)
    for token in range(7):
        begin = int(rng.integers(0, 5))
        there[begin : int(rng.integers(begin + 1, 7)), token] = True
    return Recorded(rng.random((6, 7)), rng.random((6, 7)) < 0.5, there)


@pytest.mark.parametrize("seed", range(8))
def test_the_fixed_optimum_is_that_of_trying_all_choices(seed: int) -> None:
    recorded, budget, ends = intervals(seed), 2, [1, 3, 6]
    found = fixed_optimum(recorded, budget, ends)
    for end, value in zip(ends, found.tolist(), strict=True):
        there = recorded.there[:end]
        best = max(
            (there * recorded.returns[:end])[:, list(choice)].sum()
            for choice in (np.array(c, dtype=bool) for c in product((0, 1), repeat=7))
            if (there[:, choice].sum(axis=1) <= budget).all()
        )
        assert value == pytest.approx(best)


def test_a_choice_within_the_budget_never_earns_more_than_the_fixed_optimum() -> None:
    recorded = intervals(3)
    kept = recorded.there & (np.arange(7) < 2)
    mine = earned(Recorded(recorded.returns, kept, recorded.there))
    best = fixed_optimum(recorded, 2, [1, 2, 3, 4, 5, 6])
    assert (mine <= best + 1e-9).all()


def test_a_layout_puts_requests_side_by_side() -> None:
    returns = [np.random.default_rng(i).random((1, 2, 5, 4)).astype(np.float32) for i in range(2)]
    kept = np.array([[[0, 2], [1, 2]]], dtype=np.int32)
    steps = [Step({"a": 3}, {"a": kept}), Step({"b": 2}, {"b": kept[:, :, :1]})]
    found = lay_out(steps, ["a", "b"], returns, 0, 1)
    assert found.there.tolist() == [
        [True] * 3 + [False] * 5,
        [False] * 4 + [True] * 2 + [False] * 2,
    ]
    assert np.flatnonzero(found.kept[0]).tolist() == [1, 2]
    assert np.flatnonzero(found.kept[1]).tolist() == [5]
    np.testing.assert_allclose(found.returns[0, :3], returns[0][0, 1, 3, :3], rtol=1e-6)


@pytest.mark.parametrize(("late", "found"), [(0, 0), (7, 7), (25, None)])
def test_a_price_has_settled_once_it_stays_close(late: int, found: int | None) -> None:
    prices = [1.0] * 10 + [2.0] * late + [4.0] * (40 - late)
    assert settling(prices, 10, 40) == found
