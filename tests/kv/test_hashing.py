"""Hash chains: the same prefix gives the same hashes, anything else gives others."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pigou.kv.hashing import chain

SEED = b"seed"
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, st.integers(1, 8), st.data())
def test_a_chain_continued_is_the_chain_at_once(
    ids: list[int], size: int, data: st.DataObject
) -> None:
    whole = chain(ids, size, SEED)
    cut = data.draw(st.integers(0, len(whole)))
    rest = chain(ids[cut * size :], size, SEED, whole[max(cut - 1, 0) : cut])
    assert whole.shape == (len(ids) // size, 2)
    assert whole.dtype == np.uint64
    assert np.array_equal(np.concatenate((whole[:cut], rest)), whole)


@given(tokens, tokens, st.integers(1, 4))
def test_blocks_have_equal_hashes_exactly_when_their_prefixes_are_equal(
    one: list[int], other: list[int], size: int
) -> None:
    first, second = chain(one, size, SEED), chain(other, size, SEED)
    for i in range(min(len(first), len(second))):
        stop = (i + 1) * size
        assert (one[:stop] == other[:stop]) == np.array_equal(first[i], second[i])


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=20),
    st.lists(st.binary(min_size=1, max_size=64), min_size=2, max_size=2, unique=True),
)
@example([1, 2], [b"a", b"a\0"])
def test_another_seed_shares_no_hash(ids: list[int], seeds: list[bytes]) -> None:
    one, other = (set(map(tuple, chain(ids, 2, seed).tolist())) for seed in seeds)
    assert not one & other


def test_another_block_size_shares_no_hash() -> None:
    one, other = chain([1, 2, 3, 4], 2, SEED), chain([1, 2, 3, 4], 4, SEED)
    assert not set(map(tuple, one.tolist())) & set(map(tuple, other.tolist()))


def test_a_hash_is_keyed_blake2b_of_the_parent_and_the_tokens() -> None:
    data = np.array([7, 2**32 - 1], dtype="<u4").tobytes()
    settings = {"digest_size": 16, "key": SEED, "person": b"pigou-kv-block"}
    salt = (2).to_bytes(16, "big")
    first = blake2b(data, salt=salt, **settings).digest()
    second = blake2b(first + data, salt=salt, **settings).digest()
    expected = [
        [int.from_bytes(d[:8], "big"), int.from_bytes(d[8:], "big")] for d in (first, second)
    ]
    assert chain([7, 2**32 - 1, 7, 2**32 - 1], 2, SEED).tolist() == expected


def test_arrays_and_lists_of_tokens_hash_alike() -> None:
    ids = list(range(100))
    assert np.array_equal(chain(ids, 8, SEED), chain(np.array(ids, dtype=np.int32), 8, SEED))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        chain([1], 0, SEED)
    with pytest.raises(ValueError, match="seed has 0 bytes"):
        chain([1], 1, b"")
    with pytest.raises(ValueError, match="seed has 65 bytes"):
        chain([1], 1, bytes(65))
    with pytest.raises(OverflowError, match="-1"):
        chain([-1], 1, SEED)
