"""Products with weight matrices, packed for the CPU where that is quicker."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

#: A product: x (rows, inputs) to (rows, outputs). What replaces one wraps it.
Product: TypeAlias = Callable[[Tensor], Tensor]
#: More than `_FEW` rows are padded to a multiple of `_ROWS`.
_ROWS, _FEW = 8, 32


class Linear:
    """x W^T + b, for inputs (rows, inputs).

    On CPU in bfloat16 oneDNN packs the weight once (1.3 to 1.7 times faster, bit-identical); these
    ops are private to torch. It compiles a kernel per row count, so prompt rows are padded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Wrap a weight (outputs, inputs) and a bias (outputs,)."""
        self.bias = bias
        self.weight = weight
        self._product: Callable[..., Tensor] | None = None
        if weight.device.type == "cpu" and _can_pack(weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
            self._product = _packed_product()

    def __call__(self, x: Tensor) -> Tensor:
        """Return shape (rows, outputs)."""
        if self._product is None:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        more = -rows % _ROWS if rows > _FEW else 0
        if more:
            x = F.pad(x, (0, 0, 0, more))
        out = self._product(x, self.weight, self.bias, "none", [], "")
        return out[:rows] if more else out


@cache
def _packed_product() -> Callable[..., Tensor]:
    product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return product


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """True if packed products work and equal plain ones."""
    if dtype is not torch.bfloat16:
        return False
    weight = torch.arange(64 * 32, dtype=torch.float32).remainder(7).sub(3).view(64, 32).to(dtype)
    x = torch.arange(3 * 32, dtype=torch.float32).remainder(5).sub(2).view(3, 32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        result = _packed_product()(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, TypeError):
        return False
    return torch.equal(result, F.linear(x, weight))
