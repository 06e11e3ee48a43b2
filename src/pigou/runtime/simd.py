"""Numba intrinsics for compiled kernels: bit casts, bfloat16, and a register-blocked product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pigou.compiled import share

# ruff: noqa: ARG001  (numba finds an instruction's arguments by position)


#: Vector width of `product`, in numbers.
LANES = 16

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_WORD = ir.IntType(32)
_INDEX = ir.IntType(64)
#: Independent accumulators: enough to hide the latency of additions, while leaving half of the
#: registers (32 of 16 numbers with AVX-512, 16 of 8 without) free.
_SUMS = 8 if get_host_cpu_features().get("avx512f") else 4
Function = TypeVar("Function", bound=Callable[..., Any])


def instruction(typing: Callable[..., Any]) -> Callable[..., Any]:
    """Make an intrinsic out of a function that returns its signature and code generator."""
    return cast(Callable[..., Any], intrinsic(prefer_literal=True)(typing))


@instruction
def float_of(_context: Any, _bits: Any) -> Any:
    """Reinterpret uint32 bits as a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@instruction
def bits_of(_context: Any, _number: Any) -> Any:
    """Reinterpret a float32 as uint32 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _WORD)

    return types.uint32(types.float32), generate


@instruction
def widen(_context: Any, stored: Any) -> Any:
    """Convert a stored number to float32 (see `_widened`)."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _widened(builder, arguments[0], stored, 0)

    return types.float32(stored), generate


@instruction
def narrow(_context: Any, _number: Any, like: Any) -> Any:
    """Convert a float32 to the type that array `like` stores, rounding to nearest even."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if like.dtype == types.float32:
            return arguments[0]
        if like.dtype == types.int8:
            return _int8(builder, arguments[0])
        if like.dtype == types.uint8:
            return _e4m3(builder, arguments[0])
        word = builder.bitcast(arguments[0], _WORD)
        odd = builder.and_(builder.lshr(word, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
        rounded = builder.add(word, builder.add(odd, ir.Constant(_WORD, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, ir.Constant(_WORD, 16)), ir.IntType(16))

    return like.dtype(types.float32, like), generate


def _widened(builder: Any, number: Any, stored: Any, lanes: int) -> Any:
    """Convert `lanes` numbers (0 for a scalar) to float32.

    bfloat16 is stored as uint16, int8 as itself, FP8 E4M3 as uint8.
    """

    def constant(value: float, kind: Any) -> Any:
        if not lanes:
            return ir.Constant(kind, value)
        return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)

    real = ir.VectorType(ir.FloatType(), lanes) if lanes else ir.FloatType()
    if stored == types.float32:
        return number
    if stored == types.int8:
        return builder.sitofp(number, real)
    word = builder.zext(number, ir.VectorType(_WORD, lanes) if lanes else _WORD)
    if stored == types.uint16:
        return builder.bitcast(builder.shl(word, constant(16, _WORD)), real)
    sign = builder.shl(builder.and_(word, constant(0x80, _WORD)), constant(24, _WORD))
    rest = builder.shl(builder.and_(word, constant(0x7F, _WORD)), constant(20, _WORD))
    tiny = builder.bitcast(builder.or_(sign, rest), real)  # exponents differ by 120
    return builder.fmul(tiny, constant(2.0**120, ir.FloatType()))


def _int8(builder: Any, number: Any) -> Any:
    """Round a float32 to the nearest int8 in [-127, 127], ties to even."""
    for bound, order in ((127.0, "<"), (-127.0, ">")):
        limit = ir.Constant(ir.FloatType(), bound)
        number = builder.select(builder.fcmp_ordered(order, number, limit), number, limit)
    # The mantissa of 1.5 * 2^23 plus the number ends in its nearest integer.
    shifted = builder.fadd(number, ir.Constant(ir.FloatType(), 1.5 * 2.0**23))
    return builder.trunc(builder.bitcast(shifted, _WORD), ir.IntType(8))


def _e4m3(builder: Any, number: Any) -> Any:
    """Round a float32 to the nearest FP8 E4M3, ties to even, at most 448."""

    def constant(value: int) -> Any:
        return ir.Constant(_WORD, value)

    word = builder.bitcast(number, _WORD)
    sign = builder.and_(builder.lshr(word, constant(24)), constant(0x80))
    size, limit = builder.and_(word, constant(0x7FFFFFFF)), constant(0x43E00000)  # 448
    size = builder.select(builder.icmp_unsigned("<", size, limit), size, limit)
    odd = builder.and_(builder.lshr(size, constant(20)), constant(1))
    rounded = builder.add(size, builder.add(odd, constant(0x7FFFF)))
    normal = builder.sub(builder.lshr(rounded, constant(20)), constant(120 << 3))
    # Below 2^-6, codes count 2^-9, the unit in the last place of 2^14.
    shifted = builder.fadd(
        builder.bitcast(size, ir.FloatType()), ir.Constant(ir.FloatType(), 2.0**14)
    )
    small = builder.sub(builder.bitcast(shifted, _WORD), constant(0x46800000))
    code = builder.select(builder.icmp_unsigned("<", size, constant(0x3C800000)), small, normal)
    return builder.trunc(builder.or_(code, sign), ir.IntType(8))


@instruction
def product(
    _context: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, depth: Any,
    kind: Any, rows: Any,
) -> Any:  # fmt: skip
    """Add A B to C (rows, 16), which stays in registers while B is read once.

    `a`, `b`, `c` are addresses; strides between rows are in numbers. A (rows, depth) and C are
    float32, B (depth, 16) is stored like array `kind`. `rows` is a literal 1, 2, 4 or 8.
    """
    whole = types.intp
    signature = types.void(whole, whole, whole, whole, whole, whole, whole, kind, rows)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        body = _Product(builder, arguments, rows.literal_value, kind.dtype)
        body.write()
        return context.get_dummy_value()

    return signature, generate


@instruction
def accumulate(_context: Any, target: Any, source: Any, stride: Any, rows: Any) -> Any:
    """Add rows of 16 float32 numbers to 16 others; `stride` between rows is in numbers."""
    whole = types.intp

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source, stride, rows = arguments
        pointer = builder.inttoptr(target, _VECTOR.as_pointer())
        first, before = builder.load(pointer, align=4), builder.block
        loop = builder.append_basic_block("accumulate.loop")
        after = builder.append_basic_block("accumulate.after")
        builder.cbranch(builder.icmp_signed("<", _index(0), rows), loop, after)
        builder.position_at_end(loop)
        row, held = builder.phi(_INDEX), builder.phi(_VECTOR)
        offset = builder.mul(builder.mul(row, stride), _index(4))
        line = builder.inttoptr(builder.add(source, offset), _VECTOR.as_pointer())
        total = builder.fadd(held, builder.load(line, align=4))
        following = builder.add(row, _index(1))
        for phi, start, value in ((row, _index(0), following), (held, first, total)):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, rows), loop, after)
        builder.position_at_end(after)
        result = builder.phi(_VECTOR)
        result.add_incoming(first, before)
        result.add_incoming(total, loop)
        builder.store(result, pointer, align=4)
        return context.get_dummy_value()

    return types.void(whole, whole, whole, whole), generate


class _Product:
    """Generates the code of `product`."""

    def __init__(self, builder: Any, arguments: Any, rows: int, stored: Any) -> None:
        self.builder = builder
        self.a, self.a_stride, self.b, self.b_stride, self.c, self.c_stride, self.depth = arguments[
            :7
        ]
        self.rows = rows
        self.parts = max(1, _SUMS // rows)
        self.stored = stored

    def write(self) -> None:
        builder = self.builder
        targets = [
            self._pointer(self.c, builder.mul(self.c_stride, _index(j)), 4, _VECTOR)
            for j in range(self.rows)
        ]
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [builder.load(target, align=4) for target in targets]
        sums += [zero] * (self.rows * (self.parts - 1))
        bulk = builder.mul(builder.sdiv(self.depth, _index(self.parts)), _index(self.parts))
        sums = self._loop(_index(0), bulk, self.parts, sums)
        if self.parts > 1:
            sums = self._loop(bulk, self.depth, 1, sums)
        for j, target in enumerate(targets):
            total = sums[j]
            for part in range(1, self.parts):
                total = builder.fadd(total, sums[part * self.rows + j], flags=("contract",))
            builder.store(total, target, align=4)

    def _loop(self, start: Any, stop: Any, step: int, sums: list[Any]) -> list[Any]:
        builder = self.builder
        before = builder.block
        loop = builder.append_basic_block("product.loop")
        after = builder.append_basic_block("product.after")
        builder.cbranch(builder.icmp_signed("<", start, stop), loop, after)
        builder.position_at_end(loop)
        index = builder.phi(_INDEX)
        index.add_incoming(start, before)
        held = [builder.phi(_VECTOR) for _ in sums]
        for phi, value in zip(held, sums, strict=True):
            phi.add_incoming(value, before)
        new = list(held)
        for part in range(step):
            at = builder.add(index, _index(part))
            self._accumulate(at, new, part * self.rows)
        following = builder.add(index, _index(step))
        index.add_incoming(following, loop)
        for phi, value in zip(held, new, strict=True):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, after)
        builder.position_at_end(after)
        results = [builder.phi(_VECTOR) for _ in sums]
        for phi, skipped, value in zip(results, sums, new, strict=True):
            phi.add_incoming(skipped, before)
            phi.add_incoming(value, loop)
        return results

    def _accumulate(self, at: Any, sums: list[Any], first: int) -> None:
        builder = self.builder
        line = self._line(at)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        for j in range(self.rows):
            offset = builder.add(builder.mul(self.a_stride, _index(j)), at)
            number = builder.load(self._pointer(self.a, offset, 4, ir.FloatType()), align=4)
            lone = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
            spread = builder.shuffle_vector(lone, undefined, ir.Constant(_WORDS, [0] * LANES))
            term = builder.fmul(spread, line, flags=("contract",))
            sums[first + j] = builder.fadd(term, sums[first + j], flags=("contract",))

    def _line(self, at: Any) -> Any:
        """Load 16 numbers of row `at` of B, widened."""
        builder = self.builder
        offset, size = builder.mul(self.b_stride, at), self.stored.bitwidth // 8
        wide = self.stored == types.float32
        kind = _VECTOR if wide else ir.VectorType(ir.IntType(8 * size), LANES)
        line = builder.load(self._pointer(self.b, offset, size, kind), align=size)
        return _widened(builder, line, self.stored, LANES)

    def _pointer(self, address: Any, offset: Any, size: int, kind: Any) -> Any:
        builder = self.builder
        pointer = builder.add(address, builder.mul(offset, _index(size)))
        return builder.inttoptr(pointer, kind.as_pointer())


def _index(value: int) -> Any:
    return ir.Constant(_INDEX, value)


def fast(function: Function) -> Function:
    """Compile with reordered and fused sums; infinities and NaN keep their meaning."""
    math = {"reassoc", "contract", "arcp", "nsz"}
    compiler = njit(cache=True, nogil=True, fastmath=math, error_model="numpy")
    return cast(Function, share(compiler(function)))


@fast
def exponential(x: Any) -> Any:
    """Return e^x of a float32 clipped to [-87, 87] (Cephes expf; relative error 1e-7)."""
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    power = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * rest + np.float32(1.3981999507e-3)
    y = y * rest + np.float32(8.3334519073e-3)
    y = y * rest + np.float32(4.1665795894e-2)
    y = y * rest + np.float32(1.6666665459e-1)
    y = y * rest + np.float32(5.0000001201e-1)
    y = y * rest * rest + rest + np.float32(1.0)
    return y * float_of(np.uint32(np.int32(power) + np.int32(127)) << np.uint32(23))


@fast
def logarithm(x: Any) -> Any:
    """Return the log of a normal, positive, finite float32 (Cephes logf; error 1e-7)."""
    bits = bits_of(x)
    # The exponent for a mantissa in [sqrt(1/2), sqrt(2)].
    power = np.int32(bits - np.uint32(0x3F3504F3)) >> np.int32(23)
    rest = float_of(bits - (np.uint32(power) << np.uint32(23))) - np.float32(1.0)
    y = np.float32(7.0376836292e-2)
    y = y * rest - np.float32(1.1514610310e-1)
    y = y * rest + np.float32(1.1676998740e-1)
    y = y * rest - np.float32(1.2420140846e-1)
    y = y * rest + np.float32(1.4249322787e-1)
    y = y * rest - np.float32(1.6668057665e-1)
    y = y * rest + np.float32(2.0000714765e-1)
    y = y * rest - np.float32(2.4999993993e-1)
    y = y * rest + np.float32(3.3333331174e-1)
    square, whole = rest * rest, np.float32(power)
    y = y * rest * square - whole * np.float32(2.12194440e-4) - square * np.float32(0.5)
    return rest + y + whole * np.float32(0.693359375)


@fast
def row_max(row: Any, count: int, lanes: NDArray[np.float32]) -> Any:
    """Return the maximum of a row's first numbers; 16 scratch `lanes` let numba vectorize."""
    bulk = count - count % LANES
    lanes[:] = np.float32(-np.inf)
    for start in range(0, bulk, LANES):
        for lane in range(LANES):
            number = widen(row[start + lane])
            lanes[lane] = number if number > lanes[lane] else lanes[lane]
    largest = np.float32(-np.inf)
    for lane in range(LANES):
        largest = max(largest, lanes[lane])
    for d in range(bulk, count):
        largest = max(largest, widen(row[d]))
    return largest
