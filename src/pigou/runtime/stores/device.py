"""Device: the blocks of the KV cache, as what a mover copies from and to."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pigou.kv import checksum
from pigou.kv.block import Bytes, KVLayout
from pigou.kv.checksum import Checksums
from pigou.request import Ints


class Blocks(Protocol):
    """A KV cache seen as bytes: `pigou.runtime.kv_cache.KVCache`, or an array of a test."""

    @property
    def layout(self) -> KVLayout:
        """How a block lies in memory."""
        ...

    def as_bytes(self) -> Bytes | None:
        """All blocks without a copy, shape (blocks, block_bytes); None if not in host memory."""
        ...

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks out, shape (n, block_bytes), in the order of `ids`."""
        ...

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, shape (n, block_bytes), into the blocks `ids`."""
        ...


def copy_out(blocks: Blocks, ids: Ints, arena: Bytes, rows: Ints) -> Checksums:
    """Copy the blocks `ids` into rows of an arena; returns checksums of what was copied.

    In host memory the blocks are read once, free of the GIL.
    """
    data = blocks.as_bytes()
    if data is not None:
        return checksum.copy(data, ids, arena, rows)
    arena[rows] = blocks.read(ids)
    return checksum.checksums_of(arena, rows)


def copy_in(blocks: Blocks, ids: Ints, arena: Bytes, rows: Ints) -> Checksums:
    """Copy rows of an arena into the blocks `ids`; returns checksums of what was copied."""
    data = blocks.as_bytes()
    if data is not None:
        return checksum.copy(arena, rows, data, ids)
    sums = checksum.checksums_of(arena, rows)
    blocks.write(ids, np.ascontiguousarray(arena[rows]))
    return sums


def make_arena(blocks: Blocks, rows: int) -> Bytes:
    """Allocate host memory for `rows` blocks, shape (rows, block_bytes).

    It is pinned where the blocks are not in host memory themselves.
    """
    shape = (rows, blocks.layout.block_bytes)
    if blocks.as_bytes() is not None:
        return np.zeros(shape, dtype=np.uint8)
    import torch  # not needed for blocks in host memory

    return np.asarray(torch.zeros(shape, dtype=torch.uint8, pin_memory=True).numpy())
