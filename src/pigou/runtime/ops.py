"""The element-wise operations between a model's products."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.runtime import elementwise_kernels as kernels
from pigou.runtime.tensor_io import stored


class Ops(Protocol):
    """What a decoder layer needs beside products and attention."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and return the RMS norm of the sum times `weight`.

        `x` and `residual` have shape (rows, width), `weight` (width,).
        """
        ...

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up for rows that hold gate and up, shape (rows, 2 * width)."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the first largest number of each row, shape (rows,), int64."""
        ...


class TorchOps:
    """The operations by torch, on any device."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and return the RMS norm of the sum times `weight`."""
        return F.rms_norm(residual.add_(x), weight.shape, weight, eps)

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate, up = torch.chunk(x, 2, dim=-1)
        return F.silu(gate).mul_(up)

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the first largest number of each row."""
        return x.argmax(-1)


class KernelOps:
    """The operations by compiled kernels, on the CPU."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and return the RMS norm of the sum times `weight`."""
        out = torch.empty_like(x)
        rows, work_ns = (0, len(x)), 0.5 * x.numel()
        arrays = (stored(x), stored(residual), stored(weight), eps, stored(out))
        kernels.ADD_NORM(work_ns, rows, *arrays)
        return out

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        kernels.GATE(0.5 * out.numel(), (0, len(x)), stored(x), stored(out))
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the first largest number of each row."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        kernels.ARGMAX(0.1 * x.numel(), (0, len(x)), stored(x), out.numpy())
        return out
