"""Runs compiled kernels on torch's own OpenMP threads.

Spinning threads of a second pool would occupy the cores, so kernels enter torch's pool by
`GOMP_parallel`.
"""

from __future__ import annotations

# ruff: noqa: ARG001  (numba finds an instruction's arguments by position)
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch  # (also loads its OpenMP library)
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from pigou.runtime.simd import instruction

#: Half-open row range of a kernel call.
RowRange: TypeAlias = tuple[int, int]

#: Single-thread nanoseconds below which parallel execution does not pay.
MIN_PARALLEL_NS = 20_000.0
#: Parts per thread, to balance load.
_PARTS_PER_THREAD = 4
_min_parallel_ns = MIN_PARALLEL_NS

_WORD = ir.IntType(32)
_INDEX = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_MEMBER = ir.FunctionType(ir.VoidType(), [_POINTER])
#: void GOMP_parallel(void (*member)(void *), void *data, unsigned threads, unsigned flags)
_START = ir.FunctionType(ir.VoidType(), [_MEMBER.as_pointer(), _POINTER, _WORD, _WORD])


@cache
def openmp_entry() -> int:
    """Return the address of `GOMP_parallel` in torch's OpenMP; 0 if not available."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for path in sorted({line.split(maxsplit=5)[-1] for line in maps if "/libgomp" in line}):
        entry = ctypes.CDLL(path).GOMP_parallel
        return ctypes.cast(entry, ctypes.c_void_p).value or 0
    return 0


@dataclass(frozen=True, slots=True)
class ParallelKernel:
    """A kernel that runs on several threads where that pays."""

    kernel: Callable[..., None]  # takes the row range first
    # threaded variant: `run_parallel`'s first three arguments, then the kernel's.
    parallel: Callable[..., None]

    def __call__(self, work_ns: float, rows: RowRange, *arguments: object) -> None:
        """Run the kernel on rows; `work_ns` estimates the single-thread time."""
        threads = torch.get_num_threads() if work_ns >= _min_parallel_ns else 1
        count = rows[1] - rows[0]
        start = openmp_entry() if threads > 1 and count > 1 else 0
        if not start:
            self.kernel(rows, *arguments)
            return
        parts = min(threads * _PARTS_PER_THREAD, count)
        self.parallel(start, threads, parts, rows, *arguments)


@contextmanager
def always_parallel() -> Iterator[None]:
    """Use all threads even for the smallest work, to compile or test it."""
    global _min_parallel_ns  # noqa: PLW0603
    _min_parallel_ns = 0.0
    try:
        yield
    finally:
        _min_parallel_ns = MIN_PARALLEL_NS


@instruction
def run_parallel(
    _context: Any, start: Any, threads: Any, parts: Any, kernel: Any, arguments: Any
) -> Any:
    """Run `kernel` over `parts` pieces of its rows on the next free threads (an intrinsic).

    `start` is `openmp_entry`, not 0; `arguments` is a tuple, the range of all rows first.
    """
    function = kernel.dispatcher

    def work(part: int, parts: int, arguments: Any) -> None:
        first, count = arguments[0][0], arguments[0][1] - arguments[0][0]
        rows = (first + count * part // parts, first + count * (part + 1) // parts)
        function(rows, *arguments[1:])

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        start, threads, parts, _, packed = values
        signature = types.void(types.intp, types.intp, arguments)
        compiled = context.compile_subroutine(builder, work, signature)
        shared = ir.LiteralStructType([_INDEX, _INDEX, packed.type])
        address = builder.alloca(shared)
        filled = ir.Constant(shared, ir.Undefined)
        for index, value in enumerate((ir.Constant(_INDEX, 0), parts, packed)):
            filled = builder.insert_value(filled, value, index)
        builder.store(filled, address)
        name = f"{builder.function.name}.member"
        member = ir.Function(builder.module, _MEMBER, builder.module.get_unique_name(name))
        member.linkage = "internal"
        _write_member(context, member, shared, compiled.fndesc, signature)
        entry = builder.inttoptr(start, _START.as_pointer())
        data = builder.bitcast(address, _POINTER)
        builder.call(entry, [member, data, builder.trunc(threads, _WORD), ir.Constant(_WORD, 0)])
        return context.get_dummy_value()

    whole = types.intp
    return types.void(whole, whole, whole, kernel, arguments), generate


def _write_member(context: Any, member: Any, shared: Any, work: Any, signature: Any) -> None:
    builder = ir.IRBuilder(member.append_basic_block("entry"))
    loop, body, leave = (member.append_basic_block(name) for name in ("loop", "body", "leave"))
    address = builder.bitcast(member.args[0], shared.as_pointer())

    def field(index: int) -> Any:
        return builder.gep(address, [ir.Constant(_WORD, 0), ir.Constant(_WORD, index)])

    following, parts = field(0), builder.load(field(1))
    arguments = builder.load(field(2))
    builder.branch(loop)
    builder.position_at_end(loop)
    part = builder.atomic_rmw("add", following, ir.Constant(_INDEX, 1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", part, parts), body, leave)
    builder.position_at_end(body)
    context.call_internal_no_propagate(builder, work, signature, [part, parts, arguments])
    builder.branch(loop)
    builder.position_at_end(leave)
    builder.ret_void()
