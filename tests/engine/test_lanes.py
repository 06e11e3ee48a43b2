"""The lane of long prompts in an engine."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.core_oracle import step

from pigou.config import ConfigError, EngineConfig, EvictionConfig, LaneConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan
from pigou.request import Request

LANE = LaneConfig(min_prompt=32, tokens=2, seqs=1, kv_share=0.5)


def engine(**fields: Any) -> EngineCore:
    base: dict[str, Any] = {
        "blocks": 64, "block_size": 2, "max_seqs": 4, "max_batched_tokens": 8, "lane": LANE,
    }  # fmt: skip
    return EngineCore(EngineConfig(**{**base, "max_model_len": 100, "order": "fcfs", **fields}))


def started(plan: Plan) -> list[str]:
    return [each.request for each in plan.started]


def test_a_short_prompt_starts_beside_a_long_one_that_came_first() -> None:
    core = engine()
    core.add(Request("long", 40, 4))
    core.add(Request("short", 6, 4))
    plan = step(core)
    assert started(plan) == ["long", "short"]
    assert plan.counts.tolist() == [2, 6]
    without = engine(lane=None)
    without.add(Request("long", 40, 4))
    without.add(Request("short", 6, 4))
    assert started(step(without)) == ["long"]


def test_a_long_prompt_alone_takes_the_whole_budget_or_what_it_is_lent() -> None:
    for lent, tokens in ((0, 8), (4, 4)):
        lane = LaneConfig(min_prompt=32, tokens=2, idle_tokens=lent)
        core = engine(lane=lane)
        core.add(Request("long", 40, 4))
        assert step(core).counts.tolist() == [tokens]


def test_long_prompts_keep_their_tokens_however_many_short_ones_wait() -> None:
    core = engine()
    core.add(Request("long", 40, 1))
    for number in range(30):
        core.add(Request(f"s{number}", 8, 1))
    for _ in range(20):
        plan = step(core)
        assert int(plan.counts.sum()) == 8  # work-conserving
        assert 2 in plan.counts.tolist()


def test_chunks_of_a_long_prompt_shrink_with_its_context() -> None:
    core = engine(lane=LaneConfig(min_prompt=32, tokens=4, idle_tokens=8, halved_at=16))
    core.add(Request("long", 60, 1))
    counts = [step(core).counts.tolist() for _ in range(11)]
    assert counts == [[8], [5], [4], [3], [3], [3], [3], [2], [2], [2], [2]]
    for count, context in zip((8, 5, 4, 3), (0, 8, 13, 17), strict=True):
        assert count == 8 * 16 // (16 + context)


def test_short_prompts_take_a_long_ones_tokens_for_a_few_steps_in_a_row() -> None:
    core = engine(lane=LaneConfig(min_prompt=32, tokens=2, yields=2), max_seqs=40, blocks=200)
    core.add(Request("long", 60, 1))
    step(core)
    for number in range(12):
        core.add(Request(f"s{number}", 8, 9))
    plans = [step(core) for _ in range(6)]
    shares = [dict(zip(p.rows.tolist(), p.counts.tolist(), strict=True)).get(0, 0) for p in plans]
    assert shares == [0, 0, 2, 0, 0, 2]


def test_an_arrival_waits_behind_its_own_lane_alone() -> None:
    core = engine()
    core.add(Request("first", 40, 4))
    core.add(Request("second", 40, 4))
    step(core)
    assert core.would_wait(Request("third", 40, 4))
    assert not core.would_wait(Request("short", 6, 4))


def test_a_waiting_long_prompt_gets_a_row_and_blocks_before_short_ones_take_them() -> None:
    core = engine(blocks=24, max_seqs=3, max_model_len=40)
    for number in range(3):
        core.add(Request(f"first{number}", 2, 6))
    step(core)
    core.add(Request("long", 34, 2))
    for number in range(12):
        core.add(Request(f"s{number}", 2, 6))
    began = [name for _ in range(16) for name in started(step(core))]
    assert "long" in began
    assert began.index("long") <= 1


def test_long_prompts_leave_short_ones_their_blocks() -> None:
    core = engine(blocks=64)
    core.add(Request("short", 4, 30))
    for number in range(3):
        core.add(Request(f"long{number}", 40, 2))
    plan = step(core)
    assert started(plan) == ["short", "long0"]  # another would exceed its row and half the blocks
    core.add(Request("next", 4, 4))
    assert started(step(core)) == ["next"]


def test_the_lane_that_exceeds_its_blocks_is_preempted() -> None:
    core = engine(blocks=30, max_model_len=60, headroom=0)
    core.add(Request("long", 40, 2))  # 20 of its 15 blocks: it came alone
    step(core)
    core.add(Request("short", 8, 40))
    preempted = [name for _ in range(30) for name in step(core).preempted]
    assert preempted[0] == "long"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min_prompt=10", "tokens"),
        ("min_prompt=10,tokens=0", "long_lane: tokens is 0"),
        ("min_prompt=10,tokens=4,rows=1", "`rows`"),
        ("min_prompt=10,tokens=4,tokens=5", "given twice"),
        ("min_prompt=10,tokens=4,kv_share=1", "kv_share is 1"),
    ],
)
def test_a_wrong_lane_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LaneConfig.parse(text)


def test_a_lane_refuses_what_knows_no_lanes() -> None:
    with pytest.raises(ConfigError, match="eviction"):
        engine(eviction=EvictionConfig(policy="price"))
    with pytest.raises(ConfigError, match="tokens is 2"):
        engine(max_batched_tokens=1)
