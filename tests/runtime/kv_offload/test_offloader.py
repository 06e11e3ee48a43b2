"""A mover: blocks arrive whole or not at all, queues are bounded, and no failure ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_bench import NAMESPACE, SIZE, bytes_of, entries_of, keys_of, rows_of

from pigou.kv.block import Bytes, KVLayout
from pigou.kv.checksum import Checksums
from pigou.request import SECOND, BlockHashes, Ints
from pigou.runtime.stores.disk_store import DiskStore
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.offloader import KVOffloader, OffloaderSettings, StagedCopy
from pigou.runtime.stores.store import BlockRecords, Bools, Store, StoreError
from pigou.runtime.stores.transfer_queue import OffloadResult

LAYOUT = KVLayout("m", "d", "float32", 16, 1, 1, 4, SIZE)
FAST = OffloaderSettings(pause=1_000_000, longest_pause=2_000_000, failures=2, close_seconds=30)


class Device:
    """Blocks in an array; `plain` devices can be seen as bytes, others must be read and written."""

    layout = LAYOUT

    def __init__(self, blocks: int, plain: bool) -> None:
        self.data = bytes_of(range(blocks))
        self._plain = plain

    def as_bytes(self) -> Bytes | None:
        return self.data if self._plain else None

    def read(self, ids: Ints) -> Bytes:
        return np.asarray(self.data[ids])

    def write(self, ids: Ints, data: Bytes) -> None:
        self.data[ids] = data


class Broken(HostStore):
    """A store that fails in the way it is told to, or waits until it may go on."""

    def __init__(self, capacity: int = 64) -> None:
        super().__init__(np.zeros((capacity, SIZE), dtype=np.uint8), capacity)
        self.error: BaseException | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.probes = 0

    def _may(self) -> None:
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error

    def put(
        self, entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        self._may()
        return super().put(entries, data, rows, sums)

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        self._may()
        return super().get(keys, out, rows)

    def probe(self) -> None:
        self.probes += 1
        if self.error is not None:
            raise StoreError("still broken")


class Answer:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self.values: list[Any] = []

    def __call__(self, value: Any) -> None:
        self.values.append(value)
        self._there.set()

    def wait(self) -> Any:
        assert self._there.wait(60), "nobody called"
        return self.values[0]


@pytest.fixture
def movers() -> Iterator[Callable[..., KVOffloader]]:
    made: list[KVOffloader] = []

    def make(
        stores: dict[str, Store] | None = None,
        *,
        plain: bool = True,
        capacity: int = 8,
        staging: int = 8,
        settings: OffloaderSettings = FAST,
    ) -> KVOffloader:
        arena = np.zeros((capacity + staging, SIZE), dtype=np.uint8)
        host = HostStore(arena, capacity)
        made.append(KVOffloader(Device(16, plain), host, stores, settings))
        return made[-1]

    yield make
    for mover in made:
        mover.close()


def copied(mover: KVOffloader, blocks: list[int]) -> StagedCopy:
    answer = Answer()
    assert mover.copy_out(np.array(blocks, dtype=np.int32), answer)
    copy = answer.wait()
    assert copy.good.all()
    return copy


def ids(*numbers: int) -> Ints:
    return np.array(numbers, dtype=np.int32)


def restored(
    mover: KVOffloader, numbers: list[int], source: str, blocks: list[int]
) -> OffloadResult:
    answer = Answer()
    assert mover.restore(keys_of(numbers), source, ids(*blocks), answer)
    return answer.wait()


@pytest.mark.parametrize("plain", [True, False])
def test_blocks_go_down_to_the_host_and_come_up_the_same(
    movers: Callable[..., KVOffloader], plain: bool
) -> None:
    mover = movers(plain=plain)
    copy = copied(mover, [2, 3, 5])
    assert copy.publish(ids(0, 2), entries_of([2, 5])).all()
    copy.drop()
    moved = restored(mover, [2, 3, 5], "host", [10, 11, 12])
    assert moved.good.tolist() == [True, False, True]
    assert moved.reason == ""
    device = mover._device
    assert isinstance(device, Device)
    assert (device.data[[10, 12]] == bytes_of([2, 5])).all()
    assert (device.data[11] == bytes_of([11])[0]).all()


@pytest.mark.parametrize("plain", [True, False])
def test_blocks_go_through_every_store_and_come_back_the_same(
    movers: Callable[..., KVOffloader], plain: bool, tmp_path: Path
) -> None:
    disk = DiskStore(tmp_path, NAMESPACE, SIZE, 40_000)
    far = Broken()
    mover = movers({"disk": disk, "far": far}, plain=plain)
    copy = copied(mover, [1, 2, 3])
    sent = Answer()
    assert mover.send(copy, ids(0, 1), entries_of([1, 2]), "disk", sent)
    copy.drop()
    assert sent.wait().good.all()
    for source, target in (("disk", "far"), ("far", "host")):
        moved = Answer()
        assert mover.move(entries_of([1, 2]), source, target, moved)
        assert moved.wait().good.all()
    for i, source in enumerate(("disk", "far", "host")):
        up = restored(mover, [1, 2, 3], source, [10 + i, 13 + i, 0])
        assert up.good.tolist() == [True, True, False]
        assert (mover._device.read(ids(10 + i, 13 + i)) == bytes_of([1, 2])).all()
    assert len(mover._host._free) == 14  # nothing is left in staging


@pytest.mark.parametrize("target", ["host", "far"])
def test_demoted_blocks_are_in_the_store_when_it_is_said(
    movers: Callable[..., KVOffloader], target: str
) -> None:
    far = Broken(capacity=2)
    mover = movers({"far": far}, capacity=2)
    answer = Answer()
    assert mover.demote(ids(4, 5, 6), entries_of([4, 5, 6]), target, answer)
    assert answer.wait().good.tolist() == [True, True, False]
    assert restored(mover, [4, 5, 6], target, [0, 1, 2]).good.tolist() == [True, True, False]
    assert len(mover._host._free) == (10 if target == "far" else 8)


def test_a_demotion_to_a_store_that_is_down_ends_with_nothing_there(
    movers: Callable[..., KVOffloader],
) -> None:
    far = Broken()
    mover = movers({"far": far}, settings=OffloaderSettings(failures=1, pause=3600 * SECOND))
    far.error = StoreError("the disk is full")
    answers = [Answer(), Answer()]
    assert mover.demote(ids(1), entries_of([1]), "far", answers[0])
    assert answers[0].wait().reason == "the disk is full"
    assert not mover.status()["far"].up
    assert mover.demote(ids(1), entries_of([1]), "far", answers[1])
    assert "down" in answers[1].wait().reason
    assert not answers[0].wait().good.any()
    assert not answers[1].wait().good.any()
    assert len(mover._host._free) == 16


def test_blocks_that_were_moved_may_be_deleted_at_once(
    movers: Callable[..., KVOffloader], tmp_path: Path
) -> None:
    far = Broken()
    mover = movers({"far": far})
    copy = copied(mover, [1, 2])
    copy.publish(ids(0, 1), entries_of([1, 2]))
    far.gate.clear()
    moved = Answer()
    assert mover.move(entries_of([1, 2, 7]), "host", "far", moved)
    mover.delete("host", keys_of([1, 2]))
    copy = copied(mover, [3, 4, 5, 6])
    copy.drop()
    far.gate.set()
    assert moved.wait().good.tolist() == [True, True, False]
    out = np.zeros((2, SIZE), dtype=np.uint8)
    assert far.get(keys_of([1, 2]), out, rows_of(2)).all()
    assert (out == bytes_of([1, 2])).all()


def test_deletes_are_in_order_with_writes_and_never_refused(
    movers: Callable[..., KVOffloader],
) -> None:
    far = Broken()
    mover = movers({"far": far}, settings=OffloaderSettings(queue_blocks=2))
    copied(mover, [1]).publish(ids(0), entries_of([1]))
    far.gate.clear()
    answers = [Answer(), Answer()]
    assert mover.move(entries_of([1]), "host", "far", answers[0])
    mover.delete("far", keys_of([1]))
    assert mover.move(entries_of([1]), "host", "far", answers[1])
    assert not mover.move(entries_of([1]), "host", "far", answers[1])
    for _ in range(10):
        mover.delete("far", keys_of([2]))
    far.gate.set()
    assert [answer.wait().good.all() for answer in answers] == [True, True]
    assert far.counts.written == 2
    assert far.has(keys_of([1])).all()


def test_what_does_not_fit_is_refused_and_leaves_nothing_behind(
    movers: Callable[..., KVOffloader],
) -> None:
    far = Broken()
    mover = movers({"far": far}, staging=4, capacity=4, settings=OffloaderSettings(queue_blocks=3))
    assert not mover.copy_out(ids(*range(9)), Answer())  # nine rows there are not
    assert len(mover._host._free) == 8
    copy = copied(mover, [0, 1, 2])
    other = copied(mover, [3])
    far.gate.clear()
    first, second = Answer(), Answer()
    assert mover.send(copy, ids(0, 1), entries_of([0, 1]), "far", first)
    assert mover.send(copy, ids(2), entries_of([2]), "far", second)
    assert not mover.send(other, ids(0), entries_of([3]), "far", None)
    assert mover.status()["far"].writes.blocks == 3
    assert mover.status()["far"].writes.refused == 1
    assert other.publish(ids(0), entries_of([3])).all()  # a refused block is still the copy's
    assert not mover.move(entries_of([3]), "host", "far", None)
    far.gate.set()
    assert first.wait().good.all()
    assert second.wait().good.all()
    assert len(mover._host._free) == 7
    inside, go_on, third = threading.Event(), threading.Event(), Answer()

    def hold(_: OffloadResult) -> None:
        inside.set()
        go_on.wait(60)

    assert mover.restore(keys_of([3, 3, 3, 3]), "host", ids(4, 5, 6, 7), hold)
    assert inside.wait(60)
    assert mover.restore(keys_of([3, 3, 3, 3]), "host", ids(4, 5, 6, 7), third)  # it was idle
    assert not mover.restore(keys_of([3]), "host", ids(4), Answer())
    go_on.set()
    assert third.wait().good.all()
    mover.delete("host", keys_of([3]))
    assert len(mover._host._free) == 8  # what was refused is not held


def test_a_failing_store_goes_down_and_recovers_by_itself(
    movers: Callable[..., KVOffloader], caplog: pytest.LogCaptureFixture
) -> None:
    far = Broken()
    mover = movers({"far": far})
    far.error = StoreError("the server is dead")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            moved = restored(mover, [1], "far", [9])
            assert (moved.good.any(), moved.reason) == (False, "the server is dead")
        assert not mover.restore(keys_of([1]), "far", ids(9), Answer())
        status = mover.status()["far"]
        assert not status.up
        assert "dead" in status.reason or "broken" in status.reason
        assert status.writes.up
        far.error = None
        copied(mover, [1]).publish(ids(0), entries_of([1]))
        moved = Answer()
        assert mover.move(entries_of([1]), "host", "far", moved)
        assert moved.wait().good.all()
        answer = Answer()
        waiting = threading.Event()
        while not mover.restore(keys_of([1]), "far", ids(9), answer):
            waiting.wait(0.002)
        assert answer.wait().good.all()
    assert mover.status()["far"].up
    assert far.probes >= 1
    lines = [r.getMessage() for r in caplog.records if "far->host" in r.getMessage()]
    assert lines == [
        "far->host: the server is dead",
        "far->host is down: the server is dead",
        "far->host is up again",
    ]


def test_what_was_stored_before_a_failure_is_known_to_be_there(
    movers: Callable[..., KVOffloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Broken()
    mover = movers({"far": far}, settings=OffloaderSettings(batch=2))
    copied(mover, [1, 2, 3, 4, 5]).publish(ids(0, 1, 2, 3, 4), entries_of([1, 2, 3, 4, 5]))
    put = far.put

    def fails_late(
        entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        if far.counts.written:
            put(entries.take(slice(0, 1)), data, rows[:1])
            raise StoreError("the disk is full")
        return put(entries, data, rows, sums)

    monkeypatch.setattr(far, "put", fails_late)
    moved = Answer()
    assert mover.move(entries_of([1, 2, 3, 4, 5]), "host", "far", moved)
    result = moved.wait()
    assert result.reason == "the disk is full"
    assert result.good.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(3), MemoryError()])
def test_whatever_a_job_raises_the_thread_lives_on(
    movers: Callable[..., KVOffloader], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    far = Broken()
    mover = movers({"far": far})
    far.error = error
    assert not restored(mover, [1], "far", [9]).good.any()
    far.error = None
    copied(mover, [1]).publish(ids(0), entries_of([1]))
    moved = Answer()
    assert mover.move(entries_of([1]), "host", "far", moved)
    assert moved.wait().good.all()
    assert restored(mover, [1], "far", [9]).good.all()
    assert sum(r.exc_info is not None for r in caplog.records) == 1


def test_a_callback_that_fails_harms_nobody(
    movers: Callable[..., KVOffloader], caplog: pytest.LogCaptureFixture
) -> None:
    mover = movers()

    def fail(_: object) -> None:
        raise RuntimeError("a bug in a callback")

    assert mover.restore(keys_of([1]), "host", ids(9), fail)
    copied(mover, [1]).drop()
    restored(mover, [1], "host", [9])
    assert "a bug in a callback" in caplog.text


def test_closing_finishes_what_waits_and_refuses_more(movers: Callable[..., KVOffloader]) -> None:
    far = Broken()
    mover = movers({"far": far})
    copy = copied(mover, [1, 2, 3])
    answers = [Answer() for _ in range(3)]
    for i in range(3):
        assert mover.send(copy, ids(i), entries_of([i]), "far", answers[i])
    mover.close()
    assert all(answer.wait().good.all() for answer in answers)
    assert not mover.restore(keys_of([1]), "far", ids(9), Answer())
    assert not mover.copy_out(ids(1), Answer())


def test_closing_does_not_wait_for_a_store_that_hangs(movers: Callable[..., KVOffloader]) -> None:
    far = Broken()
    mover = movers({"far": far}, settings=OffloaderSettings(close_seconds=0.05))
    far.gate.clear()
    answers = [Answer(), Answer()]
    for answer in answers:
        assert mover.restore(keys_of([1]), "far", ids(9), answer)
    mover.close()
    assert answers[1].wait().reason == "closed"
    assert not answers[0].values
    far.gate.set()
    assert not answers[0].wait().good.any()


def test_a_survey_tells_what_a_store_holds(
    movers: Callable[..., KVOffloader], tmp_path: Path
) -> None:
    disk = DiskStore(tmp_path, NAMESPACE, SIZE, 40_000)
    disk.put(entries_of([1, 2]), bytes_of([1, 2]), rows_of(2))
    mover = movers({"disk": disk})
    answer = Answer()
    assert mover.survey("disk", answer)
    assert len(answer.wait()) == 2


def test_stores_that_do_not_fit_are_refused() -> None:
    host = HostStore(np.zeros((4, SIZE + 1), dtype=np.uint8), 4)
    with pytest.raises(ValueError, match="513 bytes"):
        KVOffloader(Device(4, True), host)
    host = HostStore(np.zeros((4, SIZE), dtype=np.uint8), 4)
    with pytest.raises(ValueError, match="another name"):
        KVOffloader(Device(4, True), host, {"device": Broken()})
    with pytest.raises(ValueError, match="batch is 0"):
        OffloaderSettings(batch=0)


def test_what_a_move_takes_is_learnt(movers: Callable[..., KVOffloader]) -> None:
    guess = OffloaderSettings(guesses={"host": (10.0, SIZE / 1.0)})
    mover = movers(settings=guess)
    before = mover.seconds("host", "device", 2)
    assert before == pytest.approx(12.0)
    copied(mover, [1, 2]).publish(ids(0, 1), entries_of([1, 2]))
    for _ in range(200):
        restored(mover, [1, 2], "host", [8, 9])
    assert mover.seconds("host", "device", 2) < before / 2
    status = mover.status()["host"]
    assert status.reads.moved == 400
    assert status.counts.hits == 400
