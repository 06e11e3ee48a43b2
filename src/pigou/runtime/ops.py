"""The element-wise operations between a model's products."""

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


class Ops(Protocol):
    """What a decoder layer needs beside products and attention."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and return the RMS norm of the sum times `weight`.

        `x` and `residual` have shape (rows, width), `weight` (width,).
        """

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up for rows that hold gate and up, shape (rows, 2 * width)."""

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the first largest number of each row, shape (rows,), int64."""


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
        ADD_NORM(work_ns, rows, *arrays)
        return out

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        GATE(0.5 * out.numel(), (0, len(x)), stored(x), stored(out))
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the first largest number of each row."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        ARGMAX(0.1 * x.numel(), (0, len(x)), stored(x), out.numpy())
        return out


Stored = NDArray[Any]


@fast
def add_norm(
    rows: RowRange, x: Stored, residual: Stored, weight: Stored, eps: float, out: Stored
) -> None:
    """Add x to the residual in place, and put the RMS norm of the sum, times weight, in out."""
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
    """Put silu(gate) * up in out, shape (n, width), for rows of x that hold gate, then up."""
    width = out.shape[1]
    for i in range(rows[0], rows[1]):
        for d in range(width):
            value = widen(x[i, d])
            silu = value / (np.float32(1.0) + exponential(-value))
            out[i, d] = narrow(silu * widen(x[i, width + d]), out)


@fast
def argmax(rows: RowRange, x: Stored, out: NDArray[np.int64]) -> None:
    """Put the index of the first largest number of each row of x in out; 0 if all are NaN."""
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
    """Call `add_norm` on several threads."""
    run_parallel(start, threads, parts, add_norm, (rows, x, residual, weight, eps, out))


@fast
def parallel_gate(
    start: int, threads: int, parts: int, rows: RowRange, x: Stored, out: Stored
) -> None:
    """Call `gate` on several threads."""
    run_parallel(start, threads, parts, gate, (rows, x, out))


@fast
def parallel_argmax(
    start: int, threads: int, parts: int, rows: RowRange, x: Stored, out: NDArray[np.int64]
) -> None:
    """Call `argmax` on several threads."""
    run_parallel(start, threads, parts, argmax, (rows, x, out))


ADD_NORM = ParallelKernel(add_norm, parallel_add_norm)
GATE = ParallelKernel(gate, parallel_gate)
ARGMAX = ParallelKernel(argmax, parallel_argmax)
