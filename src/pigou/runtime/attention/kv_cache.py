"""The paged KV cache: device blocks, host blocks to swap to, and the moves between them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.kv.block import KVLayout
from pigou.request import Ints
from pigou.runtime.models.model_config import ModelConfig
from pigou.runtime.tensor_io import DeviceCopies, upload

#: Blocks as bytes, shape (blocks, block_bytes).
Bytes: TypeAlias = NDArray[np.uint8]

#: Halves of a layer's block: the third axis of `KVCache.data`.
KEYS, VALUES = 0, 1
#: Columns of moves: of blocks in a plan, or of entries in a row.
SOURCE, TARGET = 0, 1

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_layout(
    config: ModelConfig, *, model: str, digest: str, dtype: torch.dtype, block_size: int
) -> KVLayout:
    """Describe the blocks of a model; a block holds keys and values of all its layers."""
    elements = 2 * config.kv_heads * config.head_dim
    return KVLayout(
        model=model,
        digest=digest,
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_bytes=config.layers * elements * block_size * dtype.itemsize,
    )


class KVCache:
    """KV blocks in one tensor, a block being one contiguous run of bytes over all layers.

    A head's keys are stored dimension by dimension and its values token by token, so that both
    products of attention run along contiguous memory.

    Attributes:
        data: shape (blocks, layers, 2, kv_heads, head_dim * block_size).
        host: blocks of host memory to swap to, as bytes, shape (host_blocks, block_bytes).
    """

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        device: torch.device,
        host_blocks: int = 0,
        memory: memoryview | None = None,
    ) -> None:
        """Make an empty cache.

        Raises ValueError: the memory is too small, read-only, or offered to another device.
        """
        self._layout = layout
        shape = (blocks, layout.layers, 2, layout.kv_heads, layout.head_dim * layout.block_size)
        raw = _bytes(blocks * layout.block_bytes, device, memory)
        self.data: Tensor = raw.view(getattr(torch, layout.dtype)).view(shape)
        self._raw = raw.view(blocks, layout.block_bytes)
        self.host = _host(host_blocks, layout.block_bytes, device)
        self._copies = DeviceCopies(self._raw) if device.type == "cuda" else None

    @property
    def layout(self) -> KVLayout:
        """How a block lies in memory."""
        return self._layout

    @property
    def blocks(self) -> int:
        """Blocks on the device."""
        return self.data.shape[0]

    def keys(self, layer: int) -> Tensor:
        """Return the keys of a layer, a view, shape (blocks, kv_heads, head_dim, block_size)."""
        layout = self._layout
        return self._split(self.data[:, layer, KEYS], layout.head_dim, layout.block_size)

    def values(self, layer: int) -> Tensor:
        """Return the values of a layer, a view, shape (blocks, kv_heads, block_size, head_dim)."""
        layout = self._layout
        return self._split(self.data[:, layer, VALUES], layout.block_size, layout.head_dim)

    @staticmethod
    def _split(part: Tensor, rows: int, columns: int) -> Tensor:
        return part.view(*part.shape[:-1], rows, columns)

    def as_bytes(self) -> Bytes | None:
        """Return all blocks without a copy, shape (blocks, block_bytes); None off the CPU."""
        return self._raw.numpy() if self._raw.device.type == "cpu" else None

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks out, shape (n, block_bytes), in the order of `ids`."""
        if self._copies is not None:
            return self._copies.read(np.asarray(ids))
        return np.asarray(self._raw[_index(ids, self._raw.device)].numpy())

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, shape (n, block_bytes), into the blocks `ids`."""
        if self._copies is not None:
            self._copies.write(np.asarray(ids), data)
            return
        source = torch.from_numpy(np.require(data, requirements=["C", "W"]))
        self._raw[_index(ids, self._raw.device)] = source

    def move(self, swap_out: Ints, copies: Ints, swap_in: Ints) -> None:
        """Do a plan's moves, in this order; each of shape (n, 2), from and to.

        Device to host, device to device, host to device. A list's sources are all read before
        its targets are written.
        """
        move_blocks(self._raw, self.host, swap_out, copies, swap_in)


def move_blocks(raw: Tensor, host: Tensor, swap_out: Ints, copies: Ints, swap_in: Ints) -> None:
    """Do a plan's moves on rows of `raw`, on the device, and of `host`, alike in shape.

    On CUDA each block is one copy from or to pinned memory, queued behind the steps before: the
    host waits for none, and the order of the queue is the order of the moves.
    """
    cpu = host.device
    if raw.device.type == "cuda":
        queue_moves(raw, host, swap_out, copies, swap_in)
        return
    if len(swap_out):
        rows = raw[_index(swap_out[:, SOURCE], raw.device)]
        host[_index(swap_out[:, TARGET], cpu)] = rows.to(cpu)
    if len(copies):
        raw[_index(copies[:, TARGET], raw.device)] = raw[_index(copies[:, SOURCE], raw.device)]
    if len(swap_in):
        rows = host[_index(swap_in[:, SOURCE], cpu)]
        raw[_index(swap_in[:, TARGET], raw.device)] = rows.to(raw.device)


def queue_moves(raw: Tensor, host: Tensor, swap_out: Ints, copies: Ints, swap_in: Ints) -> None:
    """Queue a plan's moves, block by block, without waiting for any."""
    for source, target in swap_out.tolist():
        host[target].copy_(raw[source], non_blocking=True)
    if len(copies):
        raw[_index(copies[:, TARGET], raw.device)] = raw[_index(copies[:, SOURCE], raw.device)]
    for source, target in swap_in.tolist():
        raw[target].copy_(host[source], non_blocking=True)


def _bytes(size: int, device: torch.device, memory: memoryview | None) -> Tensor:
    if memory is None:
        if device.type == "cpu":  # numpy leaves the zeroing to the kernel's fresh pages
            return torch.from_numpy(np.zeros(size, dtype=np.uint8))
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if device.type != "cpu":
        raise ValueError(f"memory was given for a cache on {device}; only a CPU can use it")
    if memory.nbytes < size or memory.readonly:
        raise ValueError(f"memory has {memory.nbytes} bytes; it must have {size}, writable")
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def _host(blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    """Return zeroed host memory, pinned where a CUDA device copies from and to it."""
    if device.type == "cuda" and blocks:
        return torch.zeros((blocks, block_bytes), dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.zeros((blocks, block_bytes), dtype=np.uint8))


def _index(ids: Ints, device: torch.device) -> Tensor:
    return upload(np.asarray(ids, dtype=np.int64), device)
