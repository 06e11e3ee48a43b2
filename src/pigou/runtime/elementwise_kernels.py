"""Compiled kernels of a layer's element-wise operations, for the CPU: norm, gate and argmax.

Arrays hold float32, or bfloat16 as uint16; sums are in float32. A kernel lives beside its
parallel version, since numba's cache watches no other file. After a change in simd.py the cached
kernels must be removed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.runtime.simd import LANES, exponential, fast, narrow, row_max, widen
from pigou.runtime.thread_pool import ParallelKernel, RowRange, run_parallel

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
