"""Laws of what prompts take from streams, and of how much things differ."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.control.latency_model.demand import ArrivalGaps
from pigou.control.latency_model.model import LatencyModel
from pigou.control.latency_model.prefill_interference import PrefillInterference
from pigou.request import SECOND


def test_interference_is_learned_whatever_the_level_of_the_law() -> None:
    rng, interference = np.random.default_rng(1), PrefillInterference()
    for _ in range(400):
        prompts = float(rng.poisson(3.0))
        tokens = float(rng.integers(50, 500)) * prompts
        work = 0.5
        itl = 1.02 + (0.004 * prompts + 2e-5 * tokens) / work + rng.normal(0.0, 0.01)
        interference.observe(itl, prompts / work, tokens / work)
    base, token = interference.law(0.05, 2e-4, 1e-5)
    assert base + 275 * token == pytest.approx(0.004 + 275 * 2e-5, rel=0.1)


def test_without_samples_a_token_of_a_prompt_takes_what_one_of_a_stream_does() -> None:
    assert PrefillInterference().law(0.02, 1e-4, 3e-5) == pytest.approx((0.0, 3e-5))
    assert PrefillInterference().law(0.02, 1e-4, 1.0) == pytest.approx((0.0, 1e-4))
    assert PrefillInterference().law(0.0, 0.0, 3e-5) == (0.0, 0.0)


def test_the_law_of_streams_is_not_blamed_for_prompts_computed_beside_them() -> None:
    """One worker: 20 ms a step with 8 streams, and 5 ms more for each of 6 prompts a second."""
    estimator, rng, now = LatencyModel(), np.random.default_rng(2), SECOND
    estimator.add_worker()
    estimator.sampler.advance(0, 0, 0, 0, now)
    estimator.sampler.change_streams(0, 8)
    for _ in range(400):
        prompts, steps = int(rng.poisson(1.5)), 12
        now += round((steps * 0.02 + prompts * 0.005) * SECOND)
        estimator.sampler.advance(0, 8, 0, 0, now - prompts * SECOND // 20)
        for left in range(prompts, 0, -1):
            done = now - (left - 1) * SECOND // 20
            estimator.sampler.advance(0, 8, 0, left, done)
            estimator.prompt_computed(0, 100, done - SECOND // 20, done)
        estimator.sampler.tokens[0] += 8 * steps
        estimator.sample(now)
    found = estimator.estimates(now)
    assert found.itl(np.array([0]), np.array([8.0])) == pytest.approx([0.02], rel=0.03)
    assert found.interference_base + 100 * found.interference_token == pytest.approx(
        [0.005], rel=0.2
    )


def test_cv2_of_gaps_is_variance_over_squared_mean() -> None:
    rng, gaps = np.random.default_rng(3), ArrivalGaps()
    assert gaps.cv2 == 1.0
    for _ in range(2000):
        gaps.observe(float(rng.gamma(4.0, 2.0)))
    assert gaps.cv2 == pytest.approx(0.25, rel=0.3)
