"""KV events without tokens: engines' hashes as 64-bit names, our keys, media as tiers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.control.prefix_index.hash_slots import Words
from pigou.control.prefix_index.holder_rows import DEVICE_BIT, HOST, STORAGE
from pigou.wire.kv_event_decoding import WireHash

#: Bit of the tier of each medium; None is the device, and any other medium is storage.
TIER_BITS: dict[str | None, int] = {
    None: DEVICE_BIT,
    "GPU": DEVICE_BIT,
    "CPU": 1 << HOST,
    "CPU_PINNED": 1 << HOST,
}
STORAGE_BIT = 1 << STORAGE
_MAX_NAME = 2**64
#: Kernels take contiguous arrays of it.
WORD = np.dtype(np.uint64)


class KeyedStored(msgspec.Struct, frozen=True, eq=False, tag_field="kind", tag="stored"):
    """Blocks that can be hit from now on."""

    hashes: Words  # the engine's own, as 64-bit names, shape (blocks,)
    keys: Words  # the router's, shape (blocks,); 0 where unknown
    parent: int | None  # name of the block before them; None at the beginning of a sequence
    medium: str | None = None  # tier, as the sender names it; None means the device


class KeyedRemoved(msgspec.Struct, frozen=True, eq=False, tag_field="kind", tag="removed"):
    """Blocks that can no longer be hit: names, shape (blocks,), and tier; None means the device."""

    hashes: Words
    medium: str | None = None


class KeyedCleared(msgspec.Struct, frozen=True, tag_field="kind", tag="cleared"):
    """The whole cache was emptied."""


KeyedEvent: TypeAlias = KeyedStored | KeyedRemoved | KeyedCleared


def name_of(value: WireHash) -> int:
    """Return a hash as an unsigned 64-bit name; longer ones and bytes are hashed (XXH3)."""
    if isinstance(value, bytes):
        return xxh3_64_intdigest(value)
    if 0 <= value < _MAX_NAME:
        return value
    return xxh3_64_intdigest(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def column(words: Words) -> Words:
    """Return an array of shape (blocks,) as one of shape (blocks, 1)."""
    return np.ascontiguousarray(words, dtype=WORD).reshape(-1, 1)


def names_of(hashes: Sequence[WireHash] | NDArray[np.uint64]) -> Words:
    """Return hashes as names, shape (blocks,)."""
    if isinstance(hashes, np.ndarray):
        return np.ascontiguousarray(hashes, dtype=np.uint64)
    try:
        return np.array(array("Q", cast("Sequence[int]", hashes)), dtype=np.uint64)
    except (OverflowError, TypeError):
        return np.array([name_of(value) for value in hashes], dtype=np.uint64)
