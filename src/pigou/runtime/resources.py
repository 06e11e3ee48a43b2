"""Free device memory, memory retention and thread settings of this process."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

    from pigou.runtime.models.model_config import ModelConfig


#: Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 29
#: Share of a GPU's free memory to use; libraries need the rest.
GPU_SHARE = 0.9
#: Bytes per logit: bfloat16, float32, its probability, and the float64 cumulative sum.
_LOGIT_BYTES = 2 + 4 + 4 + 8
#: Read by the libraries once, on load.
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
#: Idle threads spin for 10 to 100 microseconds, about the cost of a wake-up. Longer spinning would
#: take the core from other processes.
_WAITING = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "PASSIVE"}


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def device_name(device: torch.device) -> str:
    """Return a GPU's name; empty for a CPU."""
    if device.type != "cuda":
        return ""
    import torch

    return str(torch.cuda.get_device_properties(device).name)


def kv_room(
    free: int, config: ModelConfig, itemsize: int, max_seqs: int, max_batched_tokens: int,
    *, gathers: bool = True,
) -> int:  # fmt: skip
    """Return the bytes of a GPU left for KV blocks, beside logits, activations and gathers.

    Attention gathers a layer's keys and values where no kernel reads them by block tables.
    """
    logits = max_seqs * config.vocab * _LOGIT_BYTES
    width = 4 * config.hidden + 3 * config.ffn + 4 * config.heads * config.head_dim
    activations = 2 * max_batched_tokens * width * itemsize
    left = GPU_SHARE * free - logits - activations
    return max(0, int(left / (1 + 3 / config.layers * gathers)))


def keep_memory() -> None:
    """Make glibc keep freed memory, so that prefill need not wait for zeroed pages."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables for computing with `threads` >= 1 threads."""
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    return {**dict.fromkeys(_COUNTS, str(threads)), **_WAITING}


def prepare_environment(threads: int) -> None:
    """Set the `environment` of this process; raises RuntimeError if torch was loaded without."""
    wanted = environment(threads)
    if "torch" in sys.modules and not wanted.items() <= os.environ.items():
        raise RuntimeError("prepare_environment must be called before torch is imported")
    os.environ.update(wanted)


def set_threads(threads: int) -> None:
    """Limit torch to `threads` threads, one operation at a time."""
    import torch

    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    torch.set_num_threads(threads)
