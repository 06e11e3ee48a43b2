"""Between the training model and a Hugging Face folder: weights are stored, and judged, in
bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny.model import Shape, Tiny


def names(shape: Shape) -> dict[str, tuple[str, ...]]:
    """For each weight of `Tiny`, the Hugging Face tensors that it is stacked from, in order."""
    table: dict[str, tuple[str, ...]] = {
        "embed.weight": ("model.embed_tokens.weight",),
        "norm": ("model.norm.weight",),
    }
    for i in range(shape.num_hidden_layers):
        mine, theirs = f"layers.{i}", f"model.layers.{i}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        table[f"{mine}.qkv.weight"] = tuple(f"{attn}.{x}_proj.weight" for x in "qkv")
        table[f"{mine}.o.weight"] = (f"{attn}.o_proj.weight",)
        table[f"{mine}.gate_up.weight"] = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        table[f"{mine}.down.weight"] = (f"{mlp}.down_proj.weight",)
        table[f"{mine}.norm1"] = (f"{theirs}.input_layernorm.weight",)
        table[f"{mine}.norm2"] = (f"{theirs}.post_attention_layernorm.weight",)
    return table


def _rows(shape: Shape, part: str, whole: int) -> int:
    if part.endswith("q_proj.weight"):
        return shape.num_attention_heads * shape.head_dim
    if part.endswith(("k_proj.weight", "v_proj.weight")):
        return shape.num_key_value_heads * shape.head_dim
    return (
        shape.intermediate_size if part.endswith(("gate_proj.weight", "up_proj.weight")) else whole
    )


def save(state: dict[str, Tensor], shape: Shape, folder: Path, bos: int, eos: int) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors` (bfloat16) from a
    state of `Tiny`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for mine, theirs in names(shape).items():
        whole = state[mine].to(torch.bfloat16)
        parts = whole.split([_rows(shape, part, whole.shape[0]) for part in theirs])
        tensors.update(
            {part: tensor.clone().contiguous() for part, tensor in zip(theirs, parts, strict=True)}
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(shape.config(bos, eos), indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos,
                  "do_sample": False, "json_close_after": 96}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path) -> Tiny:
    """The model of a folder that `save` wrote, in float32. `KeyError` if a tensor is missing."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    tensors = load_file(folder / "model.safetensors")
    model = Tiny(shape)
    state = {
        mine: torch.cat([tensors[part] for part in theirs]).float()
        for mine, theirs in names(shape).items()
    }
    model.load_state_dict(state)
    return model.eval()
