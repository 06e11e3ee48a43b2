"""Laws of what is counted of a worker's streams, and of the prompts computed beside them."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.control.latency_model.model import LatencyModel
from pigou.control.latency_model.prefill_interference import (
    PrefillInterference,
    interference_variance,
)
from pigou.control.latency_model.throughput_sampler import ThroughputSampler
from pigou.control.latency_model.worker_factors import WorkerFactors
from pigou.request import SECOND

#: Seconds of a step of 8 streams, alone and with a chunk of a prompt, and tokens of a chunk.
STEP, MIXED, CHUNK = 0.02, 0.12, 2048


def test_itl_is_the_time_of_all_streams_by_the_tokens_that_came() -> None:
    sampler = ThroughputSampler()
    sampler.add_worker()
    sampler.advance(0, 0, 0, 0, 0)
    sampler.change_streams(0, 2)
    sampler.advance(0, 3, 700, 0, SECOND)  # two streams seen, a third whose tokens are not
    sampler.tokens[0] += 40
    (sample,) = sampler.take_samples()
    assert sample.itl == pytest.approx(2 / 40)
    assert sample.streams == pytest.approx(3)
    assert list(sampler.take_samples()) == []


def _beside(seconds: list[tuple[int, int]]) -> ThroughputSampler:
    """One stream of 10 tokens a second; samples after each (second, prompts there)."""
    sampler = ThroughputSampler()
    sampler.add_worker()
    sampler.advance(0, 0, 0, 0, 0)
    sampler.change_streams(0, 1)
    for second, prompts in seconds:
        sampler.advance(0, 1, 0, prompts, second * SECOND)
        sampler.tokens[0] += 10
    return sampler


def test_a_prompt_counts_in_the_samples_of_the_time_in_which_it_was_computed() -> None:
    sampler = _beside([(1, 0)])
    assert [each.prompts for each in sampler.take_samples()] == [0.0]
    found = []
    for second in (2, 3, 4):  # a prompt comes at 1 s, and is computed at 4 s
        sampler.advance(0, 1, 0, 1, second * SECOND)
        sampler.tokens[0] += 10
        if second == 4:
            sampler.add_prompt(0, 600.0, 3.0)
            sampler.advance(0, 1, 0, 0, second * SECOND)
        found.append([(each.prompts, each.prompt_tokens) for each in sampler.take_samples()])
    assert found[:2] == [[], []]  # nobody can say yet what was in them
    assert found[2] == [pytest.approx((1 / 3, 200.0))] * 3


def test_a_prompt_that_was_mostly_computed_alone_counts_by_its_share_beside_streams() -> None:
    sampler = ThroughputSampler()
    sampler.add_worker()
    sampler.advance(0, 0, 0, 1, 9 * SECOND)
    sampler.change_streams(0, 1)
    sampler.advance(0, 1, 0, 1, 10 * SECOND)
    sampler.tokens[0] += 10
    sampler.add_prompt(0, 1000.0, 10.0)
    sampler.advance(0, 1, 0, 0, 10 * SECOND)
    (sample,) = sampler.take_samples()
    assert (sample.prompts, sample.prompt_tokens) == pytest.approx((0.1, 100.0))


def test_samples_that_wait_stay_those_of_their_worker_when_another_leaves() -> None:
    sampler = ThroughputSampler()
    for row in (0, 1):
        sampler.add_worker()
        sampler.advance(row, 0, 0, 0, 0)
        sampler.change_streams(row, 1)
        sampler.advance(row, 1, 0, row, SECOND)
        sampler.tokens[row] += 10
    assert [each.row for each in sampler.take_samples()] == [0]
    sampler.remove_worker(0)
    sampler.add_prompt(0, 100.0, 1.0)
    assert [(each.row, each.prompt_tokens) for each in sampler.take_samples()] == [(0, 100.0)]


def test_samples_of_a_prompt_that_was_given_up_are_thrown_away() -> None:
    sampler = _beside([(1, 1)])
    assert list(sampler.take_samples()) == []
    sampler.advance(0, 1, 0, 1, 2 * SECOND)
    sampler.advance(0, 1, 0, 0, 2 * SECOND)  # it is gone, and was not computed
    assert list(sampler.take_samples()) == []
    sampler.tokens[0] += 10
    sampler.advance(0, 1, 0, 0, 3 * SECOND)
    assert [
        each.prompts for each in sampler.take_samples()
    ] == []  # a second of it was beside the prompt
    sampler.advance(0, 1, 0, 0, 4 * SECOND)
    sampler.tokens[0] += 10
    assert [each.prompts for each in sampler.take_samples()] == [0.0]


def _worker(prompts: list[int], seed: int = 0) -> tuple[LatencyModel, int]:
    """8 streams; prompts of so many chunks, one after another, 5 s apart; sampled as they come."""
    estimator, now = LatencyModel(), SECOND
    estimator.add_worker()
    estimator.sampler.advance(0, 0, 0, 0, now)
    estimator.sampler.change_streams(0, 8)
    for chunks in prompts:
        sent = now
        for step in range(chunks):
            now += round(MIXED * SECOND)
            estimator.sampler.advance(0, 8, 0, 1, now)
            estimator.sampler.tokens[0] += 8
            if step % 4 == 3:
                estimator.sample(now)
        estimator.prompt_computed(0, chunks * CHUNK, sent, now)
        for _ in range(10):
            now += round(25 * STEP * SECOND)
            estimator.sampler.advance(0, 8, 0, 0, now)
            estimator.sampler.tokens[0] += 8 * 25
            estimator.sample(now)
    return estimator, now


def test_a_long_prompt_does_not_make_its_worker_a_slow_one() -> None:
    estimator, now = _worker([40, 5, 80, 20, 100])
    found = estimator.estimates(now)
    assert found.itl(np.array([0]), np.array([8.0])) == pytest.approx([STEP], rel=0.1)
    taken = found.interference_base[0] + found.interference_token[0] * 20 * CHUNK
    assert taken == pytest.approx(20 * (MIXED - STEP), rel=0.25)


def test_a_prompt_under_way_slows_nobody_that_comes_after_it() -> None:
    """As of the middle of a prompt, half a minute long, the law of streams is what it was."""
    estimator, now = _worker([20, 20])
    before = estimator.estimates(now).itl(np.array([0]), np.array([8.0]))
    for step in range(240):
        now += round(MIXED * SECOND)
        estimator.sampler.advance(0, 8, 0, 1, now)
        estimator.sampler.tokens[0] += 8
        if step % 4 == 3:
            estimator.sample(now)
    assert estimator.estimates(now).itl(np.array([0]), np.array([8.0])) == pytest.approx(before)


def test_what_a_prompt_is_taken_for_is_surer_the_more_were_seen() -> None:
    interference = PrefillInterference()
    doubt = interference.variance(0.01, 1e-4)
    assert interference_variance(doubt, 0.0, 0.0) == 0.0
    assert interference_variance(doubt, 1.0, 0.0) == pytest.approx(0.01**2)
    assert interference_variance(doubt, 0.0, 500.0) == pytest.approx(0.05**2)
    before = interference_variance(doubt, 2.0, 900.0)
    for tokens in (100.0, 400.0, 900.0) * 20:
        interference.observe(1.0 + 2e-5 * tokens / 0.5, 1.0 / 0.5, tokens / 0.5)
    assert 0.0 < interference_variance(interference.variance(0.01, 1e-4), 2.0, 900.0) < 0.1 * before


def test_an_unsure_observation_says_less_of_a_worker() -> None:
    def scale(trust: float) -> float:
        factors = WorkerFactors()
        factors.add_worker()
        factors.add_worker()
        for at in range(40):
            factors.observe(0, 1.0, at * SECOND)
            factors.observe(
                1, 3.0 if at % 4 == 0 else 1.0, at * SECOND, trust if at % 4 == 0 else 1
            )
        return float(factors.factors(40 * SECOND)[1][1])

    assert scale(1e-3) == pytest.approx(1.0, abs=0.02)
    assert scale(1e-3) <= scale(0.1) <= scale(1.0)
