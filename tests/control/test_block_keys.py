"""Laws of the key chain: prefixes, separation, spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.prefix_index.block_keys import chain

ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids, st.integers(1, 9), st.text(max_size=5), st.integers(0, 6))
def test_a_chain_continued_after_any_block_is_the_whole_chain(
    tokens: list[int], size: int, salt: str, cut: int
) -> None:
    whole = chain(tokens, size, salt)
    assert len(whole) == len(tokens) // size
    assert 0 not in whole
    cut = min(cut, len(whole))
    parent = int(whole[cut - 1]) if cut else None
    rest = chain(tokens[cut * size :], size, salt if parent is None else "", parent)
    assert whole[cut:].tolist() == rest.tolist()


@given(ids.filter(len), st.integers(1, 9), st.data())
def test_another_token_changes_its_block_and_all_after_it(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[at] = (other[at] + data.draw(st.integers(1, 2**32 - 1))) % 2**32
    same = chain(tokens, size) == chain(other, size)
    assert same[: at // size].all()
    assert not same[at // size :].any()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_lists_and_arrays_of_any_integer_type_hash_alike(tokens: list[int], size: int) -> None:
    whole = chain(tokens, size).tolist()
    assert chain(tuple(tokens), size).tolist() == whole
    for kind in (np.uint32, np.int32, np.int64, np.uint64):
        array = np.array(tokens, dtype=kind)
        assert chain(array, size).tolist() == whole
        assert chain(np.repeat(array, 2)[::2], size).tolist() == whole


def test_salts_sizes_parents_and_zeros_keep_chains_apart() -> None:
    zeros = [0] * 64
    keys = [chain(zeros, 4, salt) for salt in ("", "a", "b", "\0")]
    keys += [chain(zeros, size) for size in (1, 2, 3, 5, 8, 16)]
    keys += [chain(zeros, 4, parent=parent) for parent in (1, 2, 2**64 - 1)]
    everything = np.concatenate(keys)
    assert len(set(everything.tolist())) == len(everything)


def test_a_chain_is_what_it_always_was() -> None:
    """Keys may be shared between processes, so they must not depend on the machine."""
    assert [hex(key) for key in chain(range(1, 9), 4, "salt").tolist()] == GOLDEN


GOLDEN = ["0x71da21f0a6c2a42f", "0xd04220cb528a2879"]


def test_small_ids_do_not_collide() -> None:
    first, second = np.meshgrid(np.arange(1000), np.arange(1000))
    pairs = np.stack([first.ravel(), second.ravel()], axis=1)
    digests = chain(pairs.ravel(), 2, parent=None)
    assert len(np.unique(digests)) == len(digests)
    rows = [chain(row, 2)[0] for row in pairs[::97]]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_each_bit_of_a_token_flips_half_of_the_bits_of_its_key(size: int) -> None:
    generator = np.random.default_rng(size)
    flips = np.zeros((size, 32, 64))
    trials = 400
    for _ in range(trials):
        tokens = generator.integers(0, 150_000, size, dtype=np.uint32)
        key = chain(tokens, size)[0]
        for at in range(size):
            for bit in range(32):
                other = tokens.copy()
                other[at] ^= np.uint32(1 << bit)
                changed = np.array([key ^ chain(other, size)[0]], dtype="<u8")
                flips[at, bit] += np.unpackbits(changed.view(np.uint8), bitorder="little")
    # 400 fair coins stay within 6 standard deviations of one half.
    assert np.abs(flips / trials - 0.5).max() < 6 * 0.5 / np.sqrt(trials)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [([-1], OverflowError), ([2**32], OverflowError), ([1.5], TypeError),
     (np.array([-1]), OverflowError), (np.array([2**32]), OverflowError),
     (np.array([1.0]), TypeError)],
)  # fmt: skip
def test_what_is_no_token_id_is_refused(tokens: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        chain(tokens, 1)


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        chain([1], 0)
