"""Transfers between host arrays and device tensors, without synchronizing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.kv.block import Bytes
from pigou.request import Ints


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device through pinned memory, without synchronizing; a view on CPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def stored(tensor: Tensor) -> NDArray[Any]:
    """View a CPU tensor as an array: float32 as is, bfloat16 as uint16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[np.generic] = tensor.numpy()
    return array


class DeviceCopies:
    """Copies blocks on a separate stream, after the work queued so far; thread-safe.

    Steps may overlap a copy, but must not use its blocks.
    """

    def __init__(self, raw: Tensor, cuda: Any = torch.cuda) -> None:
        """Use `raw`: device blocks as bytes, shape (blocks, block_bytes)."""
        self._raw = raw
        self._cuda = cuda
        self._stream = cuda.Stream(raw.device)

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks to pinned memory, shape (n, block_bytes)."""
        shape = (len(ids), self._raw.shape[1])
        host = torch.empty(shape, dtype=torch.uint8, pin_memory=self._raw.is_cuda)
        self._copy([(host[row], self._raw[block]) for row, block in enumerate(ids.tolist())])
        return np.asarray(host.numpy())

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, (n, block_bytes), into blocks `ids`."""
        host = torch.from_numpy(np.require(data, requirements=["C", "W"]))
        if self._raw.is_cuda and not host.is_pinned():
            host = host.pin_memory()
        self._copy([(self._raw[block], host[row]) for row, block in enumerate(ids.tolist())])

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._stream.wait_stream(self._cuda.default_stream(self._raw.device))
        with self._cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()


def rows_in_storage(tensor: Tensor, width: int) -> Bytes | DeviceCopies:
    """Access the storage that a tensor lies in as rows of `width` bytes."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    rows = raw[: len(raw) // width * width].view(-1, width)
    return DeviceCopies(rows) if rows.is_cuda else rows.numpy()
