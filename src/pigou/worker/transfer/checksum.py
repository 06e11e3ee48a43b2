"""Checksums of the blocks in a store, without keeping other threads waiting."""

from __future__ import annotations

import os

import numpy as np

from pigou.kv.checksum import Checksums, checksums_of
from pigou.request import Ints
from pigou.worker.transfer.store import BlockStore

#: Bytes that are read at once from a store that is not in host memory.
STAGE_BYTES = 8 << 20
#: Bytes that are digested at once, in some 50 microseconds.
PIECE_BYTES = 2 << 20


def checksums_in(store: BlockStore, ids: Ints) -> Checksums:
    """Checksums of the blocks `ids`, shape (n,), without copying when they are in host memory.

    Lets other threads run between two pieces: who waits for a core here mostly waits to be told
    of these very blocks.
    """
    parts = []
    data = store.as_bytes()
    step = max(1, (STAGE_BYTES if data is None else PIECE_BYTES) // store.layout.block_bytes)
    for i in range(0, len(ids), step):
        piece = ids[i : i + step]
        if data is not None:
            parts.append(checksums_of(data, piece))
        else:
            rows = np.ascontiguousarray(store.read(piece))
            parts.append(checksums_of(rows, np.arange(len(rows), dtype=np.int32)))
        os.sched_yield()
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
