"""Checksums of blocks: xxh3, 64 bits a block, in one pass at memory speed, free of the GIL."""

from __future__ import annotations

import os
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.request import Ints
from pigou.worker.transfer import xxh3
from pigou.worker.transfer.store import BlockStore, Bytes

#: One per block, shape (blocks,).
Checksums: TypeAlias = NDArray[np.uint64]
#: Bytes that are read at once from a store that is not in host memory.
STAGE_BYTES = 8 << 20
#: Bytes that are digested at once, in some 50 microseconds.
PIECE_BYTES = 2 << 20


def checksums_of(rows: Bytes, ids: Ints) -> Checksums:
    """Checksums of the rows `ids` of `rows`, C-contiguous; shape (n,)."""
    if rows.shape[1] > xxh3.SHORT:
        return xxh3.digest_rows(rows, ids)
    digests = (xxh3_64_intdigest(rows[i]) for i in ids.tolist())
    return np.fromiter(digests, dtype=np.uint64, count=len(ids))


def copy(source: Bytes, ids: Ints, target: Bytes, places: Ints) -> Checksums:
    """Copy the rows `ids` of `source` to the rows `places` of `target`, both C-contiguous.

    Returns:
        The checksums of what was written, shape (n,).
    """
    if source.shape[1] > xxh3.SHORT:
        return xxh3.copy_rows(source, ids, target, places)
    target[places] = source[ids]
    return checksums_of(target, places)


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
