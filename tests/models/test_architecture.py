"""Architectures count as their authors do; capacity is vLLM's arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.models.architecture import Architecture
from pigou.models.gpus import GPUS, kv_blocks
from pigou.models.read import architecture, parse_architecture
from pigou.sim.timing import RooflineTiming, StepShape


@pytest.mark.parametrize(
    ("name", "total", "kv"),
    [
        ("llama-3.1-8b", 8.03e9, 131_072),
        ("llama-3.1-70b", 70.55e9, 327_680),
        ("nemotron-4-340b", 341e9, 589_824),
        ("qwen3-32b", 32.76e9, 262_144),
        ("qwen3-30b-a3b", 30.53e9, 98_304),
    ],
)
def test_parameters_are_the_published_ones(name: str, total: float, kv: int) -> None:
    assert architecture(name).parameters == pytest.approx(total, rel=2e-3)
    assert architecture(name).kv_bytes == kv


def test_only_active_experts_compute() -> None:
    model = architecture("qwen3-30b-a3b")
    assert model.active_parameters == pytest.approx(3.0e9, rel=0.05)
    assert model.expected_experts(1) == pytest.approx(8)
    assert 127 < model.expected_experts(200) <= 128


def test_flops_are_two_for_each_parameter_and_token() -> None:
    model = architecture("llama-3.1-8b")
    assert model.flops(1, 0) == pytest.approx(2 * model.active_parameters, rel=1e-3)
    assert model.flops(10, 100, 1) < model.flops(10, 1000, 1) < model.flops(11, 1000, 1)
    whole = model.flops(64, 0, 0)
    assert model.flops(40, 0, 0) + model.flops(24, 40, 0) == pytest.approx(whole)


def test_nvlink_ends_at_the_node_unless_the_gpu_is_of_a_rack() -> None:
    keys = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "intermediate_size": 28_672,
        "vocab_size": 128_256,
    }
    model = parse_architecture(Path("wide"), keys, "wide")
    for device, tp in (("h100", 16), ("h100", 64), ("h100-nvl", 4), ("rtx4090", 16)):
        for use in (RooflineTiming, kv_blocks):
            with pytest.raises(ConfigError, match=f"tp is {tp}; links of .* join"):
                use(model, GPUS[device], tp)
    assert kv_blocks(model, GPUS["gb200"], 64) > 0


def step_seconds(model: Architecture, device: str, tokens: int) -> float:
    batch = StepShape(np.array([tokens]), np.array([0]), np.array([True]))
    return float(RooflineTiming(model, GPUS[device]).durations(batch, 1)[0]) / 1e9


def test_four_bit_floats_are_computed_where_the_device_has_them() -> None:
    model = architecture("llama-3.1-8b")
    four, half = architecture("llama-3.1-8b-nvfp4"), model
    flops = 2.0 * (model.parameters - 2 * model.vocab * model.hidden) * 16_384
    saved = step_seconds(half, "b200", 16_384) - step_seconds(four, "b200", 16_384)
    peak = 0.776 * 2250e12
    assert saved == pytest.approx(flops / peak * (1 - 2250 / 9000), rel=0.05)
    assert step_seconds(four, "h100", 16_384) == pytest.approx(
        step_seconds(half, "h100", 16_384), rel=0.02
    )


def test_blocks_are_those_that_vllm_printed() -> None:
    """vLLM 0.19: 2,588 blocks for Llama-3.1-8B on an RTX 4090, 2,048 tokens, 256 sequences."""
    assert kv_blocks(architecture("llama-3.1-8b"), GPUS["rtx4090"]) == pytest.approx(2588, rel=0.01)


def test_blocks_grow_with_memory_and_degree() -> None:
    model = architecture("llama-3.1-70b")
    assert kv_blocks(model, GPUS["h200"], 2) < kv_blocks(model, GPUS["h200"], 4)
    assert kv_blocks(model, GPUS["h100"], 4) < kv_blocks(model, GPUS["h200"], 4)
    with pytest.raises(ConfigError, match="no room"):
        kv_blocks(model, GPUS["h100"], 1)
    with pytest.raises(ConfigError, match="utilization"):
        kv_blocks(model, GPUS["h100"], 4, utilization=1.5)
    with pytest.raises(ConfigError, match="tp"):
        kv_blocks(model, GPUS["h100"], 3)
