"""A disk store: what comes back is what went in, and the directory stays under its cap."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_bench import NAMESPACE, SIZE, TENURE, bytes_of, entries_of, keys_of, rows_of
from tests.lib.foreign_files import scatter

from pigou.kv.block import Bytes
from pigou.request import NEVER
from pigou.runtime.stores.disk_store import DiskStore
from pigou.runtime.stores.segment import Segment
from pigou.runtime.stores.store import StoreError

CAP = 40_000


def open_store(path: Path, now: int = 0, cap: int = CAP) -> DiskStore:
    return DiskStore(path, NAMESPACE, SIZE, cap, clock=lambda: now)


def test_what_is_no_segment_is_left_alone_and_keeps_no_block_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert put(store, [1, 2]) == 2
    store.close()
    count = scatter(tmp_path)
    (tmp_path / ("9" * 200 + ".pigou-kv")).touch()  # no number of a segment can follow
    (tmp_path / "00000007.pigou-kv").mkdir()
    os.mkfifo(tmp_path / "00000008.pigou-kv")
    store = open_store(tmp_path)
    assert get(store, [1, 2]) == [1, 2]
    fresh = put(store, list(range(10, 400)))  # more than the cap
    assert 0 < fresh <= store.capacity
    assert get(store, [10]) == [10]
    store.close()
    assert len(list(tmp_path.glob("*.json"))) + 1 == count
    assert (tmp_path / "00000007.pigou-kv").is_dir()


def put(store: DiskStore, numbers: list[int], expiry: int = NEVER) -> int:
    entries = entries_of(numbers, expiry)
    return int(store.put(entries, bytes_of(numbers), rows_of(len(numbers))).sum())


def get(store: DiskStore, numbers: list[int]) -> list[int]:
    """Which of the blocks the store returns; fails where one is wrong."""
    out = np.zeros((len(numbers), SIZE), dtype=np.uint8)
    good = store.get(keys_of(numbers), out, rows_of(len(numbers)))
    assert (out[good] == bytes_of(numbers)[good]).all()
    return [n for n, hit in zip(numbers, good.tolist(), strict=True) if hit]


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.pigou-kv"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = open_store(tmp_path)
    yield store
    store.close()


def test_what_was_put_is_read_back_and_nothing_else(store: DiskStore) -> None:
    assert put(store, [3, 1, 2]) == 3
    assert get(store, [0, 1, 2, 3, 4]) == [1, 2, 3]
    assert store.delete(keys_of([1, 9])) == 1
    assert get(store, [1, 2, 3]) == [2, 3]
    assert (store.counts.written, store.counts.hits, store.counts.misses) == (3, 5, 3)


def test_blocks_may_be_scattered_over_the_rows_of_larger_arrays(store: DiskStore) -> None:
    data = bytes_of(range(10))
    chosen = np.array([7, 2, 5], dtype=np.int32)
    assert store.put(entries_of([7, 2, 5]), data, chosen).all()
    out = np.zeros((20, SIZE), dtype=np.uint8)
    places = np.array([19, 0, 4], dtype=np.int32)
    assert store.get(keys_of([5, 7, 2]), out, places).all()
    assert (out[places] == data[[5, 7, 2]]).all()
    assert not out[np.setdiff1d(np.arange(20), places)].any()


def test_a_full_store_refuses_and_holds_as_many_blocks_as_it_says(store: DiskStore) -> None:
    assert put(store, list(range(100))) == store.capacity < 100
    assert store.counts.refused == 100 - store.capacity
    assert store.used_bytes == on_disk(store.path) <= CAP
    store.delete(keys_of(range(0, 100, 3)))
    free = store.capacity - len(store.entries())
    assert put(store, list(range(200, 300))) == free > 0
    assert store.used_bytes == on_disk(store.path) <= CAP


def test_a_key_twice_is_one_block(store: DiskStore) -> None:
    assert put(store, [1, 1, 2]) == 3
    assert put(store, [1]) == 1
    assert len(store.entries()) == 2


def test_entries_survive_with_all_that_is_known_of_them(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    put(first, [4, 5, 6], expiry=1000)
    first.close()
    again = open_store(tmp_path)
    found = again.entries()
    order = np.argsort(found.depths)
    wanted = entries_of([4, 5, 6], expiry=1000)
    for name in ("keys", "parents", "depths", "expiries", "tenures"):
        assert (getattr(found, name)[order] == getattr(wanted, name)).all(), name
    assert found.tenures[0].tobytes() == TENURE
    again.close()


def test_void_blocks_are_neither_stored_nor_served_nor_kept(tmp_path: Path) -> None:
    now = [0]
    store = DiskStore(tmp_path, NAMESPACE, SIZE, CAP, clock=lambda: now[0])
    put(store, [1], expiry=100)
    put(store, [2], expiry=200)
    assert get(store, [1, 2]) == [1, 2]
    now[0] = 100
    assert get(store, [1, 2]) == [2]
    assert put(store, [3], expiry=50) == 0
    assert store.has(keys_of([1, 2])).tolist() == [False, True]
    store.close()
    now[0] = 200
    again = open_store(tmp_path, now=200)
    assert len(again.entries()) == 0
    assert again.used_bytes == on_disk(tmp_path) == 0
    again.close()


def test_a_segment_of_holes_is_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, list(range(20)))
    store.delete(keys_of(range(20)))
    assert store.used_bytes == on_disk(tmp_path) == 0
    assert put(store, [5]) == 1
    assert get(store, [5]) == [5]
    store.close()


@pytest.mark.parametrize("other", ["layout", "size"])
def test_another_layout_sees_nothing_and_takes_the_room_it_needs(
    tmp_path: Path, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_store(tmp_path)
    put(first, list(range(100)))
    first.close()
    namespace = bytes(16) if other == "layout" else NAMESPACE
    size = SIZE if other == "layout" else 2 * SIZE
    second = DiskStore(tmp_path, namespace, size, CAP, clock=lambda: 0)
    assert len(second.entries()) == 0
    out = np.zeros((100, size), dtype=np.uint8)
    assert not second.get(keys_of(range(100)), out, rows_of(100)).any()
    assert second.used_bytes == on_disk(tmp_path)
    numbers = list(range(second.capacity))
    stored = second.put(entries_of(numbers), bytes_of(numbers, size), rows_of(len(numbers)))
    assert stored.all()
    assert second.used_bytes == on_disk(tmp_path) <= CAP
    second.close()


def test_a_layout_that_comes_back_finds_its_blocks_if_nobody_needed_the_room(
    tmp_path: Path,
) -> None:
    first = open_store(tmp_path)
    put(first, [1, 2])
    first.close()
    second = DiskStore(tmp_path, bytes(16), SIZE, CAP, clock=lambda: 0)
    assert second.put(entries_of([1]), bytes_of([8]), rows_of(1)).all()
    second.close()
    third = open_store(tmp_path)
    assert get(third, [1, 2]) == [1, 2]
    third.close()


@pytest.mark.parametrize(("blocks", "cap"), [(50, 10_000), (10, 20_000), (10, 13_250)])
def test_a_lower_cap_holds_from_the_start(tmp_path: Path, blocks: int, cap: int) -> None:
    first = open_store(tmp_path)
    put(first, list(range(blocks)))
    first.close()
    second = open_store(tmp_path, cap=cap)
    assert second.used_bytes == on_disk(tmp_path) <= cap
    assert put(second, list(range(50))) < 50
    assert second.used_bytes == on_disk(tmp_path) <= cap
    assert len(get(second, list(range(50)))) == len(second.entries())
    second.close()


def test_a_file_that_lost_its_end_lost_the_blocks_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_store(tmp_path)
    put(first, list(range(10)))
    first.close()
    file = next(tmp_path.glob("*.pigou-kv"))
    os.truncate(file, file.stat().st_size - 2 * SIZE - 1)
    second = open_store(tmp_path)
    assert len(second.entries()) == 7
    assert second.counts.corrupt == 3
    assert len(caplog.records) == 1
    assert put(second, [20, 21, 22, 23]) == 4
    assert get(second, list(range(30))) == [*range(7), 20, 21, 22, 23]
    assert second.used_bytes == on_disk(tmp_path)
    second.close()


def test_two_stores_cannot_use_one_directory(store: DiskStore) -> None:
    with pytest.raises(StoreError, match="in use by another process"):
        open_store(store.path)
    code = (
        "import sys; from pathlib import Path\n"
        "from pigou.runtime.stores.disk_store import DiskStore\n"
        "DiskStore(Path(sys.argv[1]), bytes(16), 512, 9999)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(store.path)], capture_output=True, text=True, check=False
    )
    assert "in use by another process" in ran.stderr


def test_after_close_everything_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        put(store, [1])
    with pytest.raises(StoreError, match="closed"):
        get(store, [1])
    open_store(tmp_path).close()


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        open_store(file / "below")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_write_that_fails_damages_nothing(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    put(store, [1, 2, 3])
    store.delete(keys_of([2]))
    written = [0]

    def failing(fd: int, parts: list[memoryview], offset: int) -> int:
        if written[0]:
            raise OSError(code, os.strerror(code))
        written[0] += 1
        return os.pwrite(fd, parts[0][:100], offset)  # torn

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(StoreError, match=os.strerror(code)):
            put(store, [4, 5])
    assert store.has(keys_of([1, 2, 3, 4, 5])).tolist() == [True, False, True, False, False]
    assert get(store, [1, 2, 3, 4, 5]) == [1, 3]
    assert store.used_bytes == on_disk(store.path)
    assert put(store, [4, 5]) == 2
    assert get(store, [1, 2, 3, 4, 5]) == [1, 3, 4, 5]
    assert put(store, list(range(10, 200))) == store.capacity - 4  # no place was lost


def test_a_block_that_is_being_read_is_not_overwritten(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, list(range(store.capacity)))
    reading, go_on = threading.Event(), threading.Event()
    read = Segment.read

    def slow(self: Segment, slots: Bytes, out: Bytes, rows: Bytes) -> None:
        reading.set()
        assert go_on.wait(60)
        read(self, slots, out, rows)

    monkeypatch.setattr(Segment, "read", slow)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(get(store, [3, 4])))
    thread.start()
    assert reading.wait(60)
    assert store.delete(keys_of([3, 4, 5])) == 3
    assert put(store, [1003, 1004, 1005]) == 1  # only the place of block 5 is free
    go_on.set()
    thread.join()
    assert found == [3, 4]
    assert put(store, [1003, 1004, 1005]) == 3
    assert get(store, [3, 4, 5, 1003, 1004, 1005]) == [1003, 1004, 1005]


WRITER = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from store_bench import *
from pigou.runtime.stores.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), NAMESPACE, SIZE, 10_000_000)
data = bytes_of(range(64))
for n in range(0, 1 << 30, 8):
    numbers = list(range(n, n + 8))
    store.put(entries_of(numbers), data, np.array([i % 64 for i in numbers], dtype=np.int32))
    if n >= 64:
        store.delete(keys_of(range(n - 64, n - 60)))
    print(n, flush=True)
"""


def test_what_was_written_before_a_kill_is_there_and_right(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), here], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    done = -1
    for line in writer.stdout:
        done = int(line)
        if done >= 800:
            break
    writer.send_signal(signal.SIGKILL)
    for line in writer.stdout:  # said before the signal arrived
        done = int(line)
    writer.wait()
    store = open_store(tmp_path, cap=10_000_000)
    numbers = list(range(done + 8))
    out = np.zeros((len(numbers), SIZE), dtype=np.uint8)
    good = store.get(keys_of(numbers), out, rows_of(len(numbers)))
    kept = [n for n in numbers if n > done - 60 or (n % 8) >= 4]
    surely = [n for n in kept if n >= 4 and n not in range(done - 64, done - 52)]
    assert good[surely].all()
    wanted = bytes_of(range(64))[np.array(numbers) % 64]
    assert (out[good] == wanted[good]).all()
    assert store.counts.corrupt == 0
    store.close()
