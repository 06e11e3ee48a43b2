"""Laws of telling slow from hung: progress, silence, a slow machine, one verdict at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.fleet.hang_detection import (
    PATIENCE,
    TOKEN_S,
    EngineProgress,
    HangArbiter,
    HangDetector,
    read_health,
    read_heartbeat,
)
from pigou.fleet.worker_report import metrics_progress

HANG_S = 10.0


def looked(*signs: EngineProgress | None, step_s: float = 1.0) -> HangDetector:
    """Return a detector that saw these signs, one a look."""
    detector = HangDetector(HANG_S, 3)
    for sign in signs:
        detector.observe(sign, step_s)
    return detector


def test_an_engine_without_progress_is_hung_after_the_limit_and_not_before() -> None:
    assert not looked(*[EngineProgress(True, 7)] * 11).verdict()
    assert "no progress" in looked(*[EngineProgress(True, 7)] * 12).verdict()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=100))
def test_only_a_run_of_busy_looks_with_one_mark_makes_a_hang(looks: list[tuple[bool, int]]) -> None:
    run = longest = 0
    last = None
    detector, hung = HangDetector(HANG_S, 3), False
    for busy, mark in looks:
        run = run + 1 if busy and mark == last else 0
        last, longest = mark, max(longest, run)
        detector.observe(EngineProgress(busy, mark), 1.0)
        hung |= bool(detector.verdict())
    assert hung == (longest > HANG_S)


def test_a_long_plan_is_given_more_time() -> None:
    signs = [EngineProgress(True, 7, planned_tokens=100_000)] * 500
    assert not looked(*signs).verdict()
    assert looked(*signs, *signs, *signs).verdict()
    assert looked(signs[0]).limit_s == HANG_S + 100_000 * TOKEN_S


def test_an_idle_engine_and_one_that_tells_nothing_are_not_hung() -> None:
    assert not looked(*[EngineProgress(False, 7)] * 1000).verdict()
    assert not looked(*[None] * 1000).verdict()


def test_a_stopped_process_counts_as_down_after_a_few_looks_and_a_silent_one_after_the_limit() -> (
    None
):
    detector = HangDetector(HANG_S, 3)
    for look in range(1, 12):
        detector.miss(1.0)
        assert bool(detector.verdict(stopped=True)) == (look >= 3)
        assert bool(detector.verdict()) == (look > HANG_S)
        assert not detector.verdict(computes=True)


def test_a_heartbeat_that_comes_another_way_excuses_silence_for_a_while_alone() -> None:
    detector = HangDetector(HANG_S, 3)
    for look in range(int(PATIENCE * HANG_S) + 1):
        assert not detector.verdict(stopped=True)
        detector.miss(1.0, EngineProgress(False, look))
    assert "did not answer" in detector.verdict()


def test_a_fleet_that_is_slow_altogether_is_given_more_time() -> None:
    bench, pulses = HangArbiter(HANG_S), {name: HangDetector(HANG_S, 3) for name in "abc"}
    for name, detector in pulses.items():
        bench.add(name, detector)
        for _ in range(12):
            detector.miss(1.0)
    alone = bench.is_outlier("a")
    assert not alone
    assert not pulses["a"].verdict(stopped=True, is_outlier=alone)
    pulses["b"].observe(EngineProgress(False, 1), 1.0)
    assert pulses["a"].verdict(stopped=True, is_outlier=bench.is_outlier("a"))


def test_no_two_workers_are_judged_at_once() -> None:
    bench = HangArbiter(HANG_S)
    for name in "ab":
        bench.add(name, HangDetector(HANG_S, 3))
    assert bench.declare_hung("a", 0.0)
    assert not bench.declare_hung("b", HANG_S - 1)
    bench.remove("a")
    assert not bench.declare_hung("b", HANG_S - 1)
    bench.add("a", HangDetector(HANG_S, 3))  # it is back
    assert bench.declare_hung("b", HANG_S - 1)
    assert bench.declare_hung("a", 2 * HANG_S)  # the other has not come back for long


def page(running: str, tokens: int) -> bytes:
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'
    ).encode()


def test_a_stock_engine_is_read_by_its_metrics() -> None:
    one, same, more = (
        metrics_progress(page("1.0", n), owed=0, planned_tokens=5) for n in (3, 3, 4)
    )
    assert one is not None
    assert (one.busy, one.planned_tokens) == (True, 5)
    assert one == same != more
    idle = metrics_progress(page("0.0", 3), owed=0, planned_tokens=0)
    owing = metrics_progress(page("0.0", 3), owed=1, planned_tokens=0)
    assert idle is not None
    assert owing is not None
    assert (idle.busy, owing.busy) == (False, True)
    whole = metrics_progress(page("1.0", 3), owed=0, planned_tokens=0, unstreamed=1)
    assert whole is not None
    assert not whole.busy, "a reply in one piece says nothing before its end"
    both = metrics_progress(page("1.0", 3), owed=1, planned_tokens=0, unstreamed=1)
    read = metrics_progress(page("1.0", 3), owed=1, planned_tokens=0, unstreamed=1, bytes_read=9)
    assert both is not None
    assert both.busy
    assert both != read, "what it streams is progress"
    assert metrics_progress(b"nothing 1.0\n", owed=1, planned_tokens=0) is None


NO_HEARTBEATS: list[Any] = [
    None, 1, [], "x", {"busy": 1, "beats": 2}, {"busy": True}, {"busy": True, "beats": "3"},
    {"busy": True, "beats": None},
]  # fmt: skip


@pytest.mark.parametrize("told", NO_HEARTBEATS)
def test_what_is_no_heartbeat_is_none(told: Any) -> None:
    assert read_heartbeat(told) is None
    assert read_health(json.dumps({"status": "ok", "engine": told}).encode()).progress is None


@given(st.binary(max_size=200))
def test_no_body_of_health_raises(body: bytes) -> None:
    read_health(body)
    read_health(b"[" * 100_000 + body)
