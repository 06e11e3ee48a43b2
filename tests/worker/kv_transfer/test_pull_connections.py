"""Connections and mappings are kept for the next pull, and let go of when nobody needs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transfer_stand as stand
from transfer_stand import Wait, ids, pull

from pigou.request import SECOND
from pigou.worker.kv_transfer.transfer_params import TransferReason


def links(sender: Any) -> int:
    return len(sender._links)


def test_pulls_one_after_another_share_a_connection(make_sender: Any, make_receiver: Any) -> None:
    sender, _, _ = make_sender()
    receiver = make_receiver(stand.empty_store(), threads=1)
    for i in range(20):
        assert pull(receiver, sender.offer(str(i), ids(1), 16), ids(0)).reason is TransferReason.OK
    assert links(sender) == 1


def test_a_connection_that_the_sender_closed_meanwhile_is_replaced(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, _ = make_sender(timeout=SECOND // 10)
    receiver = make_receiver(stand.empty_store(), threads=1)
    assert pull(receiver, sender.offer("a", ids(1), 16), ids(0)).reason is TransferReason.OK
    stand.eventually(lambda: links(sender) == 0)
    assert pull(receiver, sender.offer("b", ids(1), 16), ids(0)).reason is TransferReason.OK


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_after_a_failed_pull_the_next_one_is_well(
    make_sender: Any, make_receiver: Any, backend: str
) -> None:
    sender, source, _ = make_sender()
    store = stand.empty_store()
    receiver = make_receiver(store, backends=(backend,), threads=1)
    bad = sender.offer("bad", ids(1, 2), 32)
    stand.eventually(lambda: sender._book._offers["bad"].ready.is_set())
    source.as_bytes()[2] ^= 1
    assert pull(receiver, bad, ids(0, 1)).blocks == 1
    good = pull(receiver, sender.offer("good", ids(1, 2), 32), ids(4, 5))
    assert (good.reason, good.blocks) == (TransferReason.OK, 2)
    assert (store.as_bytes()[4:6] == source.as_bytes()[1:3]).all()


def test_memory_of_a_sender_that_is_gone_is_let_go(
    make_sender: Any, make_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pigou.worker.kv_transfer.receiver._SWEEP", 0.05)
    sender, _, _ = make_sender()
    receiver = make_receiver(stand.empty_store(), backends=("shm",), timeout=SECOND // 10)
    assert pull(receiver, sender.offer("r", ids(1), 16), ids(0)).backend == "shm"
    (backend,) = receiver._imports
    assert len(backend._mapped) == 1
    sender.close()
    sender._exports["shm"]._memory.close()
    stand.eventually(lambda: not backend._mapped)
    stand.eventually(lambda: not receiver._links._idle)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_pulls_side_by_side_do_not_mix(make_sender: Any, make_receiver: Any, backend: str) -> None:
    sender, source, released = make_sender()
    store = stand.empty_store()
    receiver = make_receiver(store, backends=(backend,), threads=4)
    rng = np.random.default_rng(0)
    for turn in range(5):
        picks = rng.permutation(stand.BLOCKS).astype(np.int32).reshape(16, 4)
        waits = [Wait() for _ in picks]
        for i, (src, wait) in enumerate(zip(picks, waits, strict=True)):
            params = sender.offer(f"{turn}-{i}", src, 64)
            receiver.pull(params, 0, np.arange(4 * i, 4 * i + 4, dtype=np.int32), wait)
        assert {wait.one().reason for wait in waits} == {TransferReason.OK}
        assert (store.as_bytes() == source.as_bytes()[picks.reshape(-1)]).all()
    assert sender.held == 0
    assert sorted(released) == sorted(f"{turn}-{i}" for turn in range(5) for i in range(16))
