"""How much memory a device has left, and how this process keeps what it had."""

from __future__ import annotations

import ctypes

import psutil
import torch

#: Parameters of glibc's mallopt (malloc.h), and what they are set to.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 29


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def keep_memory() -> None:
    """Let this process keep freed memory of up to half a gigabyte for its next allocations.

    Else the activations of a long prefill go back to the system after each operation, and the
    next operation waits for fresh, zeroed pages. Nothing happens where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
