"""Prefill and decode pools: what the prefill pool cannot take, decode workers compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pigou.objectives import Slo
from pigou.performance.model import PerformanceModel
from pigou.performance.pool_load import LengthClasses, PoolLoad
from pigou.performance.split_load import SplitLoad
from pigou.request import Role

#: A second for each 10,000 prompt tokens; steps of 10 ms and 0.2 ms a stream.
MODEL = replace(
    PerformanceModel.from_points(
        [(0.001, 1e-7), (10_000.0, 1.0)], [(1.0, 100.0, 0.0102), (401.0, 100.0, 0.0902)],
        kv_tokens=1e7, max_seqs=400,
    ),
    chunk_tokens=2000,
)  # fmt: skip
SHORT, LONG = 0.1, 0.3
CLASSES = LengthClasses(
    np.array([1000.0, 3000.0]), np.array([1000.0, 3000.0]), np.array([400.0, 400.0]),
    np.array([0.5, 0.5]),
)  # fmt: skip


def split(prefill_workers: int, decode_workers: int) -> SplitLoad:
    """Return a fleet."""
    pools = (PoolLoad(MODEL, role, CLASSES) for role in (Role.PREFILL, Role.DECODE))
    return SplitLoad(*pools, prefill_workers, decode_workers)


def test_a_prefill_pool_with_room_computes_all_prompts() -> None:
    state = split(16, 4).state(20.0)
    assert state is not None
    assert state.local.max() < 1e-3
    alone = PoolLoad(MODEL, Role.PREFILL, CLASSES).ttft_quantile_s(20.0, 16, 0.95, state.joining_s)
    assert split(16, 4).latencies(20.0, 0.95)[0] == pytest.approx(alone, rel=0.02)


@pytest.mark.parametrize("rate_rps", [12.0, 16.0, 20.0])
def test_what_an_overloaded_prefill_pool_cannot_take_goes_to_decode_workers(
    rate_rps: float,
) -> None:
    servers = 2
    state = split(servers, 8).state(rate_rps)
    assert state is not None
    seconds = np.array([SHORT, LONG])
    remote = rate_rps * float(CLASSES.shares * (1.0 - state.local) @ seconds)
    offered = rate_rps * float(CLASSES.shares @ seconds)
    assert offered > servers
    assert 0.7 * servers < remote < 1.02 * servers


def test_decode_workers_with_room_raise_the_limit_of_a_small_prefill_pool() -> None:
    slo = Slo(ttft_s=1.0, itl_s=0.05)
    alone = PoolLoad(MODEL, Role.PREFILL, CLASSES).limit_rps(2, slo, 0.975)
    limits = [
        split(2, workers).limit_rps(slo, 0.975, alone, split(2, workers).highest_rps)
        for workers in (2, 4, 8)
    ]
    assert 1.1 * alone < limits[0] < limits[1] < limits[2]
