"""The weights that are used are those that transformers uses, whatever else lies in the folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, VOCAB, make_config, make_tensors, write_checkpoint
from safetensors.torch import save_file
from test_load import PARAMS, tokens_of

from pigou.config import EngineConfig
from pigou.models import ModelError
from pigou.models.weight_files import digest_model
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import load
from reference import Reference, make_prompts

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({k: v.clone() for k, v in tensors.items()}, path, metadata={"format": "pt"})


def equal_to_transformers(folder: Path) -> None:
    prompts = make_prompts(4, VOCAB, 30)
    engine = LocalEngine(load(folder, "fp32"), EngineConfig(blocks=64, max_model_len=128))
    outputs = [o.tokens for o in engine.generate(prompts, PARAMS)]
    assert Reference(folder).check(prompts, outputs) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_that_differs_is_used_whatever_the_config_says(
    family: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    untied = make_config(family, tie_word_embeddings=False)
    write_checkpoint(tmp_path, {**untied, "tie_word_embeddings": tied})
    save(make_tensors(untied), tmp_path / WHOLE)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, "fp32")
    assert not torch.equal(model.decoder.embedding, model.decoder.head.weight)
    assert ("tie_word_embeddings" in caplog.text) == tied
    equal_to_transformers(tmp_path)


def test_an_output_layer_that_is_the_embedding_is_kept_once(tmp_path: Path) -> None:
    config = make_config("qwen2", tie_word_embeddings=True)
    write_checkpoint(tmp_path, config)
    tensors = make_tensors(config)
    save({**tensors, HEAD: tensors[EMBEDDING]}, tmp_path / WHOLE)
    decoder = load(tmp_path, "fp32").decoder
    assert decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()
    equal_to_transformers(tmp_path)


def test_a_tied_model_may_have_its_output_layer_alone(tmp_path: Path) -> None:
    config = make_config("qwen2", tie_word_embeddings=True)
    write_checkpoint(tmp_path, config)
    tensors = make_tensors(config)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    save(tensors, tmp_path / WHOLE)
    equal_to_transformers(tmp_path)


def test_an_untied_model_without_output_layer_is_refused(tmp_path: Path) -> None:
    config = make_config("llama")
    write_checkpoint(tmp_path, config)
    tensors = make_tensors(config)
    del tensors[HEAD]
    save(tensors, tmp_path / WHOLE)
    with pytest.raises(ModelError, match=r"lm_head\.weight' is missing.*tie_word_embeddings"):
        load(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "stray",
    [
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "adapter_model.safetensors",
        "original/model.safetensors",
        "original/consolidated.00.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "optimizer.safetensors",
    ],
)
def test_a_stray_file_changes_nothing(shards: int, stray: str, tmp_path: Path) -> None:
    config = make_config("llama")
    folder = write_checkpoint(tmp_path / "model", config, shards=shards)
    digest, tokens = digest_model(folder), tokens_of(folder)
    path = folder / stray
    path.parent.mkdir(exist_ok=True)
    if stray.endswith("safetensors"):
        save({"layers.0.wq.weight": torch.ones(2, 2), HEAD: torch.ones(2, 2)}, path)
    else:
        path.write_bytes(b"{}")
    assert digest_model(folder) == digest
    assert tokens_of(folder) == tokens


def test_an_adapter_that_is_not_applied_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, make_config("llama"))
    (folder / "adapter_config.json").write_text("{}")
    save({"base.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "not applied" in caplog.text


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("consolidated.safetensors", "its maker's own"),
        ("adapter_model.safetensors", "is an adapter"),
        ("pytorch_model.bin", "is PyTorch's"),
        ("consolidated.00.pth", "is PyTorch's"),
    ],
)
def test_a_folder_without_weights_says_what_it_has_instead(
    file: str, message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, make_config("llama"))
    (folder / WHOLE).unlink()
    save({"x": torch.ones(1)}, folder / file)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_whole_file_wins_over_an_index_that_is_out_of_date(tmp_path: Path) -> None:
    config = make_config("llama")
    folder = write_checkpoint(tmp_path, config, seed=1, shards=2)
    save(make_tensors(config, seed=5), folder / WHOLE)
    expected = make_tensors(config, seed=5)[EMBEDDING]
    assert torch.equal(load(folder, "fp32").decoder.embedding, expected)
    equal_to_transformers(folder)


def test_an_index_that_names_shards_of_another_cut_does_not_keep_it_from_loading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, make_config("llama"), shards=3)
    tokens = tokens_of(folder)
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    stale = {k: v.replace("of-00003", "of-00007") for k, v in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": stale}))
    with caplog.at_level(logging.WARNING):
        assert tokens_of(folder) == tokens
    assert "of-00007" in caplog.text


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_config("llama"), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards_is_fine_when_both_are_alike(indexed: bool, tmp_path: Path) -> None:
    config = make_config("llama")
    folder = write_checkpoint(tmp_path, config, shards=2)
    tokens = tokens_of(folder)
    tensors = make_tensors(config)
    for file in sorted(folder.glob("model-*.safetensors")):
        save(tensors, file)
    if not indexed:
        (folder / INDEX).unlink()
    assert tokens_of(folder) == tokens


def test_of_two_tensors_that_differ_the_index_s_is_used_and_none_without_it(tmp_path: Path) -> None:
    config = make_config("llama")
    folder = write_checkpoint(tmp_path, config, shards=2)
    tokens = tokens_of(folder)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    own = make_tensors(config)
    for file in sorted(folder.glob("model-*.safetensors")):
        other = {k: v if index[k] == file.name else v + 1 for k, v in own.items()}
        save(other, file)
    assert tokens_of(folder) == tokens
    (folder / INDEX).unlink()
    with pytest.raises(ModelError, match="differs between"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj.bias", "model.layers.9.x"])
def test_no_tensor_is_skipped_in_silence(name: str, tmp_path: Path) -> None:
    config = make_config("llama")
    folder = write_checkpoint(tmp_path, config)
    save({**make_tensors(config), name: torch.ones(64)}, folder / WHOLE)
    with pytest.raises(ModelError, match=name):
        load(folder)


def test_tensors_that_follow_from_the_config_are_let_be(tmp_path: Path) -> None:
    config = make_config("llama")
    folder = write_checkpoint(tmp_path, config)
    derived = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
        "rotary_emb.inv_freq": torch.ones(8),
    }
    save({**make_tensors(config), **derived}, folder / WHOLE)
    equal_to_transformers(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantized_weights_are_refused_though_the_config_is_silent(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    config = make_config("llama")
    folder = write_checkpoint(tmp_path, config)
    tensors = make_tensors(config)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64).to(dtype)
    save(tensors, folder / WHOLE)
    with pytest.raises(ModelError, match=r"up_proj.*quantization_config"):
        load(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", 7])
def test_an_index_names_only_files_of_its_folder(file: object, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_config("llama"), shards=2)
    (folder / INDEX).write_text(json.dumps({"weight_map": {HEAD: file}}))
    with pytest.raises(ModelError, match="must be a file of this folder"):
        load(folder)
