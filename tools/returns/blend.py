"""The target of training: several returns of an entry in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blend:
    """Weights of a geometric mean; what an entry changes alone has the rest."""

    received: float
    cut: float  # weight of its value at a cut, in the first layers
    layers: float = 1.0  # share of the layers, from the first on, in which that counts

    def of(self, parts: Tensor) -> Tensor:
        """Return the logarithm of the mean.

        Args:
            parts: logarithms of the change alone, of attention received, and of what it brings at
                a cut, shape (layers, kv_heads, n, 3).

        Returns:
            Shape (layers, kv_heads, n).
        """
        alone, received, among = parts.unbind(-1)
        count = len(parts)
        cut = self.cut * (torch.arange(count) < self.layers * count)[:, None, None]
        return (1 - cut - self.received) * alone + self.received * received + cut * among
