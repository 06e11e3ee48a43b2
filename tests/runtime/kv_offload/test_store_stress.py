"""Many threads and many failures at once: no wrong byte, no lost row, one answer for each job."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_bench import NAMESPACE, SIZE, bytes_of, entries_of, keys_of, rows_of

from pigou.kv.block import Bytes, KVLayout
from pigou.kv.checksum import Checksums
from pigou.request import BlockHashes, Ints
from pigou.runtime.stores.disk_store import DiskStore
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.offloader import KVOffloader, OffloaderSettings, StagedCopy
from pigou.runtime.stores.store import BlockRecords, Bools, Store, StoreError
from pigou.runtime.stores.transfer_queue import OffloadResult, TransferQueueStatus

NUMBERS = 40
KNOWN = bytes_of(range(NUMBERS))


def work(store: Store, seed: int, steps: int, wrong: list[str]) -> None:
    """Put, get and delete at random; whatever comes back must be right."""
    chance = random.Random(seed)
    out = np.zeros((8, SIZE), dtype=np.uint8)
    try:
        for _ in range(steps):
            numbers = chance.sample(range(NUMBERS), chance.randrange(1, 8))
            rows = rows_of(len(numbers))
            what = chance.random()
            if what < 0.4:
                store.put(entries_of(numbers), KNOWN, np.array(numbers, dtype=np.int32))
            elif what < 0.8:
                good = store.get(keys_of(numbers), out, rows)
                if not (out[rows][good] == KNOWN[numbers][good]).all():
                    wrong.append(f"blocks {numbers}")
            else:
                store.delete(keys_of(numbers))
            if store.used_bytes > store.cap_bytes:
                wrong.append(f"{store.used_bytes} bytes")
    except Exception as error:
        wrong.append(repr(error))


def make(kind: str, path: Path) -> Store:
    if kind == "disk":
        return DiskStore(path, NAMESPACE, SIZE, 15_000)
    return HostStore(np.zeros((25, SIZE), dtype=np.uint8), 20)


@pytest.mark.parametrize("kind", ["disk", "host"])
def test_threads_do_not_disturb_one_another(tmp_path: Path, kind: str) -> None:
    store = make(kind, tmp_path)
    wrong: list[str] = []
    threads = [threading.Thread(target=work, args=(store, s, 150, wrong)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.counts.corrupt == 0
    assert store.counts.hits > 0
    if isinstance(store, HostStore):
        assert len(store._free) == 25 - len(store.entries())
        return
    held = {key.tobytes() for key in store.entries().keys}
    numbers = list(range(1000, 1100))
    stored = store.put(entries_of(numbers), bytes_of(numbers), rows_of(100))
    assert stored.sum() == store.capacity - len(held)  # no place was lost
    store.close()
    again = make(kind, tmp_path)
    held |= {key.tobytes() for key in keys_of(numbers)[stored]}
    assert {key.tobytes() for key in again.entries().keys} == held
    assert again.counts.corrupt == 0
    again.close()


class Moody(HostStore):
    """A store that fails now and then, before or after it did its work."""

    def __init__(self, seed: int) -> None:
        super().__init__(np.zeros((20, SIZE), dtype=np.uint8), 20)
        self.chance = random.Random(seed)

    def _maybe(self) -> None:
        mood = self.chance.random()
        if mood < 0.1:
            raise StoreError("not now")
        if mood < 0.13:
            raise RuntimeError("a bug")

    def put(
        self, entries: BlockRecords, data: Bytes, rows: Ints, sums: Checksums | None = None
    ) -> Bools:
        self._maybe()
        stored = super().put(entries, data, rows, sums)
        self._maybe()
        return stored

    def get(self, keys: BlockHashes, out: Bytes, rows: Ints) -> Bools:
        self._maybe()
        good = super().get(keys, out, rows)
        self._maybe()
        return good

    def delete(self, keys: BlockHashes) -> int:
        count = super().delete(keys)
        self._maybe()
        return count


class Device:
    """Blocks in an array: the known ones, and after them places to restore to."""

    layout = KVLayout("m", "d", "float32", 16, 1, 1, 4, SIZE)

    def __init__(self, plain: bool) -> None:
        self.data = np.concatenate([KNOWN, np.zeros_like(KNOWN)])
        self.plain = plain

    def as_bytes(self) -> Bytes | None:
        return self.data if self.plain else None

    def read(self, ids: Ints) -> Bytes:
        return np.asarray(self.data[ids])

    def write(self, ids: Ints, data: Bytes) -> None:
        self.data[ids] = data


class Driver:
    """Asks a mover for anything at random, and keeps book of the answers."""

    def __init__(self, mover: KVOffloader, device: Device, seed: int) -> None:
        self.mover, self.device = mover, device
        self.chance = random.Random(seed)
        self.asked = 0
        self.wrong: list[str] = []
        self.answered: list[int] = []
        self.free = set(range(NUMBERS))
        self.lock = threading.Lock()

    def once(self, check: Callable[[OffloadResult], None]) -> Callable[[OffloadResult], None]:
        number = self.asked

        def done(moved: OffloadResult) -> None:
            check(moved)
            self.answered.append(number)

        return done

    def step(self) -> None:
        numbers = self.chance.sample(range(NUMBERS), self.chance.randrange(1, 6))
        blocks, entries = np.array(numbers, dtype=np.int32), entries_of(numbers)
        name, other = self.chance.sample(["host", "a", "b"], 2)
        what = self.chance.randrange(5)
        nothing = self.once(lambda moved: None)
        if what == 0:
            taken = self.mover.demote(blocks, entries, name, nothing)
        elif what == 1:
            taken = self.mover.move(entries, name, other, nothing)
        elif what == 2:
            taken = self.restore(numbers, name)
        elif what == 3:
            self.mover.delete(name, keys_of(numbers))
            taken = False
        else:
            taken = self.mover.copy_out(blocks, self.dropped())
        self.asked += taken

    def dropped(self) -> Callable[[StagedCopy], None]:
        number = self.asked

        def done(copy: StagedCopy) -> None:
            copy.drop()
            self.answered.append(number)

        return done

    def restore(self, numbers: list[int], name: str) -> bool:
        with self.lock:
            places = sorted(self.free)[: len(numbers)]
            self.free -= set(places)
        numbers = numbers[: len(places)]
        blocks = np.array(places, dtype=np.int32) + NUMBERS

        def check(moved: OffloadResult) -> None:
            good = moved.good
            if not (self.device.data[blocks][good] == KNOWN[numbers][good]).all():
                self.wrong.append(f"{name}: {numbers}")
            with self.lock:
                self.free |= set(places)

        if self.mover.restore(keys_of(numbers), name, blocks, self.once(check)):
            return True
        with self.lock:
            self.free |= set(places)
        return False


def links(mover: KVOffloader) -> list[TransferQueueStatus]:
    return [link for store in mover.status().values() for link in (store.reads, store.writes)]


@pytest.mark.parametrize("plain", [True, False])
def test_a_mover_among_failing_stores_answers_each_job_once_and_loses_nothing(
    plain: bool,
) -> None:
    device = Device(plain)
    host = HostStore(np.zeros((30, SIZE), dtype=np.uint8), 12)
    settings = OffloaderSettings(
        queue_blocks=20, pause=1, longest_pause=2, close_seconds=60, batch=2
    )
    mover = KVOffloader(device, host, {"a": Moody(1), "b": Moody(2)}, settings)
    driver = Driver(mover, device, 3)
    idle = threading.Event()
    while driver.asked < 400:
        for _ in range(8):
            driver.step()
        idle.wait(0.0005)  # let the links have their turn
    while any(link.jobs for link in links(mover)):
        idle.wait(0.005)
    assert driver.wrong == []
    assert sorted(driver.answered) == list(range(driver.asked))
    assert all((link.blocks, link.restarts) == (0, 0) for link in links(mover))
    assert any(link.errors for link in links(mover))
    assert len(host._free) == 30 - len(host.entries())
    for name in ("host", "a", "b"):
        store = mover.stores[name]
        held = store.entries().keys
        numbers = [int(key) - 1 for key in held[:, 1]]
        out = np.zeros((len(numbers), SIZE), dtype=np.uint8)
        good = HostStore.get(store, held, out, rows_of(len(numbers)))  # type: ignore[arg-type]
        assert good.all()
        assert (out == KNOWN[numbers]).all()
    mover.close()
