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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.kv.block import ROOT, Block, Bytes, KVLayout, hashes_of, keys_of
from pigou.kv.checksum import Checksums
from pigou.request import NEVER, BlockHashes, Ints, Nanos


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

    @property
    def record_bytes(self) -> int:
        """Bytes of the cap that a block takes, a few more for many blocks together left aside."""

    @property
    def cap_bytes(self) -> int:
        """What `used_bytes` never exceeds."""

    @property
    def capacity(self) -> int:
        """Blocks that have room when there is nothing else; the decider's cap."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken now, headers included."""

    def put(
        self, entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        """Store blocks; return which are in the store now, shape (n,): False without room, or void.

        Args:
            data: holds their bytes in its `rows`, (n,); C-contiguous, shape (any, block_bytes).
            sums: their checksums where the caller has them, shape (n,); readers compare with them.

        Raises:
            StoreError: the medium fails; blocks of the batch may have been stored.
        """

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        """Read blocks into `rows` of `out`, and return which were read and are right, shape (n,).

        `keys` is (n, 2), `out` C-contiguous, (any, block_bytes). A row of a block that is not
        right is undefined. Raises StoreError: the medium fails.
        """

    def has(self, keys: BlockHashes) -> Bools:
        """Which blocks are there, as far as known without I/O, shape (n,)."""

    def delete(self, keys: BlockHashes) -> int:
        """Forget blocks; returns how many there were.

        Raises StoreError: the medium fails; they are forgotten, but may be back after a restart.
        """

    def entries(self) -> BlockRecords:
        """All blocks in the store that are not void; after opening, what survived.

        Raises StoreError: the medium fails.
        """

    def probe(self) -> None:
        """Find out cheaply whether the medium is there. Raises StoreError: it is not."""

    def close(self) -> None:
        """Let go of files and connections; later calls raise StoreError, a second `close` not."""


#: What the entry point of a store names, given the place of `NAME=SIZE@PLACE`, the layout's
#: fingerprint (16 bytes), the bytes of a block and the cap; raises StoreError or ValueError.
OpenStore: TypeAlias = Callable[[str, bytes, int, int], Store]

#: One per block, shape (n,).
Bools: TypeAlias = NDArray[np.bool_]
#: Digests of tenures, shape (n, 32).
Digests: TypeAlias = NDArray[np.uint8]
#: Bytes of a tenure's digest.
TENURE_BYTES = 32
_COLUMNS = ("keys", "parents", "depths", "expiries", "tenures")


@dataclass(frozen=True, slots=True)
class BlockRecords:
    """Blocks by their keys, each with where it stands in its sequence and how long it is valid."""

    keys: BlockHashes  # keyed hashes, shape (n, 2); the tenure is in the key
    parents: BlockHashes  # keys of the blocks before, shape (n, 2); (0, 0) for a sequence's first
    depths: Ints  # blocks before it in its sequence, shape (n,), int32
    expiries: Nanos  # nanoseconds since 1970, shape (n,); `NEVER` is never
    tenures: Digests  # of the tenures, shape (n, 32); zeros where they are not known

    def __post_init__(self) -> None:
        n = len(self.keys)
        shapes = (n, 2), (n, 2), (n,), (n,), (n, TENURE_BYTES)
        for name, shape in zip(_COLUMNS, shapes, strict=True):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}; give {shape}")

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, index: NDArray[np.integer] | Bools | slice) -> BlockRecords:
        """Return the entries at `index` (ids, a mask or a slice)."""
        return BlockRecords(*(getattr(self, name)[index] for name in _COLUMNS))

    def write(self, index: Ints, other: BlockRecords) -> None:
        """Write `other` over the entries at `index`, shape (n,)."""
        for name in _COLUMNS:
            getattr(self, name)[index] = getattr(other, name)

    def alive(self, now: int) -> Bools:
        """Which are not void at `now`, nanoseconds since 1970."""
        alive: Bools = self.expiries > now
        return alive

    def blocks(self, size: int) -> list[Block]:
        """Return what the decider calls them, each of `size` bytes."""
        keys, parents = keys_of(self.keys), keys_of(self.parents)
        rest = zip(keys, parents, self.depths.tolist(), self.expiries.tolist(), strict=True)
        return [
            Block(key, parent if any(parent) else ROOT, depth, size, expiry)
            for key, parent, depth, expiry in rest
        ]

    @staticmethod
    def of(blocks: Sequence[Block], tenure: bytes = bytes(TENURE_BYTES)) -> BlockRecords:
        """Describe what the decider calls blocks, all of one tenure."""
        records = no_records(len(blocks))
        records.keys[:] = hashes_of([block.key for block in blocks])
        records.parents[:] = hashes_of([block.parent or bytes(16) for block in blocks])
        records.depths[:] = [block.depth for block in blocks]
        records.expiries[:] = [block.expiry for block in blocks]
        records.tenures[:] = np.frombuffer(tenure, dtype=np.uint8)
        return records

    @staticmethod
    def chain(
        keys: BlockHashes,
        tenure: bytes,
        *,
        expiry: int = NEVER,
        parent: BlockHashes | None = None,
        depth: int = 0,
    ) -> BlockRecords:
        """Describe consecutive blocks of one sequence.

        Args:
            keys: shape (n, 2).
            expiry: nanoseconds since 1970.
            parent: key of the block before the first, shape (1, 2); None where there is none.
        """
        before = np.zeros((1, 2), dtype=np.uint64) if parent is None else parent
        n = len(keys)
        digest = np.frombuffer(tenure, dtype=np.uint8)
        return BlockRecords(
            keys,
            np.concatenate([before, keys[:-1]])[:n],
            np.arange(depth, depth + n, dtype=np.int32),
            np.full(n, expiry, dtype=np.int64),
            np.broadcast_to(digest, (n, len(digest))),
        )

    @staticmethod
    def join(parts: Sequence[BlockRecords]) -> BlockRecords:
        """Put entries one after the other."""
        if not parts:
            return no_records()
        columns = ([getattr(part, name) for part in parts] for name in _COLUMNS)
        return BlockRecords(*map(np.concatenate, columns))


def no_records(count: int = 0) -> BlockRecords:
    """Return entries of no block, or `count` blank ones to be written over."""
    return BlockRecords(
        np.zeros((count, 2), dtype=np.uint64),
        np.zeros((count, 2), dtype=np.uint64),
        np.zeros(count, dtype=np.int32),
        np.zeros(count, dtype=np.int64),
        np.zeros((count, TENURE_BYTES), dtype=np.uint8),
    )


#: Changes when the format does; older records are then foreign.
MAGIC = b"PIGOUKV1"

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("namespace", "u1", (16,)),
        ("key", "<u8", (2,)),
        ("parent", "<u8", (2,)),
        ("tenure", "u1", (32,)),
        ("depth", "<i4"),
        ("size", "<u4"),  # bytes of the block
        ("expiry", "<i8"),  # nanoseconds since 1970
        ("payload", "<u8"),  # xxh3 of the block
        ("spare", "<u8"),
        ("check", "<u8"),  # xxh3 of all that comes before
    ]
)
#: Bytes of a header.
HEADER_BYTES = HEADER.itemsize
_CHECKED = HEADER_BYTES - 8


def encode(namespace: bytes, entries: BlockRecords, payloads: Checksums, size: int) -> Bytes:
    """Make headers, shape (n, 128). `payloads`: xxh3 of the blocks, shape (n,)."""
    table = np.zeros(len(entries), dtype=HEADER)
    table["magic"] = MAGIC
    table["namespace"] = np.frombuffer(namespace, dtype=np.uint8)
    table["key"] = entries.keys
    table["parent"] = entries.parents
    table["tenure"] = entries.tenures
    table["depth"] = entries.depths
    table["size"] = size
    table["expiry"] = entries.expiries
    table["payload"] = payloads
    raw = table.view(np.uint8).reshape(len(entries), HEADER_BYTES)
    table["check"] = _checks(raw)
    return raw


def decode(raw: Bytes, namespace: bytes, size: int) -> tuple[Bools, BlockRecords, Checksums]:
    """Read headers, shape (n, 128): which are whole and of this layout, entries, and checksums.

    Entries and checksums of headers that are not good mean nothing.
    """
    table = raw.view(HEADER).reshape(len(raw))
    good: Bools = table["magic"] == MAGIC
    good &= (table["namespace"] == np.frombuffer(namespace, dtype=np.uint8)).all(axis=1)
    good &= table["size"] == size
    if good.any():  # an empty table is not digested
        rows = np.flatnonzero(good)
        good[rows] = table["check"][rows] == _checks(raw[rows])
    entries = BlockRecords(
        table["key"].astype(np.uint64),
        table["parent"].astype(np.uint64),
        table["depth"].astype(np.int32),
        table["expiry"].astype(np.int64),
        table["tenure"],
    )
    return good, entries, table["payload"].astype(np.uint64)


def _checks(raw: Bytes) -> Checksums:
    digests = (xxh3_64_intdigest(memoryview(row)[:_CHECKED]) for row in raw)
    return np.fromiter(digests, dtype=np.uint64, count=len(raw))


class SlotMap:
    """Keys in slots. A slot that is being read outlives its key. Not locked: the store locks."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._readers: dict[int, int] = {}
        self._doomed: set[int] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def find(self, key: bytes) -> int | None:
        """Where a key lies, None for nowhere."""
        return self._slots.get(key)

    def put(self, key: bytes, slot: int) -> None:
        """Enter a key that is not there."""
        self._slots[key] = slot

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """Find keys and pin their slots for reading; -1 where there is none."""
        slots = [self._slots.get(key, -1) for key in keys]
        for slot in slots:
            if slot >= 0:
                self._readers[slot] = self._readers.get(slot, 0) + 1
        return slots

    def unpin(self, slots: Iterable[int]) -> list[int]:
        """End reading; returns the slots that nobody needs any more."""
        empty = []
        for slot in slots:
            if slot < 0:
                continue
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                if slot in self._doomed:
                    self._doomed.discard(slot)
                    empty.append(slot)
        return empty

    def remove(self, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """Forget keys; returns how many there were, and the slots that nobody needs any more."""
        slots = [slot for key in keys if (slot := self._slots.pop(key, -1)) >= 0]
        empty = [slot for slot in slots if slot not in self._readers]
        self._doomed.update(slot for slot in slots if slot in self._readers)
        return len(slots), empty

    def keys(self) -> list[bytes]:
        """All keys, in no order."""
        return list(self._slots)

    def slots(self) -> list[int]:
        """Where keys lie, in no order."""
        return list(self._slots.values())


class DeviceBlocks(Protocol):
    """A KV cache seen as bytes; several threads call it at once."""

    @property
    def layout(self) -> KVLayout:
        """How a block lies in memory."""

    def as_bytes(self) -> Bytes | None:
        """All blocks without a copy, shape (blocks, block_bytes); None if not in host memory."""

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks out, shape (n, block_bytes), in the order of `ids`."""

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, shape (n, block_bytes), into the blocks `ids`."""
