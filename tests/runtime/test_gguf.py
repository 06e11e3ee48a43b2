"""GGUF files: bytes, names, order of rows, tokenizer, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.runtime.checkpoints import VOCAB, make_config, make_tensors
from tests.runtime.reference import make_prompts
from tests.runtime.test_quantisation import checked, write_plain
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pigou.config import EngineConfig
from pigou.models import ModelError, bundled_path
from pigou.models.gguf_folder import gguf_folder
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.gguf_file import GGUFWeights
from pigou.runtime.models.load import load

CPU = torch.device("cpu")
OURS = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
Kind = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stored(name: str, weight: np.ndarray, config: dict[str, Any], family: str) -> np.ndarray:
    """Rows as llama.cpp's converter orders them."""
    for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if family == "llama" and part in name:
            heads = config[count]
            parts = weight.reshape(heads, 2, -1, *weight.shape[1:])
            return parts.swapaxes(1, 2).reshape(weight.shape)
    return weight


def write_gguf(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], kind: Kind,
    tokenizer: bool = True,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Write a file as llama.cpp's converter does; return the plain numbers."""
    family = config["model_type"].replace("mistral", "llama")
    writer, plain = gguf.GGUFWriter(path, family), {}
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_eos_token_id(2)
    if tokenizer:
        add_tokenizer(writer)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        numbers = stored(name, tensor.numpy(), config, family)
        own = kind if tensor.ndim == 2 and tensor.shape[1] % 256 == 0 else Kind.F32
        own = kind if kind in (Kind.Q8_0, Kind.F16) and tensor.ndim == 2 else own
        data = gguf.quantize(numbers, own)
        layer = module.split(".")[2] if "layers." in module else ""
        bare = module.split(f"layers.{layer}.")[1] if layer else module
        prefix = f"blk.{layer}." if layer else ""
        writer.add_tensor(f"{prefix}{OURS[bare]}.{part}", data, raw_dtype=own)
        back = gguf.dequantize(data, own).reshape(numbers.shape)
        plain[name] = torch.from_numpy(undone(name, back, config, family).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def undone(name: str, weight: np.ndarray, config: dict[str, Any], family: str) -> np.ndarray:
    for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if family == "llama" and part in name:
            parts = weight.reshape(config[count], -1, 2, *weight.shape[1:])
            return parts.swapaxes(1, 2).reshape(weight.shape)
    return weight


def small_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "w")]
    tokens = ["<a>", "<b>", "<end>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<a>", "<b>", "<end>"])
    return tokenizer


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = small_tokenizer()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(vocab))])
    parsed = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in parsed])


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.F16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_model_is_that_of_its_plain_numbers(family: str, kind: Kind, tmp_path: Path) -> None:
    config = make_config(family, tie_word_embeddings=False)
    plain = write_gguf(tmp_path / "m.gguf", config, make_tensors(config), kind)
    checked(tmp_path / "m.gguf", write_plain(tmp_path / "plain", config, plain))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.F32])
def test_weights_equal_gguf_s_own_bit_for_bit(kind: Kind, tmp_path: Path) -> None:
    config = make_config("llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=256, tie_word_embeddings=False)  # fmt: skip
    plain = write_gguf(tmp_path / "m.gguf", config, make_tensors(config), kind)
    weights = GGUFWeights(gguf_folder(tmp_path / "m.gguf"), torch.float32, CPU)
    for name, numbers in plain.items():
        assert torch.equal(weights.take(name, *numbers.shape), numbers)
        if numbers.ndim == 2:
            matrix = weights.matrix(name.removesuffix(".weight"), *numbers.shape)
            assert torch.equal(matrix.dense(torch.float32), numbers)
            assert (matrix.data.dtype is torch.int8) == (kind is Kind.Q8_0)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_blocks_of_256_equal_gguf_s_own(kind: Kind, tmp_path: Path) -> None:
    """gguf writes no such blocks: here they are random bytes with small scales."""
    blocks, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 64, size=(256, size * 256 // blocks), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    config = make_config("qwen2", hidden_size=256, num_attention_heads=4, intermediate_size=256)
    write_gguf(path, config, make_tensors(config), Kind.F32)
    weights = GGUFWeights(gguf_folder(path), torch.float32, CPU)
    reader = weights._tensors["blk.0.ffn_up.weight"]
    weights._tensors["blk.0.ffn_up.weight"] = reader._replace(data=data, tensor_type=kind)
    wanted = torch.from_numpy(gguf.dequantize(data, kind))
    got = weights.matrix("model.layers.0.mlp.up_proj", 256, 256).dense(torch.float32)
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


def test_a_tokenizer_is_made_of_the_file_s_metadata(tmp_path: Path) -> None:
    config = make_config("qwen2")
    write_gguf(tmp_path / "m.gguf", config, make_tensors(config), Kind.F32)
    made = Tokenizer.from_file(str(gguf_folder(tmp_path / "m.gguf") / "tokenizer.json"))
    wanted = small_tokenizer()
    for text in ("hello world", "<a>he 12 l\n\n'll", "ünïcode \U0001f600"):
        assert made.encode(text).ids == wanted.encode(text).ids
        assert made.decode(made.encode(text).ids) == wanted.decode(wanted.encode(text).ids)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    config = make_config("qwen2")
    write_gguf(tmp_path / "a.gguf", config, make_tensors(config), Kind.F32, tokenizer=False)
    with pytest.raises(ModelError, match=r"tokenizer\.json beside"):
        load(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="damaged"):
        load(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match="2 GGUF files"):
        load(tmp_path)
    write_gguf(tmp_path / "c.gguf", config | {"model_type": "gemma"}, {}, Kind.F32)
    with pytest.raises(ModelError, match="gemma"):
        load(tmp_path / "c.gguf")


def test_a_folder_with_a_tokenizer_beside_serves(tmp_path: Path) -> None:
    config = json.loads((bundled_path() / "config.json").read_text())
    shape = make_config("llama", tie_word_embeddings=True)
    tensors = make_tensors(shape)
    write_gguf(tmp_path / "m.gguf", shape, tensors, Kind.Q8_0, tokenizer=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bundled_path() / name).read_bytes())
    model = load(tmp_path, "fp32")
    assert model.config.tied
    assert config["vocab_size"] > 0
    engine = LocalEngine(model, EngineConfig(blocks=20, max_model_len=64))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(engine.generate(make_prompts(1, VOCAB, 20), params)[0].tokens) == 4
