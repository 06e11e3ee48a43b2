"""Entries: what a store knows about blocks besides their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.kv.block import ROOT, Block, Bytes, hashes_of, keys_of
from pigou.kv.checksum import Checksums
from pigou.request import NEVER, BlockHashes, Ints, Nanos

#: One per block, shape (n,).
Bools: TypeAlias = NDArray[np.bool_]
#: Digests of tenures, shape (n, 32).
Digests: TypeAlias = NDArray[np.uint8]
#: Bytes of a tenure's digest.
TENURE_BYTES = 32


@dataclass(frozen=True, slots=True)
class BlockRecords:
    """Blocks by their keys, each with where it stands in its sequence and how long it is valid."""

    keys: BlockHashes  # keyed hashes of the blocks, shape (n, 2); the tenure is in the key
    # keys of the blocks before, shape (n, 2); (0, 0) for the first of a sequence.
    parents: BlockHashes
    depths: Ints  # blocks before it in its sequence, shape (n,), int32
    # when a block becomes void, nanoseconds since 1970, shape (n,); `NEVER` is never.
    expiries: Nanos
    # digests of the tenures, shape (n, 32), for inspection of a store; zeros where they are not
    # known.
    tenures: Digests

    def __post_init__(self) -> None:
        n = len(self.keys)
        wanted = {
            "keys": (n, 2),
            "parents": (n, 2),
            "depths": (n,),
            "expiries": (n,),
            "tenures": (n, TENURE_BYTES),
        }
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}; give {shape}")

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.keys)

    def take(self, index: NDArray[np.integer] | Bools | slice) -> BlockRecords:
        """Return the entries at `index` (ids, a mask or a slice)."""
        return BlockRecords(
            self.keys[index],
            self.parents[index],
            self.depths[index],
            self.expiries[index],
            self.tenures[index],
        )

    def write(self, index: Ints, other: BlockRecords) -> None:
        """Write `other` over the entries at `index`, shape (n,)."""
        self.keys[index] = other.keys
        self.parents[index] = other.parents
        self.depths[index] = other.depths
        self.expiries[index] = other.expiries
        self.tenures[index] = other.tenures

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
            tenure: digest of the tenure, 32 bytes.
            expiry: nanoseconds since 1970.
            parent: key of the block before the first, shape (1, 2); None where there is none.
            depth: blocks before the first.
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
        return BlockRecords(
            np.concatenate([p.keys for p in parts]),
            np.concatenate([p.parents for p in parts]),
            np.concatenate([p.depths for p in parts]),
            np.concatenate([p.expiries for p in parts]),
            np.concatenate([p.tenures for p in parts]),
        )


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
    """Make headers, shape (n, 128).

    Args:
        namespace: the layout's fingerprint, 16 bytes.
        payloads: xxh3 of the blocks, shape (n,).
        size: bytes of a block.
    """
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
    """Read headers, shape (n, 128), C-contiguous.

    Returns:
        Which are whole and of this namespace and block size, shape (n,); and entries and checksums
        of the blocks, of all n, worth nothing where they are not.
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
