"""Keys of the prefix index: a 64-bit hash chain over token ids, the same for all engines.

    digest  w = seed; for each 4 tokens, as 64-bit words x, y (the last ones padded by zeros):
            w = fold((x ^ K1) * (y ^ w))           wyhash's step (Wang Yi 2019, final version 4)
    key     h_i = avalanche(h_{i-1} ^ digest_i)    SplitMix64's last step (Stafford 2011, mix 13)

`fold` xors the halves of the 128-bit product. Not secure against attackers: a collision only
misroutes a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pigou.compiled import kernel
from pigou.request import BlockKeys

#: Token ids: a NumPy array of integers is taken as it is, anything else is converted.
Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]

# Two of wyhash's secrets. Both halves of K1 have their top bit, so that no two ids below 2^31
# cancel it out.
_K0 = np.uint64(0x2D358DCCAA6C78A5)
_K1 = np.uint64(0x8BB84B93962EACC9)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def chain(
    tokens: Tokens, block_size: int, salt: str = "", parent: int | None = None, lora: str = ""
) -> BlockKeys:
    """Hash the full blocks of a sequence after `parent` (its key); no key is 0.

    Raises ValueError for a bad `block_size`, OverflowError or TypeError for a bad token id.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    keys = np.empty(len(tokens) // block_size, dtype=np.uint64)
    if len(keys):
        start = salt_key(salt, lora) if parent is None else parent
        _chain(token_array(tokens), block_size, np.uint64(start), keys)
    return keys


def salt_key(salt: str, lora: str = "") -> int:
    """Return the key before the first block: the hash of salt and adapter (XXH3)."""
    seed = xxh3_64_intdigest(lora.encode()) if lora else 0
    return xxh3_64_intdigest(salt.encode(), seed) if salt or lora else 0


def token_array(tokens: Tokens) -> NDArray[np.uint32]:
    """Return token ids as contiguous uint32; raises OverflowError or TypeError."""
    if not isinstance(tokens, np.ndarray):
        return np.frombuffer(array("I", tokens), dtype=np.uint32)
    if tokens.dtype != np.uint32:
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"token ids are of type {tokens.dtype}; they must be integers")
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**32:
            raise OverflowError(
                f"token ids {tokens.min()} to {tokens.max()}; they must be in [0, 2^32)"
            )
        tokens = tokens.astype(np.uint32)
    return np.ascontiguousarray(tokens)


def _fold(context: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        wide, narrow = ir.IntType(128), ir.IntType(64)
        x, y = (builder.zext(argument, wide) for argument in arguments)
        product = builder.mul(x, y)
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), narrow)
        return builder.xor(builder.trunc(product, narrow), high)

    return types.uint64(types.uint64, types.uint64), code


fold = cast("Callable[[np.uint64, np.uint64], np.uint64]", intrinsic(_fold))


@kernel
def _tail(tokens: NDArray[np.uint32], start: int, stop: int, w: np.uint64) -> np.uint64:
    """Mix the last one to three tokens of a block into its digest."""
    x, y = np.uint64(tokens[start]), np.uint64(0)
    if start + 1 < stop:
        x |= np.uint64(tokens[start + 1]) << _HALF
    if start + 2 < stop:
        y = np.uint64(tokens[start + 2])
    return fold(x ^ _K1, y ^ w)


@kernel
def _digests(tokens: NDArray[np.uint32], size: int, keys: BlockKeys) -> None:
    """Write the digests of the blocks, each by itself."""
    seed = fold(np.uint64(size) ^ _K0, _K1)
    fours, start = size // 4 * 4, 0
    for i in range(keys.shape[0]):
        w, at, whole = seed, start, start + fours
        while at < whole:
            x = np.uint64(tokens[at]) | (np.uint64(tokens[at + 1]) << _HALF)
            y = np.uint64(tokens[at + 2]) | (np.uint64(tokens[at + 3]) << _HALF)
            w = fold(x ^ _K1, y ^ w)
            at += 4
        start += size
        if at < start:
            w = _tail(tokens, at, start, w)
        keys[i] = w


@kernel
def _chain(tokens: NDArray[np.uint32], size: int, parent: np.uint64, keys: BlockKeys) -> None:
    """Write the key chain over blocks of `size` tokens."""
    _digests(tokens, size, keys)
    h = parent
    for i in range(keys.shape[0]):
        h ^= keys[i]
        h = (h ^ (h >> np.uint64(30))) * _M1
        h = (h ^ (h >> np.uint64(27))) * _M2
        h ^= h >> np.uint64(31)
        h = max(h, np.uint64(1))
        keys[i] = h
