"""Laws of budgets over time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.control.admission.budgets import (
    PERIODS,
    SESSION_IDLE_NS,
    BudgetExceeded,
    BudgetSlot,
    KeyBudgets,
    Spending,
)
from pigou.request import SECOND

MINUTE, SLOT = PERIODS["minute"], PERIODS["minute"] // 60


def budgets(period: str = "minute", **limits: float) -> KeyBudgets:
    return KeyBudgets({period: limits})


def used(budget: KeyBudgets, now: int) -> float:
    return next(iter(budget.states("", now))).used


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 20 * SECOND), st.integers(1, 60), st.floats(0, 1)),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_no_window_has_more_than_the_limit_and_each_refusal_says_when_it_fits(
    requests: list[tuple[int, int, float]],
) -> None:
    budget, now, kept = budgets(tokens=100), SECOND, list[tuple[int, float]]()
    for wait, tokens, share in requests:
        now += wait
        try:
            claim = budget.claim(tokens, "", now)
        except BudgetExceeded as over:
            reset = over.state.reset_ns
            assert reset is not None
            assert 0 < reset <= MINUTE + SLOT
            with pytest.raises(BudgetExceeded):
                budget.claim(tokens, "", now + reset - 1)
            now += reset
            claim = budget.claim(tokens, "", now)
        use = share * tokens
        budget.settle(claim, {"requests": 1, "tokens": use, "seconds": 0, "price": 0}, now)
        kept.append((now, use))
        assert sum(amount for at, amount in kept if at > now - MINUTE) <= 100 + 1e-6


def test_what_was_not_used_comes_back_and_what_was_used_beyond_is_owed() -> None:
    budget = budgets(tokens=100)
    claim = budget.claim(80, "", SECOND)
    with pytest.raises(BudgetExceeded):
        budget.claim(30, "", 2 * SECOND)
    budget.settle(claim, {}, 2 * SECOND)
    assert used(budget, 2 * SECOND) == 0
    claim = budget.claim(10, "", 2 * SECOND)
    over = {"requests": 1.0, "tokens": 250.0, "seconds": 0.0, "price": 0.0}
    budget.settle(claim, over, 70 * SECOND)
    assert used(budget, 70 * SECOND) == 240, "its claim has left the window, the rest is of now"
    with pytest.raises(BudgetExceeded) as refused:
        budget.claim(1, "", 71 * SECOND)
    assert refused.value.state.reset_ns == 60 * SECOND


def test_a_claim_beyond_the_whole_budget_never_fits() -> None:
    with pytest.raises(BudgetExceeded) as refused:
        budgets(tokens=100).claim(101, "", SECOND)
    assert refused.value.state.reset_ns is None


@pytest.mark.parametrize("unit", ["seconds", "price"])
def test_what_a_token_took_before_is_claimed_before_it_is_used(unit: str) -> None:
    budget = budgets(**{unit: 10.0})
    took = {"requests": 1.0, "tokens": 10.0, "seconds": 0.0, "price": 0.0, unit: 4.0}
    budget.settle(budget.claim(10, "", SECOND), took, SECOND)
    budget.claim(10, "", SECOND)
    with pytest.raises(BudgetExceeded) as refused:
        budget.claim(10, "", SECOND)
    assert refused.value.state.used == pytest.approx(8)
    assert refused.value.requested == pytest.approx(4)


def test_a_session_has_its_steps_until_it_is_idle_and_others_have_their_own() -> None:
    budget = budgets("session", requests=2)
    for now in (0, SECOND):
        budget.claim(1, "a", now)
    with pytest.raises(BudgetExceeded) as refused:
        budget.claim(1, "a", SECOND + SESSION_IDLE_NS - 1)
    assert refused.value.state == ("session.requests", 2, 2, None)
    budget.claim(1, "b", SECOND)
    budget.claim(1, "", SECOND)
    budget.claim(1, "a", SECOND + SESSION_IDLE_NS)


def test_a_request_refused_by_one_budget_costs_the_others_nothing() -> None:
    budget = KeyBudgets({"minute": {"requests": 10}, "day": {"tokens": 5}})
    for _ in range(20):
        with pytest.raises(BudgetExceeded) as refused:
            budget.claim(6, "", SECOND)
        assert refused.value.state.name == "day.tokens"
    assert [state.used for state in budget.states("", SECOND)] == [0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 3 * SECOND), st.integers(1, 30), st.floats(0, 1),
            st.sampled_from(["", "a"]), st.booleans(),
        ),
        min_size=1, max_size=40,
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_gateways_agree_on_what_all_used_whatever_order_their_messages_take(
    steps: list[tuple[int, int, int, float, str, bool]], rng: random.Random
) -> None:
    gateways = [KeyBudgets({"minute": {"tokens": 1e9}, "session": {"tokens": 1e9}}) for _ in "abc"]
    changed: list[dict[BudgetSlot, None]] = [{}, {}, {}]
    now, kept, sent = SECOND, list[tuple[int, float, str]](), list[tuple[int, int, Spending]]()
    numbers = [0, 0, 0]

    def tell(sender: int) -> None:
        numbers[sender] += 1
        sent.extend((sender, numbers[sender], slot.spending(b"k")) for slot in changed[sender])
        changed[sender].clear()

    for sender, wait, tokens, share, session, tells in steps:
        now += wait
        claim = gateways[sender].claim(tokens, session, now)
        changed[sender] |= dict.fromkeys(claim.slots)
        if tells:
            tell(sender)
        use = {"requests": 1.0, "tokens": share * tokens, "seconds": 0.0, "price": 0.0}
        changed[sender] |= dict.fromkeys(gateways[sender].settle(claim, use, now))
        kept.append((now, share * tokens, session))
    for sender in range(3):
        tell(sender)
    late = [*sent, *rng.sample(sent, len(sent) // 2)]  # some come twice
    rng.shuffle(late)
    for receiver in range(3):
        for sender, number, spending in late:
            if sender != receiver:
                gateways[receiver].merge(f"g{sender}", number, spending, now)
    in_window = sum(use for at, use, _ in kept if at // SLOT >= now // SLOT - 60)
    of_session = sum(use for _, use, session in kept if session)
    for gateway in gateways:
        minute, *rest = gateway.states("a", now)
        assert minute.used == pytest.approx(in_window)
        assert [state.used for state in rest] == pytest.approx([of_session] * len(rest))


def test_a_gateway_refuses_what_others_used_up_and_says_when_it_fits() -> None:
    a, b = budgets(tokens=100), budgets(tokens=100)
    for slot in a.claim(90, "", SECOND).slots:
        b.merge("a", 1, slot.spending(b"k"), 5 * SECOND)
    with pytest.raises(BudgetExceeded) as refused:
        b.claim(20, "", 5 * SECOND)
    assert refused.value.state.used == 90
    assert refused.value.state.reset_ns == MINUTE + SLOT - 4 * SECOND
    b.claim(10, "", 5 * SECOND)
    assert [slot.spending(b"k").amount for slot in a.own()] == [90]
