"""The paged KV cache: device blocks, host blocks for swapping, and moves between them."""

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

#: Indices of the third axis of `KVCache.data`.
KEYS, VALUES = 0, 1
#: Columns of moves (of blocks or entries).
SOURCE, TARGET = 0, 1

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_layout(
    config: ModelConfig, *, model: str, digest: str, dtype: torch.dtype, block_size: int
) -> KVLayout:
    """Describe a model's blocks; each holds keys and values of all layers."""
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
    """KV blocks in one tensor; a block is contiguous over all layers.

    `data` is (blocks, layers, 2, kv_heads, head_dim * block_size). Keys are dimension-major and
    values token-major, so both attention products read contiguously.
    """

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        device: torch.device,
        host_blocks: int = 0,
        memory: memoryview | None = None,
        heads: range | None = None,
    ) -> None:
        """Allocate an empty cache; raises ValueError if `memory` is unsuitable.

        Ranks that share `memory` see their `heads` alone in `data`, and whole blocks elsewhere.
        """
        self._layout = layout
        shape = (blocks, layout.layers, 2, layout.kv_heads, layout.head_dim * layout.block_size)
        raw = _bytes(blocks * layout.block_bytes, device, memory)
        self.data: Tensor = raw.view(getattr(torch, layout.dtype)).view(shape)
        if heads is not None:
            self.data = self.data[:, :, :, heads.start : heads.stop]
        self._raw = raw.view(blocks, layout.block_bytes)
        self.host = _host(host_blocks, layout.block_bytes, device)
        self._copies = DeviceCopies(self._raw) if device.type == "cuda" else None

    @property
    def layout(self) -> KVLayout:
        """Memory layout of a block."""
        return self._layout

    @property
    def blocks(self) -> int:
        """Device blocks."""
        return self.data.shape[0]

    def keys(self, layer: int) -> Tensor:
        """Return a view of a layer's keys, (blocks, kv_heads, head_dim, block_size)."""
        layout = self._layout
        return self._split(self.data[:, layer, KEYS], layout.head_dim, layout.block_size)

    def values(self, layer: int) -> Tensor:
        """Return a view of a layer's values, (blocks, kv_heads, block_size, head_dim)."""
        layout = self._layout
        return self._split(self.data[:, layer, VALUES], layout.block_size, layout.head_dim)

    @staticmethod
    def _split(part: Tensor, rows: int, columns: int) -> Tensor:
        return part.view(*part.shape[:-1], rows, columns)

    def as_bytes(self) -> Bytes | None:
        """Return a view of all blocks, (blocks, block_bytes); None off the CPU."""
        return self._raw.numpy() if self._raw.device.type == "cpu" else None

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks `ids` out, in order, shape (n, block_bytes)."""
        if self._copies is not None:
            return self._copies.read(np.asarray(ids))
        return np.asarray(self._raw[_index(ids, self._raw.device)].numpy())

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, (n, block_bytes), into blocks `ids`."""
        if self._copies is not None:
            self._copies.write(np.asarray(ids), data)
            return
        source = torch.from_numpy(np.require(data, requirements=["C", "W"]))
        self._raw[_index(ids, self._raw.device)] = source

    def move(self, swap_out: Ints, copies: Ints, swap_in: Ints) -> None:
        """Apply swap-outs, copies, swap-ins, each (n, 2), reading a list's sources first."""
        move_blocks(self._raw, self.host, swap_out, copies, swap_in)


def move_blocks(raw: Tensor, host: Tensor, swap_out: Ints, copies: Ints, swap_in: Ints) -> None:
    """Apply a plan's moves to rows of `raw` and `host`; asynchronous, in stream order, on CUDA."""
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
    """Enqueue a plan's moves, block by block, without synchronizing."""
    for source, target in swap_out.tolist():
        host[target].copy_(raw[source], non_blocking=True)
    if len(copies):
        raw[_index(copies[:, TARGET], raw.device)] = raw[_index(copies[:, SOURCE], raw.device)]
    for source, target in swap_in.tolist():
        raw[target].copy_(host[source], non_blocking=True)


def _bytes(size: int, device: torch.device, memory: memoryview | None) -> Tensor:
    if memory is None:
        if device.type == "cpu":  # numpy zeroes lazily, by fresh pages
            return torch.from_numpy(np.zeros(size, dtype=np.uint8))
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if device.type != "cpu":
        raise ValueError(f"memory was given for a cache on {device}; only a CPU can use it")
    if memory.nbytes < size or memory.readonly:
        raise ValueError(f"memory has {memory.nbytes} bytes; it must have {size}, writable")
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def _host(blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda" and blocks:
        return torch.zeros((blocks, block_bytes), dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.zeros((blocks, block_bytes), dtype=np.uint8))


def _index(ids: Ints, device: torch.device) -> Tensor:
    return upload(np.asarray(ids, dtype=np.int64), device)
