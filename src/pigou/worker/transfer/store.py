"""BlockStore: the KV blocks of a worker, seen as bytes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pigou.kv.layout import Bytes, KVLayout
from pigou.request import Ints


class BlockStore(Protocol):
    """What a transfer reads and writes; called from several of its threads at once."""

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


class HostStore:
    """Blocks in an array of host memory."""

    def __init__(self, layout: KVLayout, data: Bytes) -> None:
        """Wrap `data`, C-contiguous, shape (blocks, layout.block_bytes).

        Raises:
            ValueError: the array does not have that shape or is not contiguous.
        """
        if data.ndim != 2 or data.shape[1] != layout.block_bytes or not data.flags.c_contiguous:
            raise ValueError(
                f"data has shape {data.shape}; give a contiguous (blocks, {layout.block_bytes})"
            )
        self._layout = layout
        self._data = data

    @property
    def layout(self) -> KVLayout:
        """How a block lies in memory."""
        return self._layout

    def as_bytes(self) -> Bytes:
        """All blocks without a copy, shape (blocks, block_bytes)."""
        return self._data

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks out, shape (n, block_bytes)."""
        return np.asarray(self._data[ids])

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, shape (n, block_bytes), into the blocks `ids`."""
        self._data[ids] = data
