"""Entries: what a store knows about blocks besides their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.kv.block import ROOT, Block, hashes_of, keys_of
from pigou.request import NEVER, BlockHashes, Ints, Nanos

#: One per block, shape (n,).
Bools: TypeAlias = NDArray[np.bool_]
#: Digests of tenures, shape (n, 32).
Digests: TypeAlias = NDArray[np.uint8]
#: Bytes of a tenure's digest.
TENURE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Entries:
    """Blocks by their keys, each with where it stands in its sequence and how long it is valid.

    Attributes:
        keys: keyed hashes of the blocks, shape (n, 2); the tenure is in the key.
        parents: keys of the blocks before, shape (n, 2); (0, 0) for the first of a sequence.
        depths: blocks before it in its sequence, shape (n,), int32.
        expiries: when a block becomes void, nanoseconds since 1970, shape (n,); `NEVER` is never.
        tenures: digests of the tenures, shape (n, 32), for whoever looks into a store; zeros where
            they are not known.
    """

    keys: BlockHashes
    parents: BlockHashes
    depths: Ints
    expiries: Nanos
    tenures: Digests

    def __post_init__(self) -> None:
        """Refuse columns of different lengths."""
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

    def take(self, index: NDArray[np.integer] | Bools | slice) -> Entries:
        """Return the entries at `index` (ids, a mask or a slice)."""
        return Entries(
            self.keys[index],
            self.parents[index],
            self.depths[index],
            self.expiries[index],
            self.tenures[index],
        )

    def write(self, index: Ints, other: Entries) -> None:
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
    def of(blocks: Sequence[Block], tenure: bytes = bytes(TENURE_BYTES)) -> Entries:
        """Describe what the decider calls blocks, all of one tenure."""
        found = no_entries(len(blocks))
        found.keys[:] = hashes_of([block.key for block in blocks])
        found.parents[:] = hashes_of([block.parent or bytes(16) for block in blocks])
        found.depths[:] = [block.depth for block in blocks]
        found.expiries[:] = [block.expiry for block in blocks]
        found.tenures[:] = np.frombuffer(tenure, dtype=np.uint8)
        return found

    @staticmethod
    def chain(
        keys: BlockHashes,
        tenure: bytes,
        *,
        expiry: int = NEVER,
        parent: BlockHashes | None = None,
        depth: int = 0,
    ) -> Entries:
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
        return Entries(
            keys,
            np.concatenate([before, keys[:-1]])[:n],
            np.arange(depth, depth + n, dtype=np.int32),
            np.full(n, expiry, dtype=np.int64),
            np.broadcast_to(digest, (n, len(digest))),
        )

    @staticmethod
    def join(parts: Sequence[Entries]) -> Entries:
        """Put entries one after the other."""
        if not parts:
            return no_entries()
        return Entries(
            np.concatenate([p.keys for p in parts]),
            np.concatenate([p.parents for p in parts]),
            np.concatenate([p.depths for p in parts]),
            np.concatenate([p.expiries for p in parts]),
            np.concatenate([p.tenures for p in parts]),
        )


def no_entries(count: int = 0) -> Entries:
    """Return entries of no block, or `count` blank ones to be written over."""
    return Entries(
        np.zeros((count, 2), dtype=np.uint64),
        np.zeros((count, 2), dtype=np.uint64),
        np.zeros(count, dtype=np.int32),
        np.zeros(count, dtype=np.int64),
        np.zeros((count, TENURE_BYTES), dtype=np.uint8),
    )
