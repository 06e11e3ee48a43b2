"""Replays of requests through a fleet: known queues, and what no schedule may break."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.games.queueing import mgc_wait
from pigou.performance.fleet_replay import ReplayedFleet, ReplayedPrompts, StepTable, replay

#: Steps of 10 ms and 0.2 ms a stream, whatever the streams hold.
AXIS = np.array([1.0, 401.0])
STEPS = StepTable(AXIS, np.array([1.0, 1e5]), np.tile(0.01 + 2e-4 * AXIS, (2, 1)))
#: A second for each 10,000 prompt tokens.
TOKEN_S = 1e-4


def fleet(prefill: int, decode: int, max_seqs: int = 400) -> ReplayedFleet:
    return ReplayedFleet(prefill, decode, 2000.0, 2000.0, max_seqs, 1e9)


def prompts(
    arrivals: np.ndarray, lengths: np.ndarray, outputs: np.ndarray, local: float = 1.0
) -> ReplayedPrompts:
    """Return requests; workers that decode compute their prompts `local` times as long."""
    seconds = lengths * TOKEN_S
    return ReplayedPrompts(
        arrivals, lengths, outputs, lengths, seconds, np.zeros(len(lengths)), local * seconds,
        local * seconds,
    )  # fmt: skip


def poisson(rate: float, count: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(1).exponential(1.0 / rate, count))


def equal(count: int, prompt: float, output: float) -> tuple[np.ndarray, np.ndarray]:
    return np.full(count, prompt), np.full(count, output)


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    one = prompts(np.zeros(1), *equal(1, 1000.0, 11.0))
    first, last = replay(one, STEPS, fleet(0, 1), 1.0)[0]
    assert first == pytest.approx(0.1 + 0.0102)  # the chunk is part of a step
    assert last - first == pytest.approx(10 * 0.0102)


def test_prompts_before_one_prefill_worker_wait_as_in_m_d_1() -> None:
    arrivals = poisson(6.0, 20_000)
    asked = prompts(arrivals, *equal(len(arrivals), 1000.0, 1.0), local=1e4)
    times_s = replay(asked, STEPS, ReplayedFleet(1, 40, 1000.0, 2000.0, 400, 1e9), 6.0)
    wait_s = times_s[:, 0] - arrivals - 0.1
    expected_s = 0.1 * mgc_wait(1, 0.6, 0.0)
    joining_s = wait_s.min()  # a step, and what is under way
    assert wait_s.mean() - joining_s == pytest.approx(expected_s, rel=0.12)


def test_what_an_overloaded_prefill_pool_cannot_take_goes_to_decode_workers() -> None:
    arrivals = poisson(20.0, 2000)
    asked = prompts(arrivals, *equal(2000, 1000.0, 40.0))
    alone = prompts(arrivals, *equal(2000, 1000.0, 40.0), local=1e4)
    helped_s, alone_s = (
        replay(requests, STEPS, fleet(1, 8), 20.0)[:, 0] - arrivals for requests in (asked, alone)
    )
    assert alone_s[-100:].mean() > 40.0  # a second of prompts comes every half a second
    assert helped_s[-100:].mean() < 1.0


def test_streams_beyond_the_slots_wait() -> None:
    asked = prompts(np.zeros(6), *equal(6, 1.0, 100.0))
    last_s = np.sort(replay(asked, STEPS, fleet(0, 1, max_seqs=2), 1.0)[:, 1])
    assert np.allclose(np.diff(last_s[::2]), np.diff(last_s[::2])[0], rtol=0.05)
    assert last_s[-1] > 2.7 * last_s[0]


@given(
    prefill=st.integers(0, 3), decode=st.integers(1, 3), slots=st.integers(1, 8),
    rate=st.floats(0.5, 200.0), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_every_request_is_served_no_faster_than_alone(
    prefill: int, decode: int, slots: int, rate: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1.0 / rate, 60))
    lengths = np.ceil(random.exponential(1500.0, 60)) + 1.0
    outputs = np.ceil(random.exponential(20.0, 60))
    asked = prompts(arrivals, lengths, outputs)
    times_s = replay(asked, STEPS, fleet(prefill, decode, slots), rate)
    assert (times_s[:, 0] - arrivals >= lengths * TOKEN_S - 1e-9).all()
    assert (times_s[:, 1] - times_s[:, 0] >= (outputs - 1.0) * 0.0102 - 1e-9).all()
    assert times_s[:, 1].max() < arrivals[-1] + 60.0 * (lengths.sum() * TOKEN_S + outputs.sum())
