"""Products with weight matrices, packed for the CPU where that is quicker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.models import ModelError
from pigou.runtime.models.int8_product import Int8Product

#: A product: x (rows, inputs) to (rows, outputs). What replaces one wraps it.
Product: TypeAlias = Callable[[Tensor], Tensor]
#: More than `_FEW` rows are padded to a multiple of `_ROWS`.
_ROWS, _FEW = 8, 32
#: Rows up to which torch's int8 product is quicker than dequantising.
_INT8_ROWS = 16
#: Largest codes.
INT8_MAX, FP8_MAX = 127.0, 448.0
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """A weight matrix: plain numbers, or int8 or FP8 codes times scales per group of inputs."""

    data: Tensor  # shape (outputs, inputs)
    scales: Tensor | None = None  # float32, shape (outputs, groups); None for plain numbers
    group: int = 0  # inputs in a group, the last may have fewer; 0 for all inputs
    input_scale: float | None = None  # static E4M3 scale of the inputs; None if not quantised

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return plain numbers, computed in float32 and rounded once."""
        if self.scales is None:
            return self.data.to(dtype)
        inputs = self.data.shape[1]
        scales = self.scales.repeat_interleave(self.group or inputs, 1)[:, :inputs]
        return (self.data.float() * scales).to(dtype)

    def quantised(self, kind: torch.dtype) -> WeightMatrix:
        """Return codes of dtype `kind` with a scale per output; those of this kind stay."""
        if self.data.dtype is kind:
            return self
        numbers = self.dense(torch.float32)
        highest = INT8_MAX if kind is torch.int8 else FP8_MAX
        scales = numbers.abs().amax(1, keepdim=True).clamp_min(1e-30) / highest
        codes = (numbers / scales).clamp_(-highest, highest)
        return WeightMatrix((codes.round_() if kind is torch.int8 else codes).to(kind), scales)

    def to(self, device: torch.device) -> WeightMatrix:
        """Return the matrix on a device."""
        scales = None if self.scales is None else self.scales.to(device)
        return replace(self, data=self.data.to(device), scales=scales)

    def rows(self, start: int, stop: int) -> WeightMatrix:
        """Return some of the outputs."""
        scales = None if self.scales is None else self.scales[start:stop]
        return replace(self, data=self.data[start:stop], scales=scales)

    def columns(self, start: int, stop: int) -> WeightMatrix:
        """Return some of the inputs; raises ModelError if they cut a group."""
        if self.scales is None or not self.group:
            return replace(self, data=self.data[:, start:stop])
        if start % self.group or (stop % self.group and stop != self.data.shape[1]):
            raise ModelError(
                f"inputs {start} to {stop} of a weight cut its groups of {self.group}; use fewer "
                "ranks, or --quantization none"
            )
        groups = slice(start // self.group, -(-stop // self.group))
        return replace(self, data=self.data[:, start:stop], scales=self.scales[:, groups])


def concatenate(parts: Sequence[WeightMatrix]) -> WeightMatrix:
    """Stack matrices of the same inputs; those of different formats become plain numbers.

    Their static input scale is the largest, if all have one (as in vLLM).
    """
    if len(parts) == 1:
        return parts[0]
    static = [part.input_scale for part in parts if part.input_scale is not None]
    input_scale = max(static) if len(static) == len(parts) else None
    scales = [part.scales for part in parts if part.scales is not None]
    if len({(part.data.dtype, part.group, part.scales is None) for part in parts}) > 1:
        return WeightMatrix(torch.cat([part.dense(torch.float32) for part in parts]))
    data = torch.cat([part.data for part in parts])
    return WeightMatrix(data, torch.cat(scales) if scales else None, parts[0].group, input_scale)


def make_linear(matrix: WeightMatrix, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """Return the quickest product with a matrix on its device, for inputs of `dtype`."""
    if matrix.scales is None:
        linear = Linear(matrix.data.to(dtype), bias)
    else:
        linear = QuantisedLinear(matrix, bias, dtype)
    linear.input_scale = matrix.input_scale
    return linear


def round_inputs(x: Tensor, scale: float) -> Tensor:
    """Return x as E4M3 codes times `scale` represent it, in the dtype of x."""
    return e4m3_codes(x, scale).float().mul_(scale).to(x.dtype)


def e4m3_codes(x: Tensor, scale: Tensor | float) -> Tensor:
    """Return E4M3 codes of x / scale, clamped to the largest."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


class Linear:
    """x W^T + b, for inputs (rows, inputs).

    On CPU in bfloat16 oneDNN packs the weight once (1.3 to 1.7 times faster, bit-identical); these
    ops are private to torch. It compiles a kernel per row count, so prompt rows are padded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Wrap a weight (outputs, inputs) and a bias (outputs,)."""
        self.bias = bias
        self.weight = weight
        self.input_scale: float | None = None  # as in `WeightMatrix`
        self._product: Callable[..., Tensor] | None = None
        on_cpu = weight.device.type == "cpu"
        if on_cpu and weight.dtype is torch.bfloat16 and _works(_packed_product):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
            self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """Return shape (rows, outputs)."""
        if self.input_scale is not None:
            x = round_inputs(x, self.input_scale)
        if self._product is None:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        more = -rows % _ROWS if rows > _FEW else 0
        if more:
            x = F.pad(x, (0, 0, 0, more))
        out = self._product(x, self.weight, self.bias, "none", [], "")
        return out[:rows] if more else out


class QuantisedLinear(Linear):
    """x W^T + b with int8 or FP8 codes of W.

    int8 on CPU: our kernel, else torch's (private) for few rows. FP8 on CUDA: `torch._scaled_mm`
    on inputs scaled per row, or by
    their static scale. Otherwise W is dequantised in each product.
    """

    def __init__(self, matrix: WeightMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Wrap a quantised matrix and a bias (outputs,), for inputs of `dtype`."""
        assert matrix.scales is not None
        codes, scales, on_cuda = matrix.data, matrix.scales, matrix.data.is_cuda
        self.bias = bias
        self.input_scale = None
        self.matrix: WeightMatrix | None = matrix
        self._product = None
        self._few = 0  # rows up to which torch's int8 product is used
        if codes.dtype is torch.int8 and Int8Product.supports(codes, matrix.group):
            self._product, self.matrix = Int8Product(codes, scales, matrix.group, bias), None
        elif codes.dtype is torch.int8 and not (on_cuda or matrix.group):
            # torch's result is wrong for other sizes, and slow in float32.
            fits = dtype is torch.bfloat16 and not any(size % 32 for size in codes.shape)
            self._few = _INT8_ROWS * (fits and _works(_int8_product))
        elif codes.dtype is FP8 and on_cuda and not matrix.group:
            fits = not any(size % 16 for size in codes.shape)
            if fits and torch.cuda.get_device_capability(codes.device) >= (8, 9):
                self._product = self._scaled_product

    def __call__(self, x: Tensor) -> Tensor:
        """Return shape (rows, outputs)."""
        if self._product is not None:
            return self._product(x)
        if self.input_scale is not None:
            x = round_inputs(x, self.input_scale)
        assert self.matrix is not None
        assert self.matrix.scales is not None
        if x.shape[0] <= self._few:
            scales = self.matrix.scales.flatten().to(x.dtype)
            out: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.matrix.data, scales)
            return out if self.bias is None else out.add_(self.bias)
        return F.linear(x, self.matrix.dense(x.dtype), self.bias)

    def _scaled_product(self, x: Tensor) -> Tensor:
        assert self.matrix is not None
        assert self.matrix.scales is not None
        if self.input_scale is None:
            unit = x.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / FP8_MAX
        else:
            unit = torch.full((len(x), 1), self.input_scale, device=x.device)
        codes, weights = e4m3_codes(x, unit), self.matrix.data.t()
        return torch._scaled_mm(
            codes, weights, unit, self.matrix.scales.t(), self.bias, out_dtype=x.dtype
        )


def _packed_product(x: Tensor, weight: Tensor) -> Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    return out


def _int8_product(x: Tensor, weight: Tensor) -> Tensor:
    ones = torch.ones(len(weight), dtype=x.dtype)
    out: Tensor = torch.ops.aten._weight_int8pack_mm(x, weight.to(torch.int8), ones)
    return out


@cache
def _works(product: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """True if a product with a bfloat16 weight works here and equals a plain one."""
    weight = torch.arange(64 * 32).remainder(7).sub(3).view(64, 32).to(torch.bfloat16)
    x = torch.arange(3 * 32).remainder(5).sub(2).view(3, 32).to(torch.bfloat16)
    try:
        return torch.equal(product(x, weight), F.linear(x, weight))
    except (RuntimeError, AttributeError, TypeError):
        return False
