"""Products of activations with int8 weights on CPUs with AVX-512 VNNI.

Activations become 16-bit integers, scaled per token, in two bytes of one `vpdpbusd` each: as exact
as bfloat16 ones, and sums do not depend on the batch.
"""

from __future__ import annotations

# ruff: noqa: ARG001  (numba finds an instruction's arguments by position)
import platform
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from pigou.request import Ints
from pigou.runtime.simd import LANES, fast, instruction, narrow, widen
from pigou.runtime.tensor_io import stored
from pigou.runtime.thread_pool import ParallelKernel, RowRange, run_parallel

#: Outputs of a tile of packed weights, in vectors; inputs of one instruction.
_VECTORS, _QUAD = 4, 4
OUTPUTS = LANES * _VECTORS
#: Rows of a call, so that their codes stay in cache.
_ROWS_AT_ONCE = 96
#: Largest code of an activation: its high byte is at most 127.
_HIGHEST = 32_512.0
#: Single-thread nanoseconds of a product, and of quantising an input.
_PRODUCT_NS, _QUANTISE_NS = 0.011, 0.7

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_WORD, _INDEX = ir.IntType(32), ir.IntType(64)
_HAS_VNNI = platform.machine() == "x86_64" and bool(get_host_cpu_features().get("avx512vnni"))
Stored = NDArray[Any]
Floats = NDArray[np.float32]
Codes = NDArray[np.int8]


@instruction
def dot(
    _context: Any, a: Any, a_stride: Any, b: Any, c: Any, quads: Any, sums: Any, scales: Any,
    rows: Any,
) -> Any:  # fmt: skip
    """Add to C (rows / 2, 64) the product of codes A and a tile B, times `scales` (64,).

    All but the literal `rows` are addresses, or int64. A (rows, 4 * quads) holds high and low
    bytes of inputs in turn, B (quads, 64, 4) weights plus 128; `sums` (rows,) undo the 128.
    """
    whole, count = types.intp, rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        a, a_stride, b, c, quads, sums, scales, _ = arguments
        name, undefined = "llvm.x86.avx512.vpdpbusd.512", ir.Constant(_WORDS, ir.Undefined)
        kind = ir.FunctionType(_WORDS, [_WORDS, _BYTES, _BYTES])
        step = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)

        def pointer(base: Any, offset: int, kind: Any) -> Any:
            return builder.inttoptr(builder.add(base, _index(offset)), kind.as_pointer())

        def load(base: Any, offset: int, kind: Any) -> Any:
            return builder.load(pointer(base, offset, kind), align=1)

        def spread(word: Any) -> Any:
            lone = builder.insert_element(undefined, word, ir.Constant(_WORD, 0))
            return builder.shuffle_vector(lone, undefined, ir.Constant(_WORDS, [0] * LANES))

        starts = [spread(load(sums, 4 * row, _WORD)) for row in range(count)]
        lines = [builder.add(a, builder.mul(a_stride, _index(row))) for row in range(count)]
        before, loop = builder.block, builder.append_basic_block("dot.loop")
        after = builder.append_basic_block("dot.after")
        builder.branch(loop)
        builder.position_at_end(loop)
        quad = builder.phi(_INDEX)
        held = [[builder.phi(_WORDS) for _ in range(_VECTORS)] for _ in range(count)]
        tile = builder.add(b, builder.mul(quad, _index(_QUAD * OUTPUTS)))
        weights = [load(tile, 4 * LANES * j, _BYTES) for j in range(_VECTORS)]
        new = []
        for line, accumulators in zip(lines, held, strict=True):
            word = load(builder.add(line, builder.mul(quad, _index(_QUAD))), 0, _WORD)
            codes = builder.bitcast(spread(word), _BYTES)
            pairs = zip(accumulators, weights, strict=True)
            new.append([builder.call(step, [total, part, codes]) for total, part in pairs])
        following = builder.add(quad, _index(1))
        quad.add_incoming(_index(0), before)
        quad.add_incoming(following, loop)
        for start, phis, updated in zip(starts, held, new, strict=True):
            for phi, value in zip(phis, updated, strict=True):
                phi.add_incoming(start, before)
                phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, quads), loop, after)
        builder.position_at_end(after)
        shift = ir.Constant(_FLOATS, [256.0] * LANES)
        for j in range(_VECTORS):
            scale = load(scales, 4 * LANES * j, _FLOATS)
            for row in range(0, count, 2):
                high, low = (builder.sitofp(new[row + k][j], _FLOATS) for k in (0, 1))
                number = builder.fadd(builder.fmul(high, shift), low, flags=("contract",))
                target = pointer(c, row // 2 * 4 * OUTPUTS + 4 * LANES * j, _FLOATS)
                term = builder.fmul(number, scale, flags=("contract",))
                total = builder.fadd(builder.load(target, align=4), term, flags=("contract",))
                builder.store(total, target, align=4)
        return context.get_dummy_value()

    return types.void(*[whole] * 7, rows), generate


def _index(value: int) -> Any:
    return ir.Constant(_INDEX, value)


@fast
def quantise(
    rows: RowRange, x: Stored, group: int, codes: Codes, sums: Ints, units: Floats
) -> None:
    """Split inputs (rows, inputs) into high and low bytes, rows of `codes` (2 * rows, inputs).

    `sums` (groups, 2 * rows) receives -128 times the codes' sums, `units` (rows,) the scales.
    """
    inputs, stop = codes.shape[1], x.shape[1]
    lanes = np.empty(LANES, np.float32)
    for i in range(rows[0], rows[1]):
        row = x[i]
        lanes[:] = np.float32(0.0)
        for first in range(0, stop - stop % LANES, LANES):
            for lane in range(LANES):
                number = abs(widen(row[first + lane]))
                lanes[lane] = number if number > lanes[lane] else lanes[lane]
        largest = np.float32(0.0)
        for lane in range(LANES):
            largest = max(largest, lanes[lane])
        for d in range(stop - stop % LANES, stop):
            largest = max(largest, abs(widen(row[d])))
        units[i] = largest / np.float32(_HIGHEST)
        scale = np.float32(_HIGHEST) / largest if largest > 0 else np.float32(0.0)
        for g in range(len(sums)):
            line = row[g * group : (g + 1) * group]
            high = codes[2 * i, g * group : (g + 1) * group]
            low = codes[2 * i + 1, g * group : (g + 1) * group]
            highs, lows = np.int32(0), np.int32(0)
            for d in range(len(line)):
                code = np.int32(np.rint(widen(line[d]) * scale))
                upper = (code + np.int32(128)) >> np.int32(8)
                lower = code - (upper << np.int32(8))
                high[d], low[d] = np.int8(upper), np.int8(lower)
                highs += upper
                lows += lower
            sums[g, 2 * i], sums[g, 2 * i + 1] = -128 * highs, -128 * lows
        for d in range(stop, inputs):
            codes[2 * i, d] = codes[2 * i + 1, d] = np.int8(0)


@fast
def multiply(
    tiles: RowRange, codes: Codes, sums: Ints, units: Floats, weights: NDArray[np.uint8],
    scales: Floats, bias: Floats, out: Stored,
) -> None:  # fmt: skip
    """Write some tiles of outputs, for `weights` (tiles, inputs / 4, 64, 4).

    `scales` is (groups, outputs), `bias` (outputs,); others as in `quantise`.
    """
    rows, outputs = out.shape
    inputs, groups = codes.shape[1], len(sums)
    quads = inputs // groups // 4
    scratch = np.empty((rows, 64), np.float32)
    for tile in range(tiles[0], tiles[1]):
        scratch[:] = np.float32(0.0)
        first = tile * 64
        for g in range(groups):
            b = weights.ctypes.data + first * inputs + g * quads * 256
            scale = scales.ctypes.data + (g * scales.shape[1] + first) * 4
            done = 0
            while done < rows:
                a = codes.ctypes.data + 2 * done * inputs + g * quads * 4
                c, total = scratch.ctypes.data + done * 256, sums[g].ctypes.data + done * 8
                if rows - done >= 3:
                    dot(a, inputs, b, c, quads, total, scale, 6)
                    done += 3
                elif rows - done == 2:
                    dot(a, inputs, b, c, quads, total, scale, 4)
                    done += 2
                else:
                    dot(a, inputs, b, c, quads, total, scale, 2)
                    done += 1
        for i in range(rows):
            for j in range(min(64, outputs - first)):
                out[i, first + j] = narrow(scratch[i, j] * units[i] + bias[first + j], out)


@fast
def parallel_quantise(
    start: int, threads: int, parts: int, rows: RowRange, x: Stored, group: int, codes: Codes,
    sums: Ints, units: Floats,
) -> None:  # fmt: skip
    """Run `quantise` on several threads."""
    run_parallel(start, threads, parts, quantise, (rows, x, group, codes, sums, units))


@fast
def parallel_multiply(
    start: int, threads: int, parts: int, tiles: RowRange, codes: Codes, sums: Ints,
    units: Floats, weights: NDArray[np.uint8], scales: Floats, bias: Floats, out: Stored,
) -> None:  # fmt: skip
    """Run `multiply` on several threads."""
    arguments = (tiles, codes, sums, units, weights, scales, bias, out)
    run_parallel(start, threads, parts, multiply, arguments)


QUANTISE = ParallelKernel(quantise, parallel_quantise)
MULTIPLY = ParallelKernel(multiply, parallel_multiply)


class Int8Product:
    """x W^T + b with packed int8 codes of W."""

    @staticmethod
    def supports(codes: Tensor, group: int) -> bool:
        """True if the kernel runs here on codes (outputs, inputs) with such groups."""
        fits = not group or (group % _QUAD == 0 and codes.shape[1] % group == 0)
        return codes.device.type == "cpu" and fits and _HAS_VNNI

    def __init__(self, codes: Tensor, scales: Tensor, group: int, bias: Tensor | None) -> None:
        """Pack codes (outputs, inputs), scales (outputs, groups) and a bias (outputs,)."""
        outputs, inputs = codes.shape
        self.group = group or inputs
        padding = (0, -inputs % _QUAD, 0, -outputs % OUTPUTS)
        wide = F.pad(codes, padding)
        tiles = wide.view(-1, OUTPUTS, wide.shape[1] // _QUAD, _QUAD).transpose(1, 2)
        #: Unsigned, shape (tiles, quads, 64, 4).
        self.weights = tiles.contiguous().view(torch.uint8).bitwise_xor_(128)
        self.scales = F.pad(scales.T, padding[2:]).contiguous()
        self.bias = torch.zeros(outputs) if bias is None else bias.float()
        self._packed = (self.weights.numpy(), self.scales.numpy(), self.bias.numpy())

    def __call__(self, x: Tensor) -> Tensor:
        """Return shape (rows, outputs) for inputs (rows, inputs)."""
        out = x.new_empty((len(x), len(self.bias)))
        given, result = stored(x.contiguous()), stored(out)
        tiles, inputs = len(self.weights), self.weights[0].numel() // OUTPUTS
        codes = np.empty((2 * min(len(x), _ROWS_AT_ONCE), inputs), dtype=np.int8)
        sums = np.empty((len(self.scales), len(codes)), dtype=np.int32)
        units = np.empty(len(codes), dtype=np.float32)
        for at in range(0, len(x), _ROWS_AT_ONCE):
            some, target = given[at : at + _ROWS_AT_ONCE], result[at : at + _ROWS_AT_ONCE]
            QUANTISE(_QUANTISE_NS * some.size, (0, len(some)), some, self.group, codes, sums, units)
            work_ns = _PRODUCT_NS * len(some) * self.weights.numel()
            MULTIPLY(work_ns, (0, tiles), codes, sums, units, *self._packed, target)
        return out
