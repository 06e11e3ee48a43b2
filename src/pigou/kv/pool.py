"""The blocks of one device: reference counts, and the queue of free ones."""

from __future__ import annotations

import numpy as np

from pigou.kv import kernels, queue_kernels
from pigou.kv.integrity import check_forest, check_queue, check_references, check_table
from pigou.request import BlockHashes, Ints

#: What there is least of a table of hashes: slots per block. Most searches end where they begin.
_SLOTS_PER_BLOCK = 4


class BlockPool:
    """Blocks 0 to n - 1, each free or referred to, each cached under a hash or not.

    A block that is cached and free can still be hit, and counts as free. Arrays are described
    in `pigou.kv.kernels`; `pigou.kv.prefix` works on the same ones.
    """

    def __init__(self, blocks: int) -> None:
        """Make a pool of `blocks` free blocks, handed out from 0 on at first."""
        self.blocks = blocks
        self.meta: Ints = np.full((blocks + 1, kernels.WIDTH), -1, dtype=np.int32)
        self.meta[:, kernels.REFS] = 0
        ring = np.arange(-1, blocks, dtype=np.int32)
        self.meta[:, kernels.PREV] = ring
        self.meta[:, kernels.NEXT] = ring + 2
        self.meta[0, kernels.PREV] = blocks
        self.meta[blocks, kernels.NEXT] = 0
        self.keys: BlockHashes = np.zeros((blocks, 2), dtype=np.uint64)
        size = 1 << (_SLOTS_PER_BLOCK * blocks - 1).bit_length()
        self.slots: Ints = np.full(size, -1, dtype=np.int32)
        self.counts = np.array([blocks, 0, 0, 0], dtype=np.int64)
        #: Where kernels write the hashes that died, until they are copied.
        self.removed: BlockHashes = np.zeros((blocks, 2), dtype=np.uint64)

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
            out: where their ids go, shape (n,), with n at most `free`.

        Returns:
            Hashes that can no longer be hit, in order, shape (m, 2).
        """
        assert len(out) <= self.counts[kernels.FREE], "more blocks than are free"
        count = kernels.allocate(self.meta, self.keys, self.counts, out, self.removed)
        return self.removed[:count].copy() if count else self.removed[:0]

    def peek(self, count: int) -> Ints:
        """Return which `count` blocks `allocate` will hand out next, and leave them there."""
        assert count <= self.counts[kernels.FREE], "more blocks than are free"
        out = np.empty(count, dtype=np.int32)
        kernels.peek(self.meta, count, out)
        return out

    def claim(self, blocks: Ints) -> BlockHashes:
        """Take these free blocks, wherever in the queue they are; returns as `allocate` does."""
        count = kernels.claim(self.meta, self.keys, self.counts, blocks, self.removed)
        return self.removed[:count].copy() if count else self.removed[:0]

    def forget(self, table: Ints, start: int, stop: int) -> BlockHashes:
        """Forget the hashes of `table[start:stop]`, which will hold something else.

        Returns:
            Hashes that can no longer be hit, those of what stands on them first, shape (m, 2).
        """
        count = kernels.forget(self.meta, self.keys, self.counts, table, start, stop, self.removed)
        return self.removed[:count].copy() if count else self.removed[:0]

    def take(self, blocks: Ints, out: Ints) -> None:
        """Refer to cached `blocks` once more, and write their ids to `out`, both shape (n,)."""
        kernels.take(self.meta, self.counts, blocks, out)

    def release(
        self, table: Ints, start: int, stop: int, hashes: BlockHashes, twins: bool = False
    ) -> int:
        """Drop one reference of each of `table[start:stop]`, the last block first.

        Args:
            table: block ids of one sequence, from its first block on.
            start: first index to drop.
            stop: one past the last.
            hashes: those of the sequence that are known, shape (known, 2).
            twins: whether some block of the sequence has its hash cached elsewhere.

        Returns:
            How many blocks became free.
        """
        return kernels.release(
            self.meta, self.keys, self.slots, self.counts, table, start, stop, hashes, twins
        )

    def yield_up(self, table: Ints) -> int:
        """Drop one reference of each cached block of a chain, whose tail is to be handed out next.

        Of the tail, that is, what nobody else refers to, and on which nothing else stands; the
        rest joins the end of the queue, as by `release`.

        Args:
            table: block ids from the chain's beginning on, shape (n,).

        Returns:
            How many blocks became free.
        """
        return queue_kernels.yield_up(self.meta, self.counts, table)

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
