"""Laws of the performance model: latency by load, its inverse, and other ways to make it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from benchmarks.control.planner.clairvoyant import fewest_workers
from pigou.games.latency import LatencyLaw
from pigou.objectives import Slo
from pigou.performance.model import PerformanceModel, joint_share
from pigou.performance.speed import (
    DecodeLaw,
    DecodeTable,
    PrefillLine,
    PrefillTable,
    RequestMix,
    largest_batch,
)
from pigou.request import Role

MODEL = PerformanceModel(
    PrefillLine(0.0, 0.246 / 3000),
    DecodeLaw(LatencyLaw(0.0003, 0.01)),
    kv_tokens=500_000,
)
MIX = RequestMix(isl=3000, osl=300)
SLO = Slo(ttft_s=3 * 0.246, itl_s=0.03)


def test_one_prefill_worker_serves_two_a_second_at_p95_of_three_bare_prefills() -> None:
    """The anchor's V2: 1 / wt is 4.065 rps, of which a p95 goal leaves 2.0."""
    assert MODEL.limit_rps(Role.PREFILL, 1, MIX, SLO, 0.95) == pytest.approx(2.0, abs=0.02)
    eight = MODEL.limit_rps(Role.PREFILL, 8, MIX, SLO, 0.95)
    assert eight > 8 * 2.0  # a pooled queue waits less
    alone = replace(MODEL, pooled=False)
    assert alone.limit_rps(Role.PREFILL, 8, MIX, SLO, 0.95) == pytest.approx(16.0, abs=0.16)


@pytest.mark.parametrize("role", list(Role))
@given(
    workers=st.integers(1, 40), share=st.floats(0.5, 0.99), isl=st.floats(100, 6000),
    osl=st.floats(10, 600),
)  # fmt: skip
@settings(max_examples=examples(25))
def test_the_limit_is_where_latency_meets_the_objective(
    role: Role, workers: int, share: float, isl: float, osl: float
) -> None:
    mix = RequestMix(isl, osl)
    limit = MODEL.limit_rps(role, workers, mix, SLO, share)
    if limit <= 0.01:
        return
    inside = MODEL.latency(role, 0.97 * limit, workers, mix, share)
    assert inside.ttft_s <= SLO.ttft_s
    assert inside.itl_s <= SLO.itl_s
    outside = MODEL.latency(role, 1.05 * limit, workers, mix, share)
    assert outside.ttft_s > SLO.ttft_s or outside.itl_s > SLO.itl_s or outside.utilisation > 0.9


@pytest.mark.parametrize("role", list(Role))
@given(rps=st.floats(0.1, 60), share=st.floats(0.5, 0.99))
@settings(max_examples=examples(15))
def test_the_fewest_workers_keep_the_load_and_one_less_does_not(
    role: Role, rps: float, share: float
) -> None:
    workers = fewest_workers(MODEL, role, rps, MIX, SLO, share)
    assert workers is not None
    assert MODEL.limit_rps(role, workers, MIX, SLO, share) >= rps
    if workers > 1:
        assert MODEL.limit_rps(role, workers - 1, MIX, SLO, share) < rps


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@given(workers=st.integers(1, 20), share=st.floats(0.55, 0.99))
@settings(max_examples=examples(20))
def test_at_the_limit_of_a_share_that_share_is_inside(
    role: Role, workers: int, share: float
) -> None:
    limit = MODEL.limit_rps(role, workers, MIX, SLO, share)
    assert MODEL.inside_share(role, limit, workers, MIX, SLO) == pytest.approx(share, abs=0.02)
    assert MODEL.inside_share(role, 0.0, 0, MIX, SLO) == 1.0
    assert MODEL.inside_share(role, 1e6, workers, MIX, SLO) == 0.0


def test_no_number_of_workers_keeps_what_one_request_alone_breaks() -> None:
    assert fewest_workers(MODEL, Role.PREFILL, 1.0, MIX, Slo(ttft_s=0.2), 0.95) is None
    assert fewest_workers(MODEL, Role.DECODE, 1.0, MIX, Slo(itl_s=0.005), 0.95) is None
    assert fewest_workers(MODEL, Role.DECODE, 0.0, MIX, SLO, 0.95) == 0


def test_streams_deviate_as_those_of_the_exact_station_do() -> None:
    rps, workers = 8.0, 2
    numbers = np.arange(1, 1200)
    cap = MODEL.max_streams(MIX) * workers
    held = np.minimum(numbers, cap)
    rates = held / (MIX.osl * np.array([MODEL.itl_at(n / workers, MIX) for n in held]))
    # p_n ~ prod_i rps / rates[i - 1]: servers that are shared (Cohen 1979)
    logs = np.concatenate(([0.0], np.cumsum(math.log(rps) - np.log(rates))))
    shares = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
    counts = np.arange(len(shares))
    mean = float(shares @ counts)
    deviation = math.sqrt(float(shares @ counts**2) - mean**2)
    streams = MODEL.streams(Role.DECODE, rps, workers, MIX)
    assert streams * workers == pytest.approx(mean, rel=0.03)
    assert MODEL._stream_deviation(streams, workers, MIX) * workers == pytest.approx(
        deviation, rel=0.03
    )


def test_hits_shorten_prefill_and_not_what_decode_holds() -> None:
    hits = replace(MIX, hit_rate=0.5)
    assert MODEL.service_s(hits) == pytest.approx(0.5 * MODEL.service_s(MIX))
    assert MODEL.max_streams(hits) == MODEL.max_streams(MIX)


def test_a_full_cache_bounds_decode() -> None:
    small = replace(MODEL, kv_tokens=10 * MIX.context)
    assert small.batch(MIX, 1.0) == pytest.approx(10)
    assert math.isinf(small.streams(Role.DECODE, 100.0, 1, MIX))
    assert small.latency(Role.DECODE, 100.0, 1, MIX, 0.9).itl_s == math.inf


def test_overload_is_infinite_and_no_load_is_a_request_alone() -> None:
    assert MODEL.latency(Role.PREFILL, 5.0, 1, MIX, 0.9).ttft_s == math.inf
    assert MODEL.latency(Role.PREFILL, 1.0, 0, MIX, 0.9).ttft_s == math.inf
    assert MODEL.latency(Role.PREFILL, 0.0, 0, MIX, 0.9).ttft_s == pytest.approx(0.246)


def test_measured_points_lie_on_straight_lines() -> None:
    model = PerformanceModel.from_points(
        [(2000, 0.2), (1000, 0.1)],
        [(1, 1000, 0.01), (11, 1000, 0.02), (1, 2000, 0.02), (11, 2000, 0.04)],
    )
    assert model.prefill.seconds(1500, 1500) == pytest.approx(0.15)
    assert model.prefill.seconds(4000, 4000) == pytest.approx(0.4)
    assert model.decode.itl_s(6, 1500) == pytest.approx(0.0225)
    assert model.decode.itl_s(6, 4000) == pytest.approx(0.06)
    assert largest_batch(model.decode, 1000, 0.015, 100) == pytest.approx(6)
    for bad in ((), ((1.0, -1.0),), ((2.0, 1.0), (1.0, 1.0)), ((1.0, math.nan),)):
        with pytest.raises(ValueError, match="give"):
            PrefillTable(bad)
    with pytest.raises(ValueError, match="give"):
        DecodeTable(())


def test_streams_beyond_the_greatest_throughput_are_not_counted() -> None:
    pole = DecodeLaw(LatencyLaw(0.0001, 0.01, 0.05, 50.0, 1.0))
    most = largest_batch(pole, 1000, 1.0, 256)
    throughput = [n / pole.itl_s(n, 1000) for n in (most - 1, most, most + 1)]
    assert throughput[1] >= max(throughput[0], throughput[2]) * (1 - 1e-4)


def test_two_objectives_share_the_percentile() -> None:
    assert joint_share(SLO) == pytest.approx(0.975)
    assert joint_share(Slo(ttft_s=1.0)) == pytest.approx(0.95)
