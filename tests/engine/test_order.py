"""Who is admitted first, and what a step's budget is spent on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.core_oracle import step

from pigou.config import ConfigError, EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Finish, Plan, Result
from pigou.engine.sequence import Sequence, WaitingQueue, order_key
from pigou.request import SECOND, FinishReason, Request, no_hashes


def engine(**fields: Any) -> EngineCore:
    base = {"blocks": 64, "block_size": 2, "max_seqs": 8, "max_batched_tokens": 8}
    return EngineCore(EngineConfig(**{**base, "max_model_len": 64, **fields}))


def started(core: EngineCore, plans: int) -> list[str]:
    return [each.request for _ in range(plans) for each in step(core).started]


REQUESTS = [
    Request("late", 2, 1, priority=0, arrival=9, deadline=30),
    Request("urgent", 2, 1, priority=1, arrival=5, deadline=10),
    Request("early", 2, 1, priority=1, arrival=1, deadline=20),
]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", ["early", "urgent", "late"]),
        ("priority", ["late", "early", "urgent"]),
        ("edf", ["urgent", "early", "late"]),
    ],
)
def test_requests_are_admitted_in_the_order_of_the_queue(order: str, expected: list[str]) -> None:
    core = engine(order=order, max_seqs=1)
    for request in REQUESTS:
        core.add(request)
    assert started(core, 3) == expected


def test_the_shortest_by_prediction_goes_first_whatever_it_declares() -> None:
    core = engine(order="shortest", max_seqs=1, max_model_len=2000)
    for name, expected, limit in (("long", 900, 1), ("short", 5, 60), ("mid", 90, 2)):
        core.add(Request(name, 2, limit, expected=expected))
    assert core.would_wait(Request("longer", 2, 1, expected=999))
    assert not core.would_wait(Request("shorter", 2, 50, expected=2))
    assert started(core, 70) == ["short", "mid", "long"]


def test_ageing_lets_nobody_overtake_who_waited_for_its_length() -> None:
    core = engine(order="shortest", max_seqs=1, ageing=10.0)
    core.add(Request("late", 2, 1, arrival=10 * SECOND, expected=1))
    core.add(Request("early", 2, 1, arrival=SECOND, expected=90))
    assert started(core, 2) == ["early", "late"]


def test_uncached_prompt_tokens_count_beside_predicted_ones() -> None:
    core = engine(order="shortest", max_seqs=1, input_weight=0.5)
    hashes = np.arange(40, dtype=np.uint64).reshape(20, 2) + 1
    core.add(Request("first", 41, 1, hashes, expected=1))
    while core.running or core.waiting:
        step(core)
    core.add(Request("uncached", 20, 1, expected=9))  # 9 + 20 / 2
    core.add(Request("cached", 41, 1, hashes, expected=12))  # 12 + 1 / 2
    core.add(Request("remote", 21, 1, remote=20, expected=14))
    assert core.would_wait(Request("longer", 41, 1, expected=1))
    assert not core.would_wait(Request("hit", 41, 1, hashes, expected=1))
    core.abort("remote")
    assert started(core, 3) == ["cached", "uncached"]
    with pytest.raises(ConfigError, match="input_weight is -1"):
        engine(order="shortest", input_weight=-1.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=2, max_size=6))
def test_declared_limits_move_nobody_in_the_engines_queue(asked: list[tuple[int, int]]) -> None:
    orders = []
    for declared in (False, True):
        core = engine(order="shortest", max_seqs=1)
        for number, (expected, limit) in enumerate(asked):
            core.add(Request(str(number), 2, limit if declared else 20, expected=expected))
        orders.append(started(core, 150))
    assert orders[0] == orders[1]


def test_an_engine_learns_which_prompts_have_short_outputs() -> None:
    core = engine(order="shortest", max_seqs=1)
    hashes = {name: np.full((1, 2), key, np.uint64) for key, name in enumerate(("s", "l"), 1)}
    for number in range(30):
        for name, tokens in (("s", 1), ("l", 20)):
            core.add(Request(f"{name}{number}", 2, 40, hashes[name]))
            while f"{name}{number}" in core:
                plan = core.schedule(0)
                seq_ends = core._state.sequences[f"{name}{number}"].length + 1 >= 2 + tokens
                core.apply(plan, Result(finished=[Finish(0, FinishReason.STOP, 1)] * seq_ends))
    core.add(Request("long", 2, 1, hashes["l"]))
    core.add(Request("short", 2, 40, hashes["s"]))
    assert started(core, 1) == ["short"]


def test_a_preempted_sequence_has_what_it_generated_less_to_go() -> None:
    core = engine(order="shortest", blocks=6, max_seqs=2, headroom=0, prefix_caching=False)
    core.add(Request("a", 2, 9, expected=9))
    core.add(Request("b", 2, 9, expected=8))
    before = {name: seq.key[0] for name, seq in core._state.sequences.items()}
    while not any(seq.preemptions for seq in core._state.sequences.values()):
        step(core)
    (seq,) = (seq for seq in core._state.sequences.values() if seq.preemptions)
    left = 0.05 * (seq.length - 2) - (seq.length - 2)  # its tokens are to be computed again
    assert seq.key[0] == round(before[seq.request.id] + left * SECOND)
    assert seq.request.id == "a"


@pytest.mark.parametrize("order", ["fcfs", "priority", "edf", "shortest"])
def test_equal_requests_are_admitted_as_they_came(order: str) -> None:
    core = engine(order=order, max_seqs=1)
    for name in "bac":
        core.add(Request(name, 2, 1))
    assert started(core, 3) == ["b", "a", "c"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_a_queue_gives_the_lowest_key_of_those_that_are_left(
    items: list[tuple[int, bool]],
) -> None:
    queue = WaitingQueue()
    left = []
    for number, (priority, stays) in enumerate(items):
        request = Request(str(number), 1, 1, priority=priority)
        seq = Sequence(
            request,
            order_key(request, EngineConfig(blocks=1, order="priority"), number),
            no_hashes(),
        )
        queue.push(seq)
        if stays:
            left.append(seq)
        else:
            queue.remove(seq)
            assert seq not in queue
    assert set(queue) == set(left)
    for expected in sorted(left, key=lambda seq: seq.key):
        assert queue.head() is expected
        queue.pop(expected)
    assert queue.head() is None


def test_decodes_come_before_chunks_and_chunks_before_admissions() -> None:
    core = engine(max_batched_tokens=6)
    core.add(Request("decode", 2, 9))
    step(core)
    core.add(Request("chunked", 9, 9))
    core.add(Request("new", 4, 9))
    assert step(core).counts.tolist() == [1, 5]
    plan = step(core)
    assert plan.counts.tolist() == [1, 4, 1]
    assert plan.samples.tolist() == [True, True, False]
    assert plan.starts.tolist() == plan.kv_lens.tolist() == [3, 5, 0]
    assert [s.request for s in plan.started] == ["new"]


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=8),
)
def test_no_step_exceeds_the_budget_and_every_token_is_computed_once(
    budget: int, lengths: list[tuple[int, int]]
) -> None:
    core = engine(max_batched_tokens=budget)
    for i, (prompt, most) in enumerate(lengths):
        core.add(Request(str(i), prompt, most))
    computed = 0
    sampled = 0
    while core.running or core.waiting:
        plan = core.schedule(0)
        assert 0 < plan.tokens <= budget
        assert (plan.counts > 0).all()
        computed += plan.tokens
        sampled += int(core.apply(plan, Result()).tokens.sum())
    assert computed == sum(prompt + most - 1 for prompt, most in lengths)
    assert sampled == sum(most for _, most in lengths)


def names(core: EngineCore, plan: Plan) -> list[str]:
    """Who computes in a plan, which nobody has left yet."""
    running = core._state.rows.owner
    return [seq.request.id for row in plan.rows.tolist() if (seq := running[row]) is not None]


def test_a_prompt_of_a_lower_number_is_computed_before_others_go_on() -> None:
    core = engine(order="priority", max_batched_tokens=4)
    core.add(Request("low", 9, 9, priority=5))
    assert names(core, step(core)) == ["low"]
    core.add(Request("high", 9, 9, priority=1))
    assert names(core, step(core)) == ["high"]
    core.add(Request("higher", 4, 9, priority=0))
    assert [names(core, step(core)) for _ in range(5)] == [
        ["higher"], ["higher", "high"], ["higher", "high"], ["high", "higher", "low"],
        ["high", "higher", "low"],
    ]  # fmt: skip


def test_equal_priorities_are_served_as_they_come() -> None:
    """Whatever the number is, plans are those of first come, first served."""
    plans = []
    for order, priority in (("fcfs", 0), ("priority", 0), ("priority", 7), ("priority", -7)):
        core = engine(order=order, blocks=12, max_batched_tokens=5)
        for number in range(6):
            request = Request(str(number), 3 + 2 * number, 9, priority=priority, arrival=number)
            core.add(request)
        mine = []
        while core.running or core.waiting:
            plan = step(core)
            mine.append((plan.rows.tolist(), plan.counts.tolist(), plan.preempted))
        plans.append(mine)
    assert plans[1:] == plans[:1] * 3


def test_decodes_beside_an_urgent_prompt_rest_but_of_its_own_number_every_other_step() -> None:
    core = engine(order="priority", max_batched_tokens=4, blocks=40)
    for name, priority in (("first", -1), ("equal", 0), ("low", 1)):
        core.add(Request(name, 2, 20, priority=priority))
        step(core)
    core.add(Request("prompt", 11, 2, priority=0))
    assert [names(core, step(core)) for _ in range(5)] == [
        ["first", "prompt"], ["first", "equal", "prompt"], ["first", "prompt"],
        ["first", "equal", "prompt"], ["first", "equal", "low", "prompt"],
    ]  # fmt: skip


def test_what_rests_keeps_its_blocks_and_nobody_rests_for_a_prompt_that_does_not_fit() -> None:
    core = engine(order="priority", blocks=10, max_batched_tokens=4)
    core.add(Request("low", 9, 6, priority=5))
    step(core)
    free = core.free_blocks
    core.add(Request("large", 12, 2, priority=0))
    assert names(core, step(core)) == ["low"]
    assert (core.waiting, core.free_blocks, core.stats.preemptions) == (1, free, 0)
    core.add(Request("small", 3, 2, priority=-1))
    assert names(core, step(core)) == ["small"]
    assert (core.free_blocks, core.stats.preemptions) == (free - 2, 0)


def test_prompts_in_the_background_take_no_more_of_a_step_than_they_may() -> None:
    core = engine(order="priority", max_batched_tokens=8, max_background_tokens=3)
    core.add(Request("low", 4, 1, priority=1))
    core.add(Request("lower", 9, 1, priority=2))
    core.add(Request("high", 4, 2, priority=0))
    plans = [step(core) for _ in range(3)]
    assert [plan.counts.tolist() for plan in plans] == [[4], [1, 3], [1, 3]]
    alone = engine(order="priority", max_batched_tokens=8, max_background_tokens=3)
    alone.add(Request("only", 8, 1, priority=0))
    assert step(alone).counts.tolist() == [8]


def test_a_limit_of_the_background_needs_the_order_by_priority() -> None:
    with pytest.raises(ConfigError, match="max_background_tokens is 3, and order fcfs"):
        engine(max_background_tokens=3)


def test_an_engine_without_work_plans_nothing() -> None:
    core = engine()
    plan = core.schedule(0)
    assert not plan
    assert plan.tokens == 0
    assert core.apply(plan, Result()).tokens.size == 0
    assert not core.schedule(0)


def test_admission_leaves_a_block_for_each_running_row() -> None:
    core = engine(blocks=5)
    core.add(Request("a", 4, 5))
    core.add(Request("b", 5, 5))
    assert [s.request for s in core.schedule(0).started] == ["a"]
    assert core.waiting == 1


def test_figures_count_what_there_is() -> None:
    core = engine(blocks=10)
    hashes = np.arange(2, 6, dtype=np.uint64).reshape(2, 2)
    core.add(Request("a", 5, 2, hashes))
    assert (core.running, core.waiting, core.free_blocks, core.usage) == (0, 1, 10, 0.0)
    step(core)
    assert (core.running, core.waiting, core.free_blocks) == (1, 0, 7)
    assert core.usage == pytest.approx(0.3)
    step(core)
    core.add(Request("b", 5, 1, hashes))
    step(core)
    assert (core.stats.queried_tokens, core.stats.hit_tokens, core.stats.preemptions) == (10, 4, 0)
    assert (core.usage, core.cached_blocks) == (0.0, 2)


def test_a_head_that_did_not_fit_is_tried_again_when_a_row_becomes_free() -> None:
    """A prompt that is held frees no block, but the block that was left for its row."""
    core = engine(blocks=4, max_batched_tokens=3)
    core.add(Request("held", 4, 1, hold=True))
    core.add(Request("head", 4, 1))
    assert started(core, 3) == ["held", "head"]
    assert core.held == 1
    core = engine(blocks=4)
    core.add(Request("loading", 4, 1, remote=4))
    core.add(Request("head", 4, 1))
    assert started(core, 1) == []
    core.abort("loading")
    assert started(core, 1) == ["head"]
