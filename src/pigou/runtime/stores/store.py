"""Store: the interface of block storage outside the device, and the format of its records.

A store serves one layout (model, weights, dtype, block size, shape), holds immutable blocks by key,
and is thread-safe. It returns a block exactly as put (64-bit xxh3), else a miss. `used_bytes` never
exceeds `cap_bytes`; the caller evicts with `delete`. A failing medium raises `StoreError`.
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
from pigou.request import BlockHashes, Ints, Nanos

#: Per block, shape (n,).
Bools: TypeAlias = NDArray[np.bool_]
#: Tenure digests, shape (n, 32).
Digests: TypeAlias = NDArray[np.uint8]
TENURE_BYTES = 32
_TENANT = "utf-8", "surrogateescape"
_COLUMNS = ("keys", "parents", "depths", "expiries", "tenures")
#: Format version; records of another are ignored.
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
        ("check", "<u8"),  # xxh3 of the fields above
    ]
)
HEADER_BYTES = HEADER.itemsize
_CHECKED = HEADER_BYTES - 8


class StoreError(Exception):
    """Raised when a store's medium fails; stored blocks stay intact."""


@dataclass(slots=True)
class StoreCounts:
    """Block counters since the store was opened."""

    hits: int = 0  # blocks that `get` returned
    misses: int = 0  # blocks that `get` did not return
    corrupt: int = 0  # torn or altered, among misses and at opening
    expired: int = 0  # void blocks dropped
    written: int = 0  # blocks newly stored
    refused: int = 0  # blocks without room
    deleted: int = 0

    def count_reads(self, good: Bools) -> None:
        """Count the blocks that a read returned, and did not."""
        hits = int(np.count_nonzero(good))
        self.hits += hits
        self.misses += len(good) - hits


class Store(Protocol):
    """Block storage by key; batches of n blocks may succeed in part."""

    counts: StoreCounts

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""

    @property
    def cap_bytes(self) -> int:
        """Upper bound of `used_bytes`."""

    @property
    def capacity(self) -> int:
        """Blocks that fit in an empty store."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use, headers included."""

    def put(
        self, entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        """Store blocks; return which are stored, (n,): False if void or without room.

        `data` is C-contiguous, (any, block_bytes), with the blocks in `rows` (n,); readers verify
        against `sums` (n,). Raises StoreError if the medium fails; part of the batch may be stored.
        """

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        """Read blocks `keys` (n, 2) into `rows` of `out`; return which are valid, (n,).

        `out` is C-contiguous, (any, block_bytes); rows of other blocks are undefined. Raises
        StoreError.
        """

    def has(self, keys: BlockHashes) -> Bools:
        """Return which blocks are indexed, (n,), without I/O."""

    def delete(self, keys: BlockHashes) -> int:
        """Delete blocks; return how many existed. On StoreError they may return after a restart."""

    def entries(self) -> BlockRecords:
        """Return all valid blocks; after opening, those that survived. Raises StoreError."""

    def probe(self) -> None:
        """Check cheaply that the medium is available; raises StoreError if not."""

    def close(self) -> None:
        """Close files and connections; later calls raise StoreError. Idempotent."""


#: Factory of a store's entry point. Takes the place in `NAME=SIZE@PLACE`, layout fingerprint
#: (16 bytes), block bytes and cap; raises StoreError or ValueError.
OpenStore: TypeAlias = Callable[[str, bytes, int, int], Store]


@dataclass(frozen=True, slots=True)
class BlockRecords:
    """Metadata of n blocks, as columns."""

    keys: BlockHashes  # keyed hashes, tenure included, shape (n, 2)
    parents: BlockHashes  # keys of the preceding blocks, shape (n, 2); (0, 0) for a first block
    depths: Ints  # preceding blocks in the sequence, shape (n,), int32
    expiries: Nanos  # nanoseconds since 1970, or `NEVER`, shape (n,)
    tenures: Digests  # shape (n, 32); or the tenant's mark; zeros if unknown

    def __post_init__(self) -> None:
        n = len(self.keys)
        shapes = (n, 2), (n, 2), (n,), (n,), (n, TENURE_BYTES)
        for name, shape in zip(_COLUMNS, shapes, strict=True):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}; give {shape}")

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, index: NDArray[np.integer] | Bools | slice) -> BlockRecords:
        """Return the records at `index` (ids, mask or slice)."""
        return BlockRecords(*(getattr(self, name)[index] for name in _COLUMNS))

    def write(self, index: Ints, other: BlockRecords) -> None:
        """Overwrite the records at `index`, shape (n,)."""
        for name in _COLUMNS:
            getattr(self, name)[index] = getattr(other, name)

    def alive(self, now: int) -> Bools:
        """Return which are valid at `now`, nanoseconds since 1970."""
        alive: Bools = self.expiries > now
        return alive

    def blocks(self, size: int) -> list[Block]:
        """Convert to the scheduler's blocks of `size` bytes each."""
        keys, parents = keys_of(self.keys), keys_of(self.parents)
        tenants = (bytes(row).rstrip(b"\0").decode(*_TENANT) for row in self.tenures)
        rest = self.depths.tolist(), self.expiries.tolist(), tenants
        return [
            Block(key, parent if any(parent) else ROOT, depth, size, expiry, tenant)
            for key, parent, depth, expiry, tenant in zip(keys, parents, *rest, strict=True)
        ]

    @staticmethod
    def of(blocks: Sequence[Block]) -> BlockRecords:
        """Build records of the scheduler's blocks; tenants of over 32 bytes are left out."""
        records = no_records(len(blocks))
        records.keys[:] = hashes_of([block.key for block in blocks])
        records.parents[:] = hashes_of([block.parent or bytes(16) for block in blocks])
        records.depths[:] = [block.depth for block in blocks]
        records.expiries[:] = [block.expiry for block in blocks]
        names = [block.tenant.encode(*_TENANT) for block in blocks]
        marks = b"".join((name if len(name) <= TENURE_BYTES else b"").ljust(TENURE_BYTES, b"\0")
                         for name in names)  # fmt: skip
        records.tenures[:] = np.frombuffer(marks, dtype=np.uint8).reshape(-1, TENURE_BYTES)
        return records

    @staticmethod
    def join(parts: Sequence[BlockRecords]) -> BlockRecords:
        """Concatenate records."""
        if not parts:
            return no_records()
        columns = ([getattr(part, name) for part in parts] for name in _COLUMNS)
        return BlockRecords(*map(np.concatenate, columns))


def no_records(count: int = 0) -> BlockRecords:
    """Return empty records, or `count` blank ones to overwrite."""
    return BlockRecords(
        np.zeros((count, 2), dtype=np.uint64), np.zeros((count, 2), dtype=np.uint64),
        np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int64),
        np.zeros((count, TENURE_BYTES), dtype=np.uint8),
    )  # fmt: skip


def encode(namespace: bytes, entries: BlockRecords, payloads: Checksums, size: int) -> Bytes:
    """Build headers, (n, 128), given the blocks' xxh3 `payloads`, (n,)."""
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
    """Parse headers, (n, 128): which are valid, their records, and checksums."""
    table = raw.view(HEADER).reshape(len(raw))
    good: Bools = table["magic"] == MAGIC
    good &= (table["namespace"] == np.frombuffer(namespace, dtype=np.uint8)).all(axis=1)
    good &= table["size"] == size
    if good.any():  # skip hashing an empty table
        rows = np.flatnonzero(good)
        good[rows] = table["check"][rows] == _checks(raw[rows])
    entries = BlockRecords(
        table["key"].astype(np.uint64), table["parent"].astype(np.uint64),
        table["depth"].astype(np.int32), table["expiry"].astype(np.int64), table["tenure"],
    )  # fmt: skip
    return good, entries, table["payload"].astype(np.uint64)


def _checks(raw: Bytes) -> Checksums:
    digests = (xxh3_64_intdigest(memoryview(row)[:_CHECKED]) for row in raw)
    return np.fromiter(digests, dtype=np.uint64, count=len(raw))


class SlotMap:
    """Maps keys to slots; a slot being read outlives its key. Not thread-safe."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._readers: dict[int, int] = {}
        self._doomed: set[int] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def find(self, key: bytes) -> int | None:
        """Return a key's slot, or None."""
        return self._slots.get(key)

    def put(self, key: bytes, slot: int) -> None:
        """Insert a new key."""
        self._slots[key] = slot

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """Pin the slots of keys for reading; -1 where missing."""
        slots = [self._slots.get(key, -1) for key in keys]
        for slot in slots:
            if slot >= 0:
                self._readers[slot] = self._readers.get(slot, 0) + 1
        return slots

    def unpin(self, slots: Iterable[int]) -> list[int]:
        """Unpin slots; return those that became free."""
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
        """Remove keys; return how many existed, and the slots that became free."""
        slots = [slot for key in keys if (slot := self._slots.pop(key, -1)) >= 0]
        empty = [slot for slot in slots if slot not in self._readers]
        self._doomed.update(slot for slot in slots if slot in self._readers)
        return len(slots), empty

    def keys(self) -> list[bytes]:
        """Return all keys, unordered."""
        return list(self._slots)

    def slots(self) -> list[int]:
        """Return all slots that hold a key, unordered."""
        return list(self._slots.values())


class DeviceBlocks(Protocol):
    """A KV cache viewed as bytes; thread-safe."""

    @property
    def layout(self) -> KVLayout:
        """Memory layout of a block."""

    def as_bytes(self) -> Bytes | None:
        """Return all blocks without a copy, (blocks, block_bytes); None if not in host memory."""

    def read(self, ids: Ints) -> Bytes:
        """Copy blocks `ids` out, in order, shape (n, block_bytes)."""

    def write(self, ids: Ints, data: Bytes) -> None:
        """Copy `data`, (n, block_bytes), into blocks `ids`."""
