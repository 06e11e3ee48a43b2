"""Elementary functions of float32 for compiled loops, which go through them 16 numbers at a time.

numba's cache of a kernel does not watch this file (see `pigou.runtime.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

import pigou.compiled  # noqa: F401  (chooses where numba keeps what it compiled)
from pigou.kernel_cache import share
from pigou.runtime.simd import bits_of, float_of

Function = TypeVar("Function", bound=Callable[..., Any])


def fast(function: Function) -> Function:
    """Compile; sums may be reordered and fused, but infinities and NaN keep their meaning."""
    math = {"reassoc", "contract", "arcp", "nsz"}
    compiler = njit(cache=True, nogil=True, fastmath=math, error_model="numpy")
    return cast(Function, share(compiler(function)))


@fast
def exponential(x: Any) -> Any:
    """Return e^x of a float32 clipped to [-87, 87] (Cephes expf; error about 1e-7 of it)."""
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
    """Return the natural logarithm of a normal float32 above 0 (Cephes logf; error about 1e-7).

    Infinities and NaN are none of these, and give numbers that mean nothing.
    """
    bits = bits_of(x)
    # The exponent that leaves a mantissa from sqrt(1/2) to sqrt(2).
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
