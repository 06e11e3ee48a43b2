"""The price policy: what reuse it learns, what it lets in, and how its price moves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.kv.block import ROOT, Block
from pigou.kv.offload import RecomputeCost
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.policy import TierSetting, make
from pigou.kv.tier_eviction.price import PriceEviction, PriceParams
from pigou.kv.tier_eviction.reuse import BINS, CLASSES, GROWTH, ReuseModel, age_bin, use_class
from pigou.request import SECOND


def block(number: int, depth: int = 0, parent: bytes = ROOT, size: int = 1) -> Block:
    return Block(number.to_bytes(16), parent, depth, size)


def chain(first: int, count: int) -> list[Block]:
    keys = [(first + i).to_bytes(16) for i in range(count)]
    return [Block(k, keys[i - 1] if i else ROOT, i, 1) for i, k in enumerate(keys)]


def priced(cap: int, worth: RecomputeCost | None = None) -> tuple[Tier, PriceEviction]:
    policy = PriceEviction(TierSetting(cap, worth or RecomputeCost()), PriceParams(sample=1))
    return Tier(cap, policy), policy


def ask(tier: Tier, blocks: list[Block], now: int) -> int:
    keys = [each.key for each in blocks]
    found = tier.find(keys, now)
    tier.hit(keys[:found], now)
    tier.admit(blocks[found:], now)
    return found


def test_bins_of_age_cover_all_ages_in_order() -> None:
    ages = [0, SECOND // 4, SECOND // 2, SECOND, 10 * SECOND, 10**6 * SECOND, 2**62]
    bins = [age_bin(age) for age in ages]
    assert bins == sorted(bins)
    assert (bins[0], bins[-1]) == (0, BINS - 1)
    assert age_bin(int(0.5 * GROWTH**5 * SECOND)) == 6
    assert [use_class(uses) for uses in (1, 2, 16, 10**6)] == [0, 1, CLASSES - 1, CLASSES - 1]


def test_uses_at_a_constant_rate_are_worth_that_rate_at_any_age() -> None:
    generator = np.random.default_rng(1)
    reuse = ReuseModel(sample=1, prior=1.0, decay=1.0, followed=100_000)
    gaps = generator.exponential(20.0, (200, 400)).cumsum(axis=1)
    uses = sorted((at, key) for key, row in enumerate(gaps) for at in row)
    last = 0
    for at, key in uses:
        if at > 5000:
            break
        last = int(at * SECOND)
        reuse.use(key.to_bytes(16), last)
    reuse.refresh(last)
    rates = reuse.rates[CLASSES - 1]
    # Within a bin all reuses count as if they came in its middle, so that wide ones are coarse.
    for at in (0, 1, 3, 5, 6):
        assert rates[at] == pytest.approx(1 / 20, rel=0.25)


def test_what_is_used_once_is_worth_less_than_what_comes_back() -> None:
    reuse = ReuseModel(sample=1, prior=5.0, decay=1.0, followed=10_000)
    for step in range(600):
        now = step * SECOND
        reuse.use((10**6 + step).to_bytes(16), now)
        reuse.use((step % 20).to_bytes(16), now)
    reuse.refresh(600 * SECOND)
    assert reuse.rates[CLASSES - 1][0] > 5 * reuse.rates[0][0]
    hazards = reuse.hazards(600 * SECOND)
    assert ((hazards >= 0) & (hazards < 1)).all()


def test_while_there_is_room_everything_comes_in() -> None:
    tier, policy = priced(100)
    policy.price = 1e9
    for number in range(10):
        assert len(tier.admit(chain(100 * number, 10), number * SECOND).admitted) == 10
    tier.check()


def test_the_price_falls_to_nothing_while_the_tier_is_not_full() -> None:
    tier, policy = priced(1000)
    policy.price = 1.0
    prices = []
    for number in range(60):
        tier.admit([block(number)], number * SECOND)
        prices.append(tier.price)
    assert all(after < before for before, after in pairwise(prices))
    assert prices[-1] < 1e-9


def test_the_price_rises_while_more_is_worth_it_than_fits() -> None:
    tier, policy = priced(20)
    for step in range(3000):  # forty blocks, each asked for every ten seconds
        ask(tier, [block(step % 40)], step * SECOND // 4)
    assert tier.used_bytes == 20
    policy.price *= 1e-6
    low = tier.price
    for step in range(3000, 6000):
        ask(tier, [block(step % 40)], step * SECOND // 4)
    assert tier.price > 1e3 * low


def test_blocks_asked_for_once_do_not_displace_those_that_come_back() -> None:
    hits = {"lru": 0, "price": 0}
    for name, tier in (("price", priced(30)[0]), ("lru", _lru(30))):
        for step in range(4000):
            now = step * SECOND
            hits[name] += ask(tier, [block(step % 40)], now)
            ask(tier, chain(10**6 + 1000 * step, 3), now)
    assert hits["lru"] == 0
    assert hits["price"] > 2000


def test_of_equal_reuse_the_deeper_chain_stays() -> None:
    tier, _ = priced(40, RecomputeCost(base=1.0, slope=0.5))
    deep, shallow = chain(1000, 30), [chain(10_000 + 100 * i, 3) for i in range(10)]
    for step in range(400):
        now = step * 20 * SECOND
        ask(tier, deep, now)
        for i, each in enumerate(shallow):
            ask(tier, each, now + (i + 1) * SECOND)
    keys = [each.key for each in deep]
    assert tier.find(keys, now + 19 * SECOND) == 30


def test_what_costs_more_to_restore_than_to_compute_is_not_kept_for_what_does_not() -> None:
    worth = RecomputeCost(base=1.0, slope=0.0, restore=0.3)
    policy = PriceEviction(TierSetting(10, worth), PriceParams())
    assert policy.value(3, 0, 0, size=4) == 0
    assert policy.value(3, 0, 0, size=1) > 0
    assert worth.saved(block(1, size=4)) == 0


def test_parameters_are_checked() -> None:
    for wrong in ({"eta": 0}, {"margin": 0.5}, {"sample": 3}, {"prior": 0}, {"nothing": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make(PriceEviction, TierSetting(10), wrong, "price")
    with pytest.raises(ConfigError, match=r"price: .* unknown field `nothing`; its keys are: eta"):
        make(PriceEviction, TierSetting(10), {"nothing": 1}, "price")


def test_worth_is_the_sum_of_its_blocks() -> None:
    worth = RecomputeCost(base=2.0, slope=0.5, restore=0.1)
    alone = sum(worth.saved(block(i, depth=i)) for i in range(3, 8))
    assert worth.recompute(3, 5) - 0.1 * 5 == pytest.approx(alone)
    with pytest.raises(ValueError, match="slope"):
        RecomputeCost(slope=-1)


def _lru(cap: int) -> Tier:
    from eviction_names import policy

    return Tier(cap, policy("lru", cap))


def test_what_the_tier_above_holds_goes_first_and_counts_again_when_that_gives_it_up() -> None:
    tier, policy = priced(3)
    above = {block(1).key}
    policy.above = above.__contains__
    for number in (1, 2, 3):
        tier.admit([block(number)], number * SECOND)
    tier.use([block(4)], 4 * SECOND)
    assert tier.admit([block(4)], 4 * SECOND, used=False).evicted == [block(1)]
    above.clear()
    assert policy.value(1, 0, 0, 1) > 0
    assert tier.admit([block(1)], 4 * SECOND, used=False).admitted == []  # no use: it earns no more


def test_an_offer_that_is_no_use_teaches_nothing() -> None:
    tier, policy = priced(2)
    tier.use([block(1)], SECOND)
    for step in range(2, 9):
        tier.admit([block(1)], step * SECOND, used=False)
        tier.drop([block(1).key], step * SECOND)
    tier.admit([block(1)], 10 * SECOND, used=False)
    entry = tier.entry(block(1).key)
    assert entry is not None
    assert (entry.uses + entry.mark, entry.last) == (1, SECOND)
    assert policy.reuse._reused.sum() == 0
