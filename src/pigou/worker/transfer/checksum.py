"""Checksums of blocks: xxh3, 64 bits a block, in one pass at memory speed."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.request import Ints
from pigou.worker.transfer.store import BlockStore, Bytes

#: One per block, shape (blocks,).
Checksums: TypeAlias = NDArray[np.uint64]
#: Bytes that are read at once from a store that is not in host memory.
STAGE_BYTES = 8 << 20


def checksums_of(rows: Bytes) -> Checksums:
    """Checksum of each row of `rows`, shape (n,)."""
    return np.fromiter((xxh3_64_intdigest(row) for row in rows), dtype=np.uint64, count=len(rows))


def checksums_in(store: BlockStore, ids: Ints) -> Checksums:
    """Checksums of the blocks `ids`, shape (n,), without copying when they are in host memory."""
    data = store.as_bytes()
    if data is not None:
        digests = (xxh3_64_intdigest(data[i]) for i in ids.tolist())
        return np.fromiter(digests, dtype=np.uint64, count=len(ids))
    step = max(1, STAGE_BYTES // store.layout.block_bytes)
    parts = [checksums_of(store.read(ids[i : i + step])) for i in range(0, len(ids), step)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
