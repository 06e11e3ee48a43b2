"""Shapes of models: parameters and cache as their makers state them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pigou.config import ConfigError
from pigou.models.read import architecture, parse_architecture, presets


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("Qwen3-0.6B", 596_049_920),
        ("mixtral-8x7b", 46_702_792_704),
        ("openai/gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("deepseek-ai/DeepSeek-V3", 671_026_404_352),
    ],
)
def test_parameters_are_those_of_the_checkpoint(model: str, parameters: int) -> None:
    assert architecture(model).parameters == parameters


@pytest.mark.parametrize(
    ("model", "dtype", "token_bytes"),
    [
        ("qwen3-0.6b", "", 114_688),
        ("llama-3.1-8b", "", 131_072),
        ("llama-3.1-70b", "fp8", 163_840),
        ("qwen3-30b-a3b", "", 98_304),
        ("mixtral-8x7b", "", 131_072),
        ("deepseek-v3", "", 70_272),
        ("deepseek-v3", "fp8_ds_mla", 61 * 656),
    ],
)
def test_a_token_takes_the_known_bytes_of_cache(model: str, dtype: str, token_bytes: int) -> None:
    shape = architecture(model)
    assert (replace(shape, kv_dtype=dtype) if dtype else shape).token_bytes() == token_bytes


def test_a_window_bounds_what_its_layers_hold() -> None:
    shape = architecture("gpt-oss-20b")
    assert shape.sequence_bytes(32_768) == 808_452_096
    assert shape.sequence_bytes(100) == 100 * shape.token_bytes()


def test_multi_head_attention_takes_a_head_for_each_query_head() -> None:
    shape = replace(architecture("llama-3.1-70b"), kv_dtype="fp8")
    assert shape.sequence_bytes(16_384) == 2.5 * 2**30
    assert shape.multi_head_token_bytes() == 20 * 2**30 // 16_384


def test_tensor_parallelism_divides_kv_heads_and_no_latent_cache() -> None:
    grouped, latent = architecture("llama-3.1-8b"), architecture("deepseek-v3")
    assert grouped.token_bytes(4) * 4 == grouped.token_bytes()
    assert grouped.token_bytes(16) == grouped.token_bytes(8)
    assert latent.token_bytes(8) == latent.token_bytes()
    # What is not divided is held whole: eight GPUs hold more than the model in all.
    assert latent.weight_bytes_on(8) * 8 > latent.weight_bytes


@pytest.mark.parametrize(("model", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_mxfp4_stores_the_experts_alone(model: str, gib: float) -> None:
    # Table 1 of the gpt-oss model card (arXiv 2508.10925): checkpoint size.
    assert architecture(model).weight_bytes / 2**30 == pytest.approx(gib, abs=0.1)


@pytest.mark.parametrize(
    ("model", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("deepseek-v3", 36.6)]
)
def test_active_parameters_are_those_that_are_stated(model: str, billions: float) -> None:
    assert architecture(model).active_parameters / 1e9 == pytest.approx(billions, abs=0.05)


def test_llama_4_alternates_chunked_layers_and_experts() -> None:
    source = {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 8192, "intermediate_size_mlp": 16_384, "num_local_experts": 128,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "vocab_size": 202_048,
        "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 12,
        "max_position_embeddings": 1_048_576,
    }  # fmt: skip
    shape = parse_architecture(Path("maverick"), source, "maverick")
    # "400B parameters, 17B active" (Llama 4 model card), which counts the embedding.
    assert shape.parameters / 1e9 == pytest.approx(400, rel=0.01)
    active = shape.active_parameters + shape.vocab * shape.hidden
    assert active / 1e9 == pytest.approx(17, rel=0.02)
    assert {kept.window: count for kept, count in shape.caches} == {0: 12, 8192: 36}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mamba_d_state": 16}, "mamba_d_state is 16"),
        ({"layer_types": ["linear_attention"] * 28}, "linear_num_value_heads is None"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers of 28"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is 8192"),
    ],
)
def test_layers_that_are_not_described_are_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**presets()["qwen3-0.6b"], **change}))
    with pytest.raises(ConfigError, match=words):
        architecture(str(tmp_path))


@pytest.mark.parametrize("model", ["DeepSeek-V4", "gpt-oss", "Qwen3-0.6B-GGUF", "llama-3.1"])
def test_an_unknown_name_is_never_taken_for_its_neighbour(model: str) -> None:
    with pytest.raises(ConfigError, match="model is"):
        architecture(model)
