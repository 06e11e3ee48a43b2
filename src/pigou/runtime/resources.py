"""How much memory a device has left, and how this process keeps what it had."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

    from pigou.runtime.models.model_config import ModelConfig


#: Parameters of glibc's mallopt (malloc.h), and what they are set to.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 29
#: Share of a GPU's free memory that is shared out; the rest is for the libraries' own needs.
GPU_SHARE = 0.9
#: Bytes for each logit: itself, as float32, its probability, and the float64 of their sums.
_LOGIT_BYTES = 2 + 4 + 4 + 8


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def device_name(device: torch.device) -> str:
    """Return a GPU's name as the driver has it; empty for a CPU."""
    if device.type != "cuda":
        return ""
    import torch

    return str(torch.cuda.get_device_properties(device).name)


def kv_room(
    free: int, config: ModelConfig, itemsize: int, max_seqs: int, max_batched_tokens: int
) -> int:
    """Return the bytes of a GPU that KV blocks may take, so that a full batch still fits.

    Left out are the largest logits with what sampling makes of them, the activations of the
    longest step, and three copies of one layer's keys and values, which a step gathers.
    """
    logits = max_seqs * config.vocab * _LOGIT_BYTES
    width = 4 * config.hidden + 3 * config.ffn + 4 * config.heads * config.head_dim
    activations = 2 * max_batched_tokens * width * itemsize
    left = GPU_SHARE * free - logits - activations
    return max(0, int(left / (1 + 3 / config.layers)))


def keep_memory() -> None:
    """Let this process keep freed memory of up to half a gigabyte for its next allocations.

    Else the activations of a long prefill go back to the system after each operation, and the
    next operation waits for fresh, zeroed pages. Nothing happens where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


#: Variables that the libraries read once, when they are loaded.
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
#: A thread that has done its part looks out for more before it sleeps, for some ten microseconds
#: up to a tenth of a millisecond, by the processor: about as long as waking it would take. Longer
#: would take its core from the other processes.
_WAITING = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "PASSIVE"}


def environment(threads: int) -> dict[str, str]:
    """Return the variables for a process that computes with so many threads (at least 1)."""
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    return {**dict.fromkeys(_COUNTS, str(threads)), **_WAITING}


def prepare_environment(threads: int) -> None:
    """Set the variables of `environment` in this process.

    Raises RuntimeError: torch is loaded already, and would not see them.
    """
    if "torch" in sys.modules:
        raise RuntimeError("prepare_environment must be called before torch is imported")
    os.environ.update(environment(threads))


def set_threads(threads: int) -> None:
    """Make torch compute with so many threads, one operation at a time."""
    import torch

    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    torch.set_num_threads(threads)
