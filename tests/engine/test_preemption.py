"""Who is preempted, and whether by recompute or by swap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Rates, Result
from pigou.engine.preemption import is_swap_cheaper
from pigou.request import Request

SWAP = Rates(prefill=1.0, swap=1e9, block_bytes=1)
RECOMPUTE = Rates(prefill=1e9, swap=1.0, block_bytes=1)


def engine(**fields: Any) -> EngineCore:
    base = {"blocks": 6, "block_size": 2, "host_blocks": 8, "max_model_len": 64}
    return EngineCore(EngineConfig(**{**base, **fields}))


def until_preempted(core: EngineCore) -> Plan:
    for _ in range(50):
        plan = core.schedule(0)
        core.check_integrity()
        if plan.preempted:
            return plan
        core.apply(plan, Result())
    raise AssertionError("nobody was preempted")


def crowd(core: EngineCore, **fields: Any) -> None:
    core.add(Request("first", 2, 10, **fields))
    core.add(Request("second", 2, 10, arrival=1, **fields))


def test_the_last_of_the_queue_is_preempted() -> None:
    core = engine()
    crowd(core)
    assert until_preempted(core).preempted == ["second"]
    core = engine(order="priority")
    core.add(Request("lesser", 2, 10, priority=2))
    core.add(Request("greater", 2, 10, priority=1, arrival=1))
    assert until_preempted(core).preempted == ["lesser"]


def test_without_rates_or_host_blocks_the_sequence_is_recomputed() -> None:
    for core in (engine(), engine(host_blocks=2)):
        core.rates = None if core.config.host_blocks > 2 else SWAP
        crowd(core)
        plan = until_preempted(core)
        assert not len(plan.swap_out)
        assert core.stats.swaps == 0
        assert core.stats.preemptions == 1


def test_a_recomputed_sequence_keeps_its_tokens() -> None:
    core = engine()
    core.rates = RECOMPUTE
    crowd(core)
    finished = []
    generated = 0
    plan = until_preempted(core)
    while True:
        effects = core.apply(plan, Result())
        core.check_integrity()
        finished += effects.finished
        if not (core.running or core.waiting):
            break
        plan = core.schedule(0)
        again = [s for s in plan.started if s.request == "second"]
        if again:
            entry = plan.rows.tolist().index(again[0].row)
            generated = int(plan.counts[entry]) - 2
            assert again[0].computed == 0
            assert bool(plan.samples[entry])
    assert generated > 0
    assert [(f.request, f.generated, f.preemptions) for f in finished] == [
        ("first", 10, 0),
        ("second", 10, 1),
    ]


def test_a_swapped_sequence_comes_back_where_it_was() -> None:
    core = engine()
    core.rates = SWAP
    crowd(core)
    plan = until_preempted(core)
    assert plan.swap_out.shape == (3, 2)
    core.apply(plan, Result())
    while True:
        plan = core.schedule(0)
        core.check_integrity()
        if plan.started:
            break
        core.apply(plan, Result())
    assert plan.started[0].computed == 6
    assert plan.swap_in[:, 0].tolist() == [0, 1, 2]
    assert plan.swap_in[:, 1].tolist() == core.tables[plan.started[0].row, :3].tolist()
    assert plan.counts.tolist() == [1]
    assert core.stats.swaps == 1


def test_blocks_still_cached_are_not_swapped_in() -> None:
    core = engine(blocks=8)
    core.rates = SWAP
    crowd(core, hashes=np.array([[1, 1]], dtype=np.uint64))
    core.apply(until_preempted(core), Result())
    while not (plan := core.schedule(0)).started:
        core.apply(plan, Result())
    assert plan.started[0].computed > 2
    assert len(plan.swap_in) == -(-plan.started[0].computed // 2) - 1


@pytest.mark.parametrize("swaps", [True, False])
def test_an_abort_frees_what_a_preempted_sequence_has(swaps: bool) -> None:
    core = engine()
    core.rates = SWAP if swaps else RECOMPUTE
    crowd(core)
    plan = until_preempted(core)
    core.abort("second")
    core.check_integrity()
    core.apply(plan, Result())
    core.abort("first")
    core.check_integrity()
    assert core.free_blocks == 6


@given(
    tokens=st.integers(1, 10_000),
    blocks=st.integers(1, 1000),
    prefill=st.floats(1, 1e6),
    swap=st.floats(1, 1e12),
    size=st.integers(1, 10_000_000),
)
def test_the_cheaper_way_takes_no_longer_than_the_other(
    tokens: int, blocks: int, prefill: float, swap: float, size: int
) -> None:
    rates = Rates(prefill, swap, size)
    again, moved = tokens / prefill, 2 * blocks * size / swap
    assert is_swap_cheaper(tokens, blocks, rates) == (moved < again)


def test_hits_make_both_ways_cheaper() -> None:
    rates = Rates(prefill=100.0, swap=1000.0, block_bytes=100)
    assert not is_swap_cheaper(160, 10, rates)
    assert is_swap_cheaper(250, 10, rates)
    assert not is_swap_cheaper(250, 10, rates, hit_tokens=160, hit_blocks=5)


def test_rates_that_no_machine_has_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill is 0"):
        Rates(prefill=0, swap=1, block_bytes=1)
    with pytest.raises(ValueError, match="swap is nan"):
        Rates(prefill=1, swap=float("nan"), block_bytes=1)


def test_what_others_keep_in_the_cache_counts_as_a_hit() -> None:
    """Two share a long prefix: recomputing the one that leaves costs only what it has alone."""
    core = engine(blocks=7, block_size=4)
    core.rates = Rates(prefill=1.0, swap=1.0, block_bytes=1)
    hashes = np.array([[1, i] for i in range(1, 5)], dtype=np.uint64)
    core.add(Request("first", 17, 8, hashes))
    core.apply(core.schedule(0), Result())
    core.add(Request("second", 17, 8, hashes, arrival=1))
    plan = until_preempted(core)
    assert plan.preempted == ["second"]
    assert is_swap_cheaper(20, 5, core.rates)
    assert not is_swap_cheaper(20, 5, core.rates, hit_tokens=16, hit_blocks=4)
    assert not len(plan.swap_out)


def test_a_step_that_preempts_admits_nobody() -> None:
    """Else a host block could be written to and read from in one plan."""
    core = engine()
    core.rates = SWAP
    crowd(core)
    for _ in range(5):
        core.apply(core.schedule(0), Result())
    core.add(Request("small", 1, 1))
    plan = core.schedule(0)
    assert plan.preempted == ["second"]
    assert core.free_blocks > 1
    assert not plan.started
    core.apply(plan, Result())
    assert [each.request for each in core.schedule(0).started] == ["small"]
