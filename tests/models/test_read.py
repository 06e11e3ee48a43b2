"""Architectures that are read from a config.json or known by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pigou.config import ConfigError
from pigou.models.gpus import GPUS, gpu
from pigou.models.read import architecture, read_architecture

QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151_936,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 262_144,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_file_counts_as_its_preset(tmp_path: Path) -> None:
    write(tmp_path, QWEN)
    read, preset = architecture(str(tmp_path)), architecture("qwen3-30b-a3b")
    assert replace(read, name=preset.name) == preset


def test_names_are_found_with_owner_and_suffix() -> None:
    assert architecture("meta-llama/Llama-3.1-8B-Instruct") == architecture("llama-3.1-8b")
    assert architecture("Qwen/Qwen3-30B-A3B-Instruct-2507") == architecture("qwen3-30b-a3b")
    assert gpu("NVIDIA GeForce RTX 4090") is GPUS["rtx4090"]
    assert gpu("RTX PRO 6000") is GPUS["rtxpro6000"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is None"),
        ({"hidden_size": None}, "hidden_size"),
        ({"torch_dtype": "float13"}, "float13"),
        ({"quantization_config": {"quant_method": "magic"}}, "magic"),
        ({"num_key_value_heads": 5}, "kv_heads"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads is 'x'"),
        ({"num_attention_heads": 0, "head_dim": None}, "heads is 0"),
        ({"text_config": 3}, "no object"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"layer_types": ["sliding_attention"] * 48}, "sliding_window is None"),
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


def test_a_model_without_a_type_is_refused(tmp_path: Path) -> None:
    source = {key: value for key, value in QWEN.items() if key != "model_type"}
    with pytest.raises(ConfigError, match="model_type is ''"):
        read_architecture(write(tmp_path, source))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "jamba"}, "jamba"),
        ({"layer_types": ["mamba"] * 48}, "layer_types has 'mamba'"),
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
    assert (model.main.dtype, model.compute_dtype, model.kv_dtype) == (dtype, compute, "bfloat16")


def test_embedding_and_output_layer_and_router_are_not_quantised(tmp_path: Path) -> None:
    path = write(tmp_path, QWEN | {"quantization_config": {"quant_method": "fp8"}})
    model = read_architecture(path)
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    wide = 2 * 151_936 * 2048 + 48 * 128 * 2048 + norms
    assert model.weight_bytes == model.parameters + wide


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
    assert (model.main.dtype, model.compute_dtype) == (dtype, compute)


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


@pytest.mark.parametrize(
    ("text", "billions", "window"),
    [
        # google/gemma-3-4b-it and mistralai/Mistral-Small-3.1-24B, as the hub has them.
        ({"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240,
          "num_hidden_layers": 34, "sliding_window": 1024}, 4.3, 1024),
        ({"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32_768,
          "num_hidden_layers": 40, "head_dim": 128, "sliding_window": None,
          "vocab_size": 131_072}, 24.0, 0),
    ],
)  # fmt: skip
def test_keys_left_out_and_null_ones_are_as_the_family_has_them(
    tmp_path: Path, text: dict[str, Any], billions: float, window: int
) -> None:
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    source = {"model_type": "outer", "text_config": text, "vision_config": vision}
    model = read_architecture(write(tmp_path, source))
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    assert max(cache.window for cache, _ in model.caches) == window


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8_KV = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        # Checkpoints of hugging-quants and nvidia on the hub, by their index files.
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", 5.73),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", 39.77),
    ],
)
def test_scales_and_zeros_of_groups_count(model: str, gigabytes: float) -> None:
    assert architecture(model).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_hf_quant_config_says_format_exclusions_and_cache(tmp_path: Path) -> None:
    """A folder of NVFP4 was counted as one of 16 bits."""
    write(tmp_path, QWEN)
    wide = read_architecture(tmp_path)
    quantisation = FP8_KV | {"exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantisation}))
    model = read_architecture(tmp_path)
    assert (model.main.dtype, model.kv_dtype) == ("nvfp4", "fp8")
    parts, before = model.parts(), wide.parts()
    assert parts["experts"] == pytest.approx(before["experts"] * 0.5625 / 2)
    assert parts["attention"] == before["attention"]
    write(tmp_path, QWEN | {"quantization_config": {"quant_algo": "FP8"}})
    with pytest.raises(ConfigError, match="quant_algo is 'NVFP4', and 'FP8' in config"):
        read_architecture(tmp_path)


def group(kind: str, bits: int, targets: list[str], **weights: Any) -> dict[str, Any]:
    return {"weights": {"type": kind, "num_bits": bits, **weights}, "targets": targets}


@pytest.mark.parametrize(
    ("keys", "experts", "attention"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}, 1.0, 2.0),
        (AWQ | {"modules_to_not_convert": ["model.layers.0.mlp"]}, None, 0.5 + 2.5 / 128),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"], "config_groups": {
            "a": group("int", 4, ["Linear"], group_size=32)}}, 0.5 + 2 / 32, 2.0),
        ({"quant_method": "compressed-tensors", "config_groups": {
            "a": group("float", 8, ["re:.*self_attn.*"]),
            "b": group("float", 4, ["Linear"], group_size=16)}}, 0.5625, 1.0),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            f"model.layers.{at}.mlp.experts": {"quant_algo": "MXFP8"} for at in range(48)}},
         1 + 1 / 32, 2.0),
    ],
)  # fmt: skip
def test_modules_are_quantised_by_their_names(
    tmp_path: Path, keys: dict[str, Any], experts: float | None, attention: float
) -> None:
    model = read_architecture(write(tmp_path, QWEN | {"quantization_config": keys}))
    layer = 128 * 3 * 2048 * 768
    first = (47 * (0.5 + 2.5 / 128) + 2.0) / 48  # the first layer alone is left out
    assert model.parts()["experts"] == pytest.approx(48 * layer * (experts or first))
    assert model.parts()["attention"] == pytest.approx(48 * 2 * 2048 * 4608 * attention)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"memory_layers": 3}, "memory_layers is 3"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"layer_types": 3}, "layer_types is 3"),
        ({"quantization_config": {"quant_method": "compressed-tensors",
                                  "config_groups": {"a": 3}}}, "not understood"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": "lm_head"}}, "ignore is"),
        ({"quantization_config": FP8_KV | {"kv_cache_quant_algo": "FP2"}}, "FP2"),
        ({"quantization_config": {"quant_algo": "MIXED_PRECISION"}}, "without quantized_layers"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        read_architecture(write(tmp_path, QWEN | change))


def test_a_hub_s_model_is_read_where_no_preset_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    write(tmp_path, QWEN)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert architecture("nobody/nothing-30b").parameters == architecture("qwen3-30b-a3b").parameters
