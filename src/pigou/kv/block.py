"""Blocks as the tiers beyond the device know them, and where they hang in their chains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import count, repeat
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.request import NEVER, BlockHashes

#: The parent's key of a chain's first block.
ROOT = b""


class IntegrityError(AssertionError):
    """A law of the cache does not hold: a defect of the engine. Names the law and the blocks."""


def ensure(law: bool, otherwise: str) -> None:
    """Raise an IntegrityError where a law does not hold."""
    if not law:
        raise IntegrityError(otherwise)


class Block(NamedTuple):
    """A block of KV that a tier is offered, or has given up."""

    key: bytes  # its hash, 16 bytes, most significant first (`keys_of`)
    parent: bytes  # key of the block before it in its chain; `ROOT` for the first
    depth: int  # its index in the chain, from 0
    size: int  # bytes that it takes in the tier
    expiry: int = NEVER  # when its tenure ends, in nanoseconds of the epoch


class Entry:
    """A block that a tier holds, with its place in the forest of chains. Policies read it.

    `last` and `uses` count what ended at this block; a child that goes hands its own to its
    parent. So those of a block without children are all of its uses, and a hit is O(1).
    """

    __slots__ = (
        "block", "down", "held", "last", "left", "level", "mark", "pins", "rank", "right", "up",
        "uses",
    )  # fmt: skip

    def __init__(self, block: Block, now: int) -> None:
        self.block = block
        self.last = now  # when it was last used, or admitted; nanoseconds
        self.uses = 0  # hits since it was admitted
        self.pins = 0  # readers and writers at present
        self.held = True  # whether it can be hit; if not, its bytes wait for the last pin
        self.up: Entry | None = None  # the parent where that is held
        self.down: Entry | None = None  # the first child
        self.left: Entry | None = None  # siblings
        self.right: Entry | None = None
        self.rank: float = 0.0  # the policy's own, as `level` and `mark`
        self.level: float = 0.0
        self.mark = 0

    @property
    def free(self) -> bool:
        """True if it may be evicted: no child is held, and nobody reads or writes it."""
        return self.held and self.down is None and self.pins == 0


def keys_of(hashes: BlockHashes) -> list[bytes]:
    """Return the keys of consecutive blocks, whose hashes have shape (n, 2)."""
    keys: list[bytes] = hashes.astype(">u8").view("V16").ravel().tolist()
    return keys


def hashes_of(keys: Sequence[bytes]) -> BlockHashes:
    """Return the hashes of blocks by their keys, shape (n, 2)."""
    words = np.frombuffer(b"".join(keys), dtype=">u8").reshape(len(keys), 2)
    return words.astype(np.uint64)


def chain_of(
    hashes: BlockHashes, size: int, expiry: int = NEVER, start: int = 0, parent: bytes = ROOT
) -> list[Block]:
    """Return consecutive blocks of one chain from index `start` on; `size` in bytes, `hashes` (n,
    2).
    """
    keys = keys_of(hashes)
    rows = zip(keys, [parent, *keys[:-1]], count(start), repeat(size), repeat(expiry), strict=False)
    return list(map(_block, rows))


#: A block of a tuple of its fields, in a third of the time.
_block = partial(tuple.__new__, Block)


#: Blocks as bytes, shape (blocks, block_bytes).
Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one KV block lies in memory."""

    model: str
    digest: str  # of the weights or of what identifies them (hexadecimal)
    dtype: str  # of keys and values, by torch's name without `torch.` (`float32`, `bfloat16`)
    block_size: int  # tokens in a block
    layers: int  # layers that have a KV cache
    kv_heads: int  # key-value heads of a layer
    head_dim: int  # numbers in a key or a value of one head
    block_bytes: int  # bytes of a block, keys and values of all layers

    def __post_init__(self) -> None:
        for name in ("block_size", "layers", "kv_heads", "head_dim", "block_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def fingerprint(self) -> str:
        """Digest over every field, 32 hexadecimal digits; equal layouts have equal fingerprints."""
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=16).hexdigest()

    def differences(self, other: KVLayout) -> list[str]:
        """Fields in which the two differ, each as `name: mine / theirs`; empty when equal."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name}: {mine!r} / {theirs!r}" for name, mine, theirs in pairs if mine != theirs]
