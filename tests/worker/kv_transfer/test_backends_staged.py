"""Blocks that are not in host memory move by shared memory, too: staged, and not left behind."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
import transfer_stand as stand
from transfer_stand import BLOCK_SIZE, BLOCKS, ids, pull

from pigou.worker.kv_transfer.block_store import PREFIX, SHARED_DIR, HostBlockStore
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.transfer_params import TransferReason

kinds = pytest.mark.parametrize("kind", [HostBlockStore, stand.StagedStore])


#: Shared memory of workers that other tests made in this process.
_others: set[str] = set()


def _files() -> set[str]:
    return {path.name for path in SHARED_DIR.glob(f"{PREFIX}{os.getpid()}-*")}


@pytest.fixture(autouse=True)
def _note_the_files_of_others() -> None:
    _others.clear()
    _others.update(_files())


def files() -> list[str]:
    return sorted(_files() - _others)


def source(kind: type[HostBlockStore] = stand.StagedStore) -> Any:
    data = np.random.default_rng(3).integers(0, 256, (BLOCKS, stand.BLOCK_BYTES), dtype=np.uint8)
    return kind(stand.layout(), data)


@pytest.fixture
def make_staged(_nothing_leaks: None, closing: Any) -> Any:
    def make(store: Any, **changes: Any) -> Sender:
        sender = Sender(store, lambda _request: None, stand.config(**changes))
        closing.callback(sender.close)
        return sender

    return make


@kinds
@pytest.mark.parametrize("step", [1, 64 << 20])
def test_blocks_of_a_device_arrive_by_shared_memory(
    kind: type[HostBlockStore],
    step: int,
    make_staged: Any,
    make_receiver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pigou.worker.kv_transfer.backends._STEP_BYTES", step)
    store, target = source(), stand.empty_store(kind)
    sender = make_staged(store, backends=("shm",))
    receiver = make_receiver(target, backends=("shm",))
    src, dest = ids(9, 3, 40, 41), ids(0, 5, 2, 63)
    outcome = pull(receiver, sender.offer("r", src, 4 * BLOCK_SIZE), dest)
    assert (outcome.reason, outcome.backend, outcome.blocks) == (TransferReason.OK, "shm", 4)
    assert (target._data[dest] == store._data[src]).all()
    stand.eventually(lambda: not files())


def test_part_of_an_offer_is_staged_and_part_only(make_staged: Any, make_receiver: Any) -> None:
    store, target = source(), stand.empty_store()
    sender = make_staged(store, backends=("shm",))
    receiver = make_receiver(target, backends=("shm",))
    src = ids(*range(10))
    assert pull(receiver, sender.offer("r", src, 160), ids(7, 8), first=6).blocks == 2
    assert (target._data[[7, 8]] == store._data[[6, 7]]).all()


def test_without_room_in_memory_the_blocks_come_by_tcp(
    make_staged: Any, make_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_size: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("pigou.worker.kv_transfer.backends.SharedMemory", full)
    store, target = source(), stand.empty_store()
    sender, receiver = make_staged(store), make_receiver(target)
    outcome = pull(receiver, sender.offer("r", ids(1, 2), 32), ids(1, 2))
    assert (outcome.reason, outcome.backend, outcome.blocks) == (TransferReason.OK, "tcp", 2)


def test_a_store_that_cannot_be_read_leaves_no_memory_behind(
    make_staged: Any, make_receiver: Any
) -> None:
    class Broken(stand.StagedStore):
        reads = 0

        def read(self, ids: Any) -> Any:
            Broken.reads += 1
            if Broken.reads > 1:  # the first is for the checksums
                raise RuntimeError("the device is lost")
            return super().read(ids)

    sender = make_staged(source(Broken), backends=("shm",))
    receiver = make_receiver(stand.empty_store(), backends=("shm",))
    offer = sender.offer("r", ids(1), 16)
    assert pull(receiver, offer, ids(1)).blocks == 0
    stand.eventually(lambda: not files())
