"""The element-wise operations between a model's products."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ops(Protocol):
    """What a decoder layer needs beside products and attention."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of x, shape (rows, width), times `weight`, shape (width,)."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and return the RMS norm of the sum."""
        ...

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up for rows that hold gate and up, shape (rows, 2 * width)."""
        ...


class TorchOps:
    """The operations by torch, on any device."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of x times `weight`."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and return the RMS norm of the sum."""
        return F.rms_norm(residual.add_(x), weight.shape, weight, eps)

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate, up = torch.chunk(x, 2, dim=-1)
        return F.silu(gate).mul_(up)
