"""The blocks of one device, and of the host memory that sequences are swapped to."""

from __future__ import annotations

import numpy as np

from pigou.kv import block_pool_kernels as kernels
from pigou.kv.block_pool_kernels import PoolArrays
from pigou.kv.integrity import (
    IntegrityError,
    check_forest,
    check_queue,
    check_references,
    check_table,
)
from pigou.request import BlockHashes, Ints

#: Slots of the hash table for each block, at least. Most searches end where they begin.
_SLOTS_PER_BLOCK = 4


class BlockPool:
    """Blocks 0 to n - 1, each free or referred to, each cached under a hash or not.

    A block that is cached and free can still be hit, and counts as free. Cached blocks are evicted
    leaf first, and least recently used first: a sequence that ends appends its blocks to the free
    queue from its tail to its head, and a hit takes blocks out of the queue.

    Arrays are described in `pigou.kv.block_pool_kernels`; `PrefixCache` works on the same ones.

    Example:
        pool = BlockPool(8)
        table = np.empty(3, dtype=np.int32)
        pool.allocate(table)  # one reference to each of three blocks
        assert pool.free == 5
    """

    def __init__(self, blocks: int) -> None:
        """Make a pool of `blocks` free blocks, handed out from 0 on at first."""
        self.blocks = blocks
        self.meta: Ints = np.full((blocks + 1, kernels.META_COLUMNS), -1, dtype=np.int32)
        self.meta[:, kernels.REFS] = 0
        ids = np.arange(blocks + 1, dtype=np.int32)
        self.meta[:, kernels.PREV] = np.roll(ids, 1)
        self.meta[:, kernels.NEXT] = np.roll(ids, -1)
        self.keys: BlockHashes = np.zeros((blocks, 2), dtype=np.uint64)
        size = 1 << (_SLOTS_PER_BLOCK * blocks - 1).bit_length()
        self.slots: Ints = np.full(size, -1, dtype=np.int32)
        self.counts = np.array([blocks, 0, 0, 0], dtype=np.int64)
        #: Where kernels write the hashes that they removed, until they are copied.
        self.removed: BlockHashes = np.zeros((blocks, 2), dtype=np.uint64)
        #: All of these, as kernels take them.
        self.arrays: PoolArrays = (self.meta, self.keys, self.slots, self.counts, self.removed)

    @property
    def free(self) -> int:
        """Blocks that nobody refers to."""
        return self.counts.item(kernels.FREE)

    @property
    def cached(self) -> int:
        """Blocks that can be hit, free or not."""
        return self.counts.item(kernels.CACHED)

    def refs(self, blocks: Ints) -> Ints:
        """Return the reference counts of `blocks`, shape (n,)."""
        counts: Ints = self.meta[blocks, kernels.REFS]
        return counts

    def allocate(self, out: Ints) -> BlockHashes:
        """Fill `out` with the blocks that are next in the free queue, one reference each.

        Args:
            out: takes their ids, shape (n,), with n at most `free`.

        Returns:
            Hashes that can no longer be hit, in order, shape (m, 2).
        """
        assert len(out) <= self.counts[kernels.FREE], "more blocks than are free"
        count = kernels.allocate(self.meta, self.keys, self.counts, out, self.removed)
        return self._removed(count)

    def peek(self, count: int) -> Ints:
        """Return which `count` blocks `allocate` will hand out next, and leave them there."""
        assert count <= self.counts[kernels.FREE], "more blocks than are free"
        out = np.empty(count, dtype=np.int32)
        kernels.peek(self.meta, count, out)
        return out

    def claim(self, blocks: Ints) -> BlockHashes:
        """Take these free blocks, wherever in the queue they are; return as `allocate` does."""
        count = kernels.claim(self.meta, self.keys, self.counts, blocks, self.removed)
        return self._removed(count)

    def forget(self, table: Ints, start: int, stop: int) -> BlockHashes:
        """Forget the hashes of `table[start:stop]`, which will hold something else.

        Returns:
            Hashes that can no longer be hit, descendants first, shape (m, 2).
        """
        count = kernels.forget(self.meta, self.keys, self.counts, table, start, stop, self.removed)
        return self._removed(count)

    def _removed(self, count: int) -> BlockHashes:
        return self.removed[:count].copy() if count else self.removed[:0]

    def take(self, blocks: Ints, out: Ints) -> None:
        """Refer to cached `blocks` once more, and write their ids to `out`, both shape (n,)."""
        kernels.take(self.meta, self.counts, blocks, out)

    def release(
        self, table: Ints, start: int, stop: int, hashes: BlockHashes, duplicates: bool = False
    ) -> int:
        """Drop one reference of each of `table[start:stop]`, the last block first.

        Args:
            table: block ids of one sequence, from its first block on.
            start: first index to drop.
            stop: one past the last.
            hashes: those of the sequence that are known, shape (known, 2).
            duplicates: whether some block of the sequence has its hash cached elsewhere.

        Returns:
            How many blocks became free.
        """
        return kernels.release(
            self.meta, self.keys, self.slots, self.counts, table, start, stop, hashes, duplicates
        )

    def release_chain(self, table: Ints) -> int:
        """Drop one reference of each cached block of a chain, whose tail is handed out next.

        The tail is what nobody else refers to, and on which nothing else stands. The rest joins the
        end of the queue, as by `release`.

        Args:
            table: block ids from the chain's beginning on, shape (n,).

        Returns:
            How many blocks became free.
        """
        return kernels.release_chain(self.meta, self.counts, table)

    def check(self, references: Ints) -> None:
        """Check every law of the pool.

        Args:
            references: how often each block ought to be referred to, shape (blocks,).

        Raises:
            IntegrityError: names the first law that does not hold, and where.
        """
        check_references(self.meta, self.counts, references)
        check_queue(self.meta, self.counts)
        check_table(self.keys, self.slots, self.counts)
        check_forest(self.meta, self.keys)


class HostPool:
    """Blocks 0 to n - 1 of host memory, each free or the property of one preempted sequence."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._stack: Ints = np.arange(blocks - 1, -1, -1, dtype=np.int32)
        self.free = blocks

    def allocate(self, count: int) -> Ints:
        """Take `count` blocks, at most `free`; return their ids, shape (count,)."""
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
