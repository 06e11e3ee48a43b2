"""When rows give up entries: not without need, for growth, for newcomers, and up to a ceiling."""

from __future__ import annotations

import random

import numpy as np
from eviction_oracle import EvictionOracle

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.core import EngineCore

EVICTION = EvictionConfig(sinks=1, recent=2, least=4, interval=4)


def engine(blocks: int, eviction: EvictionConfig | None, **fields: int) -> EvictionOracle:
    config = EngineConfig(
        blocks=blocks, block_size=2, max_model_len=64, eviction=eviction, **fields
    )
    return EvictionOracle(EngineCore(config), ends=False, rng=random.Random(0))


def add(oracle: EvictionOracle, name: str, prompt: int, most: int) -> None:
    tokens = [random.Random(name).randrange(1, 9) for _ in range(prompt)]
    oracle.add(oracle.request(name, tokens, most), tokens)


def step(oracle: EvictionOracle) -> bool:
    plan = oracle.core.schedule(0)
    result = oracle.execute(plan)
    if plan:
        oracle.observe(oracle.core.apply(plan, result))
    oracle.check()
    return bool(plan)


def test_without_need_plans_are_those_without_eviction() -> None:
    plans = []
    for eviction in (None, EVICTION):
        oracle = engine(200, eviction, max_repeat=4)
        for i in range(6):
            add(oracle, f"r{i}", 3 + i, 10 + i)
        found = []
        while oracle.core.running or oracle.core.waiting:
            plan = oracle.core.schedule(0)
            found.append(
                [each.tolist() for each in (plan.rows, plan.starts, plan.counts, plan.kv_lens)]
            )
            assert not plan.compactions
            assert not len(plan.to_score)
            oracle.observe(oracle.core.apply(plan, oracle.execute(plan)))
        plans.append(found)
    assert plans[0] == plans[1]


def test_who_grows_beyond_what_there_is_gives_up_entries_in_place_of_its_row() -> None:
    oracle = engine(16, EVICTION)
    for name in ("a", "b"):
        add(oracle, name, 6, 26)  # 31 tokens each have entries at last: 16 blocks each
    while step(oracle):
        pass
    assert oracle.core.stats.preemptions == 0
    assert oracle.given > 0
    assert oracle.core.stats.evicted_tokens == oracle.given


def test_a_newcomer_is_let_in_at_the_expense_of_who_runs() -> None:
    """As soon as somebody runs whose entries were appraised."""
    for eviction, let_in in ((EVICTION, True), (None, False)):
        oracle = engine(16, eviction, headroom=0)
        add(oracle, "long", 20, 12)
        for _ in range(3):
            step(oracle)
        add(oracle, "new", 12, 2)
        for _ in range(3):
            step(oracle)
        assert (oracle.core.waiting == 0) == let_in


def test_nobody_gives_up_what_is_worth_more_than_the_ceiling() -> None:
    oracle = engine(16, EvictionConfig(sinks=1, recent=2, least=4, interval=4, ceiling=1e-9))
    oracle._curve = np.ones  # type: ignore[method-assign]
    for name in ("a", "b"):
        add(oracle, name, 6, 26)
    while step(oracle):
        pass
    assert oracle.given == 0
    assert oracle.core.stats.preemptions > 0


def test_by_price_entries_come_back_when_there_is_room_again() -> None:
    eviction = EvictionConfig(policy="paper", sinks=1, recent=2, least=4, interval=4, rate=9.0)
    oracle = engine(16, eviction)
    add(oracle, "stays", 6, 24)
    add(oracle, "goes", 6, 14)
    while step(oracle):
        pass
    assert oracle.given >= oracle.revived > 0
    assert oracle.revived == oracle.core.stats.recomputed_tokens
