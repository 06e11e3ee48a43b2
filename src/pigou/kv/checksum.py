"""Checksums of blocks: xxh3, 64 bits per block, at memory speed, without the GIL."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.compiled import kernel
from pigou.kv.block import Bytes
from pigou.request import Ints

#: One per block, shape (blocks,).
Checksums: TypeAlias = NDArray[np.uint64]
Digests = NDArray[np.uint64]
#: Longest input, in bytes, for which xxh3 uses other formulas.
SHORT = 240
_STRIPE = 64
_BLOCK = 16 * _STRIPE
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    dtype=np.uint8,
)
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], dtype=np.uint64)
#: Secrets mixed in after each 1,024 bytes, and at the end.
_SCRAMBLE = _SECRET[128:].view("<u8")
_MERGE = _SECRET[11:75].copy().view("<u8")
_LENGTH = np.uint64(_P64_1)
_SCRAMBLER = np.uint64(_P32_1)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_INDEX = ir.IntType(64)
_LANES = ir.VectorType(_INDEX, 8)
_KEY: int = _SECRET.ctypes.data


def checksums_of(rows: Bytes, ids: Ints) -> Checksums:
    """Return the checksums of the rows `ids` of C-contiguous `rows`; shape (n,)."""
    if rows.shape[1] > SHORT:
        return digest_rows(rows, ids)
    digests = (xxh3_64_intdigest(rows[i]) for i in ids.tolist())
    return np.fromiter(digests, dtype=np.uint64, count=len(ids))


def copy(source: Bytes, ids: Ints, target: Bytes, places: Ints) -> Checksums:
    """Copy rows `ids` of `source` to rows `places` of `target`, C-contiguous; return checksums."""
    if source.shape[1] > SHORT:
        return copy_rows(source, ids, target, places)
    target[places] = source[ids]
    return checksums_of(target, places)


# ruff: noqa: ARG001  (numba finds an instruction's arguments by position)


def _stripes(stores: bool) -> Any:
    @intrinsic
    def add(_context: Any, sums: Any, source: Any, target: Any, key: Any, count: Any) -> Any:
        signature = types.void(*[types.intp] * 5)

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _write_stripes(builder, *arguments, stores=stores)
            return context.get_dummy_value()

        return signature, generate

    return add


def _write_stripes(
    builder: Any, sums: Any, source: Any, target: Any, key: Any, count: Any, *, stores: bool
) -> None:
    def at(address: Any, step: int, index: Any) -> Any:
        lane_address = builder.add(address, builder.mul(index, ir.Constant(_INDEX, step)))
        return builder.inttoptr(lane_address, _LANES.as_pointer())

    low, half = ir.Constant(_LANES, [0xFFFFFFFF] * 8), ir.Constant(_LANES, [32] * 8)
    pairs = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    sums_pointer = builder.inttoptr(sums, _LANES.as_pointer())
    held = cgutils.alloca_once_value(  # type: ignore[no-untyped-call]
        builder, builder.load(sums_pointer, align=8)
    )
    with cgutils.for_range(builder, count) as loop:
        data = builder.load(at(source, _STRIPE, loop.index), align=1)
        if stores:
            builder.store(data, at(target, _STRIPE, loop.index), align=1)
        keyed = builder.xor(data, builder.load(at(key, 8, loop.index), align=1))
        product = builder.mul(builder.and_(keyed, low), builder.lshr(keyed, half))
        more = builder.add(product, builder.shuffle_vector(data, data, pairs))
        builder.store(builder.add(builder.load(held), more), held)
    builder.store(builder.load(held), sums_pointer, align=8)


_read_stripes = _stripes(stores=False)
_copy_stripes = _stripes(stores=True)


@kernel
def _fold(a: Any, b: Any) -> Any:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = ((a_low * b_low) >> half) + ((a_high * b_low) & low) + a_low * b_high
    upper = ((a_high * b_low) >> half) + (middle >> half) + a_high * b_high
    return (a * b) ^ upper


@kernel
def _add(sums: Any, source: Any, target: Any, key: Any, count: Any) -> None:
    if target:
        _copy_stripes(sums, source, target, key, count)
    else:
        _read_stripes(sums, source, target, key, count)


@kernel
def _digest(sums: Any, source: Any, target: Any, size: Any, key: Any) -> Any:
    """Digest `size` bytes at `source`; also copy them to `target` unless it is 0."""
    sums[:] = _START
    sums_address = sums.ctypes.data
    shift = target - source if target else 0
    at, last = source, source + size - _STRIPE
    while at + _BLOCK < source + size:
        _add(sums_address, at, at + shift if target else 0, key, 16)
        for lane in range(8):
            mixed = sums[lane] ^ (sums[lane] >> np.uint64(47)) ^ _SCRAMBLE[lane]
            sums[lane] = mixed * _SCRAMBLER
        at += _BLOCK
    _add(sums_address, at, at + shift if target else 0, key, (source + size - 1 - at) // _STRIPE)
    _add(sums_address, last, last + shift if target else 0, key + 121, 1)
    total = np.uint64(size) * _LENGTH
    for lane in range(0, 8, 2):
        total += _fold(sums[lane] ^ _MERGE[lane], sums[lane + 1] ^ _MERGE[lane + 1])
    total = (total ^ (total >> np.uint64(37))) * _AVALANCHE
    return total ^ (total >> np.uint64(32))


@kernel
def _rows(source: Any, ids: Any, target: Any, places: Any, size: Any, key: Any) -> Any:
    digests = np.empty(len(ids), dtype=np.uint64)
    sums = np.empty(8, dtype=np.uint64)
    for i in range(len(ids)):
        to = target + places[i] * size if target else 0
        digests[i] = _digest(sums, source + ids[i] * size, to, size, key)
    return digests


def digest_rows(rows: Bytes, ids: Ints) -> Digests:
    """Return digests of the rows `ids`, C-contiguous and longer than `SHORT`; shape (n,)."""
    wanted = ids.astype(np.int64)
    return cast(Digests, _rows(_address(rows, wanted), wanted, 0, wanted, rows.shape[1], _KEY))


def copy_rows(source: Bytes, ids: Ints, target: Bytes, places: Ints) -> Digests:
    """Copy rows longer than `SHORT`; return digests, or raise ValueError on a shape mismatch."""
    wanted, where = ids.astype(np.int64), places.astype(np.int64)
    if len(wanted) != len(where) or source.shape[1] != target.shape[1]:
        raise ValueError("source and target differ in the number of rows, or in their length")
    begin, end = _address(source, wanted), _address(target, where)
    return cast(Digests, _rows(begin, wanted, end, where, source.shape[1], _KEY))


def _address(rows: Bytes, ids: NDArray[np.int64]) -> int:
    if not rows.flags.c_contiguous or rows.shape[1] <= SHORT:
        raise ValueError(f"rows of {rows.shape[1]} bytes; give contiguous ones above {SHORT}")
    if len(ids) and not 0 <= ids.min() <= ids.max() < len(rows):
        raise ValueError(f"rows {ids.min()} to {ids.max()} of {len(rows)}")
    return int(rows.ctypes.data)


def warm_up() -> None:
    """Compile the kernels before the first transfer."""
    rows = np.zeros((2, SHORT + 1), dtype=np.uint8)
    copy_rows(rows, np.array([0], dtype=np.int32), rows, np.array([1], dtype=np.int32))
