"""Block keys: a keyed chain of 128-bit hashes over the full blocks of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pigou.request import BlockHashes, no_hashes

_BYTES = 16
_PERSON = b"pigou-kv-block"

Tokens = Sequence[int] | NDArray[np.integer]


def chain(
    tokens: Tokens, block_size: int, seed: bytes, parent: BlockHashes | None = None
) -> BlockHashes:
    """Return the hashes of a sequence's full blocks, shape (len(tokens) // block_size, 2).

    A hash is 128-bit BLAKE2b (RFC 7693), keyed by `seed` (a tenure's digest), over the parent's
    hash and the tokens as 32-bit little-endian integers. `parent` is the hash of the block before
    `tokens`, shape (1, 2), or empty at the beginning. No hash is (0, 0).

    Raises:
        ValueError: `block_size` or the length of `seed` (1 to 64 bytes) is out of range.
        OverflowError: a token id is not in [0, 2^32).
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    if not 1 <= len(seed) <= 64:
        raise ValueError(f"the seed has {len(seed)} bytes; it must have 1 to 64")
    blocks = len(tokens) // block_size
    if blocks == 0:
        return no_hashes()
    data = memoryview(_encode(tokens, blocks * block_size))
    keyed = blake2b(digest_size=_BYTES, key=seed, person=_PERSON, salt=block_size.to_bytes(16))
    width = 4 * block_size
    digest = b"" if parent is None else parent.astype(">u8").tobytes()
    digests = []
    for start in range(0, blocks * width, width):
        state = keyed.copy()
        state.update(digest)
        state.update(data[start : start + width])
        digest = state.digest()
        if not any(digest):  # (0, 0) means "no hash"
            digest = bytes(_BYTES - 1) + b"\1"
        digests.append(digest)
    hashes = np.frombuffer(b"".join(digests), dtype=">u8").reshape(blocks, 2)
    return hashes.astype(np.uint64)


def _encode(tokens: Tokens, count: int) -> bytes:
    ids = np.asarray(tokens[:count], dtype=np.int64)
    if ids.min() < 0 or ids.max() >= 2**32:
        raise OverflowError(f"token ids {ids.min()} to {ids.max()}; they must be in [0, 2^32)")
    return ids.astype("<u4").tobytes()
