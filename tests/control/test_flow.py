"""Laws of what is counted of a worker's streams, and of the prompts computed beside them."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.control.latency_model.flow import Flow
from pigou.control.latency_model.model import LatencyModel
from pigou.control.latency_model.scales import Scales
from pigou.control.latency_model.stall import Stall
from pigou.control.latency_model.stall_kernel import variance
from pigou.request import SECOND

#: Seconds of a step of 8 streams, alone and with a chunk of a prompt, and tokens of a chunk.
STEP, MIXED, CHUNK = 0.02, 0.12, 2048


def test_itl_is_the_time_of_all_streams_by_the_tokens_that_came() -> None:
    flow = Flow()
    flow.up()
    flow.advance(0, 0, 0, 0, 0)
    flow.change(0, 2)
    flow.advance(0, 3, 700, 0, SECOND)  # two streams seen, a third whose tokens are not
    flow.came(0, 40)
    (sample,) = flow.harvest()
    assert sample.itl == pytest.approx(2 / 40)
    assert sample.streams == pytest.approx(3)
    assert list(flow.harvest()) == []


def _beside(seconds: list[tuple[int, int]]) -> Flow:
    """One stream of 10 tokens a second; a harvest after each (second, prompts there)."""
    flow = Flow()
    flow.up()
    flow.advance(0, 0, 0, 0, 0)
    flow.change(0, 1)
    for second, prompts in seconds:
        flow.advance(0, 1, 0, prompts, second * SECOND)
        flow.came(0, 10)
    return flow


def test_a_prompt_counts_in_the_samples_of_the_time_in_which_it_was_computed() -> None:
    flow = _beside([(1, 0)])
    assert [each.prompts for each in flow.harvest()] == [0.0]
    found = []
    for second in (2, 3, 4):  # a prompt comes at 1 s, and is computed at 4 s
        flow.advance(0, 1, 0, 1, second * SECOND)
        flow.came(0, 10)
        if second == 4:
            flow.prompt(0, 600.0, 3.0)
            flow.advance(0, 1, 0, 0, second * SECOND)
        found.append([(each.prompts, each.work) for each in flow.harvest()])
    assert found[:2] == [[], []]  # nobody can say yet what was in them
    assert found[2] == [pytest.approx((1 / 3, 200.0))] * 3


def test_a_prompt_that_was_mostly_computed_alone_counts_by_its_share_beside_streams() -> None:
    flow = Flow()
    flow.up()
    flow.advance(0, 0, 0, 1, 9 * SECOND)
    flow.change(0, 1)
    flow.advance(0, 1, 0, 1, 10 * SECOND)
    flow.came(0, 10)
    flow.prompt(0, 1000.0, 10.0)
    flow.advance(0, 1, 0, 0, 10 * SECOND)
    (sample,) = flow.harvest()
    assert (sample.prompts, sample.work) == pytest.approx((0.1, 100.0))


def test_samples_that_wait_stay_those_of_their_worker_when_another_leaves() -> None:
    flow = Flow()
    for row in (0, 1):
        flow.up()
        flow.advance(row, 0, 0, 0, 0)
        flow.change(row, 1)
        flow.advance(row, 1, 0, row, SECOND)
        flow.came(row, 10)
    assert [each.row for each in flow.harvest()] == [0]
    flow.down(0)
    flow.prompt(0, 100.0, 1.0)
    assert [(each.row, each.work) for each in flow.harvest()] == [(0, 100.0)]


def test_samples_of_a_prompt_that_was_given_up_are_thrown_away() -> None:
    flow = _beside([(1, 1)])
    assert list(flow.harvest()) == []
    flow.advance(0, 1, 0, 1, 2 * SECOND)
    flow.advance(0, 1, 0, 0, 2 * SECOND)  # it is gone, and was not computed
    assert list(flow.harvest()) == []
    flow.came(0, 10)
    flow.advance(0, 1, 0, 0, 3 * SECOND)
    assert [each.prompts for each in flow.harvest()] == []  # a second of it was beside the prompt
    flow.advance(0, 1, 0, 0, 4 * SECOND)
    flow.came(0, 10)
    assert [each.prompts for each in flow.harvest()] == [0.0]


def _worker(prompts: list[int], seed: int = 0) -> tuple[LatencyModel, int]:
    """8 streams; prompts of so many chunks, one after another, 5 s apart; harvests as they come."""
    estimator, now = LatencyModel(), SECOND
    estimator.up()
    estimator.flow.advance(0, 0, 0, 0, now)
    estimator.flow.change(0, 8)
    for chunks in prompts:
        sent = now
        for step in range(chunks):
            now += round(MIXED * SECOND)
            estimator.flow.advance(0, 8, 0, 1, now)
            estimator.flow.came(0, 8)
            if step % 4 == 3:
                estimator.harvest(now)
        estimator.prefilled(0, chunks * CHUNK, sent, now)
        for _ in range(10):
            now += round(25 * STEP * SECOND)
            estimator.flow.advance(0, 8, 0, 0, now)
            estimator.flow.came(0, 8 * 25)
            estimator.harvest(now)
    return estimator, now


def test_a_long_prompt_does_not_make_its_worker_a_slow_one() -> None:
    estimator, now = _worker([40, 5, 80, 20, 100])
    found = estimator.now(now)
    assert found.itl(np.array([0]), np.array([8.0])) == pytest.approx([STEP], rel=0.1)
    taken = found.interference_base[0] + found.interference_token[0] * 20 * CHUNK
    assert taken == pytest.approx(20 * (MIXED - STEP), rel=0.25)


def test_a_prompt_under_way_slows_nobody_that_comes_after_it() -> None:
    """As of the middle of a prompt, half a minute long, the law of streams is what it was."""
    estimator, now = _worker([20, 20])
    before = estimator.now(now).itl(np.array([0]), np.array([8.0]))
    for step in range(240):
        now += round(MIXED * SECOND)
        estimator.flow.advance(0, 8, 0, 1, now)
        estimator.flow.came(0, 8)
        if step % 4 == 3:
            estimator.harvest(now)
    assert estimator.now(now).itl(np.array([0]), np.array([8.0])) == pytest.approx(before)


def test_what_a_prompt_is_taken_for_is_surer_the_more_were_seen() -> None:
    stall = Stall()
    doubt = stall.doubt(0.01, 1e-4)
    assert variance(doubt, 0.0, 0.0) == 0.0
    assert variance(doubt, 1.0, 0.0) == pytest.approx(0.01**2)
    assert variance(doubt, 0.0, 500.0) == pytest.approx(0.05**2)
    before = variance(doubt, 2.0, 900.0)
    for tokens in (100.0, 400.0, 900.0) * 20:
        stall.observe(1.0 + 2e-5 * tokens / 0.5, 1.0 / 0.5, tokens / 0.5)
    assert 0.0 < variance(stall.doubt(0.01, 1e-4), 2.0, 900.0) < 0.1 * before


def test_an_unsure_observation_says_less_of_a_worker() -> None:
    def scale(trust: float) -> float:
        scales = Scales()
        scales.up()
        scales.up()
        for at in range(40):
            scales.observe(0, 1.0, at * SECOND)
            scales.observe(1, 3.0 if at % 4 == 0 else 1.0, at * SECOND, trust if at % 4 == 0 else 1)
        return float(scales.now(40 * SECOND)[1][1])

    assert scale(1e-3) == pytest.approx(1.0, abs=0.02)
    assert scale(1e-3) <= scale(0.1) <= scale(1.0)
