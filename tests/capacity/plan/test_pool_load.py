"""The analytic pass: known queues, and monotone laws."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.games.queueing import erlang_c, mgc_wait
from pigou.objectives import Slo
from pigou.performance.model import PerformanceModel
from pigou.performance.pool_load import LengthClasses, PoolLoad
from pigou.request import Role

#: A second for each 1,000 prompt tokens, which are a chunk; steps of 10 ms and 0.2 ms a stream.
MODEL = replace(
    PerformanceModel.from_points(
        [(0.001, 1e-6), (1000.0, 1.0), (2000.0, 2.0)],
        [(1.0, 100.0, 0.0102), (101.0, 100.0, 0.0302)],
        kv_tokens=1e6,
        max_seqs=100,
    ),
    chunk_tokens=1000,
)


def classes(*rows: tuple[float, float, float]) -> LengthClasses:
    """Return classes of (prompt, output, share) without cached tokens."""
    prompts, outputs, shares = np.array(rows, dtype=float).T
    return LengthClasses(prompts, prompts, outputs, shares)


def test_the_wait_of_equal_prompts_is_that_of_m_d_c() -> None:
    load = PoolLoad(MODEL, Role.PREFILL, classes((1000, 100, 1.0)))
    for workers, rho in ((1, 0.5), (4, 0.75), (8, 0.9)):
        wait, waiting = mgc_wait(workers, rho, 0.0), erlang_c(workers, rho)
        for t in (0.5 * wait, wait, 3.0 * wait):
            share = 1.0 - waiting * math.exp(-t * waiting / wait)
            assert load.ttft_share(rho * workers, workers, 1.0 + t) == pytest.approx(
                share, rel=1e-6
            )


def test_a_share_of_requests_waits_as_erlang_says() -> None:
    load = PoolLoad(MODEL, Role.PREFILL, classes((1000, 100, 1.0)))
    at_once = load.ttft_share(3.0, 4, 1.0 + 1e-9)
    assert at_once == pytest.approx(1.0 - erlang_c(4, 0.75), abs=1e-6)


def test_long_prompts_decide_the_tail() -> None:
    load = PoolLoad(MODEL, Role.PREFILL, classes((100, 10, 0.9), (2000, 10, 0.1)))
    assert load.ttft_share(1e-6, 8, 0.11) == pytest.approx(0.9)
    assert load.ttft_share(1e-6, 8, 2.01) == pytest.approx(1.0)


def test_a_chunk_that_is_filled_up_delays_the_prompt_that_ends_in_it() -> None:
    lengths = classes((1000, 100, 1.0))
    exact, wide = (
        PoolLoad(replace(MODEL, chunk_tokens=chunk), Role.PREFILL, lengths)
        for chunk in (1000, 1400)
    )
    later = 1.5 + 0.4 * erlang_c(4, 0.75)
    assert wide.ttft_share(3.0, 4, later) == pytest.approx(exact.ttft_share(3.0, 4, 1.5))


def test_streams_without_a_slot_count_as_outside() -> None:
    lengths = classes((50, 100, 1.0))
    wide, narrow = (
        PoolLoad(replace(MODEL, max_seqs=slots), Role.DECODE, lengths) for slots in (100, 13)
    )
    assert wide.streams(10.0, 1) == pytest.approx(narrow.streams(10.0, 1), rel=1e-6)
    assert wide.itl_share(10.0, 1, 1.0) > 0.999
    assert 0.5 < narrow.itl_share(10.0, 1, 1.0) < 0.65


def test_streams_are_those_of_littles_law() -> None:
    load = PoolLoad(MODEL, Role.DECODE, classes((50, 100, 1.0)))
    streams = load.streams(20.0, 2)
    assert streams == pytest.approx(10.0 * 100 * load.step_s(streams), rel=1e-5)


def test_a_class_holds_context_in_proportion_to_its_tokens() -> None:
    mixed = classes((0, 10, 0.5), (1000, 90, 0.5))
    assert mixed.context == pytest.approx((10 * 5 + 90 * 1045) / 100)


def test_prompts_slow_the_streams_of_a_worker_that_does_both() -> None:
    lengths = classes((100, 100, 1.0))
    apart, both = (PoolLoad(MODEL, role, lengths) for role in (Role.DECODE, Role.BOTH))
    slack = 1.0 - 4.0 * (0.1 - 0.0102)  # a step with a chunk decodes, too
    for itl_s in (0.02, 0.025):
        assert both.itl_share(4.0, 1, itl_s / slack) < apart.itl_share(4.0, 1, itl_s)


def test_nothing_is_inside_in_overload() -> None:
    load = PoolLoad(MODEL, Role.BOTH, classes((1000, 100, 1.0)))
    assert load.itl_share(1.1, 1, 1e3) == load.ttft_share(1.1, 1, 1e3) == 0.0


@given(
    role=st.sampled_from(list(Role)),
    prompt=st.integers(10, 1500),
    output=st.integers(2, 400),
    ttft_s=st.floats(0.05, 4.0),
    itl_s=st.floats(0.012, 0.05),
)
def test_more_workers_and_longer_objectives_hold_more(
    role: Role, prompt: int, output: int, ttft_s: float, itl_s: float
) -> None:
    load = PoolLoad(MODEL, role, classes((prompt, output, 1.0)))
    slo = Slo(ttft_s=ttft_s, itl_s=itl_s)
    limits = [load.limit_rps(workers, slo, 0.95) for workers in (1, 2, 5)]
    assert limits[0] <= limits[1] * 1.001 <= limits[2] * 1.002
    longer = load.limit_rps(2, Slo(ttft_s=1.3 * ttft_s, itl_s=1.3 * itl_s), 0.95)
    assert longer >= limits[1] * 0.999
    if limits[1]:
        # At the limit the objectives hold, just above they do not.
        inside = min(load.ttft_share(limits[1], 2, ttft_s), load.itl_share(limits[1], 2, itl_s))
        assert inside >= 0.95


def test_bursts_of_arrivals_spread_the_gaps_between_tokens() -> None:
    lengths = classes((200, 100, 1.0))
    calm, bursty = (PoolLoad(MODEL, Role.BOTH, lengths, scv) for scv in (1.0, 9.0))
    assert bursty.itl_share(2.0, 1, 0.03) < calm.itl_share(2.0, 1, 0.03) - 0.01
