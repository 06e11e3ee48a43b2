"""The measured memory of a worker: the six terms of `pigou vram`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import torch

Value = TypeVar("Value")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: Value for `clear_refs` that resets the peak RSS.
_CLEAR_PEAK = "5"


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device, in bytes."""

    device: str  # "cpu" or "cuda:N"
    memory: int
    weights: int  # tensors of the model and of its draft model
    cache: int  # KV blocks of both
    activations: int  # peak of the startup steps, above what stays
    adapters: int  # slots of LoRA adapters
    runtime: int  # libraries and context that are resident
    graphs: int  # CUDA graphs: none
    scratch: int


def measured(
    run: Callable[[], Value], device: torch.device, weights: int, cache: int, adapters: int = 0
) -> tuple[Value, MemoryReport]:
    """Run the startup loads; return their result and the measured memory."""
    take = _on_cuda if device.type == "cuda" else _on_cpu
    result, report = take(run, device, weights, cache)
    return result, msgspec.structs.replace(report, weights=weights - adapters, adapters=adapters)


def _on_cuda(
    run: Callable[[], Value], device: torch.device, weights: int, cache: int
) -> tuple[Value, MemoryReport]:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return result, MemoryReport(
        device=str(device), memory=total, weights=weights, cache=cache,
        activations=max(peak - before, 0), adapters=0, graphs=0,
        runtime=max(total - free - reserved, 0),
        scratch=max(reserved - weights - cache - max(peak - before, 0), 0),
    )  # fmt: skip


def _on_cpu(
    run: Callable[[], Value], device: torch.device, weights: int, cache: int
) -> tuple[Value, MemoryReport]:
    with suppress(OSError):  # else the peak covers the whole start
        _CLEAR.write_text(_CLEAR_PEAK)
    before = _resident("VmRSS")
    result = run()
    peak = _resident("VmHWM")
    files, heap = _resident("RssFile"), _resident("RssAnon")
    code = min(files, max(files + heap - weights, 0))
    return result, MemoryReport(
        device=str(device), memory=psutil.virtual_memory().total, weights=weights, cache=cache,
        activations=max(peak - before, 0), adapters=0, graphs=0, runtime=code,
        scratch=max(files + heap - weights - code, 0),
    )  # fmt: skip


def _resident(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def tensor_bytes(model: Any) -> int:
    """Return the bytes of a model's tensors, counting shared ones once."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(model, set()):
        if tensor.is_mkldnn:  # repacked: no accessible storage
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (list, tuple)):
        parts: Any = value
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, torch.nn.Module):
        own = (getattr(value, name, None) for name in ("product", "pigou_latents"))
        parts = [value._parameters, value._buffers, value._modules, *own]
    elif type(value).__module__.startswith("pigou."):
        slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        names = {*slots, *getattr(value, "__dict__", ())}
        parts = [getattr(value, name, None) for name in names]
    else:
        return
    for part in parts:
        yield from _tensors(part, seen)
