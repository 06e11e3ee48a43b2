"""Who gives up how much, and at what price: laws of the cut and of the price."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.token_pd.regret_games import admits, excess
from pigou.kv.memory_price import (
    FLOOR,
    EvictionCurve,
    MemoryPrice,
    averaged_price,
    blocks_above,
    blocks_below,
    cheapest_evictions,
    evictable_by_tenant,
    exponentiated_price,
    marginal_ahead,
)

LOSSES = st.lists(st.floats(0.0, 8.0).map(lambda x: round(x, 1)), max_size=4).map(
    lambda found: np.array(sorted(found))
)
OFFERS = st.lists(st.builds(EvictionCurve, LOSSES, st.sampled_from(["a", "b", ""])), max_size=4)


def loss(offers: list[EvictionCurve], counts: tuple[int, ...]) -> float:
    return sum(float(o.lost_returns[:n].sum()) for o, n in zip(offers, counts, strict=True))


def choices(
    offers: list[EvictionCurve], blocks: int, ceiling: float, spare: dict[str, int]
) -> list:
    found = []
    for counts in itertools.product(*(range(len(o.lost_returns) + 1) for o in offers)):
        if sum(counts) != blocks:
            continue
        taken = {t: sum(n for o, n in zip(offers, counts, strict=True) if o.tenant == t)
                 for t in spare}  # fmt: skip
        dear = any(
            (o.lost_returns[:n] > ceiling).any() for o, n in zip(offers, counts, strict=True)
        )
        if not dear and all(taken[t] <= spare[t] for t in spare):
            found.append(counts)
    return found


@given(
    OFFERS,
    st.integers(0, 9),
    st.sampled_from([math.inf, 4.0]),
    st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 4)),
)
def test_no_choice_of_as_many_blocks_loses_less(
    offers: list[EvictionCurve], blocks: int, ceiling: float, spare: dict[str, int]
) -> None:
    chosen = cheapest_evictions(offers, blocks, blocks, ceiling, spare)
    others = choices(offers, blocks, ceiling, spare)
    if chosen is None:
        assert not others, "it could be had"
        return
    counts = tuple(chosen.counts.tolist())
    assert counts in others
    assert loss(offers, counts) == pytest.approx(min(loss(offers, c) for c in others))


@given(OFFERS, st.integers(0, 6), st.integers(0, 6))
def test_a_cut_is_exact_or_is_not_made(offers: list[EvictionCurve], least: int, more: int) -> None:
    total = sum(len(offer.lost_returns) for offer in offers)
    chosen = cheapest_evictions(offers, least, least + more)
    if total < least:
        assert chosen is None
    else:
        assert chosen is not None
        assert chosen.blocks == min(total, least + more)


@given(OFFERS, st.integers(0, 8))
def test_the_marginal_return_rises_with_what_is_wanted(
    offers: list[EvictionCurve], blocks: int
) -> None:
    one, more = (
        cheapest_evictions(offers, blocks, blocks),
        cheapest_evictions(offers, blocks + 1, blocks + 1),
    )
    if one is not None and more is not None:
        assert one.marginal <= more.marginal
        assert (one.counts <= more.counts).all(), "who gave up a block keeps it as more is wanted"


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), st.integers(0, 30), st.integers(1, 4)
)
def test_with_true_returns_what_stays_is_the_top_k(
    returns: list[float], gone: int, requests: int
) -> None:
    """With lambda = 0 and blocks of a token: the highest returns of all requests are kept."""
    shares = [np.sort(np.array(returns[i::requests])) for i in range(requests)]
    chosen = cheapest_evictions([EvictionCurve(share) for share in shares], 0, gone)
    assert chosen is not None
    kept = np.concatenate(
        [share[n:] for share, n in zip(shares, chosen.counts.tolist(), strict=True)]
    )
    best = np.sort(returns)[min(gone, len(returns)) :]
    assert np.sort(kept).tolist() == best.tolist()


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), st.integers(0, 30))
def test_a_tenant_keeps_its_floor(held: dict[str, int], blocks: int) -> None:
    floors = {"a": 4, "b": 9}
    offers = [EvictionCurve(np.full(count, 0.1), tenant) for tenant, count in held.items()]
    chosen = cheapest_evictions(
        offers, 0, blocks, evictable_by_tenant=evictable_by_tenant(floors, held)
    )
    assert chosen is not None
    for offer, count in zip(offers, chosen.counts.tolist(), strict=True):
        floor = min(floors.get(offer.tenant, 0), held[offer.tenant])
        assert held[offer.tenant] - count >= floor


# --- the price --------------------------------------------------------------------------------


def test_the_price_falls_to_its_floor_while_memory_is_left() -> None:
    price = 3.0
    for _ in range(1000):
        following = exponentiated_price(price, 60.0, 100.0, 0.1)
        assert following < price or following == FLOOR
        price = following
    assert price == FLOOR


@given(st.floats(1e-9, 1e9), st.floats(0, 500), st.floats(0, 500), st.floats(0.01, 5.0))
def test_the_price_rises_with_demand(price: float, one: float, other: float, rate: float) -> None:
    low, high = sorted((one, other))
    assert exponentiated_price(price, low, 100.0, rate) <= exponentiated_price(
        price, high, 100.0, rate
    )
    assert exponentiated_price(price, 100.0, 100.0, rate) == pytest.approx(price)


@given(st.floats(1e-9, 1e9), st.floats(0, 300), st.integers(1, 9))
def test_steps_at_once_are_as_good_as_one_by_one(price: float, used: float, steps: int) -> None:
    once = exponentiated_price(price, used, 100.0, 0.1, steps)
    for _ in range(steps):
        price = exponentiated_price(price, used, 100.0, 0.1)
    assert once == pytest.approx(price, rel=1e-9)


def test_the_price_of_cuts_settles_within_ten_of_them_after_a_change_of_load() -> None:
    memory_price = MemoryPrice(100, 0.1, by_price=False)
    for marginal in (0.02, 1.7, 0.3):
        for _ in range(10):
            memory_price.note(marginal)
            memory_price.step(100, 1)
        assert memory_price.price == pytest.approx(marginal, rel=0.06)


def test_the_outlook_is_the_dearest_of_what_goes_before_curves_are_renewed() -> None:
    offers = [EvictionCurve(np.array([0.1, 0.4, 0.9])), EvictionCurve(np.array([0.2, 0.3]))]
    offers += [EvictionCurve(np.full(4, math.inf)), EvictionCurve(np.empty(0))]
    taken = np.array([1, 0, 3, 0], dtype=np.int32)
    assert marginal_ahead(offers, taken, 0.4) == 0.2  # one block of 0.2, 0.3, 0.4, 0.9
    assert marginal_ahead(offers, taken, 1.5) == 0.4  # three
    assert marginal_ahead(offers, taken, 16.0) == 0.9
    assert marginal_ahead(offers, np.array([3, 2, 0, 0], dtype=np.int32), 1.0) == -math.inf


def test_the_cuts_of_one_plan_are_one_and_the_last_of_them_counts() -> None:
    apart, alone = (MemoryPrice(100, 0.1, by_price=False) for _ in range(2))
    for memory_price, cuts in ((apart, (0.1, 0.2, 0.8)), (alone, (0.8,))):
        memory_price.note(0.5)
        memory_price.step(100, 1)
        for each in cuts:
            memory_price.note(0.01, each)
        memory_price.step(100, 1)
    assert apart.price == alone.price == pytest.approx(math.sqrt(0.5 * 0.8))


def test_the_price_stands_while_requests_will_need_what_is_free() -> None:
    memory_price = MemoryPrice(100, 0.1, by_price=False)
    memory_price.note(0.5)
    memory_price.step(100, 1)
    memory_price.step(90, 1, ahead=10)
    assert memory_price.price == 0.5
    memory_price.step(80, 1, ahead=10)
    assert memory_price.price < 0.5


@pytest.mark.parametrize("seed", range(3))
def test_the_excess_over_the_budget_grows_with_the_root_of_steps_at_most(seed: int) -> None:
    """Token-PD, appendix A; and after a change of load the price is found again."""
    rng = np.random.default_rng(100 + seed)
    values = np.minimum(rng.pareto(1.5, 200) * 0.01 * np.exp(0.5 * rng.normal(size=(2000, 200))), 1)
    values[1000:] *= 3.0
    memory_price, excess_blocks = MemoryPrice(70, 0.1, by_price=True), []
    memory_price.note(float(np.sort(values[0])[-71]))
    for returns in values:
        wanted = int((returns >= memory_price.price).sum())
        excess_blocks.append(wanted - 70)
        memory_price.step(wanted, 1)
    sums = np.abs(np.cumsum(excess_blocks))
    roots = np.sqrt(np.arange(1, 1001))
    assert (sums[:1000] <= 4.0 * roots + 70).all()
    assert np.abs(np.mean(excess_blocks[1100:])) < 0.5
    assert np.abs(excess_blocks[1100:]).mean() < 5.0


@pytest.mark.parametrize("seed", range(3))
def test_the_return_kept_is_nearly_that_of_the_best_fixed_price_of_each_load(seed: int) -> None:
    """At a falling rate that starts anew: 2% of the return, 1% of the budget, at most."""
    rng = np.random.default_rng(200 + seed)
    values = rng.pareto(1.5, (2000, 200)) * 0.01
    values[1000:] *= 3.0
    memory_price, kept, wanted = MemoryPrice(70, 0.1, by_price=True), 0.0, 0
    memory_price.note(float(np.sort(values[0])[-71]))
    for returns in values:
        above = returns >= memory_price.price
        kept, wanted = kept + float(returns[above].sum()), wanted + int(above.sum())
        memory_price.step(int(above.sum()), 1)
    halves = [np.sort(half, axis=None)[-70_000:] for half in (values[:1000], values[1000:])]
    assert wanted <= 70 * 2000 * 1.01
    assert kept >= 0.98 * sum(float(half.sum()) for half in halves)


def test_rates_fall_as_the_root_of_steps_however_many_are_reported_at_once() -> None:
    singles, whole = (MemoryPrice(100, 0.1, by_price=True) for _ in range(2))
    for memory_price in (singles, whole):
        memory_price.note(0.5)
        memory_price.step(101, 1)
    for _ in range(5):
        singles.step(99, 1)
    whole.step(99, 5)
    assert singles.price == pytest.approx(whole.price, rel=1e-12)
    before = whole.price
    whole.step(101, 1)
    assert math.log(whole.price / before) == pytest.approx(0.01 * 2.0 * (7**0.5 - 6**0.5))


def test_small_changes_of_the_marginal_return_leave_the_price_alone() -> None:
    assert averaged_price(1.0, 1.04, 0.5, 0.05) == 1.0
    assert averaged_price(1.0, 1.2, 0.5, 0.05) == pytest.approx(math.sqrt(1.2))
    assert averaged_price(1.0, -3.0, 1.0, 0.05) == pytest.approx(FLOOR)


def test_a_loss_that_nobody_knows_says_nothing_of_the_price() -> None:
    memory_price = MemoryPrice(100, 0.1, by_price=False)
    memory_price.note(0.5)
    memory_price.note(math.inf)
    assert memory_price.price == 0.5


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1),
    st.floats(-1, 1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_higher_price_admits_nobody_more(
    found: list[tuple[float, float]], risk: float, one: float, other: float
) -> None:
    returns, variances = np.array(found).T
    low, high = sorted((one, other))
    few, many = (admits(returns, variances, risk, price) for price in (high, low))
    assert (few <= many).all()
    assert (few == (excess(returns, variances, risk, high) >= 0)).all()


def test_what_earns_its_price_exactly_stays_and_is_not_brought_back() -> None:
    assert blocks_below(np.array([0.1, 0.2, 0.2, 0.3]), 0.2) == 1
    assert blocks_above(np.array([0.3, 0.2, 0.2, 0.1]), 0.2) == 1
