"""A host store: a hard cap, verified copies, and rows that are not reused while they are read."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_bench import SIZE, bytes_of, entries_of, keys_of, rows_of

from pigou.request import NEVER
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.offloader import StagedCopy, copy_out
from pigou.runtime.stores.store import StoreError


def make(capacity: int, rows: int | None = None, now: int = 0) -> HostStore:
    arena = np.zeros((rows or capacity, SIZE), dtype=np.uint8)
    return HostStore(arena, capacity, clock=lambda: now)


def put(store: HostStore, numbers: list[int], expiry: int = NEVER) -> list[int]:
    stored = store.put(entries_of(numbers, expiry), bytes_of(numbers), rows_of(len(numbers)))
    return [n for n, there in zip(numbers, stored.tolist(), strict=True) if there]


def get(store: HostStore, numbers: list[int]) -> list[int]:
    out = np.zeros((len(numbers), SIZE), dtype=np.uint8)
    good = store.get(keys_of(numbers), out, rows_of(len(numbers)))
    assert (out[good] == bytes_of(numbers)[good]).all()
    return [n for n, hit in zip(numbers, good.tolist(), strict=True) if hit]


NUMBERS = st.lists(st.integers(0, 9), max_size=6)


@given(st.lists(st.tuples(st.booleans(), NUMBERS), max_size=30))
def test_a_host_store_is_a_dictionary_with_a_cap(steps: list[tuple[bool, list[int]]]) -> None:
    store, held = make(4, rows=6), set[int]()
    for adds, numbers in steps:
        if adds:
            new = [n for n in dict.fromkeys(numbers) if n not in held]
            stored = put(store, numbers)
            held |= set(stored)
            assert len(held) <= 4
            assert len(held) == 4 or set(new) <= held or len(set(numbers)) < len(numbers)
        else:
            assert store.delete(keys_of(numbers)) == len(held & set(numbers))
            held -= set(numbers)
        assert get(store, list(range(10))) == sorted(held)
        assert store.used_bytes == len(held) * SIZE <= store.cap_bytes
        assert len(store._free) == 6 - len(held)


def test_staged_rows_become_blocks_or_are_free_again() -> None:
    store = make(2, rows=5)
    device = bytes_of(range(4))
    rows = store.stage(4)
    assert rows is not None
    assert store.stage(2) is None
    copy = StagedCopy(store, rows)
    copy.sums[:] = copy_out(Fake(device), rows_of(4), store.arena, rows)
    copy.good[:] = True
    assert copy.publish(np.array([2], dtype=np.int32), entries_of([2])).all()
    with pytest.raises(ValueError, match="not all there"):
        copy.publish(np.array([2], dtype=np.int32), entries_of([2]))
    three = copy.publish(np.array([0, 1, 3], dtype=np.int32), entries_of([0, 1, 3]))
    assert three.tolist() == [True, False, False]
    copy.drop()
    copy.drop()
    assert get(store, [0, 1, 2, 3]) == [0, 2]
    assert len(store._free) == 3
    assert store.counts.refused == 2


class Fake:
    """Device blocks in an array."""

    layout = None

    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def as_bytes(self) -> np.ndarray:
        return self._data

    read = write = None


def test_a_pinned_row_outlives_its_key() -> None:
    store = make(2)
    put(store, [1, 2])
    rows = store.pin(keys_of([1, 5]))
    assert rows[1] == -1
    store.delete(keys_of([1]))
    assert put(store, [3]) == []  # its row is still being read
    assert (store.arena[rows[0]] == bytes_of([1])[0]).all()
    store.unpin(rows)
    assert put(store, [3]) == [3]
    assert get(store, [1, 2, 3]) == [2, 3]


def test_memory_that_altered_is_a_miss_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    store = make(4)
    put(store, [1, 2, 3])
    rows = store.pin(keys_of([1, 2]))
    store.unpin(rows)
    store.arena[rows, 17] ^= 1
    with caplog.at_level(logging.WARNING):
        assert get(store, [1, 2, 3]) == [3]
        assert get(store, [1, 2, 3]) == [3]
    assert len(caplog.records) == 1
    assert (store.counts.corrupt, store.counts.misses, store.counts.hits) == (2, 4, 2)
    assert put(store, [1, 2]) == [1, 2]


def test_void_blocks_are_neither_taken_nor_served() -> None:
    now = [0]
    store = HostStore(np.zeros((4, SIZE), dtype=np.uint8), 4, clock=lambda: now[0])
    put(store, [1], expiry=10)
    put(store, [2])
    now[0] = 10
    assert put(store, [3], expiry=10) == []
    assert len(store.entries()) == 1
    assert get(store, [1, 2, 3]) == [2]
    assert store.counts.expired == 1
    assert len(store._free) == 3


def test_a_closed_store_refuses() -> None:
    store = make(4)
    put(store, [1])
    store.close()
    assert store.stage(1) is None
    with pytest.raises(StoreError, match="closed"):
        get(store, [1])


def test_an_arena_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="arena"):
        HostStore(np.zeros((3, SIZE), dtype=np.uint8), 4)
    with pytest.raises(ValueError, match="arena"):
        HostStore(np.zeros((8, SIZE), dtype=np.uint8)[::2], 4)
