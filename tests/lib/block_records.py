"""Records of consecutive blocks, for the tests and benchmarks of stores."""

from __future__ import annotations

import numpy as np

from pigou.request import NEVER, BlockHashes
from pigou.runtime.stores.store import BlockRecords


def chain_records(keys: BlockHashes, tenure: bytes, expiry: int = NEVER) -> BlockRecords:
    """Records of consecutive blocks; `expiry` in nanoseconds since 1970."""
    n = len(keys)
    first = np.zeros((1, 2), dtype=np.uint64)
    return BlockRecords(
        keys,
        np.concatenate([first, keys[:-1]])[:n],
        np.arange(n, dtype=np.int32),
        np.full(n, expiry, dtype=np.int64),
        np.broadcast_to(np.frombuffer(tenure, dtype=np.uint8), (n, len(tenure))),
    )
