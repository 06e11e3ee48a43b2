"""What is loaded is what was asked for, and what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import BASE, FAMILIES, VOCAB, make_config, make_tensors, write_checkpoint
from safetensors.torch import save_file

from pigou.config import EngineConfig, EvictionConfig
from pigou.models import ModelError
from pigou.models.weight_files import find_model
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import load
from pigou.runtime.models.model_config import parse_config
from pigou.runtime.models.rotary_embedding import read_rope
from reference import make_prompts

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def tokens_of(folder: Path) -> list[list[int]]:
    engine = LocalEngine(load(folder), EngineConfig(blocks=64, max_model_len=128))
    return [o.tokens for o in engine.generate(make_prompts(4, VOCAB, 30), PARAMS)]


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    config = make_config("qwen2")
    whole = write_checkpoint(tmp_path / "whole", config)
    shards = write_checkpoint(tmp_path / "shards", config, shards=3)
    assert tokens_of(whole) == tokens_of(shards)


def test_both_styles_of_configuration_are_read_alike() -> None:
    old = make_config("llama", rope_scaling={"type": "linear", "factor": 2.0})
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    new["dtype"] = "float32"
    first, second = parse_config(old), parse_config(new)
    assert np.array_equal(first.rope.frequencies, second.rope.frequencies)
    assert first.dtype == second.dtype == "float32"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.1,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-with-betas"],
)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {k: v for k, v in BASE.items() if k not in ("rope_theta", "torch_dtype")}
    parameters = {"rope_theta": 10000.0, **rope}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(parameters)))
    ours = read_rope({**BASE, "rope_parameters": parameters}, 16)
    assert ours.frequencies == pytest.approx(theirs.inv_freq.numpy(), rel=1e-6)
    assert ours.amplitude == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quant_method is ''"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "'odd'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(make_config("llama", **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})],
)
def test_windows_are_those_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = make_config(family, sliding_window=20, **changes)
    write_checkpoint(tmp_path, config)
    tokens = []
    for implementation in ("pigou", "transformers"):
        model = load(tmp_path, "fp32", implementation=implementation)
        engine = LocalEngine(model, EngineConfig(blocks=40, max_model_len=96, max_batched_tokens=9))
        prompts = [np.random.default_rng(n).integers(3, 300, size=n) for n in (60, 21, 7)]
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        tokens.append([output.tokens for output in engine.generate(prompts, params)])
    assert tokens[0] == tokens[1]


def test_windows_that_no_sequence_leaves_are_left_out_and_others_evict_nothing(
    tmp_path: Path,
) -> None:
    model = load(write_checkpoint(tmp_path, make_config("mistral", sliding_window=64)))
    eviction = EvictionConfig(policy="pigou", recent=8, least=16, interval=16)
    LocalEngine(model, EngineConfig(blocks=8, max_model_len=64, eviction=eviction))
    with pytest.raises(ModelError, match="the model has windows"):
        LocalEngine(model, EngineConfig(blocks=8, max_model_len=96, eviction=eviction))


def test_an_engine_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, make_config("mistral", max_position_embeddings=100)))
    with pytest.raises(ModelError, match="max_model_len is 101"):
        LocalEngine(model, EngineConfig(blocks=8, max_model_len=101))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_or_unexpected_or_misshapen_tensor_is_named(family: str, tmp_path: Path) -> None:
    config = make_config(family)
    folder = write_checkpoint(tmp_path, config)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = make_tensors(config)

    def refused(message: str, **changes: torch.Tensor | None) -> None:
        changed = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            load(folder)

    refused(f"tensor '{name}' is missing", **{name: None})
    refused(
        "unexpected tensor 'model.odd' and 1 more",
        **{k: torch.ones(1) for k in ("model.odd", "odd")},
    )
    refused(f"tensor '{name}' has shape", **{name: tensors[name][:-1].clone()})


def test_a_damaged_or_absent_file_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_config("llama"), shards=2)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"00002-of-00002\.safetensors is damaged"):
        load(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002\.safetensors is missing"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="is missing"):
        load(folder)


def test_a_hub_id_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match="hub cannot be reached"):
        find_model("nobody/nothing")
    with pytest.raises(ModelError, match="is no folder"):
        find_model("./nowhere")


def test_dtype_and_device_are_checked(folder: Callable[[str], Path]) -> None:
    assert load(folder("llama"), "auto").dtype is torch.float32
    assert load(folder("llama"), "bf16").dtype is torch.bfloat16
    with pytest.raises(ModelError, match="dtype 'fp8'"):
        load(folder("llama"), "fp8")
    with pytest.raises(ModelError, match="device 'tpu'"):
        load(folder("llama"), device="tpu")


def test_end_tokens_of_config_and_generation_config_are_united(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_config("llama"))
    assert load(folder).config.eos == {2}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load(folder).config.eos == {2, 5, 7}


def test_models_of_other_weights_have_other_digests(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(s), make_config("llama"), seed=s) for s in (0, 1)]
    again = write_checkpoint(tmp_path / "again", make_config("llama"), seed=0)
    digests = [load(f).digest for f in (*folders, again)]
    assert digests[0] == digests[2] != digests[1]


def test_a_model_with_frozen_embeddings_has_another_digest(tmp_path: Path) -> None:
    config = make_config("llama")
    folder = write_checkpoint(tmp_path, config)
    before = load(folder).digest
    tensors = make_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder).digest != before
