"""How much memory a device has left."""

from __future__ import annotations

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
