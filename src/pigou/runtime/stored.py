"""Tensors as the arrays that compiled kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def stored(tensor: Tensor) -> NDArray[Any]:
    """View a CPU tensor as an array: float32 as it is, bfloat16 as uint16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[np.generic] = tensor.numpy()
    return array
