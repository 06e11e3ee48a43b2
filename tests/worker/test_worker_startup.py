"""Laws of the rehearsal: what is measured is so, fits, keeps its time, and leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sleeping_clock import Clock, TickingClock
from tests.lib.examples import examples
from worker_process import Worker

from pigou.config import ConfigError, EngineConfig, EvictionConfig
from pigou.engine.core import EngineCore
from pigou.engine.startup_profiling import CONTEXT_TOKENS, DECODE_STEPS, profiled_loads
from pigou.kv.tier_config import StoreTier
from pigou.request import SECOND
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.mock_worker import MockBackend, TimingLaw
from pigou.worker.startup.build import build
from pigou.worker.startup.profiling import profile_at_startup

LAW = TimingLaw(base=2_000_000, per_sequence=100_000, prefill_rate=100_000.0)
LIMITS = EngineConfig(blocks=4096, max_model_len=16_384, max_seqs=128, max_repeat=8)


@contextmanager
def slept() -> Iterator[Clock]:
    """Let time pass by sleeping alone."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("pigou.worker.engine_thread.mock_worker.time", clock)
        patch.setattr("pigou.worker.startup.profiling.time", clock)
        yield clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    with slept() as clock:
        yield clock


def sleeper(law: TimingLaw = LAW, size: int = 16) -> MockBackend:
    return MockBackend(law, size, 100, frozenset())


def check_empty(core: EngineCore) -> None:
    """Check that nothing is in an engine, or was in its cache."""
    core.check_integrity()
    assert (core.running, core.waiting, core.held, core.cached_blocks) == (0, 0, 0, 0)
    assert core.free_blocks == core.config.blocks
    assert (core.stats.hit_tokens, core.stats.preemptions, core.stats.swaps) == (0, 0, 0)
    assert (core.stats.evicted_tokens, core.stats.recomputed_tokens, core.missing_entries) == (
        0,
        0,
        0,
    )
    assert core.abort("rehearsed-prompt").events == []
    assert not core.schedule(0)


@pytest.mark.parametrize("options", [
    {}, {"eviction": EvictionConfig()}, {"eviction": EvictionConfig(policy="paper")},
    {"order": "edf", "prefix_caching": False},
    {"tiers": (StoreTier(name="host", gib=2**-10),)}, {"max_waiting": 2, "max_seqs": 5},
    {"blocks": 20, "max_model_len": 320},
])  # fmt: skip
def test_a_rehearsal_of_a_model_leaves_nothing_behind(options: dict[str, Any]) -> None:
    config = {"blocks": 512, "max_model_len": 1024, "kv_transfer": "none", **options}
    parts = build(WorkerConfig(**config))
    price = parts.core.price
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pigou.worker.startup.profiling.time", TickingClock())
        found = profile_at_startup(parts.core, parts.backend, 0.04)
    assert found
    assert [each[:2] for each in found] == list(profiled_loads(parts.core.config))[: len(found)]
    assert parts.core.price == price
    assert not parts.backend._sequences  # type: ignore[attr-defined]
    check_empty(parts.core)


@pytest.mark.parametrize("most", [1, 8, 32])
def test_what_is_measured_is_what_the_law_says(clock: Clock, most: int) -> None:
    core, backend = EngineCore(LIMITS), sleeper()
    found = profile_at_startup(core, backend, 1e9, backend.rest)
    assert [each[:2] for each in found] == list(profiled_loads(LIMITS))
    for tokens, streams, steps, seconds in found:
        assert steps == (-(-tokens // (LIMITS.max_batched_tokens - streams)) or DECODE_STEPS)
        law = steps * (LAW.base + LAW.per_sequence * streams) / SECOND + tokens / LAW.prefill_rate
        assert seconds == pytest.approx(law, rel=1e-6)
    check_empty(core)


def test_on_the_real_clock_a_sleeping_worker_measures_its_law() -> None:
    core, backend = EngineCore(LIMITS), sleeper()
    found = profile_at_startup(core, backend, 60.0, backend.rest)
    assert [each[:2] for each in found] == list(profiled_loads(LIMITS))
    for tokens, streams, steps, seconds in found:
        law = steps * (LAW.base + LAW.per_sequence * streams) / SECOND + tokens / LAW.prefill_rate
        assert seconds >= law * 0.999


@pytest.mark.parametrize("budget", [0.0, 0.01, 0.3, 1.0, 5.0])
def test_a_slow_worker_keeps_its_budget_to_a_step(clock: Clock, budget: float) -> None:
    law = TimingLaw(base=50_000_000, prefill_rate=10_000.0)
    core, backend = EngineCore(LIMITS), sleeper(law)
    began = clock.now
    found = profile_at_startup(core, backend, budget, backend.rest)
    step = 0.05 + 0.0001 * 64 + LIMITS.max_batched_tokens / law.prefill_rate
    assert clock.now - began <= (budget + step) * SECOND
    assert len(found) < len(profiled_loads(LIMITS))
    assert bool(found) == (budget > 0)
    check_empty(core)


@st.composite
def limits(draw: Callable[..., Any]) -> EngineConfig:
    size = draw(st.sampled_from([1, 5, 16, 32, 128]))
    interval = max(64, size)
    return EngineConfig(
        blocks=draw(st.integers(1, 40_000 // size)),
        block_size=size,
        max_seqs=draw(st.integers(1, 80)),
        max_batched_tokens=draw(st.integers(1, 3000)),
        max_model_len=draw(st.integers(1, 10_000)),
        order=draw(st.sampled_from(["fcfs", "priority", "edf"])),
        prefix_caching=draw(st.booleans()),
        max_repeat=draw(st.integers(1, 16)),
        repeat_chunks=draw(st.booleans()),
        max_waiting=draw(st.sampled_from([0, 1, 5, 20, 100])),
        headroom=draw(st.integers(0, 3)),
        eviction=draw(st.sampled_from([None, EvictionConfig(interval=interval)])),
    )


@settings(max_examples=examples(40))
@given(config=limits())
def test_every_scene_fits_the_limits_and_nobody_loses_a_row(config: EngineConfig) -> None:
    wanted = profiled_loads(config)
    assume(wanted)
    law = TimingLaw(LAW.base, 0, LAW.prefill_rate)
    core, backend = EngineCore(config), sleeper(law, config.block_size)
    with slept():
        found = profile_at_startup(core, backend, 1e9, backend.rest)
    assert [each[:2] for each in found] == list(wanted)
    for tokens, streams, steps, seconds in found:
        time = steps * law.base / SECOND + tokens / law.prefill_rate
        assert steps == (-(-tokens // (config.max_batched_tokens - streams)) or DECODE_STEPS)
        # The law takes a chunk of one token for a decode.
        assert seconds == pytest.approx(time, abs=1.001 * steps / law.prefill_rate)
        assert streams * CONTEXT_TOKENS <= config.blocks * config.block_size
    check_empty(core)


@pytest.mark.parametrize("limit", ["blocks", "max_seqs", "max_model_len", "max_batched_tokens"])
def test_an_engine_that_is_too_small_measures_nothing_and_starts(clock: Clock, limit: str) -> None:
    config = EngineConfig(**{"blocks": 64, "max_seqs": 1, limit: 1})
    core = EngineCore(config)
    found = profile_at_startup(core, sleeper(TimingLaw(0, 0, 1e9)), 0.1)
    assert len(found) == len(profiled_loads(config))
    check_empty(core)


def test_a_worker_tells_what_it_measured_and_its_figures_begin_at_zero(
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker("--rehearse", "20")
    told = worker.get("/server_info").json["rehearsed"]
    assert told[0][:3] == [128, 0, 1]
    assert all(len(each) == 4 and each[3] > 0 for each in told)
    assert "rehearsed" not in worker.info
    assert worker.get("/server_info").json["memory"] is None  # it sleeps, and holds no model
    for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
                 "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
                 "vllm:num_preemptions_total", "vllm:num_requests_running"):  # fmt: skip
        assert worker.metric(name) == 0
    worker.settle()
    assert start_worker("--rehearse", "0").get("/server_info").json["rehearsed"] == []


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_rehearsal_takes_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(
        ConfigError, match=r"rehearse is .*; it must be (finite, )?at least 0 seconds"
    ):
        WorkerConfig(rehearse=seconds)
