"""Arrays of the host as tensors of a device, without waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on a device; on the CPU it is the array's own memory.

    A copy from memory that is not pinned waits for all that the device has to do. So the array
    is copied to pinned memory first, which torch keeps until the device has read it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
