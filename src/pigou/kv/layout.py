"""The layout of KV blocks: what two caches must have in common to exchange bytes."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Blocks as bytes, shape (blocks, block_bytes).
Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one KV block lies in memory.

    Attributes:
        model: name of the model.
        digest: of the weights or of what identifies them (hexadecimal).
        dtype: of keys and values, by torch's name without `torch.` (`float32`, `bfloat16`).
        block_size: tokens in a block.
        layers: layers that have a KV cache.
        kv_heads: key-value heads of a layer.
        head_dim: numbers in a key or a value of one head.
        block_bytes: bytes of a block, keys and values of all layers.
    """

    model: str
    digest: str
    dtype: str
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    block_bytes: int

    def __post_init__(self) -> None:
        """Refuse sizes that no block has."""
        for name in ("block_size", "layers", "kv_heads", "head_dim", "block_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def fingerprint(self) -> str:
        """Digest over every field, 32 hexadecimal digits; equal layouts have equal fingerprints."""
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=16).hexdigest()

    def differences(self, other: KVLayout) -> list[str]:
        """Fields in which the two differ, each as `name: mine / theirs`; empty when equal."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name}: {mine!r} / {theirs!r}" for name, mine, theirs in pairs if mine != theirs]
