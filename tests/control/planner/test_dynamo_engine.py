"""Dynamo's model of an engine, and its budget, by their published rules."""

from __future__ import annotations

import math

import pytest

from pigou.games.latency import LatencyLaw
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import DecodeLaw, PrefillLine
from pigou.request import Role
from pigou.windows.planner_window import WorkerWindow
from pigou_lab.planner.dynamo_budget import (
    HELD,
    RECONCILED,
    fit_to_budget,
    guard_pair,
    guard_single,
)
from pigou_lab.planner.dynamo_engine import SAMPLES, EngineModel, PassRegression
from pigou_lab.planner.dynamo_passes import ForwardPass, forward_pass, hit_discount

SPEED = PerformanceModel(
    PrefillLine(0.004, 0.00008), DecodeLaw(LatencyLaw(0.0004, 0.008)),
    kv_tokens=400_000.0, max_seqs=128,
)  # fmt: skip


def test_attention_counts_pairs_of_equally_long_prompts() -> None:
    assert ForwardPass(prompts=1, prompt_tokens=4).attention == 10
    assert ForwardPass(prompts=2, prompt_tokens=8).attention == 20
    assert ForwardPass(prompts=1, prompt_tokens=4, prompt_kv_tokens=3).attention == 25
    assert ForwardPass(streams=2, stream_tokens=50).attention == 50


def test_the_regression_finds_a_law_of_tokens_and_attention() -> None:
    regression = PassRegression()
    for streams in (1, 8, 32, 64):
        for context in (500, 2000):
            step = ForwardPass(streams=streams, stream_tokens=streams * context)
            seconds = 0.01 + 3e-4 * step.tokens + 1e-8 * step.attention
            regression.add(ForwardPass(streams=streams, stream_tokens=streams * context,
                                       seconds=seconds))  # fmt: skip
    seen = ForwardPass(streams=20, stream_tokens=30_000)
    assert regression.seconds(seen) == pytest.approx(0.01 + 6e-3 + 3e-4)
    assert regression.seconds(ForwardPass()) == 0.0


def test_too_few_or_equal_samples_say_nothing() -> None:
    regression = PassRegression()
    for _ in range(10):
        regression.add(ForwardPass(streams=4, stream_tokens=400, seconds=0.01))
        assert regression.seconds(ForwardPass(streams=1)) is None


def test_samples_of_other_loads_stay() -> None:
    regression = PassRegression()
    far = ForwardPass(streams=100, stream_tokens=100_000, seconds=0.05)
    regression.add(far)
    for n in range(5 * SAMPLES):
        seconds = 0.01 + 4e-4 * (1 + n % 4)
        regression.add(ForwardPass(streams=1 + n % 4, stream_tokens=500, seconds=seconds))
    assert regression.seconds(far) == pytest.approx(0.05, rel=0.01)


def test_cold_samples_enter_the_regression() -> None:
    """Issue 12430: what the price planner leaves out."""
    model = EngineModel(SPEED, Role.DECODE)
    warm = model.capacity(1000, 100, math.inf, 0.03)
    for n in range(SAMPLES):
        streams = 1 + n % 30
        cold = 3 * SPEED.decode.itl_s(streams, 1000)
        model.observe(ForwardPass(streams=streams, stream_tokens=streams * 1000, seconds=cold))
    polluted = model.capacity(1000, 100, math.inf, 0.03)
    assert warm is not None
    assert polluted is not None
    assert polluted.rps < 0.8 * warm.rps


def test_prompts_are_batched_up_to_a_step_and_the_objective() -> None:
    model = EngineModel(SPEED, Role.PREFILL)
    one, batch = (model.capacity(500, 1, ttft_s, math.inf) for ttft_s in (0.05, 0.5))
    assert one == pytest.approx((1 / 0.044, True), rel=1e-3)
    assert batch == pytest.approx((4 / 0.164, True), rel=1e-3)
    slow = model.capacity(500, 1, 0.01, math.inf)
    assert slow is not None
    assert not slow.inside


def test_what_waits_is_discounted_by_hits_up_to_95_per_cent() -> None:
    assert hit_discount(None) == 1.0
    assert hit_discount(0.25) == 0.75
    assert hit_discount(1.0) == pytest.approx(0.05)
    worker = WorkerWindow(id="w", waiting=2, queued_prefill_tokens=300.0)
    seen = forward_pass(worker, Role.PREFILL, 5.0, 2048, 0.0, 0.25)
    assert (seen.queued_prompts, seen.queued_prompt_tokens, seen.seconds) == (2, 400, 0.0)


@pytest.mark.parametrize(
    ("current", "proposed", "final"),
    [
        ((2, 6), (3, 7), ((2, 6), HELD)),  # full: nobody gives
        ((2, 6), (3, 5), ((3, 5), "")),  # full: one gives for the other
        ((2, 4), (2, 10), ((2, 4), HELD)),  # the clamp would take a prefill worker
        ((2, 4), (2, 6), ((2, 6), "")),
        ((4, 8), (4, 8), ((2, 6), RECONCILED)),
    ],
)
def test_a_budget_keeps_the_directions_of_a_proposal(
    current: tuple[int, int], proposed: tuple[int, int], final: tuple[tuple[int, int], str]
) -> None:
    assert guard_pair(current, proposed, (1, 1), (0, 8)) == final


def test_opposing_moves_both_happen_or_neither() -> None:
    assert fit_to_budget((2, 2), (1, 4), (4, 2), (0, 12)) == (1, 4)
    assert fit_to_budget((1, 2), (3, 1), (8, 1), (0, 12)) == (1, 2)
    assert fit_to_budget((2, 2), (4, 5), (1, 1), (0, 6)) == (3, 3)


def test_one_pool_is_held_at_its_budget() -> None:
    assert guard_single(8, 9, 1, (0, 8), 1) == (8, HELD)
    assert guard_single(6, 9, 1, (0, 8), 1) == (8, "")
    assert guard_single(9, 9, 1, (0, 8), 1) == (8, RECONCILED)
    assert guard_single(4, 3, 1, (4, 8), 1) == (4, HELD)
