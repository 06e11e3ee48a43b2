"""Experts in steps: known answers, published deployments, the slowest rank, skew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou.models.gpus import gpu, kv_blocks
from pigou.models.parallelism import ParallelConfig
from pigou.models.read import architecture
from pigou.performance.speed import RequestMix
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import ScalingConfig, read_fleet
from pigou.sim.pool_performance import measure_performance
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.timing import RooflineTiming, StepShape
from pigou.sim.timing_experts import activated, all_to_all_s, inclusion, read_expert_loads
from pigou.sim.timing_models import build_timing
from pigou.sim.workload import RequestLengths, renewal

DEEPSEEK = architecture("deepseek-v3")
EP72, EP144 = ParallelConfig(1, 72, True, 32), ParallelConfig(1, 144, True, 32)
EP32 = ParallelConfig(1, 32, True, 32)


def batch(counts: list[int], kv: list[int]) -> StepShape:
    samples = np.ones(len(counts), np.bool_)
    return StepShape(np.array(counts, np.int32), np.array(kv, np.int32), samples)


def step_s(timing: RooflineTiming, sequences: int, kv: int, count: int = 1) -> float:
    return float(timing.durations(batch([count] * sequences, [kv] * sequences), 1)[0]) * 1e-9


@pytest.mark.parametrize(
    ("experts", "active", "tokens", "read"),
    [(128, 8, 1, 8.0), (128, 8, 16, 82.423), (128, 8, 64, 125.942), (8, 2, 4, 5.469),
     (8, 2, 16, 7.92)],
)  # fmt: skip
def test_uniform_choices_read_the_known_number_of_experts(
    experts: int, active: int, tokens: int, read: float
) -> None:
    chosen = inclusion(np.ones(experts), active)
    assert activated(chosen, tokens) == pytest.approx(read, abs=5e-4)


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=40), st.integers(1, 8))
def test_a_token_chooses_so_many_experts_however_loads_lie(loads: list[int], active: int) -> None:
    weights = np.array(loads, dtype=float)
    chosen = inclusion(weights + 1e-3, active)
    assert (chosen <= 1.0).all()
    assert chosen.sum() == pytest.approx(active)
    assert (np.diff(chosen[np.argsort(weights)]) >= -1e-12).all()
    assert activated(chosen, 5) <= activated(inclusion(np.ones(len(loads)), active), 5) + 1e-9


#: Microseconds of DeepEP's low-latency kernels on H800 (its V1 page): 128 tokens a GPU,
#: width 7168, 8 experts, FP8 out and bfloat16 back.
DEEP_EP = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369),
           256: (194, 360)}  # fmt: skip


@pytest.mark.parametrize("gpus", DEEP_EP)
def test_all_to_all_takes_what_deep_ep_measured(gpus: int) -> None:
    split = ParallelConfig(1, gpus, True)
    for size, measured in zip((7168, 2 * 7168), DEEP_EP[gpus], strict=True):
        seconds = all_to_all_s(gpu("H800"), split, 128, 8, size)
        assert 0.75 <= seconds * 1e6 / measured <= 1.1


def test_a_rack_exchanges_faster_than_nodes_on_a_network() -> None:
    rack, nodes = (all_to_all_s(gpu(name), EP72, 128, 8, 7168) for name in ("GB200", "B200"))
    assert nodes > 4 * rack


@pytest.mark.parametrize(
    ("split", "device", "sequences", "kv", "count", "tokens_per_node"),
    [
        (EP72, "H100", 256, 3000, 1, 22_282),  # LMSYS, 96 H100: decode, 2,000-token inputs
        (EP32, "H100", 1, 0, 2048, 54_543),  # the same: prefill of 2,000-token inputs
        (EP144, "H800", 92, 4989, 1, 14_800),  # DeepSeek's own service
    ],
)
def test_published_deployments_of_deepseek_within_a_tenth(
    split: ParallelConfig, device: str, sequences: int, kv: int, count: int, tokens_per_node: float
) -> None:
    timing = RooflineTiming(DEEPSEEK, gpu(device), split)
    seconds = step_s(timing, split.dp * sequences, kv, count)
    assert 8 * sequences * count / seconds == pytest.approx(tokens_per_node, rel=0.1)


def test_deepseek_s_service_writes_20_to_22_tokens_a_second() -> None:
    assert 1.0 / step_s(RooflineTiming(DEEPSEEK, gpu("H800"), EP144), 144 * 88, 4989) == (
        pytest.approx(21.0, abs=1.0)
    )


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 900)), min_size=1, max_size=12))
def test_ranks_wait_for_the_slowest(rows: list[tuple[int, int]]) -> None:
    qwen, split = architecture("qwen3-30b-a3b"), ParallelConfig(1, 4, True)
    rows.sort(key=lambda row: row[0] > 1)
    timing = RooflineTiming(qwen, gpu("H100"), split)
    made = timing.durations(batch([c for c, _ in rows], [k for _, k in rows]), 3)
    ranks: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    for i, row in enumerate(rows):
        loads = [sum(c for c, _ in rank if c > 1) for rank in ranks]
        ranks[i % 4 if row[0] == 1 else loads.index(min(loads))].append(row)
    timing._dp = 1
    experts = round(timing.experts(sum(c for c, _ in rows)) * 1e9)  # type: ignore[misc]
    timing.experts = None
    alone = [timing.durations(batch([c for c, _ in r], [k for _, k in r]), 3) for r in ranks]
    assert (made == np.max(alone, axis=0) + experts).all()


def test_repeated_steps_equal_single_ones() -> None:
    timing = RooflineTiming(architecture("mixtral-8x7b"), gpu("H100"), ParallelConfig(1, 4, True))
    kv = [100, 200, 300, 50, 7]
    together = timing.durations(batch([1] * 5, kv), 4)
    for step in range(4):
        assert together[step] == timing.durations(batch([1] * 5, [k + step for k in kv]), 1)[0]


def test_skew_slows_expert_parallel_steps_and_balancing_takes_most_of_it_back() -> None:
    loads = read_expert_loads("zipf:0.8", 256)
    split = ParallelConfig(1, 32, True)
    uniform = RooflineTiming(DEEPSEEK, gpu("H100"), split)
    skewed = RooflineTiming(DEEPSEEK, gpu("H100"), split, loads)
    copied = RooflineTiming(DEEPSEEK, gpu("H100"), EP32, loads, eplb=True)
    even, hot, balanced = (step_s(t, 32, 0, 4096) for t in (uniform, skewed, copied))
    assert hot > 1.3 * even  # the hottest rank is waited for: congestion
    assert balanced - even < 0.1 * (hot - even)


def test_skew_reads_fewer_experts_where_each_gpu_has_a_part_of_all() -> None:
    loads = read_expert_loads("zipf:1.2", 128)
    qwen = architecture("qwen3-30b-a3b")
    hot, even = (RooflineTiming(qwen, gpu("H100"), 1, w) for w in (loads, None))
    assert step_s(hot, 16, 500) < 0.9 * step_s(even, 16, 500)  # decode pays by activation


def test_data_parallel_attention_divides_the_latent_cache_and_experts_leave_room() -> None:
    one, blocks = gpu("H200"), {}
    for split in (ParallelConfig(8), ParallelConfig(8, 1, True), ParallelConfig(1, 8, True)):
        blocks[split] = kv_blocks(DEEPSEEK, one, split, max_seqs=64)
    tp, tp_ep, dp_ep = blocks.values()
    assert tp == pytest.approx(tp_ep, rel=0.01)  # each GPU has the whole latent either way
    assert dp_ep > 5 * tp
    wide = kv_blocks(DEEPSEEK, one, ParallelConfig(1, 64, True), max_seqs=64)
    assert wide / 64 > 2.4 * dp_ep / 8  # experts spread wider


def test_llama_4_and_every_moe_preset_are_timed_with_expert_parallelism() -> None:
    for name in ("llama-4-scout", "llama-4-maverick", "gpt-oss-120b", "qwen3-235b-a22b", "kimi-k2"):
        shape = architecture(name)
        split = ParallelConfig(1, 16, True)
        built = build_timing("roofline", name, "H200", split, "", "zipf:0.5", eplb=True)
        assert 1e-3 < step_s(built.timing, 64, 1000) < 0.2, shape.name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "model", "load", "word"),
    [
        (ParallelConfig(1, 4), "llama-3.1-8b", "", "dp is 4"),
        (ParallelConfig(1, 7, True), "deepseek-v3", "", "multiple of the 7"),
        (ParallelConfig(1, 1, False, 32), "deepseek-v3", "", "ep is off"),
        (ParallelConfig(16), "deepseek-v3", "", "tp is 16"),
        (ParallelConfig(1, 8, True), "deepseek-v3", "zipf:-1", "zipf:-1"),
        (ParallelConfig(1, 8, True), "deepseek-v3", "hot", "zipf:EXPONENT"),
        (ParallelConfig(1), "llama-3.1-8b", "zipf:1", "no experts"),
    ],
)
def test_parallelism_and_loads_that_do_not_fit_are_refused(
    split: ParallelConfig, model: str, load: str, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        build_timing("roofline", model, "H100", split, "", load)


def test_other_timings_refuse_what_they_would_ignore() -> None:
    with pytest.raises(ConfigError, match="expert_load is given"):
        build_timing("law:340b", "", "", 1, "", "zipf:1")


def test_a_file_has_loads_of_experts_or_of_each_layer(tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps([[1, 2, 3, 4], [4, 3, 2, 1]]))
    loads = read_expert_loads(str(file), 4)
    assert loads is not None
    assert loads.tolist() == [[1, 2, 3, 4], [4, 3, 2, 1]]
    for wrong in ([1, 2, 3], [[1, 2, 3, -4]], [[1, 2, 3, 4], [0, 0, 0, 0]], {"a": 1}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match="expert_load is"):
            read_expert_loads(str(file), 4)


def test_the_planner_of_a_simulated_fleet_sees_hot_experts_and_proposes_copies() -> None:
    lengths = RequestLengths(input=(200, 400), output=(20, 40))
    load = renewal(lengths, 10.0, 1.0, 150, 0.0, 0)
    setups = {
        name: Setup(model="qwen3-30b-a3b", gpu="H100", dp=8, ep=True, expert_load=name)
        for name in ("zipf:0.9", "uniform")
    }
    scaling = ScalingConfig(planner={"planner": "price"}, max_workers=1, slo="ttft=1,itl=0.05")
    advice = {}
    for name, setup in setups.items():
        simulation = Simulation(
            load, read_fleet("1xboth"), setup, unlimited(), ClientConfig(), scaling=scaling
        )
        planner = simulation.run().document()["planner"]
        advice[name] = [reason for made in planner["decisions"] for reason in made["reasons"]]
    assert any("slowest rank of both-0" in reason for reason in advice["zipf:0.9"])
    assert not any("slowest rank" in reason for reason in advice["uniform"])


def test_a_planner_counts_the_prompts_that_ranks_compute_side_by_side() -> None:
    mix, share = RequestMix(isl=2000.0, osl=100.0), 0.95
    made = {}
    for dp in (2, 8):
        setup = Setup(model="qwen3-30b-a3b", gpu="H100", dp=dp, ep=True)
        load = renewal(RequestLengths(input=(2000, 2000), output=(2, 2)), 1.0, 1.0, 1, 0.0, 0)
        fleet = read_fleet("1p+1d")
        simulation = Simulation(load, fleet, setup, unlimited(), ClientConfig())
        spec = simulation.membership.pools["prefill"].spec
        made[dp] = measure_performance(spec, Role.PREFILL, fleet)
    rates = {dp: one.throughput_rps(Role.PREFILL, mix) for dp, one in made.items()}
    assert rates[8] == pytest.approx(4 * rates[2], rel=0.2)
    alone = {dp: one.latency(Role.PREFILL, 0.0, 1, mix, share).ttft_s for dp, one in made.items()}
    assert alone[8] == pytest.approx(alone[2], rel=0.2)  # a prompt is no faster on more ranks
