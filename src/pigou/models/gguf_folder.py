"""GGUF files as models: configuration and tokenizer in Hugging Face's format."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from pigou.models import ModelError
from pigou.models.weight_files import GGUF

#: `general.architecture` -> architecture; Mistral's files say llama.
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SIZES = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length", "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
FREQUENCIES = "rope_freqs.weight"
_CONTROL, _DEFINED = 3, 4  # token types of added tokens
#: Digits of a number that stay together, by `tokenizer.ggml.pre`.
_DIGITS = {"qwen2": "", "llama-bpe": "{1,3}"}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def open_gguf(path: Path) -> Any:
    """Return the reader of a file; raises ModelError if it is damaged."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(f"{path} needs the package gguf: pip install '.[gguf]'") from None
    try:
        return GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None


def find_gguf(model: str | Path) -> Path | None:
    """Return the GGUF file that `model` is, or that its folder has instead of a config.json."""
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = sorted(path.glob("*.gguf")) if not (path / "config.json").is_file() else []
    if len(files) > 1:
        raise ModelError(f"{path} has {len(files)} GGUF files; give one, as {files[0]}")
    return files[0] if files else None


def gguf_folder(path: Path) -> Path:
    """Write a GGUF file's configuration and tokenizer to a folder of the cache; return it."""
    stat, root = path.stat(), Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()
    folder = root / "pigou" / "gguf" / hashlib.blake2b(key, digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    reader = open_gguf(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    (folder / "config.json").write_text(json.dumps(_config(path, values, tensors)))
    for file in path.parent.glob("*token*.json"):
        shutil.copyfile(file, folder / file.name)
    if not (folder / "tokenizer.json").is_file():
        _write_tokenizer(path, folder, values)
    link = folder / GGUF
    link.unlink(missing_ok=True)
    link.symlink_to(path.resolve())
    return folder


def _config(path: Path, values: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    family = str(values.get("general.architecture"))
    if family not in _FAMILIES:
        raise ModelError(
            f"{path}: general.architecture is {family!r}; supported: {', '.join(_FAMILIES)}"
        )
    config: dict[str, Any] = {
        name: values[key] for name, part in _SIZES.items() if (key := f"{family}.{part}") in values
    }
    scaling = values.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{path}: rope.scaling.type is {scaling!r}; convert it to safetensors")
    if FREQUENCIES in tensors:  # written for Llama 3.1 and later
        config["rope_scaling"] = {
            "rope_type": "llama3", "factor": float(np.max(tensors[FREQUENCIES].data)),
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    return config | {
        "architectures": [_FAMILIES[family]], "model_type": family, "torch_dtype": "bfloat16",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]), "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
    }  # fmt: skip


def _write_tokenizer(path: Path, folder: Path, values: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.processors import TemplateProcessing

    kind = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if kind[0] != "gpt2" or kind[1] not in _DIGITS:
        raise ModelError(
            f"{path}: no tokenizer can be made of {kind}; put tokenizer.json beside it"
        )
    tokens = values["tokenizer.ggml.tokens"]
    types = values["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    whole = kind[1] == "llama-bpe"
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=whole)
    )
    words = pre.Split(Regex(_WORDS % _DIGITS[kind[1]]), "isolated")
    tokenizer.pre_tokenizer = pre.Sequence(
        [words, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if not whole:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for added in (_CONTROL, _DEFINED):
        some = [t for t, k in zip(tokens, types, strict=True) if k == added]
        options = {"special": added == _CONTROL, "normalized": False}
        tokenizer.add_tokens([AddedToken(t, **options) for t in some])
    ids = {role: values.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
    named = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    if values.get("tokenizer.ggml.add_bos_token", whole) and ids["bos"] is not None:
        bos = named["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids["bos"])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    template = {"chat_template": values.get("tokenizer.chat_template")}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | template))
