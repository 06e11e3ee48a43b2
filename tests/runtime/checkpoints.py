"""Tiny random models in Hugging Face format, and the reference that computes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FAMILIES = tuple(ARCHITECTURES)
#: The trained model that ships with the package.
BUNDLED = "bundled"
MODELS = (*FAMILIES, BUNDLED)
VOCAB = 320

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
#: What each family's configuration says beyond the base.
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}


def make_config(family: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        **BASE,
        **SPECIAL[family],
        **changes,
    }


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a configuration."""
    family = config["model_type"]
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    biased = family == "qwen2" or config.get("attention_bias", False)
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, heads * width),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        parts[f"self_attn.{name}_proj.weight"] = (count * width, hidden)
        if biased:
            parts[f"self_attn.{name}_proj.bias"] = (count * width,)
    if biased and family != "qwen2":
        parts["self_attn.o_proj.bias"] = (hidden,)
    if config.get("mlp_bias"):
        parts |= {"mlp.gate_proj.bias": (ffn,), "mlp.up_proj.bias": (ffn,)}
        parts["mlp.down_proj.bias"] = (hidden,)
    if family == "qwen3":
        parts |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    result = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in parts.items()
    }
    result["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    result["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    return result


def make_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights whose attention is sharp, norms differ from 1, and biases are felt."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(shapes(config).items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.2 * noise
        elif name.endswith(".bias"):
            tensors[name] = 0.5 * noise
        elif "embed" in name or "lm_head" in name:
            tensors[name] = noise
        else:
            gain = 2.0 if ".q_proj" in name or ".k_proj" in name else 1.0
            tensors[name] = gain * noise / shape[-1] ** 0.5
    return tensors


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], seed: int = 0, shards: int = 1
) -> Path:
    """Write a model's folder, its weights in so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = make_tensors(config, seed)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    files = {
        f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)
    }
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
    index = {n: file for file, part in files.items() for n in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder
