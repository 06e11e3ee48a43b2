"""What workers measured of themselves is what the control plane takes them for."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pigou.config import EngineConfig
from pigou.control.latency_model.estimates import Estimates
from pigou.control.latency_model.model import LatencyModel
from pigou.request import SECOND, Rehearsed
from pigou.sim.pool_performance import measure_speeds
from pigou.sim.timing import Law, LawTiming

LAW = Law(itl_a=0.02, itl_b=0.001, prefill=0.045, prefill_token=1e-4, mixed=0.006)
ENGINE = EngineConfig(blocks=4096, max_model_len=10_000)


def itl_s(known: Estimates, row: int, streams: float) -> float:
    """Return the ITL of a worker at a number of streams."""
    return known.itl(np.array([row]), np.array([streams])).item()


def told(*laws: Law) -> Estimates:
    """Return the estimates of a fleet right after its workers came up."""
    estimator = LatencyModel()
    for law in laws:
        estimator.add_worker(measure_speeds(LawTiming(law), ENGINE), 5 * SECOND)
    return estimator.estimates(5 * SECOND)


def test_speeds_are_known_before_the_first_request() -> None:
    found = told(LAW, LAW)
    assert found.prefill_base + 1000 * found.prefill_token == pytest.approx([0.145] * 2, rel=0.02)
    for streams in (1.0, 16.0, 64.0):
        assert itl_s(found, 0, streams) == pytest.approx(0.02 + 0.001 * streams, rel=0.02)
    taken = found.interference_base + 2000 * found.interference_token
    assert taken == pytest.approx([0.206] * 2, rel=0.1)


def test_alike_workers_are_taken_for_alike_though_they_measured_unlike() -> None:
    noisy = msgspec.structs.replace(LAW, itl_a=0.022, prefill_token=1.1e-4)
    found = told(LAW, noisy)
    assert found.table[:, 0].tolist() == found.table[:, 1].tolist()


def test_a_worker_half_as_fast_is_known_for_a_slow_one_before_the_first_request() -> None:
    """Its factor of 2 is shrunk, as of any worker of which little was seen."""
    slow = Law(itl_a=0.04, itl_b=0.002, prefill=0.09, prefill_token=2e-4, mixed=0.012)
    found = told(LAW, slow)
    fast, other = itl_s(found, 0, 16.0), itl_s(found, 1, 16.0)
    assert 1.4 < other / fast < 2.1
    assert 0.03 < fast < 0.045
    assert 1.4 < found.mean_prefill[1] / found.mean_prefill[0] < 2.1


def test_a_worker_that_tells_nothing_is_taken_for_one_like_those_that_did() -> None:
    estimator = LatencyModel()
    estimator.add_worker(measure_speeds(LawTiming(LAW), ENGINE), SECOND)
    estimator.add_worker()
    found = estimator.estimates(SECOND)
    assert found.table[:, 0].tolist() == found.table[:, 1].tolist()


def test_who_rehearses_after_requests_were_served_changes_no_law_of_the_others() -> None:
    estimator = LatencyModel()
    estimator.add_worker(measure_speeds(LawTiming(LAW), ENGINE), SECOND)
    before = estimator.estimates(SECOND).table[:, 0].tolist()
    estimator.outputs.observe(100)
    noisy = msgspec.structs.replace(LAW, itl_a=0.023, prefill_token=1.2e-4, mixed=0.03)
    estimator.add_worker(measure_speeds(LawTiming(noisy), ENGINE), SECOND)
    found = estimator.estimates(SECOND).table
    assert found[:, 0].tolist() == found[:, 1].tolist() == before


def test_prompts_beside_streams_alone_teach_nothing() -> None:
    estimator = LatencyModel()
    estimator.add_worker((Rehearsed(128, 4, 1, 0.05),), SECOND)
    found, prior = estimator.estimates(SECOND), Estimates.prior(1)
    assert itl_s(found, 0, 8.0) == pytest.approx(itl_s(prior, 0, 8.0))
    assert found.prefill_token == pytest.approx(prior.prefill_token)


def test_a_simulated_worker_tells_what_its_law_says() -> None:
    for tokens, streams, steps, seconds in measure_speeds(LawTiming(LAW), ENGINE):
        alone = LAW.decode(streams) * steps if streams else 0.0
        prompt = (LAW.mixed or 0.0) if streams else LAW.prefill
        expected = alone + (prompt + LAW.prefill_token * tokens if tokens else 0.0)
        assert seconds == pytest.approx(expected)
        assert steps == (-(-tokens // (2048 - streams)) if tokens else 8)
