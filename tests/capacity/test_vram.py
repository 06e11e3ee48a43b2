"""The memory map: its terms add up, and known answers hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pigou.capacity.vram import (
    VramConfig,
    VramMap,
    adapter_bytes,
    mix_demand,
    ridge_point,
    vram_map,
)
from pigou.cli import main
from pigou.config import ConfigError
from pigou.models.architecture import Architecture
from pigou.models.gpus import GIB, gpu
from pigou.models.read import architecture

#: Streams of the worked example: conversations, retrieval, agents at the p95 of their lengths.
MIX = [(28, 1280), (8, 16_896), (4, 32_896)]


def fp8_70b() -> Architecture:
    return replace(architecture("llama-3.1-70b-fp8"), kv_dtype="fp8")


def seed_map(capacity_gib: float, weights: int) -> VramMap:
    """Return the map of the worked example, whose terms are given."""
    cache = int(capacity_gib * GIB) - weights - 5_000_000_000
    return VramMap(
        usable=int(capacity_gib * GIB), weights=weights, cache=cache, activations=0, adapters=0,
        runtime=5_000_000_000, scratch=0, blocks=cache // (16 * 163_840), tokens=cache // 163_840,
    )  # fmt: skip


def test_the_worked_h200_example_needs_46_17_gib_of_43_03_safe() -> None:
    memory = seed_map(141e9 / GIB, 70_000_000_000)
    demand = mix_demand(fp8_70b(), gpu("H200"), memory, MIX)
    assert memory.cache / GIB == pytest.approx(61.47, abs=0.01)
    assert demand.demand / GIB == 46.171875
    assert demand.safe / GIB == pytest.approx(43.03, abs=0.01)
    assert demand.fits
    assert not demand.is_safe


def test_its_conclusion_turns_with_what_the_driver_reports() -> None:
    # 143,771 MiB in place of 141 GB; and with all weights counted, on 139.8 GiB.
    demand = mix_demand(fp8_70b(), gpu("H200"), seed_map(140.4, 70_000_000_000), MIX)
    assert demand.safe / GIB == pytest.approx(49.39, abs=0.01)
    assert demand.is_safe
    weights = fp8_70b().weight_bytes
    assert weights / GIB == pytest.approx(67.66, abs=0.01)
    demand = mix_demand(fp8_70b(), gpu("H200"), seed_map(139.8, weights), MIX)
    assert demand.safe / GIB == pytest.approx(47.24, abs=0.02)
    assert demand.is_safe


def test_its_batch_misses_25_ms_a_step_unless_the_memory_runs_at_its_peak() -> None:
    memory = seed_map(141e9 / GIB, 70_000_000_000)
    demand = mix_demand(fp8_70b(), gpu("H200"), memory, MIX)
    assert demand.step_peak_s == pytest.approx(24.91e-3, abs=1e-5)
    eighty = replace(gpu("H200"), streaming=0.8, cache=0.8)
    assert mix_demand(fp8_70b(), eighty, memory, MIX).step_s == pytest.approx(31.1e-3, abs=1e-4)


def test_the_terms_add_up_to_what_the_engine_takes() -> None:
    config = VramConfig(tp=2, adapters=4, max_seqs=64)
    memory = vram_map(architecture("llama-3.1-70b"), gpu("H200"), config)
    terms = (memory.weights, memory.cache, memory.activations, memory.adapters, memory.runtime,
             memory.scratch)  # fmt: skip
    block = memory.cache // memory.blocks
    assert 0 <= memory.usable - sum(terms) < block
    assert memory.tokens == 16 * memory.blocks


def test_a_draft_model_takes_its_weights_and_a_share_of_each_block() -> None:
    model, draft = architecture("llama-3.1-70b"), architecture("llama-3.2-1b")
    config, device = VramConfig(tp=4), gpu("H200")
    alone, both = vram_map(model, device, config), vram_map(model, device, config, draft)
    assert both.weights - alone.weights == draft.weight_bytes
    assert both.cache // both.blocks == 16 * (model.token_bytes(4) + draft.token_bytes())
    assert both.usable - both.weights - both.cache - both.activations > 0
    mix = [(4, 1000)]
    need = [mix_demand(model, device, both, mix, 4, draft=d).demand for d in (None, draft)]
    assert need[1] - need[0] == 4 * draft.sequence_bytes(1000)


def test_a_lora_adapter_of_rank_16_has_its_known_size() -> None:
    assert adapter_bytes(architecture("llama-3.1-8b"), 16, ("q", "k", "v", "o")) == 27_262_976


@pytest.mark.parametrize(
    ("device", "dtype", "flops_per_byte"),
    [("H100", "fp8", 591), ("H100", "bfloat16", 295), ("H200", "fp8", 412),
     ("H200", "bfloat16", 206)],
)  # fmt: skip
def test_ridge_points(device: str, dtype: str, flops_per_byte: int) -> None:
    assert round(ridge_point(gpu(device), dtype)) == flops_per_byte


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("llama-3.1-70b", {}, "leave no room for KV"),
        ("llama-3.1-8b", {"tp": 16}, "tp is 16"),
        ("mixtral-8x7b", {"tp": 2, "adapters": 1, "adapter_targets": ("up",)}, "has experts"),
        ("deepseek-v3", {"tp": 8, "adapters": 1}, "not described"),
        ("llama-3.1-8b", {"dp": 2}, "dp is 2"),
        ("deepseek-v3", {"dp": 8, "redundant_experts": 32}, "ep is off"),
        ("deepseek-v3", {"dp": 24, "ep": True}, "multiple of the 24"),
    ],
)
def test_what_cannot_be_is_refused(model: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        vram_map(architecture(model), gpu("H100"), VramConfig(**options))  # type: ignore[arg-type]


def test_expert_parallelism_frees_memory_for_kv_and_ranks_have_their_own() -> None:
    deepseek, device = architecture("deepseek-v3"), gpu("H200")
    one = vram_map(deepseek, device, VramConfig(tp=8))
    node = vram_map(deepseek, device, VramConfig(dp=8, ep=True))
    wide = vram_map(deepseek, device, VramConfig(dp=64, ep=True))
    copies = vram_map(deepseek, device, VramConfig(dp=64, ep=True, redundant_experts=64))
    assert node.tokens > 5 * one.tokens  # MLA is whole on each GPU of a tensor-parallel worker
    assert wide.weights < 0.35 * node.weights
    assert wide.tokens == 64 * (wide.cache // deepseek.token_bytes())
    expert = deepseek.expert_bytes
    assert abs(copies.weights - wide.weights - expert) < 0.01 * expert  # one more on each GPU


def test_the_command_writes_bytes_and_says_what_a_batch_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "vram.json"
    with pytest.raises(SystemExit) as end:
        main(["vram", "--model", "llama-3.1-70b-fp8", "--gpu", "h200", "--kv-dtype", "fp8",
              "--sequences", "28x1280,8x16896,4x32896", "--json", str(out)])  # fmt: skip
    assert end.value.code == 0
    figures = json.loads(out.read_text())
    assert figures["kv"]["bytes_per_token"] == 163_840
    assert figures["kv"]["bytes_per_token_multi_head"] == 8 * 163_840
    assert figures["batch"]["demand"] == 46.171875 * GIB
    assert set(figures["map"]) >= {"weights", "cache", "activations", "adapters", "runtime",
                                   "scratch"}  # fmt: skip
    assert "46.17 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sequences", "4x0"], "--sequences has '4x0'"),
        (["--kv-dtype", "fp7"], "kv_dtype is 'fp7'"),
        (["--kv-dtype", "fp8_ds_mla"], "no latent cache"),
        (["--utilization", "1.5"], "1.5"),
        (["--adapter-targets", "x"], "has 'x'"),
        (["--worker", "http://127.0.0.1:9"], "options of a computed map"),
        (["--key", "x"], "--api-key is given"),
        (["--tp", "3"], "has 8 KV heads"),
        (["--margin", "0.2"], "--margin is given"),
        (["--memory-gib", "inf"], "--memory-gib is inf"),
    ],
)
def test_the_command_names_what_is_wrong(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["vram", "--model", "llama-3.1-8b", "--gpu", "H100", *options])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_a_worker_is_asked_where_nothing_computed_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["vram", "--worker", "http://127.0.0.1:9"])
    assert end.value.code == 2
    assert "cannot be asked" in capsys.readouterr().err


def test_adapters_change_the_default_modules(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["vram", "--model", "llama-3.1-8b", "--gpu", "H100", "--adapters", "8"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "adapters" in line)
    assert float(row.split("│")[2]) > 0.1


def test_a_latent_cache_is_mapped_without_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["vram", "--model", "deepseek-v3", "--gpu", "h200", "--tp", "8"])
    assert end.value.code == 0
    assert "deepseek-ai/DeepSeek-V3 on 8 x H200" in capsys.readouterr().out
