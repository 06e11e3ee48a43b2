"""Checksums of blocks: xxh3, 64 bits a block, in one pass at memory speed, free of the GIL."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.kv.layout import Bytes
from pigou.kv.xxh3 import SHORT, copy_rows, digest_rows
from pigou.request import Ints

#: One per block, shape (blocks,).
Checksums: TypeAlias = NDArray[np.uint64]


def checksums_of(rows: Bytes, ids: Ints) -> Checksums:
    """Checksums of the rows `ids` of `rows`, C-contiguous; shape (n,)."""
    if rows.shape[1] > SHORT:
        return digest_rows(rows, ids)
    digests = (xxh3_64_intdigest(rows[i]) for i in ids.tolist())
    return np.fromiter(digests, dtype=np.uint64, count=len(ids))


def copy(source: Bytes, ids: Ints, target: Bytes, places: Ints) -> Checksums:
    """Copy the rows `ids` of `source` to the rows `places` of `target`, both C-contiguous.

    Returns:
        The checksums of what was written, shape (n,).
    """
    if source.shape[1] > SHORT:
        return copy_rows(source, ids, target, places)
    target[places] = source[ids]
    return checksums_of(target, places)
