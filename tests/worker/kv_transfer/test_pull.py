"""Laws of a transfer in which nothing goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import transfer_stand as stand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from transfer_stand import BLOCK_SIZE, BLOCKS, ids, pull

from pigou.worker.kv_transfer.block_store import HostBlockStore
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.transfer_params import TransferConfig, TransferReason

both = pytest.mark.parametrize("backend", ["shm", "tcp"])
kinds = pytest.mark.parametrize("kind", [HostBlockStore, stand.StagedStore])


@pytest.fixture
def stage(make_sender: Any, make_receiver: Any) -> Iterator[Any]:
    """`stage(kind, backend)` returns the same (sender, its store, store, receiver) each time."""
    made: list[Any] = []

    def stage(kind: type[HostBlockStore], backend: str) -> Any:
        if not made:
            sender, source, _ = make_sender(block_bytes=1000)
            store = stand.empty_store(kind, 1000)
            made.extend((sender, source, store, make_receiver(store, backends=(backend,))))
        return made

    yield stage
    made.clear()


@both
@kinds
@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_the_blocks_asked_for_arrive_in_order_and_no_other_is_touched(
    stage: Any, backend: str, kind: type[HostBlockStore], data: Any
) -> None:
    sender, source, store, receiver = stage(kind, backend)
    permutation = st.permutations(range(BLOCKS))
    count = data.draw(st.integers(1, BLOCKS))
    first = data.draw(st.integers(0, count))
    take = data.draw(st.integers(0, count - first))
    src = ids(*data.draw(permutation)[:count])
    dest = ids(*data.draw(permutation)[:take])
    store._data[:] = 0
    outcome = pull(receiver, sender.offer("r", src, count * BLOCK_SIZE), dest, first)
    assert (outcome.reason, outcome.blocks) == (TransferReason.OK, take)
    assert (outcome.backend, outcome.bytes) == (backend, take * 1000)
    wanted = np.zeros_like(store._data)
    wanted[dest] = source.as_bytes()[src[first : first + take]]
    assert (store._data == wanted).all()


@both
def test_blocks_larger_than_a_message_arrive(
    make_sender: Any, make_receiver: Any, backend: str
) -> None:
    size = 3_000_000
    sender, source, _ = make_sender(block_bytes=size)
    store = stand.empty_store(block_bytes=size)
    receiver = make_receiver(store, backends=(backend,))
    src, dest = ids(5, 6, 1, 9), ids(0, 3, 4, 5)
    assert pull(receiver, sender.offer("r", src, 64), dest).blocks == 4
    assert (store.as_bytes()[dest] == source.as_bytes()[src]).all()


@both
def test_tokens_count_what_the_last_block_really_holds(
    make_sender: Any, make_receiver: Any, backend: str
) -> None:
    sender, _, _ = make_sender()
    receiver = make_receiver(stand.empty_store(), backends=(backend,))
    src = ids(0, 1, 2)
    assert pull(receiver, sender.offer("a", src, 35), ids(0, 1, 2)).tokens == 35
    assert pull(receiver, sender.offer("b", src, 35), ids(2), first=2).tokens == 3
    assert pull(receiver, sender.offer("c", src, 35), ids(0, 1)).tokens == 32


@both
def test_pulled_blocks_are_released_once_and_at_once(
    make_sender: Any, make_receiver: Any, backend: str
) -> None:
    sender, _, released = make_sender()
    receiver = make_receiver(stand.empty_store(), backends=(backend,))
    params = sender.offer("r", ids(1), 16)
    assert pull(receiver, params, ids(0)).reason is TransferReason.OK
    assert released == ["r"]
    again = pull(receiver, params, ids(0))
    assert (again.reason, again.blocks) == (TransferReason.UNKNOWN, 0)
    assert not sender.release("r")
    assert (released, sender.held) == (["r"], 0)


def test_a_declined_offer_is_released_at_once(make_sender: Any, make_receiver: Any) -> None:
    sender, _, released = make_sender()
    receiver = make_receiver(stand.empty_store())
    receiver.decline(sender.offer("r", ids(1), 16))
    stand.eventually(lambda: released == ["r"])


def test_shared_memory_is_preferred_on_the_same_host_and_tcp_used_from_another(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, _ = make_sender()
    receiver = make_receiver(stand.empty_store())
    assert pull(receiver, sender.offer("a", ids(1), 16), ids(0)).backend == "shm"
    elsewhere = sender.offer("b", ids(1), 16) | {"remote_host_id": "another"}
    assert pull(receiver, elsewhere, ids(0)).backend == "tcp"


def test_tcp_takes_over_when_the_shared_memory_cannot_be_mapped(
    make_sender: Any, make_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, source, _ = make_sender()
    store = stand.empty_store()
    receiver = make_receiver(store)

    def refused(name: str, key: str) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr("pigou.worker.kv_transfer.backends.MappedMemory", refused)
    outcome = pull(receiver, sender.offer("r", ids(7), 16), ids(3))
    assert (outcome.reason, outcome.backend) == (TransferReason.OK, "tcp")
    assert (store.as_bytes()[3] == source.as_bytes()[7]).all()


def test_a_sender_in_device_memory_serves_readers_elsewhere_by_tcp(
    closing: Any, make_receiver: Any
) -> None:
    data = np.random.default_rng(1).integers(0, 256, (BLOCKS, 1000), dtype=np.uint8)
    sender = Sender(stand.StagedStore(stand.layout(1000), data), lambda _: None)
    closing.callback(sender.close)
    store = stand.empty_store(block_bytes=1000)
    receiver = make_receiver(store, backends=("tcp",))
    outcome = pull(receiver, sender.offer("r", ids(4, 2), 32), ids(1, 0))
    assert (outcome.reason, outcome.backend) == (TransferReason.OK, "tcp")
    assert (store.as_bytes()[[1, 0]] == data[[4, 2]]).all()


def test_an_offer_that_does_not_fit_its_tokens_is_refused_by_name(make_sender: Any) -> None:
    sender, _, _ = make_sender()
    with pytest.raises(ValueError, match="3 blocks for 20 tokens"):
        sender.offer("r", ids(1, 2, 3), 20)
    sender.offer("r", ids(1, 2), 20)
    with pytest.raises(ValueError, match="offered already"):
        sender.offer("r", ids(1, 2), 20)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"backends": ("rdma",)}, "backends"),
        ({"backends": ()}, "backends"),
        ({"lease": 0}, "lease"),
        ({"max_hold": 1}, "max_hold"),
        ({"port": 70000}, "port"),
        ({"host": "0.0.0.0"}, "advertise"),
        ({"threads": 0}, "threads"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(
    changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        TransferConfig(**changes)
