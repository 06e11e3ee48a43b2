"""Random LoRA adapters in PEFT's format, and checkpoints with one merged in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rank_of(kind: Mapping[str, Any], name: str) -> tuple[int, float]:
    """PEFT's rank and scale of a module."""
    rank = next((r for p, r in kind.get("rank_pattern", {}).items() if name.endswith(p)), kind["r"])
    patterns = kind.get("alpha_pattern", {})
    alpha = next((a for p, a in patterns.items() if name.endswith(p)), kind["lora_alpha"])
    return rank, alpha / (rank**0.5 if kind.get("use_rslora") else rank)


def write_adapter(
    folder: Path, base: Path, kind: Mapping[str, Any], seed: int = 0, size: float = 0.04
) -> Path:
    """Write a random adapter for a checkpoint, and beside it the checkpoint with it merged in."""
    torch.manual_seed(seed)
    weights = load_file(base / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for weight_name in sorted(weights):
        name = weight_name.removesuffix(".weight")
        if name.rsplit(".", 1)[-1] in kind["target_modules"]:
            rank, scale = rank_of(kind, name)
            outputs, inputs = weights[weight_name].shape
            a, b = torch.randn(rank, inputs) * 0.1, torch.randn(outputs, rank) * size
            tensors |= {f"base_model.model.{name}.lora_A.weight": a,
                        f"base_model.model.{name}.lora_B.weight": b}  # fmt: skip
            merged = weights[weight_name].float() + scale * b @ a
            weights[weight_name] = merged.to(weights[weight_name].dtype)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "bias": "none", **kind}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "merged").mkdir(exist_ok=True)
    for file in base.iterdir():
        if file.name != "model.safetensors" and file.is_file():
            (folder / "merged" / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "merged" / "model.safetensors")
    return folder
