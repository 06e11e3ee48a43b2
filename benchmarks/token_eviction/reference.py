"""What the full cache gives, once and for all methods: computed with transformers in float32."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.token_eviction.task import Prepared, Task


def prepare(task: Task, tokens: NDArray[np.int64], folder: Path) -> Prepared:
    """Compute a task's reference and store it all.

    Args:
        tokens: shape (rows, length).
    """
    disable_progress_bar()
    final, folder = folder, folder.with_suffix(".part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    task.write(folder)
    np.save(folder / "tokens.npy", tokens)
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = model.config
    rows, length = tokens.shape
    shapes = {
        "logits": (rows, length - 1 - task.measured, config.vocab_size),
        "attention": (
            rows, len(task.asked), config.num_hidden_layers, config.num_attention_heads, length,
        ),
        "mass": (
            rows, len(task.cuts) + 1, config.num_hidden_layers, config.num_key_value_heads, length,
        ),
    }  # fmt: skip
    stores = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, shape)
        for name, shape in shapes.items()
    }
    for row, ids in enumerate(tokens):
        with torch.inference_mode():
            found = model(torch.from_numpy(ids)[None], output_attentions=True, use_cache=False)
        stores["logits"][row] = found.logits[0, task.measured : -1].numpy()
        weights = torch.stack([each[0] for each in found.attentions])
        asked = weights[:, :, list(task.asked)].permute(2, 0, 1, 3)
        stores["attention"][row] = asked.numpy()
        stores["mass"][row] = mass(weights, config.num_key_value_heads, task.cuts)
    for store in stores.values():
        store.flush()
    folder.rename(final)
    return Prepared.read(final)


def mass(weights: torch.Tensor, kv_heads: int, cuts: list[int]) -> NDArray[np.float32]:
    """Return the attention that each position has got by each cut, and by the end.

    Args:
        weights: of attention, shape (layers, heads, length, length).
        kv_heads: each gets what its query heads give.
        cuts: tokens computed by then, ascending.

    Returns:
        Shape (cuts + 1, layers, kv_heads, length).
    """
    layers, heads, length, _ = weights.shape
    grouped = weights.view(layers, kv_heads, heads // kv_heads, length, length).sum(2)
    edges = [0, *cuts, length]
    pieces = [grouped[:, :, first:end].sum(2) for first, end in pairwise(edges)]
    found: NDArray[np.float32] = torch.stack(pieces).cumsum(0).numpy()
    return found
