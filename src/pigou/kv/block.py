"""Blocks of KV in host memory and in tiers below the device, and their layout in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import count, repeat
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.config import check_fields
from pigou.request import NEVER, BlockHashes, Ints

#: The parent's key of a chain's first block.
ROOT = b""
#: Blocks as bytes, shape (blocks, block_bytes).
Bytes: TypeAlias = NDArray[np.uint8]


class IntegrityError(AssertionError):
    """An invariant of the cache is violated: a bug in the engine."""


def ensure(law: bool, otherwise: str) -> None:
    """Raise an IntegrityError with the message `otherwise` unless `law` is true."""
    if not law:
        raise IntegrityError(otherwise)


class Block(NamedTuple):
    """A KV block offered to a tier or evicted from one."""

    key: bytes  # 16-byte hash, most significant byte first (`keys_of`)
    parent: bytes  # key of the block before it in its chain; `ROOT` for the first
    depth: int  # index in the chain, from 0
    size: int  # bytes in the tier
    expiry: int = NEVER  # when its tenure ends, in nanoseconds of the epoch
    tenant: str = ""  # charged for it, if it is the first to write it


class Entry:
    """A block held in a tier, with its links in the forest of prefix chains; policies read it.

    `last` and `uses` count hits that ended at this block; a removed child adds its own to its
    parent. A leaf therefore has all of its uses, and a hit takes O(1).
    """

    __slots__ = (
        "account", "block", "down", "held", "last", "left", "level", "mark", "pins", "rank",
        "right", "up", "uses",
    )  # fmt: skip

    def __init__(self, block: Block, now: int) -> None:
        self.block = block
        self.last = now  # last use or admission, nanoseconds
        self.uses = 0  # hits since it was admitted
        self.pins = 0  # transfers reading or writing it
        self.account = ""  # tenant charged for it, or `*`; with quotas
        self.held = True  # False once dropped while pinned: bytes are freed by the last unpin
        self.up: Entry | None = None  # parent, if held
        self.down: Entry | None = None  # first child
        self.left: Entry | None = None  # siblings
        self.right: Entry | None = None
        self.rank: float = 0.0  # for the policy's use, like `level` and `mark`
        self.level: float = 0.0
        self.mark = 0

    @property
    def free(self) -> bool:
        """True if the block may be evicted: it has no held child and no pins."""
        return self.held and self.down is None and self.pins == 0


def keys_of(hashes: BlockHashes) -> list[bytes]:
    """Return the keys of consecutive blocks from their hashes, shape (n, 2)."""
    keys: list[bytes] = hashes.astype(">u8").view("V16").ravel().tolist()
    return keys


def hashes_of(keys: Sequence[bytes]) -> BlockHashes:
    """Return the hashes for block keys, shape (n, 2)."""
    words = np.frombuffer(b"".join(keys), dtype=">u8").reshape(len(keys), 2)
    return words.astype(np.uint64)


def chain_of(
    hashes: BlockHashes,
    size: int,
    expiry: int = NEVER,
    start: int = 0,
    parent: bytes = ROOT,
    tenant: str = "",
) -> list[Block]:
    """Return consecutive blocks of a chain from index `start`; `size` in bytes, `hashes` (n, 2)."""
    keys = keys_of(hashes)
    same = repeat(size), repeat(expiry), repeat(tenant)
    rows = zip(keys, [parent, *keys[:-1]], count(start), *same, strict=False)
    return list(map(_block, rows))


#: Builds a Block from a tuple of its fields, in a third of the constructor's time.
_block = partial(tuple.__new__, Block)


#: Bytes of a number, and of the scale of a token's key or value, by `KVLayout.dtype`.
KV_BYTES = {
    "float32": (4, 0), "bfloat16": (2, 0), "fp8_e4m3": (1, 0), "int8_per_token_head": (1, 2),
}  # fmt: skip


def head_bytes(dtype: str, head_dim: int, block_size: int) -> int:
    """Return the bytes of one head's keys in a block: numbers, then a scale per token."""
    number, scale = KV_BYTES[dtype]
    return block_size * (head_dim * number + scale)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Memory layout of one KV block."""

    model: str
    digest: str  # digest of the weights, or of what identifies them (hexadecimal)
    dtype: str  # format of keys and values, of `KV_BYTES` or the engine's own name
    block_size: int  # tokens in a block
    layers: int  # layers that have a KV cache
    kv_heads: int  # key-value heads of a layer
    head_dim: int  # numbers in a key or a value of one head
    block_bytes: int  # bytes of a block, keys and values of all layers
    parts: int = 2  # keys and values; 1 for latents (MLA), whose values are part of their keys

    def __post_init__(self) -> None:
        check_fields(self, "block_size", "layers", "kv_heads", "head_dim", "block_bytes", ge=1)

    def fingerprint(self) -> str:
        """Return a digest of all fields, 32 hexadecimal digits."""
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=16).hexdigest()


class HostPool:
    """Blocks of host memory, each free or owned by one preempted sequence."""

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
        """Return blocks to the pool, shape (n,)."""
        self._stack[self.free : self.free + len(blocks)] = blocks[::-1]
        self.free += len(blocks)

    def check(self, owned: Ints) -> None:
        """Raise an IntegrityError unless each block is either free or `owned`, shape (n,)."""
        times = np.bincount(self._stack[: self.free], minlength=self.blocks)
        times += np.bincount(owned, minlength=self.blocks)
        if len(times) != self.blocks or (times != 1).any():
            wrong = np.flatnonzero(times != 1)[:8].tolist()
            raise IntegrityError(f"free and swapped host blocks are not all, once: {wrong}")
