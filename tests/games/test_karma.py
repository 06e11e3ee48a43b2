"""Karma: the known run, newcomers, weights, and laws of what is allocated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.games.karma import Karma, karma

QUANTA = [[3, 2, 1], [3, 0, 0], [0, 3, 6], [2, 2, 3], [2, 3, 5]]


def test_the_known_run_of_five_quanta() -> None:
    given_, credits = karma(QUANTA, 2, alpha=0.5, credits=6)
    assert given_.tolist() == [[3, 2, 1], [3, 0, 0], [0, 3, 3], [1, 2, 3], [2, 2, 2]]
    assert credits.tolist() == [[5, 6, 7], [4, 8, 9], [6, 7, 8], [7, 7, 7], [7, 7, 7]]
    assert given_.sum(axis=0).tolist() == [9, 9, 9]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_everybody_gets_its_guarantee_and_no_slice_idles_while_it_is_wanted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    users, share = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    alpha = float(rng.choice([0.0, 0.25, 0.5, 1.0]))
    demands = rng.integers(0, 3 * share, (8, users))
    given_, credits = karma(demands, share, alpha=alpha, credits=10_000)
    assert (given_ <= demands).all()
    assert (credits > 0).all()
    assert (given_ >= np.minimum(demands, np.floor(alpha * share))).all()
    assert (given_.sum(axis=1) == np.minimum(demands.sum(axis=1), users * share)).all()


def test_slices_go_one_by_one_as_published() -> None:
    """The rule literally: shares and parts of all kinds, credits that run out."""
    rng = np.random.default_rng(2)
    for alpha in (0.0, 0.25, 0.5, 1.0) * 8:
        shares, start = rng.integers(1, 6, int(rng.integers(1, 6))), float(rng.integers(0, 8))
        demands = rng.integers(0, 9, (6, len(shares)))
        given_, left = karma(demands, shares, alpha=alpha, credits=start)
        own = np.floor(alpha * shares)
        credits, price = np.full(len(shares), start), shares.mean() / shares
        for t, wanted in enumerate(demands):
            credits += shares - own
            got = np.minimum(wanted, own)
            donated, shared = own - got, (shares - own).sum()
            while donated.sum() + shared > 0:
                able = (got < wanted) & (credits > 0)
                if not able.any():
                    break
                borrower = int(np.where(able, credits, -np.inf).argmax())
                if donated.any():
                    donor = int(np.where(donated > 0, credits, np.inf).argmin())
                    donated[donor] -= 1
                    credits[donor] += 1
                else:
                    shared -= 1
                got[borrower] += 1
                credits[borrower] -= price[borrower]
            assert given_[t].tolist() == got.tolist()
            assert left[t] == pytest.approx(credits)


def test_a_user_without_credits_has_its_guarantee_alone() -> None:
    given_, credits = karma([[8, 0], [8, 0], [8, 0]], 4, alpha=0.5, credits=0)
    assert given_[:, 0].tolist() == [4, 4, 4]  # 2 of the guarantee, 2 for that quantum's credits
    assert credits[-1].tolist() == [0, 12]


def test_a_newcomer_has_the_mean_of_credits_and_leavers_take_theirs_along() -> None:
    pool = Karma(alpha=0.5, credits=6)
    pool.join("a", 2)
    pool.join("b", 2)
    pool.allocate({"a": 4, "b": 0})
    assert pool.credits == {"a": 4, "b": 8}
    pool.join("c", 2)
    assert pool.credits["c"] == 6
    assert pool.slices == 6
    pool.leave("b")
    assert pool.credits == {"a": 4, "c": 6}
    pool.join("a", 4)  # a new share, the same credits
    assert pool.credits["a"] == 4
    assert pool.slices == 6


def test_a_slice_costs_less_who_has_a_larger_share() -> None:
    pool = Karma(alpha=0.0, credits=10)
    pool.join("large", 3)
    pool.join("small", 1)
    assert pool.allocate({"large": 3, "small": 1}) == {"large": 3, "small": 1}
    assert pool.credits == pytest.approx({"large": 10 + 3 - 3 * 2 / 3, "small": 10 + 1 - 2})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Karma(alpha=1.5), "alpha is 1.5"), (lambda: Karma(credits=-1), "credits is -1"),
        (lambda: Karma().join("a", -1), "fair_share is -1"), (lambda: Karma().leave("a"), "'a'"),
        (lambda: Karma().allocate({"a": 1}), "not joined"),
        (lambda: karma([[1, 2]], [1, 2, 3]), r"fair_share has shape \(3,\)"),
        (lambda: karma([[1.5]], 2), "is 1.5"),
        (lambda: karma([[1]], 2.5), "fair_share is 2.5"), (lambda: karma([1, 2], 2), "shape"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_name(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
