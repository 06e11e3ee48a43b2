"""A worker's repeated steps equal single ones, whatever reaches it and whenever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from worker_setups import LAW, VARIED, Doing, abort, add, journal, release, retime

from pigou.sim.timing import Slowed
from pigou.sim.timing_measured import MeasuredTiming, WorkerProfile

TIMINGS = st.sampled_from([LAW, VARIED])


def both(doings: Sequence[tuple[int, Doing]], **rest: Any) -> list[tuple[Any, ...]]:
    """Return the journal of repeated steps; that of single ones is the same."""
    many = journal(doings, stepwise=False, **rest)
    assert many == journal(doings, stepwise=True, **rest)
    return many


def times(found: list[tuple[Any, ...]], what: str) -> dict[str, int]:
    """When each request had something written of it in a journal."""
    return {entry[2]: entry[0] for entry in found if entry[1] == what}


@pytest.mark.parametrize("ahead", [False, True])
def test_one_that_came_earlier_overtakes_those_who_wait(ahead: bool) -> None:
    # 2 waits for blocks that 1 has; 3 came to the fleet before it, moves here, and is small.
    doings = [
        (100, add(1, 16, 40, arrival=90)),
        (2_000, add(2, 64, 10, arrival=2_000)),
        (9_000, add(3, 4, 4, arrival=50)),
    ]
    found = both(doings, ahead=ahead, blocks=20)
    assert times(found, "first")["3"] < times(found, "finished")["1"]
    assert times(found, "first")["2"] > times(found, "finished")["1"]


def test_those_behind_others_are_counted_as_waiting_when_they_come() -> None:
    doings = [(100 * n, add(n, 16, 40)) for n in range(1, 4)]
    found = both([*doings, (9_100, add(4, 16, 40))], max_seqs=2)
    waiting = {entry[0]: entry[3] for entry in found if entry[1] == "load"}
    assert (waiting[9_000], waiting[12_000]) == (1, 2)


def test_what_does_not_fit_is_refused_at_once_behind_others_too() -> None:
    doings = [(100 * n, add(n, 16, 40)) for n in range(1, 5)]
    found = both([*doings, (9_000, add(9, 200, 10))], max_seqs=2)
    assert 9_000 <= times(found, "refused")["9"] < 13_000


@pytest.mark.parametrize("late", range(0, 4_000, 250))
def test_one_that_comes_after_the_last_was_taken_back_is_served(late: int) -> None:
    # Decided a step ahead, 2 comes in a step after 1 is gone, when no step is under way.
    doings = [(100, add(1, 16, 40)), (4_000, abort(1)), (4_000 + late, add(2, 16, 9))]
    assert "2" in times(both(doings), "finished")
    assert "2" not in times(both([*doings, (8_000, abort(2))]), "finished")


def test_what_came_is_done_where_the_step_that_it_waits_for_has_nobody_left() -> None:
    # 1 loads its prompt beside 4 alone, which loses its row in the step before the answer counts.
    doings = [
        (50, add(0, 8, 9, streams=False)),
        (50, add(1, 37, 1, hold=True, remote=37, streams=False)),
        (0, add(2, 4, 30, streams=False)),
        (0, add(3, 20, 1, hold=True, streams=False)),
        (31_600, release(3)),
        (0, add(4, 31, 60, streams=False)),
    ]
    found = both(doings, blocks=25, max_seqs=2, max_batched_tokens=8, ahead=True, looks=0)
    assert "1" in times(found, "finished")


def test_a_plan_ends_where_one_that_was_let_in_has_others_yield() -> None:
    doings = [
        (0, add(1, 26, 30, streams=False)),
        (0, add(2, 31, 9, priority=1, streams=False)),
        (14_100, add(3, 13, 1, streams=False)),
    ]
    found = both(doings, order="priority", blocks=25, max_batched_tokens=8, ahead=False, looks=0)
    assert times(found, "finished")["3"] < times(found, "finished")["2"]


def test_a_plan_begins_anew_where_the_sequences_change() -> None:
    """Five steps of one sequence, which begin one plan of eight, or another one after a prompt."""
    law = WorkerProfile(decodes=((1, 1e-6),), prompts=((0, 0.0), (9, 0.0)))
    rhythm = ((1, (7e-7, *7 * (-1e-7,))),)
    plans = MeasuredTiming(msgspec.structs.replace(law, rhythm=rhythm))
    said = {}
    for name, timing in (("mean", MeasuredTiming(law)), ("plans", plans)):
        for others in (0, 1):
            doings = [(0, add(1, 4, 33))] + others * [(10_500, add(2, 4, 1))]
            found = both(doings, timing=timing, ahead=False, looks=0)
            said[name, others] = times(found, "finished")["1"]
    assert said["plans", 0] == said["mean", 0]  # 32 steps are four whole plans
    # A plan of eight, two steps, and a prompt; then 21 steps of three plans.
    cut = 2 * 700 - 8 * 100 + 3 * 700 - 18 * 100
    assert said["plans", 1] == said["mean", 1] + cut


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[int, Doing]], dict[str, Any]]:
    """Requests under pressure, taken back, loaded, held and released; slow times; a death."""
    doings: list[tuple[int, Doing]] = []
    # Of a grid of 50 ns as well as between: commands meet the ends of steps exactly.
    moments = st.one_of(st.integers(0, 1_500).map(lambda n: 50 * n), st.integers(0, 75_000))
    for number in range(draw(st.integers(1, 10))):
        at = draw(moments)
        prompt = draw(st.integers(1, 40))
        hold = draw(st.booleans()) and draw(st.booleans())
        doing = add(
            number, prompt, draw(st.sampled_from([1, 2, 9, 30, 60])),
            arrival=draw(st.sampled_from([-1, -1, at // 2])), streams=draw(st.booleans()),
            hold=hold, remote=draw(st.sampled_from([0, 0, prompt])),
            content=draw(st.sampled_from([-1, -1, 20, 21])),
            priority=draw(st.sampled_from([0, 0, 1, 2])),
        )  # fmt: skip
        doings.append((at, doing))
        if draw(st.booleans()) and draw(st.booleans()):
            doings.append((at + draw(moments), abort(number)))
        if hold:
            doings.append((at + draw(moments), release(number)))
    if draw(st.booleans()):
        doings.append((draw(moments), retime(Slowed(draw(TIMINGS), 2.5))))
    engine = {
        "blocks": draw(st.sampled_from([25, 30, 60])),
        "max_seqs": draw(st.sampled_from([2, 4, 8])),
        "max_batched_tokens": draw(st.sampled_from([8, 16, 64])),
        "headroom": draw(st.integers(0, 1)),
        "order": draw(st.sampled_from(["fcfs", "priority"])),
        "max_waiting": draw(st.sampled_from([0, 0, 3])),
        "ahead": draw(st.booleans()),
        "looks": draw(st.sampled_from([0, 350, 1_000])),
        "die": draw(st.sampled_from([0, 0, 30_000])),
        "timing": draw(TIMINGS),
    }
    if engine["order"] == "priority":
        engine["max_background_tokens"] = draw(st.sampled_from([0, 1, 5]))
    return doings, engine


@settings(max_examples=examples(200))
@given(histories())
def test_many_steps_at_once_equal_single_ones_on_one_worker(
    history: tuple[list[tuple[int, Doing]], dict[str, Any]],
) -> None:
    doings, rest = history
    found = both(doings, **rest)
    running, waiting, held = found[-1][4:7]
    assert running == 0
    assert waiting == 0 or held  # those who wait, wait for held blocks
