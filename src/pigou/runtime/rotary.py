"""Rotary embedding: cosines and sines of all positions, and their use."""

from __future__ import annotations

import torch
from torch import Tensor

from pigou.runtime.rope import Rope


def rotary_table(rope: Rope, positions: int, device: torch.device) -> Tensor:
    """Return cosines, then sines, of each position, shape (positions, head_dim), float32."""
    angles = torch.from_numpy(rope.angles(positions))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.amplitude
    return table.to(device)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of each head (RoFormer, in the order of Hugging Face).

    Args:
        x: shape (tokens, heads, head_dim).
        turns: rows of `rotary_table`, shape (tokens, 1, head_dim), in x's dtype.

    Returns:
        Shape of `x`.
    """
    cos, sin = turns.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
