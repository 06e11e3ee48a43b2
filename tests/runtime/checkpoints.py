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
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
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
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
                "head_dim": 16},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                  "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
                  "norm_topk_prob": True, "head_dim": 32, "num_hidden_layers": 3,
                  "mlp_only_layers": [1]},
}  # fmt: skip


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
    hidden = config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    biased = family in ("qwen2", "qwen2_moe") or config.get("attention_bias", False)
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, heads * width),
    }
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        parts[f"self_attn.{name}_proj.weight"] = (count * width, hidden)
        if biased:
            parts[f"self_attn.{name}_proj.bias"] = (count * width,)
    if biased and family not in ("qwen2", "qwen2_moe"):
        parts["self_attn.o_proj.bias"] = (hidden,)
    if family in ("qwen3", "qwen3_moe"):
        parts |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    result = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in {**parts, **feed_forward(config, layer)}.items()
    }
    result["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    result["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    return result


def feed_forward(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a layer's feed-forward part."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count or layer in config.get("mlp_only_layers", ()):
        parts = gated("mlp", hidden, ffn)
        biases = {name.replace("weight", "bias"): shape[:1] for name, shape in parts.items()}
        return {**parts, **biases} if config.get("mlp_bias") else parts
    mixtral = config["model_type"] == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    leaves = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    width = config.get("moe_intermediate_size", ffn)
    parts = {f"{block}.gate.weight": (count, hidden)}
    for expert in range(count):
        parts |= gated(f"{block}.experts.{expert}", hidden, width, leaves)
    if shared := config.get("shared_expert_intermediate_size"):
        parts |= gated("mlp.shared_expert", hidden, shared)
        parts["mlp.shared_expert_gate.weight"] = (1, hidden)
    return parts


def gated(
    name: str,
    hidden: int,
    width: int,
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, tuple[int, ...]]:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return {f"{name}.{leaf}.weight": shape for leaf, shape in zip(leaves, shapes, strict=True)}


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
