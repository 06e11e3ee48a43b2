"""Blocks of host memory that preempted sequences are swapped to."""

from __future__ import annotations

import numpy as np

from pigou.kv.integrity import IntegrityError
from pigou.request import Ints


class HostPool:
    """Blocks 0 to n - 1 of host memory, each free or the property of one sequence."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._stack: Ints = np.arange(blocks - 1, -1, -1, dtype=np.int32)
        self.free = blocks

    def allocate(self, count: int) -> Ints:
        """Take `count` blocks, at most `free`; returns their ids, shape (count,)."""
        assert count <= self.free, "more host blocks than are free"
        taken = self._stack[self.free - count : self.free][::-1].copy()
        self.free -= count
        return taken

    def release(self, blocks: Ints) -> None:
        """Give blocks back, shape (n,)."""
        self._stack[self.free : self.free + len(blocks)] = blocks[::-1]
        self.free += len(blocks)

    def check(self, owned: Ints) -> None:
        """Check that free and owned blocks together are all, each once.

        Args:
            owned: ids of the blocks that sequences own, shape (n,).

        Raises:
            IntegrityError: names the blocks that are lost or there twice.
        """
        times = np.bincount(self._stack[: self.free], minlength=self.blocks)
        times += np.bincount(owned, minlength=self.blocks)
        if len(times) != self.blocks or (times != 1).any():
            wrong = np.flatnonzero(times != 1)[:8].tolist()
            raise IntegrityError(f"free and swapped host blocks are not all, once: {wrong}")
