"""Weights of quantised checkpoints: FP8, compressed-tensors, ModelOpt, GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pigou.models import ModelError
from pigou.models.quantisation import Quantisation
from pigou.runtime.models.linear import FP8, WeightMatrix

#: Tensors that no product needs. KV is scaled as it comes; static scales are of FP8 inputs alone.
UNUSED = (
    ".input_scale", ".activation_scale", ".input_zero_point", ".k_scale", ".v_scale", ".g_idx",
    ".weight_shape", ".output_scale", ".weight_g_idx",
)  # fmt: skip
#: Places of an AWQ word's 4-bit numbers, the lowest first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SCALES = ("weight_scale_inv", "weight_scale", "scales")
_WEIGHTS = ("weight", "weight_packed", "qweight")


def read_matrix(
    find: Callable[[str], Tensor | None], module: str, shape: tuple[int, ...],
    quantisation: Quantisation,
) -> WeightMatrix:  # fmt: skip
    """Return a quantised module's weight; raises ModelError if its tensors do not fit.

    Integers of 4 bits become int8 less their zeros, exactly. `find` returns None if missing.
    """
    parts = {name: find(f"{module}.{name}") for name in (*_SCALES, *_WEIGHTS)}
    scales = next((parts[name] for name in _SCALES if parts[name] is not None), None)
    weight = next((parts[name] for name in _WEIGHTS if parts[name] is not None), None)
    if scales is None or weight is None:
        missing = "scale" if scales is None else "weight"
        raise ModelError(f"{module!r} has no {missing}; {quantisation.where} says it is quantised")
    try:
        matrix = _read(find, module, shape, quantisation, weight, scales.float())
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
        raise ModelError(f"tensors of {module!r} do not fit: {error}") from None
    if tuple(matrix.data.shape) != shape:
        raise ModelError(f"{module!r} has shape {tuple(matrix.data.shape)}, not {shape}")
    compute = quantisation.format_of([module.removeprefix("model.")]).compute
    static = find(f"{module}.input_scale")
    if (
        static is None
        or compute != "fp8"
        or quantisation.keys.get("activation_scheme") == "dynamic"
    ):
        return matrix
    if not (0 < (scale := float(static.max())) < float("inf")):
        raise ModelError(f"{module}.input_scale is {scale}; it must be positive and finite")
    return replace(matrix, input_scale=scale)


def _read(
    find: Callable[[str], Tensor | None], module: str, shape: tuple[int, ...],
    quantisation: Quantisation, weight: Tensor, scales: Tensor,
) -> WeightMatrix:  # fmt: skip
    (outputs, inputs), method = shape, quantisation.method
    zeros = find(f"{module}.weight_zero_point")
    packed = weight.dtype is torch.int32
    if packed and method in ("gptq", "awq"):
        by_inputs, zeros, scales = method == "gptq", find(f"{module}.qzeros"), scales.T
        bits = 32 * weight.numel() // (outputs * inputs)
        weight = _unpack(weight, bits, 0 if by_inputs else 1, None if by_inputs else _AWQ_ORDER).T
        if zeros is not None:
            zeros = _unpack(zeros, bits, 1, None if by_inputs else _AWQ_ORDER).T
            zeros = zeros + (by_inputs and quantisation.keys.get("checkpoint_format") != "gptq_v2")
    elif packed:
        bits = 32 * weight.numel() // (outputs * (-(-inputs // 8) * 8))
        weight = _unpack(weight, bits, 1)[:, :inputs]
        zeros = None if zeros is None else _unpack(zeros, bits, 0)[:outputs]
    elif weight.dtype not in (FP8, torch.int8):
        raise ModelError(f"{module!r} has dtype {weight.dtype}; known are FP8 E4M3 and int8")
    if packed and zeros is None:
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    block = quantisation.keys.get("weight_block_size")
    if scales.ndim == 2 and block:
        scales = scales.repeat_interleave(block[0], 0)[:outputs]
    scales = scales.reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1)
    scales = scales.expand(outputs, -1)
    group = 0 if scales.shape[1] == 1 else block[1] if block else inputs // scales.shape[1]
    for name in ("g_idx", "weight_g_idx"):
        order = find(f"{module}.{name}")
        if order is not None and (order != torch.arange(inputs) // (group or inputs)).any():
            shift = 0 if zeros is None else zeros.reshape(-1, scales.shape[1])[:, order.long()]
            return WeightMatrix((weight.float() - shift) * scales[:, order.long()])
    if zeros is None:
        return WeightMatrix(weight.contiguous(), scales.contiguous(), group)
    zeros = zeros.reshape(-1, scales.shape[1]).repeat_interleave(group or inputs, 1)
    codes = weight.short() - zeros[:, :inputs].short()
    if codes.abs().max() > 127:
        spread = scales.repeat_interleave(group or inputs, 1)[:, :inputs]
        return WeightMatrix(codes.float() * spread)
    return WeightMatrix(codes.to(torch.int8).contiguous(), scales.contiguous(), group)


def _unpack(words: Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the unsigned numbers of `bits` in int32 words along an axis, the lowest first."""
    numbers = [(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    if order is not None:
        numbers = [numbers[order.index(column)] for column in range(len(numbers))]
    return torch.stack(numbers, axis + 1).flatten(axis, axis + 1).short()
