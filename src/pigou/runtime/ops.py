"""Element-wise operations of a decoder layer, by torch or compiled kernels."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pigou.runtime.simd import LANES, exponential, fast, narrow, row_max, widen
from pigou.runtime.tensor_io import stored
from pigou.runtime.thread_pool import ParallelKernel, RowRange, run_parallel

Stored = NDArray[Any]


class Ops(Protocol):
    """Operations of a decoder layer besides products and attention."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x (rows, width) to residual in place; return the sum's RMS norm times `weight`."""

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up, for rows holding gate then up, shape (rows, 2 * width)."""

    def argmax(self, x: Tensor) -> Tensor:
        """Return the first index of each row's maximum, shape (rows,), int64."""


class TorchOps:
    """`Ops` by torch, on any device."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual in place; return the sum's RMS norm times `weight`."""
        return F.rms_norm(residual.add_(x), weight.shape, weight, eps)

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate, up = torch.chunk(x, 2, dim=-1)
        return F.silu(gate).mul_(up)

    def argmax(self, x: Tensor) -> Tensor:
        """Return the first index of each row's maximum."""
        return x.argmax(-1)


class KernelOps:
    """`Ops` by compiled kernels, on the CPU."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual in place; return the sum's RMS norm times `weight`."""
        out = torch.empty_like(x)
        rows, work_ns = (0, len(x)), 0.5 * x.numel()
        arrays = (stored(x), stored(residual), stored(weight), eps, stored(out))
        ADD_NORM(work_ns, rows, *arrays)
        return out

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        GATE(0.5 * out.numel(), (0, len(x)), stored(x), stored(out))
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """Return the first index of each row's maximum."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        ARGMAX(0.1 * x.numel(), (0, len(x)), stored(x), out.numpy())
        return out


@fast
def add_norm(
    rows: RowRange, x: Stored, residual: Stored, weight: Stored, eps: float, out: Stored
) -> None:
    """Add x to the residual in place; write the sum's RMS norm times `weight` to `out`."""
    width = x.shape[1]
    sums = np.empty(width, np.float32)
    for i in range(rows[0], rows[1]):
        square = np.float32(0.0)
        for d in range(width):
            stored = narrow(widen(x[i, d]) + widen(residual[i, d]), residual)
            residual[i, d] = stored
            sums[d] = widen(stored)
            square += sums[d] * sums[d]
        scale = np.float32(1.0) / np.sqrt(square / np.float32(width) + np.float32(eps))
        for d in range(width):
            out[i, d] = narrow(sums[d] * scale * widen(weight[d]), out)


@fast
def gate(rows: RowRange, x: Stored, out: Stored) -> None:
    """Write silu(gate) * up to `out` (n, width), for rows of x holding gate then up."""
    width = out.shape[1]
    for i in range(rows[0], rows[1]):
        for d in range(width):
            value = widen(x[i, d])
            silu = value / (np.float32(1.0) + exponential(-value))
            out[i, d] = narrow(silu * widen(x[i, width + d]), out)


@fast
def argmax(rows: RowRange, x: Stored, out: NDArray[np.int64]) -> None:
    """Write the first index of each row's maximum to `out`; 0 if all are NaN."""
    width = np.int32(x.shape[1])
    lanes = np.empty(LANES, np.float32)
    for i in range(rows[0], rows[1]):
        row = x[i]
        largest = row_max(row, int(width), lanes)
        first = width
        for d in range(width):
            candidate = np.int32(d) if widen(row[d]) == largest else width
            first = candidate if candidate < first else first
        out[i] = first if first < width else 0


@fast
def parallel_add_norm(
    start: int, threads: int, parts: int, rows: RowRange, x: Stored, residual: Stored,
    weight: Stored, eps: float, out: Stored,
) -> None:  # fmt: skip
    """Run `add_norm` on several threads."""
    run_parallel(start, threads, parts, add_norm, (rows, x, residual, weight, eps, out))


@fast
def parallel_gate(
    start: int, threads: int, parts: int, rows: RowRange, x: Stored, out: Stored
) -> None:
    """Run `gate` on several threads."""
    run_parallel(start, threads, parts, gate, (rows, x, out))


@fast
def parallel_argmax(
    start: int, threads: int, parts: int, rows: RowRange, x: Stored, out: NDArray[np.int64]
) -> None:
    """Run `argmax` on several threads."""
    run_parallel(start, threads, parts, argmax, (rows, x, out))


ADD_NORM = ParallelKernel(add_norm, parallel_add_norm)
GATE = ParallelKernel(gate, parallel_gate)
ARGMAX = ParallelKernel(argmax, parallel_argmax)
