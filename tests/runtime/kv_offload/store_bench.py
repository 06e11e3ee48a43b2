"""Blocks with known bytes, for the tests of stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.lib.block_records import chain_records

from pigou.kv.block import Bytes
from pigou.request import NEVER, BlockHashes, Ints
from pigou.runtime.stores.store import BlockRecords

NAMESPACE = bytes(range(16))
SIZE = 512
TENURE = bytes(range(32))


def keys_of(numbers: Sequence[int]) -> BlockHashes:
    return np.array([(7, n + 1) for n in numbers], dtype=np.uint64).reshape(len(numbers), 2)


def entries_of(numbers: Sequence[int], expiry: int = NEVER) -> BlockRecords:
    return chain_records(keys_of(numbers), TENURE, expiry)


def bytes_of(numbers: Sequence[int], size: int = SIZE) -> Bytes:
    """The bytes of block n, which follow from n."""
    rows = [np.random.default_rng(n).integers(0, 256, size, dtype=np.uint8) for n in numbers]
    return np.stack(rows) if rows else np.empty((0, size), dtype=np.uint8)


def rows_of(count: int) -> Ints:
    return np.arange(count, dtype=np.int32)
