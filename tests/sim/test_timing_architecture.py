"""Architectures count as their authors do; capacity is vLLM's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pigou.config import ConfigError
from pigou.sim.architecture import PRESETS, architecture, read_architecture
from pigou.sim.capacity import kv_blocks
from pigou.sim.gpus import GPUS, gpu

QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151_936,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 262_144,
}  # fmt: skip


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
    assert PRESETS[name].parameters == pytest.approx(total, rel=2e-3)
    assert PRESETS[name].kv_bytes == kv


def test_only_active_experts_compute() -> None:
    model = PRESETS["qwen3-30b-a3b"]
    assert model.active_parameters == pytest.approx(3.0e9, rel=0.05)
    assert model.expected_experts(1) == pytest.approx(8)
    assert 127 < model.expected_experts(200) <= 128


def test_flops_are_two_for_each_parameter_and_token() -> None:
    model = PRESETS["llama-3.1-8b"]
    assert model.flops(1, 0) == pytest.approx(2 * model.active_parameters, rel=1e-3)
    assert model.flops(10, 100, 1) < model.flops(10, 1000, 1) < model.flops(11, 1000, 1)
    whole = model.flops(64, 0, 0)
    assert model.flops(40, 0, 0) + model.flops(24, 40, 0) == pytest.approx(whole)


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_file_counts_as_its_preset(tmp_path: Path) -> None:
    write(tmp_path, QWEN)
    read, preset = architecture(str(tmp_path)), PRESETS["qwen3-30b-a3b"]
    for name in ("parameters", "active_parameters", "kv_bytes", "qk_norm", "context", "ffn"):
        assert getattr(read, name) == getattr(preset, name)


def test_names_are_found_with_owner_and_suffix() -> None:
    assert architecture("meta-llama/Llama-3.1-8B-Instruct") is PRESETS["llama-3.1-8b"]
    assert architecture("Qwen/Qwen3-30B-A3B-Instruct-2507") is PRESETS["qwen3-30b-a3b"]
    assert gpu("NVIDIA GeForce RTX 4090") is GPUS["rtx4090"]
    assert gpu("RTX PRO 6000") is GPUS["rtxpro6000"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv_lora_rank": 512}, "latent"),
        ({"mlp_only_layers": [1]}, "some layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"torch_dtype": "float13"}, "float13"),
        ({"quantization_config": {"quant_method": "magic"}}, "magic"),
        ({"num_key_value_heads": 5}, "kv_heads"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads is 'x'"),
        ({"num_attention_heads": 0, "head_dim": None}, "heads is 0"),
        ({"text_config": 3}, "no object"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_what_cannot_be_timed_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read_architecture(write(tmp_path, QWEN | change))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"llama"', "", "{"])
def test_a_file_that_describes_no_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}: .*; give the config.json of a model"):
        read_architecture(path)


def test_keys_without_a_value_are_as_those_left_out(tmp_path: Path) -> None:
    plain = read_architecture(write(tmp_path, QWEN))
    null = {"text_config": None, "num_local_experts": None, "quantization_config": None}
    assert read_architecture(write(tmp_path, {**null, **QWEN})) == plain


def test_unknown_names_are_refused_with_those_known() -> None:
    with pytest.raises(ConfigError, match="qwen3-32b"):
        architecture("gpt-7")
    with pytest.raises(ConfigError, match="h200"):
        gpu("abacus")


def test_quantised_weights_take_fewer_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, QWEN | {"quantization_config": {"quant_method": "fp8"}})
    assert read_architecture(path).weight_bytes == read_architecture(path).parameters


def test_blocks_are_those_that_vllm_printed() -> None:
    """vLLM 0.19: 2,588 blocks for Llama-3.1-8B on an RTX 4090, 2,048 tokens, 256 sequences."""
    assert kv_blocks(PRESETS["llama-3.1-8b"], GPUS["rtx4090"]) == pytest.approx(2588, rel=0.01)


def test_blocks_grow_with_memory_and_degree() -> None:
    model = PRESETS["llama-3.1-70b"]
    assert kv_blocks(model, GPUS["h200"], 2) < kv_blocks(model, GPUS["h200"], 4)
    assert kv_blocks(model, GPUS["h100"], 4) < kv_blocks(model, GPUS["h200"], 4)
    with pytest.raises(ConfigError, match="no room"):
        kv_blocks(model, GPUS["h100"], 1)
    with pytest.raises(ConfigError, match="utilization"):
        kv_blocks(model, GPUS["h100"], 4, utilization=1.5)
    with pytest.raises(ConfigError, match="tp"):
        kv_blocks(model, GPUS["h100"], 3)
