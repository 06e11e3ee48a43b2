"""Compiled checksums are those of the library, and a copy is a copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from pigou.kv import checksum

EDGES = (1, 240, 241, 256, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 65536)
sizes = st.sampled_from(EDGES) | st.integers(1, 5000)


@settings(deadline=None)  # the first example may compile
@given(size=sizes, seed=st.integers(0, 99), data=st.data())
def test_a_copy_brings_the_rows_with_their_checksums(
    size: int, seed: int, data: st.DataObject
) -> None:
    source = np.random.default_rng(seed).integers(0, 256, (6, size), dtype=np.uint8)
    source.flags.writeable = False  # as another process's memory is mapped
    ids = np.array(data.draw(st.lists(st.integers(0, 5), max_size=9)), dtype=np.int32)
    order = st.permutations(range(12)).map(lambda all_: all_[: len(ids)])
    places = np.array(data.draw(order), dtype=np.int32)
    target = np.full((12, size), 7, dtype=np.uint8)
    wanted = [xxh3_64_intdigest(source[i]) for i in ids]
    assert checksum.checksums_of(source, ids).tolist() == wanted
    assert checksum.copy(source, ids, target, places).tolist() == wanted
    assert (target[places] == source[ids]).all()
    untouched = np.setdiff1d(np.arange(12), places)
    assert (target[untouched] == 7).all()


def test_rows_that_do_not_exist_are_refused() -> None:
    rows = np.zeros((3, 300), dtype=np.uint8)
    for ids in ([3], [-1], [0, 2**30]):
        with pytest.raises(ValueError, match="rows"):
            checksum.digest_rows(rows, np.array(ids, dtype=np.int32))
        with pytest.raises(ValueError, match="rows"):
            checksum.copy_rows(rows, np.zeros(len(ids), dtype=np.int32), rows, np.array(ids))


def test_what_is_not_contiguous_or_differs_in_shape_is_refused() -> None:
    rows, one = np.zeros((4, 600), dtype=np.uint8), np.array([0], dtype=np.int32)
    with pytest.raises(ValueError, match="contiguous"):
        checksum.digest_rows(rows[:, :300], one)
    with pytest.raises(ValueError, match="differ"):
        checksum.copy_rows(rows, one, np.zeros((4, 300), dtype=np.uint8), one)
    with pytest.raises(ValueError, match="differ"):
        checksum.copy_rows(rows, one, rows, np.array([1, 2], dtype=np.int32))
