"""Laws of what the tokens that streams hold make steps longer by."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.control.latency_model.model import LatencyModel
from pigou.request import SECOND

#: Seconds of a step: without streams, of each stream, and of each token that they hold.
BASE, STREAM, TOKEN = 0.005, 2e-5, 3e-8


def _seen(workers: int, sizes: tuple[int, int], seconds: int = 60) -> tuple[LatencyModel, int]:
    """What is learned of workers whose streams hold so many tokens each, drawn anew each second."""
    estimator, rng, now = LatencyModel(), np.random.default_rng(4), SECOND
    for row in range(workers):
        estimator.add_worker()
        estimator.sampler.advance(row, 0, 0, 0, now)
    flowing = [0] * workers
    for _ in range(seconds):
        then = now + SECOND // 2
        for row in range(workers):
            streams = int(rng.integers(1, 40))
            estimator.sampler.change_streams(row, streams - flowing[row])
            flowing[row] = streams
            context = streams * int(rng.integers(sizes[0], sizes[1] + 1))
            estimator.sampler.advance(row, streams, context, 0, then)
            itl = (BASE + STREAM * streams + TOKEN * context) * rng.normal(1.0, 0.02)
            estimator.sampler.tokens[row] += round(0.5 / itl * streams)
        now = then
        estimator.sample(now)
    return estimator, now


def test_what_steps_read_is_told_from_what_their_streams_take() -> None:
    estimator, now = _seen(4, (200, 8000))
    found = estimator.estimates(now)
    assert found.context_token == pytest.approx([TOKEN] * 4, rel=0.1)
    few, many = (n * (STREAM + TOKEN * found.mean_context[0]) + BASE for n in (4, 32))
    rows = np.array([0, 0])
    assert found.itl(rows, np.array([4.0, 32.0])) == pytest.approx([few, many], rel=0.05)


def test_where_streams_are_alike_their_itl_is_right_whatever_is_charged() -> None:
    estimator, now = _seen(2, (2000, 2000))
    found = estimator.estimates(now)
    assert found.mean_context[0] == pytest.approx(2000.0)
    for streams in (5.0, 30.0):
        itl = BASE + streams * (STREAM + TOKEN * 2000)
        seen = found.itl(np.array([0]), np.array([streams]))
        assert seen == pytest.approx([itl], rel=0.03)


def test_a_worker_whose_streams_hold_much_is_no_slow_one() -> None:
    """One holds 20 times what the other does: by the law of both their steps are as they are."""
    estimator, rng, now = LatencyModel(), np.random.default_rng(5), SECOND
    held = (1000, 20_000)
    for row in (0, 1):
        estimator.add_worker()
        estimator.sampler.advance(row, 0, 0, 0, now)
    flowing = [0, 0]
    for _ in range(200):
        now += SECOND // 2
        for row in (0, 1):
            streams = int(rng.integers(1, 20))
            estimator.sampler.change_streams(row, streams - flowing[row])
            flowing[row] = streams
            estimator.sampler.advance(row, streams, streams * held[row], 0, now)
            itl = BASE + STREAM * streams + TOKEN * streams * held[row]
            estimator.sampler.tokens[row] += round(0.5 / itl * streams)
        estimator.sample(now)
    found = estimator.estimates(now)
    assert found.b[1] / found.b[0] == pytest.approx(1.0, rel=0.1)
    assert found.context_token[0] == pytest.approx(TOKEN, rel=0.15)


def test_tokens_cost_nothing_until_they_were_seen_to() -> None:
    estimator = LatencyModel()
    estimator.add_worker()
    found = estimator.estimates(0)
    assert (found.context_token[0], found.mean_context[0]) == (0.0, 0.0)
