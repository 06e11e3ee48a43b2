"""Drafts by price: known answers, and what a step verifies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ConfigError, EngineConfig, EvictionConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Result
from pigou.engine.speculation import (
    StepLaw,
    choose_drafts,
)
from pigou.request import Ints, Request


def expected_tokens(acceptance: float, drafts: int) -> float:
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


@pytest.mark.parametrize(
    ("acceptance", "drafts", "cost", "tokens", "speed_up", "best", "best_speed_up"),
    [(0.8, 4, 0.05, 3.3616, 2.8013, 8, 3.0921), (0.6, 3, 0.1, 2.176, 1.6738, 3, 1.6738)],
)
def test_a_lone_sequence_drafts_as_many_as_known_to_be_best(
    acceptance: float, drafts: int, cost: float, tokens: float, speed_up: float, best: int,
    best_speed_up: float,
) -> None:  # fmt: skip
    assert expected_tokens(acceptance, drafts) == pytest.approx(tokens, abs=5e-5)
    assert tokens / (1 + cost * drafts) == pytest.approx(speed_up, abs=5e-5)
    chosen = choose_drafts(np.array([acceptance]), np.array([20]), np.ones(21), cost)
    assert chosen.tolist() == [best]
    ratio = expected_tokens(acceptance, best) / (1 + cost * best)
    assert ratio == pytest.approx(best_speed_up, abs=5e-5)


@settings(max_examples=examples(80))
@given(
    acceptance=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3),
    offered=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    costs=st.lists(st.floats(0.0, 0.5), min_size=9, max_size=9),
    draft_s=st.sampled_from([0.0, 0.1]),
)
def test_no_other_choice_yields_more_tokens_a_second(
    acceptance: list[float], offered: list[int], costs: list[float], draft_s: float
) -> None:
    offers = offered[: len(acceptance)]
    seconds = 1.0 + np.concatenate(([0.0], np.cumsum(costs)))

    def rate(drafts: tuple[int, ...]) -> float:
        pairs = zip(acceptance, drafts, strict=True)
        tokens = sum(expected_tokens(a, k) for a, k in pairs)
        return tokens / float(seconds[sum(drafts)] + draft_s * max(drafts))

    chosen = choose_drafts(np.array(acceptance), np.array(offers), seconds, draft_s)
    best = max(map(rate, itertools.product(*(range(k + 1) for k in offers))))
    assert (chosen <= offers).all()
    assert rate(tuple(chosen.tolist())) == pytest.approx(best)


def test_drafts_fall_to_none_as_the_batch_grows() -> None:
    def drafts(rows: int) -> int:
        tokens = np.arange(rows, rows + 4 * rows + 1)
        seconds = np.maximum(1.0, tokens / 16)  # 16 tokens take as long as one
        return int(choose_drafts(np.full(rows, 0.7), np.full(rows, 4), seconds).sum())

    means = [drafts(rows) / rows for rows in (1, 4, 8, 16, 64)]
    assert means == sorted(means, reverse=True)
    assert means[0] == 4
    assert means[-1] == 0


def test_the_law_of_steps_learns_what_tokens_cost() -> None:
    law = StepLaw()
    assert law.seconds(1, 3).tolist() == [1, 1, 1, 1]  # nothing known: drafts are tried
    for _ in range(200):
        for tokens in (1, 3, 5):
            law.observe(tokens, 0.01 + 0.002 * tokens)
    assert law.seconds(1, 7) == pytest.approx(0.01 + 0.002 * np.arange(1, 9), rel=0.02)
    for _ in range(40):
        law.observe(1, 0.024)  # twice as slow
    assert law.seconds(1, 4) == pytest.approx(2 * (0.01 + 0.002 * np.arange(1, 6)), rel=0.3)


def test_rows_that_reject_drafts_get_none_until_they_are_tried_again() -> None:
    core = EngineCore(EngineConfig(blocks=64, max_seqs=2, num_speculative_tokens=4, max_repeat=4))
    for name in ("good", "bad"):
        core.add(Request(name, 1, 900))
    core.apply(plan := core.schedule(0), Result())
    history: list[Ints] = []
    while len(history) < 100:
        plan = core.schedule(0, drafts=np.full(2, 4, dtype=np.int32))
        history.append(plan.drafts if len(plan.drafts) else np.zeros(2, dtype=np.int32))
        core.apply(plan, _verified(plan, core, np.array([1, 0])))
    good, bad = np.array(history[20:]).T
    assert good.mean() > 3
    assert 0 < bad.sum() < 0.1 * good.sum()
    assert core.drafts is not None
    assert core.drafts.accepted_tokens == core.drafts.accepted_at.sum() > 200
    assert core.drafts.draft_tokens == np.array(history).sum()


def _verified(plan: Plan, core: EngineCore, accepts: Ints) -> Result:
    """Return a plan's result: some rows accept every draft; each token takes a tenth of a step."""
    nanos = np.full(1, 1_000_000 + 100_000 * plan.tokens, dtype=np.int64)
    return Result(accepted=plan.drafts * accepts[plan.rows][: len(plan.drafts)], durations=nanos)


def test_results_that_accept_more_than_was_drafted_are_refused() -> None:
    core = EngineCore(EngineConfig(blocks=8, num_speculative_tokens=2))
    core.add(Request("a", 1, 9))
    core.apply(core.schedule(0), Result())
    plan = core.schedule(0, drafts=np.full(256, 2, dtype=np.int32))
    assert plan.counts.tolist() == [3]
    for accepted in ([3], [-1], [], [1, 1]):
        with pytest.raises(ValueError, match="were accepted"):
            core.apply(plan, Result(accepted=np.array(accepted, dtype=np.int32)))
    assert core.apply(plan, Result(accepted=np.array([1]))).tokens.tolist() == [2]
    core.check_integrity()


def test_token_eviction_and_drafts_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 2, and eviction is given"):
        EngineConfig(blocks=8, num_speculative_tokens=2, eviction=EvictionConfig())
