"""Architectures count as their authors do; capacity is vLLM's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.sim.architecture import PRESETS, Architecture, kv_blocks
from pigou.sim.gpus import GPUS, gpu
from pigou.sim.model_config import architecture, read_architecture
from pigou.sim.timing import StepShape
from pigou.sim.timing_roofline import roofline

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


LLAMA_4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 202_048,
        "intermediate_size": 8192, "intermediate_size_mlp": 16_384, "num_local_experts": 128,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192,
    },
}  # fmt: skip


@pytest.mark.parametrize("drop", [(), ("model_type",)])
def test_llama_4_is_refused_by_name(tmp_path: Path, drop: tuple[str, ...]) -> None:
    """Counted as if all its layers had experts, Maverick came out at 778 B parameters, not 400."""
    source = {key: value for key, value in LLAMA_4.items() if key not in drop}
    text = source["text_config"]
    assert isinstance(text, dict)
    source["text_config"] = {key: value for key, value in text.items() if key not in drop}
    with pytest.raises(ConfigError, match=r"llama4_text|chunked"):
        read_architecture(write(tmp_path, source))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"bits": 4}}, "quant_method is ''"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "3 bits"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8"}}, "W4A8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
    ],
)
def test_layers_and_formats_that_nobody_described_are_refused(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        read_architecture(write(tmp_path, QWEN | change))


def compressed(kind: str, bits: int, inputs: int | None) -> dict[str, Any]:
    activations = None if inputs is None else {"num_bits": inputs}
    weights = {"type": kind, "num_bits": bits}
    group = {"weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantised", "dtype", "compute"),
    [
        ({"quant_method": "fp8"}, "fp8", "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4", "bfloat16"),
        ({"quant_method": "gptq", "bits": 8}, "int8", "bfloat16"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", "bfloat16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", "fp4"),
        ({"quant_method": "mxfp4"}, "mxfp4", "fp4"),
        (compressed("int", 8, 8), "int8", "int8"),
        (compressed("int", 4, None), "int4", "bfloat16"),
        (compressed("float", 8, 8), "fp8", "fp8"),
        (compressed("float", 4, 4), "nvfp4", "fp4"),
    ],
)
def test_formats_are_read_from_the_checkpoint(
    tmp_path: Path, quantised: dict[str, Any], dtype: str, compute: str
) -> None:
    model = read_architecture(write(tmp_path, QWEN | {"quantization_config": quantised}))
    assert (model.dtype, model.compute_dtype, model.kv_dtype) == (dtype, compute, "bfloat16")


def test_embedding_and_output_layer_are_not_quantised(tmp_path: Path) -> None:
    path = write(tmp_path, QWEN | {"quantization_config": {"quant_method": "fp8"}})
    model = read_architecture(path)
    assert model.weight_bytes == model.parameters + 2 * 151_936 * 2048


@pytest.mark.parametrize(
    ("name", "dtype", "compute"),
    [
        ("Qwen/Qwen3-32B-FP8", "fp8", "fp8"),
        ("Qwen/Qwen3-32B-AWQ", "int4", "bfloat16"),
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int8", "int8", "bfloat16"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "fp8", "fp8"),
        ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "nvfp4", "fp4"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "int4", "bfloat16"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "int8", "int8"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "int4", "bfloat16"),
        ("llama3.1-8b", "bfloat16", "bfloat16"),
    ],
)
def test_a_name_says_the_number_format(name: str, dtype: str, compute: str) -> None:
    model = architecture(name)
    assert (model.dtype, model.compute_dtype) == (dtype, compute)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-32B-GGUF", "meta-llama/Llama-3.1-8B-Guard", "llama-3.1-80b", "llama-3.1-8bx",
        "Qwen/Qwen3-30B-A3B-FP8-AWQ", "Qwen/Qwen3-32B-Q4_K_M",
    ],
)  # fmt: skip
def test_a_name_is_never_taken_for_its_neighbour(name: str) -> None:
    with pytest.raises(ConfigError, match="model is"):
        architecture(name)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
    ],
)
def test_a_device_is_found_by_what_its_driver_calls_it(name: str, key: str) -> None:
    assert gpu(name) is GPUS[key]


@pytest.mark.parametrize(
    "name", ["RTX 4090 D", "RTX 4090 Laptop GPU", "H20", "H100 96GB", "B300", "A100X", "A1000", ""]
)
def test_a_device_is_never_taken_for_its_neighbour(name: str) -> None:
    with pytest.raises(ConfigError, match="gpu is"):
        gpu(name)


def test_nvlink_ends_at_the_node_unless_the_gpu_is_of_a_rack() -> None:
    model = Architecture("wide", 4, 8192, 64, 64, 128, 28_672, 128_256)
    for device, tp in (("h100", 16), ("h100", 64), ("h100-nvl", 4), ("rtx4090", 16)):
        for use in (roofline, kv_blocks):
            with pytest.raises(ConfigError, match=f"tp is {tp}; links of .* join"):
                use(model, GPUS[device], tp)
    assert kv_blocks(model, GPUS["gb200"], 64) > 0


def step_seconds(model: Architecture, device: str, tokens: int) -> float:
    batch = StepShape(np.array([tokens]), np.array([0]), np.array([True]))
    return float(roofline(model, GPUS[device]).durations(batch, 1)[0]) / 1e9


def test_four_bit_floats_are_computed_where_the_device_has_them() -> None:
    model = PRESETS["llama-3.1-8b"]
    four, half = model.cast("nvfp4"), model
    flops = 2.0 * (model.parameters - 2 * model.vocab * model.hidden) * 16_384
    saved = step_seconds(half, "b200", 16_384) - step_seconds(four, "b200", 16_384)
    peak = 0.776 * 2250e12
    assert saved == pytest.approx(flops / peak * (1 - 2250 / 9000), rel=0.05)
    assert step_seconds(four, "h100", 16_384) == pytest.approx(
        step_seconds(half, "h100", 16_384), rel=0.02
    )


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


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 16_384),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 32_768}}, 131_072),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"rope_scaling": {"type": "su", "factor": 8.0}}, 4096),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 4096),
    ],
)  # fmt: skip
def test_the_context_is_the_one_that_workers_work_out(
    tmp_path: Path, change: dict[str, Any], context: int
) -> None:
    source = QWEN | {"max_position_embeddings": 4096} | change
    assert read_architecture(write(tmp_path, source)).context == context


@pytest.mark.parametrize("factor", [None, 0, -1, "4", True])
def test_a_factor_that_cannot_be_is_refused(tmp_path: Path, factor: Any) -> None:
    change = {"rope_scaling": {"type": "linear", "factor": factor}}
    with pytest.raises(ConfigError, match="factor is"):
        read_architecture(write(tmp_path, QWEN | change))
