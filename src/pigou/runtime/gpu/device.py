"""What a device is, and what it reaches: the peaks that speeds are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Peaks:
    """What simple operations reach on this device.

    Attributes:
        bandwidth: bytes a second, read and written, of a large copy.
        flops: floating-point operations a second of a large product in bf16.
    """

    bandwidth: float
    flops: float


def describe(name: str) -> str | None:
    """Describe a device in a line; None where torch finds none of this kind."""
    device = torch.device(name)
    if device.type != "cuda":
        return f"{name}, torch {torch.__version__}"
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} "
        f"multiprocessors; torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_peaks(device: torch.device, copy_bytes: int = 2**30, width: int = 8192) -> Peaks:
    """Time a large copy and a large product.

    Args:
        device: to measure.
        copy_bytes: of the copy.
        width: of the square matrices.
    """
    with torch.inference_mode():
        both = torch.zeros((2, copy_bytes), dtype=torch.uint8, device=device)
        copy_s = _seconds(device, lambda: both[0].copy_(both[1]))
        matrix = torch.ones((width, width), dtype=torch.bfloat16, device=device)
        product_s = _seconds(device, lambda: matrix @ matrix)
    return Peaks(2 * copy_bytes / copy_s, 2 * width**3 / product_s)


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Return seconds of a call, the mean of several after a first one."""
    call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    synchronize(device)
    return max((time.perf_counter() - began) / _REPEATS, 1e-9)
