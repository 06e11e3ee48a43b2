"""Store: where blocks lie outside the device, and what all stores promise.

- **Never a wrong byte.** A block that `get` reports is, byte for byte, what was put under this key
  (as far as 64 bits of xxh3 tell). Whatever is missing, void, torn, altered or foreign is a miss;
  what should not have been so is one line in the log, and is then forgotten.
- **One layout.** A store is opened for the fingerprint of a layout (model, weights, dtype, block
  size, shape). Blocks of another one are never seen. Tenures are apart by their keys.
- **A hard cap.** `used_bytes` never exceeds `cap_bytes`. A store refuses what has no room, and
  evicts nothing by itself. Making room is the decider's task: `delete`, then `put`.
- **Blocks are immutable.** A key that is already there is kept, and counts as put.
- Batches: every method takes n blocks at once; a batch may succeed in part, and says which.
- Calls may come from several threads at once. A block that is being read is not overwritten.

Trouble with the medium as a whole (disk full or gone, server dead) raises `StoreError`.
`KVOffloader` turns that into refusals and misses, and tries again later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pigou.kv.block import Bytes
from pigou.kv.checksum import Checksums
from pigou.request import BlockHashes, Ints
from pigou.runtime.kv_offload.records import BlockRecords, Bools


class StoreError(Exception):
    """A store cannot do its work now; says why. Nothing was damaged."""


@dataclass(slots=True)
class StoreCounts:
    """What a store has seen since it was opened, in blocks."""

    hits: int = 0  # blocks that `get` returned
    misses: int = 0  # blocks that `get` did not return, for whatever reason
    corrupt: int = 0  # of the misses and of what was found at opening: torn or altered
    expired: int = 0  # blocks dropped because they were void
    written: int = 0  # blocks that `put` stored, without those that were there already
    refused: int = 0  # blocks that `put` had no room for
    deleted: int = 0  # blocks that `delete` removed


class Store(Protocol):
    """Blocks by their keys, outside the device."""

    counts: StoreCounts

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    @property
    def record_bytes(self) -> int:
        """Bytes of the cap that a block takes, a few more for many blocks together left aside."""
        ...

    @property
    def cap_bytes(self) -> int:
        """What `used_bytes` never exceeds."""
        ...

    @property
    def capacity(self) -> int:
        """Blocks that have room when there is nothing else; the decider's cap."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken now, headers included."""
        ...

    def put(
        self, entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        """Store blocks.

        Args:
            data: where their bytes are, C-contiguous, shape (any, block_bytes).
            rows: rows of `data` that hold them, shape (n,).
            sums: their checksums where the caller has them, shape (n,); a later reader of the
                block compares its bytes to them.

        Returns:
            Which are in the store now, shape (n,); False: no room, or void.

        Raises:
            StoreError: the medium fails; blocks of the batch may have been stored.
        """
        ...

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        """Read blocks, and verify each.

        Args:
            keys: shape (n, 2).
            out: C-contiguous, shape (any, block_bytes).
            rows: rows of `out` for the blocks, shape (n,). Where the answer is False, a row's
                contents are undefined afterwards.

        Returns:
            Which were read and are right, shape (n,).

        Raises:
            StoreError: the medium fails.
        """
        ...

    def has(self, keys: BlockHashes) -> Bools:
        """Which blocks are there, as far as known without I/O, shape (n,)."""
        ...

    def delete(self, keys: BlockHashes) -> int:
        """Forget blocks; returns how many there were.

        Raises:
            StoreError: the medium fails; they are forgotten, but may be back after a restart.
        """
        ...

    def entries(self) -> BlockRecords:
        """All blocks in the store that are not void; after opening, what survived.

        Raises:
            StoreError: the medium fails.
        """
        ...

    def probe(self) -> None:
        """Find out cheaply whether the medium is there.

        Raises:
            StoreError: it is not.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections; later calls raise StoreError, a second `close` not."""
        ...


#: What the entry point of a store names, given the place of `NAME=SIZE@PLACE`, the layout's
#: fingerprint (16 bytes), the bytes of a block and the cap; raises StoreError or ValueError.
OpenStore: TypeAlias = Callable[[str, bytes, int, int], Store]
