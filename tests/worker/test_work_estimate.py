"""Laws of the FLOPs and bytes that a worker says its steps took."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.engine.plan import Plan
from pigou.models.gpus import gpu
from pigou.models.read import architecture
from pigou.worker.device_use import WorkEstimate, estimate_of
from pigou.worker.metrics import WorkerMetrics

LLAMA = architecture("llama-3.1-8b")


def plan(*entries: tuple[int, int, bool], repeat: int = 1) -> Plan:
    """Return a plan of entries: tokens to compute, cached ones, whether one is sampled."""
    counts, kv, samples = zip(*entries, strict=True)
    lens = np.array(kv, dtype=np.int32)
    return Plan(
        np.arange(len(entries), dtype=np.int32), lens, np.array(counts, dtype=np.int32), lens,
        np.array(samples), repeat=repeat,
    )  # fmt: skip


def test_flops_are_those_of_the_architecture_for_each_entry() -> None:
    work = WorkEstimate(LLAMA)
    work.count(plan((512, 100, False), (1, 2000, True), (300, 0, True)), 1)
    wanted = LLAMA.flops(512, 100, 0) + LLAMA.flops(1, 2000, 1) + LLAMA.flops(300, 0, 1)
    assert work.flops == pytest.approx(wanted, rel=1e-12)


def test_a_decode_step_reads_the_weights_and_each_sequences_entries_once() -> None:
    work = WorkEstimate(LLAMA)
    work.count(plan(*[(1, 999, True)] * 8), 1)
    weights = LLAMA.weight_bytes - LLAMA.vocab * LLAMA.hidden * 2  # the embedding is looked up
    assert work.read_bytes == weights + 8 * 1000 * 131_072
    assert work.write_bytes == 8 * 131_072


def test_steps_of_one_plan_count_as_so_many_plans() -> None:
    once, apart = WorkEstimate(LLAMA), WorkEstimate(LLAMA)
    once.count(plan((1, 40, True), (1, 7, True), (16, 32, False), repeat=4), 4)
    for step in range(4):
        apart.count(plan((1, 40 + step, True), (1, 7 + step, True), (16, 32 + 16 * step, False)), 1)
    assert once.flops == pytest.approx(apart.flops, rel=1e-12)
    assert once.read_bytes == pytest.approx(apart.read_bytes, rel=1e-12)
    assert once.write_bytes == apart.write_bytes


def test_gpus_share_all_but_kv_heads_that_each_has() -> None:
    one, many = WorkEstimate(LLAMA), WorkEstimate(LLAMA, tp=16)
    for work in (one, many):
        work.count(plan((1, 1000, True)), 1)
    assert many.flops == pytest.approx(one.flops / 16)
    assert many.write_bytes == one.write_bytes / 8  # 8 KV heads


def test_of_experts_those_are_read_that_some_token_chooses() -> None:
    model = architecture("qwen3-30b-a3b")
    few, all_ = WorkEstimate(model), WorkEstimate(model)
    few.count(plan((1, 0, True)), 1)
    all_.count(plan((4096, 0, True)), 1)
    expert = model.layers * 3 * model.hidden * 768 * 2
    weights = all_.read_bytes - 4095 * model.kv_bytes
    assert few.read_bytes == pytest.approx(weights - 120 * expert, rel=1e-6)


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H100 80GB HBM3", True), ("H20-3e", False),
                                             ("", False)])  # fmt: skip
def test_peaks_are_of_the_very_gpu_or_not_shown(name: str, known: bool) -> None:
    work = estimate_of(LLAMA, name)
    page = WorkerMetrics("m", 2048, {"block_size": "16"}, 64, work).page().decode()
    assert ("\npigou_gpu_peak_flops_per_second{" in page) is known
    assert "\nvllm:estimated_flops_per_gpu_total{" in page
    if known:
        assert work.peak_bytes_per_second == gpu("h100").bandwidth


def test_a_worker_whose_model_is_not_known_shows_no_estimate() -> None:
    page = WorkerMetrics("m", 2048, {"block_size": "16"}, 64).page().decode()
    assert "estimated" not in page
    assert "gpu_peak" not in page
