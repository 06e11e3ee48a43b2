"""Records: a header of 128 bytes that describes a block and guards its bytes.

A record names its layout and its key, so that it is worth nothing under any other, and carries
checksums of itself and of the block. All numbers are little-endian.
"""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from pigou.kv.block import Bytes
from pigou.kv.checksum import Checksums
from pigou.runtime.stores.entries import Bools, Entries

#: Changes when the format does; older records are then foreign.
MAGIC = b"PIGOUKV1"

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("namespace", "u1", (16,)),
        ("key", "<u8", (2,)),
        ("parent", "<u8", (2,)),
        ("tenure", "u1", (32,)),
        ("depth", "<i4"),
        ("size", "<u4"),  # bytes of the block
        ("expiry", "<i8"),  # nanoseconds since 1970
        ("payload", "<u8"),  # xxh3 of the block
        ("spare", "<u8"),
        ("check", "<u8"),  # xxh3 of all that comes before
    ]
)
#: Bytes of a header.
HEADER_BYTES = HEADER.itemsize
_CHECKED = HEADER_BYTES - 8


def encode(namespace: bytes, entries: Entries, payloads: Checksums, size: int) -> Bytes:
    """Make headers, shape (n, 128).

    Args:
        namespace: the layout's fingerprint, 16 bytes.
        entries: of the blocks.
        payloads: xxh3 of the blocks, shape (n,).
        size: bytes of a block.
    """
    table = np.zeros(len(entries), dtype=HEADER)
    table["magic"] = MAGIC
    table["namespace"] = np.frombuffer(namespace, dtype=np.uint8)
    table["key"] = entries.keys
    table["parent"] = entries.parents
    table["tenure"] = entries.tenures
    table["depth"] = entries.depths
    table["size"] = size
    table["expiry"] = entries.expiries
    table["payload"] = payloads
    raw = table.view(np.uint8).reshape(len(entries), HEADER_BYTES)
    table["check"] = _checks(raw)
    return raw


def decode(raw: Bytes, namespace: bytes, size: int) -> tuple[Bools, Entries, Checksums]:
    """Read headers, shape (n, 128), C-contiguous.

    Returns:
        Which are whole and of this namespace and block size, shape (n,); and entries and checksums
        of the blocks, of all n, worth nothing where they are not.
    """
    table = raw.view(HEADER).reshape(len(raw))
    good: Bools = table["magic"] == MAGIC
    good &= (table["namespace"] == np.frombuffer(namespace, dtype=np.uint8)).all(axis=1)
    good &= table["size"] == size
    if good.any():  # an empty table is not digested
        rows = np.flatnonzero(good)
        good[rows] = table["check"][rows] == _checks(raw[rows])
    entries = Entries(
        table["key"].astype(np.uint64),
        table["parent"].astype(np.uint64),
        table["depth"].astype(np.int32),
        table["expiry"].astype(np.int64),
        table["tenure"],
    )
    return good, entries, table["payload"].astype(np.uint64)


def _checks(raw: Bytes) -> Checksums:
    digests = (xxh3_64_intdigest(memoryview(row)[:_CHECKED]) for row in raw)
    return np.fromiter(digests, dtype=np.uint64, count=len(raw))
