"""The paged KV cache: device blocks, host blocks for swapping, and moves between them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pigou.kv.block import KV_BYTES, Bytes, KVLayout, head_bytes
from pigou.request import Ints
from pigou.runtime.models.model_config import ModelConfig
from pigou.runtime.tensor_io import DeviceCopies, upload

#: Indices of the third axis of `KVCache.data`.
KEYS, VALUES = 0, 1
#: Columns of moves (of blocks or entries).
SOURCE, TARGET = 0, 1

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Types of quantised numbers by `KVLayout.dtype`; its names by option.
_STORED = {"int8_per_token_head": torch.int8, "fp8_e4m3": torch.uint8}
FORMATS = {"bf16": "bfloat16", "fp32": "float32"} | {name: name for name in _STORED}


def make_layout(
    config: ModelConfig, *, model: str, digest: str, dtype: torch.dtype, block_size: int,
    kv_dtype: str = "auto",
) -> KVLayout:  # fmt: skip
    """Describe a model's blocks; each holds keys and values of all layers."""
    name = str(dtype).removeprefix("torch.") if kv_dtype == "auto" else FORMATS[kv_dtype]
    parts = 1 if any(layer.latent for layer in config.attention) else 2
    heads = parts * config.kv_heads * config.layers
    return KVLayout(
        model=model, digest=digest, dtype=name, block_size=block_size, layers=config.layers,
        kv_heads=config.kv_heads, head_dim=config.head_dim,
        block_bytes=heads * head_bytes(name, config.head_dim, block_size), parts=parts,
    )  # fmt: skip


class KVCache:
    """KV blocks in one tensor; a block is contiguous over all layers.

    `data` is (blocks, layers, parts, kv_heads, head_dim * block_size); latents have keys alone.
    Keys are dimension-major and values token-major, so both attention products read contiguously.
    In int8_per_token_head, the bytes of `block_size` scales (bfloat16) follow in the last axis.
    FP8 is stored as uint8.
    """

    def __init__(
        self, layout: KVLayout, blocks: int, device: torch.device, host_blocks: int = 0,
        memory: memoryview | None = None, heads: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Allocate an empty cache; raises ValueError if `memory` is unsuitable.

        Ranks that share `memory` see their `heads` alone in `data`, and whole blocks elsewhere.
        `dtype` is that of keys and values in use, by default the stored one.
        """
        self.layout = layout
        stored = _STORED.get(layout.dtype) or getattr(torch, layout.dtype)
        raw = _bytes(blocks * layout.block_bytes, device, memory)
        self.data: Tensor = raw.view(stored).view(
            blocks, layout.layers, layout.parts, layout.kv_heads, -1
        )
        self.dtype: torch.dtype = dtype or stored
        self.quantised = layout.dtype in _STORED
        if heads is not None:
            self.data = self.data[:, :, :, heads.start : heads.stop]
        self._raw = raw.view(blocks, layout.block_bytes)
        self.host = _host(host_blocks, layout.block_bytes, device)
        self._copies = DeviceCopies(self._raw) if device.type == "cuda" else None

    @property
    def blocks(self) -> int:
        """Device blocks."""
        return self.data.shape[0]

    def keys(self, layer: int) -> Tensor:
        """Return a view of a layer's keys, (blocks, kv_heads, head_dim, block_size)."""
        return self.split(self.data[:, layer : layer + 1])[KEYS][:, 0]

    def values(self, layer: int) -> Tensor:
        """Return a view of a layer's values, (blocks, kv_heads, block_size, head_dim)."""
        return self.split(self.data[:, layer : layer + 1])[VALUES][:, 0]

    def split(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of keys and values in `data`, as `keys` and `values`, of all layers."""
        width, size = self.layout.head_dim, self.layout.block_size
        own = data[..., : width * size]
        keys, values = own[:, :, KEYS], own[:, :, VALUES]
        return keys.unflatten(-1, (width, size)), values.unflatten(-1, (size, width))

    def scales(self, part: Tensor) -> Tensor:
        """Return a view of the scales in `data` or part of it, (..., block_size); 0 for none."""
        own = self.layout.head_dim * self.layout.block_size
        if not KV_BYTES.get(self.layout.dtype, (0, 0))[1]:
            return torch.empty((0,) * part.ndim, dtype=torch.bfloat16, device=part.device)
        return part[..., own:].view(torch.bfloat16)

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return stored numbers of heads (..., head_dim), and their scales (...), if any."""
        if self.data.dtype is torch.uint8:
            codes = numbers.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8), None
        if self.data.dtype is not torch.int8:
            return numbers.to(self.data.dtype), None
        scales = (numbers.abs().amax(-1).float() / 127.0).to(torch.bfloat16)
        units = torch.where(scales > 0, 1.0 / scales.float(), 0.0).unsqueeze(-1)
        return (numbers.float() * units).round_().clamp_(-127, 127).to(torch.int8), scales

    def decode(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """Return numbers in `dtype`; `scales`, if any, broadcast."""
        if codes.dtype is torch.uint8:
            codes = codes.view(torch.float8_e4m3fn)
        if codes.dtype is not torch.int8 or scales is None:
            return codes.to(self.dtype)
        return (codes.float() * scales.float()).to(self.dtype)

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
