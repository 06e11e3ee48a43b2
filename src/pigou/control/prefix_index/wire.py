"""What events say, as arrays: engines' hashes as 64-bit names, media as tiers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.control.prefix_index.slots import Words
from pigou.control.prefix_index.table_kernels import DEVICE, HOST, STORAGE
from pigou.wire.kv_event_decoding import WireHash

_TIERS = {None: DEVICE, "GPU": DEVICE, "CPU": HOST, "CPU_PINNED": HOST, "STORAGE": STORAGE}
_LIMIT = 2**64
#: What the kernels want: arrays of it, contiguous.
WORD = np.dtype(np.uint64)


def tier_of(medium: str | None) -> int:
    """Return the tier of a medium: None is the device, and what is not known is storage."""
    return _TIERS.get(medium, STORAGE)


def name_of(value: WireHash) -> int:
    """Return a hash as an unsigned 64-bit name; longer ones and bytes are hashed (XXH3)."""
    if isinstance(value, bytes):
        return xxh3_64_intdigest(value)
    if 0 <= value < _LIMIT:
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
