"""Whatever goes wrong, a pull ends, says why, and counts only blocks that are what was offered."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transfer_stand as stand
from transfer_stand import BLOCK_BYTES, BLOCK_SIZE, BLOCKS, Wait, ids, proxied, pull

from pigou.request import SECOND
from pigou.worker.kv_transfer.block_store import SHARED_DIR
from pigou.worker.kv_transfer.receiver import Receiver
from pigou.worker.kv_transfer.side_channel_protocol import Confirm
from pigou.worker.kv_transfer.transfer_params import TransferConfig, TransferError, TransferReason

both = pytest.mark.parametrize("backend", ["shm", "tcp"])
ALL = np.arange(BLOCKS, dtype=np.int32)
TOKENS = BLOCKS * BLOCK_SIZE


def assert_prefix(outcome: Any, store: Any, source: Any, least: int, most: int) -> None:
    """`outcome.blocks` leading blocks are as offered, and their number is in range."""
    assert least <= outcome.blocks <= most
    assert outcome.tokens == outcome.blocks * BLOCK_SIZE
    good = outcome.blocks
    assert (store._data[:good] == source.as_bytes()[:good]).all()


def test_a_connection_cut_in_the_middle_leaves_the_good_prefix(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, source, _ = make_sender()
    store = stand.empty_store()
    receiver = make_receiver(store, backends=("tcp",))
    half = BLOCKS * BLOCK_BYTES // 2
    offer = sender.offer("r", ALL, TOKENS)
    with proxied(offer, lambda offset, data: data if offset < half else None) as params:
        outcome = pull(receiver, params, ALL)
    assert outcome.reason is TransferReason.CUT
    assert_prefix(outcome, store, source, 1, BLOCKS - 1)


def test_a_shared_memory_pull_whose_side_channel_is_cut_counts_for_nothing(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, _ = make_sender()
    receiver = make_receiver(stand.empty_store(), backends=("shm",))
    confirmation = msgspec.msgpack.encode(Confirm(True))

    def until_the_confirmation(_offset: int, data: bytes) -> bytes | None:
        # However the stream was cut into pieces: it is the last frame, and held back whole.
        return None if data.endswith(confirmation) else data

    with proxied(sender.offer("r", ALL, TOKENS), until_the_confirmation) as params:
        outcome = pull(receiver, params, ALL)
    assert (outcome.reason, outcome.blocks, outcome.tokens) == (TransferReason.CUT, 0, 0)


def test_a_block_corrupted_in_flight_is_never_counted(make_sender: Any, make_receiver: Any) -> None:
    sender, source, released = make_sender()
    store = stand.empty_store()
    receiver = make_receiver(store, backends=("tcp",))
    at = 20 * BLOCK_BYTES

    def flip(offset: int, data: bytes) -> bytes:
        if not offset <= at < offset + len(data):
            return data
        i = at - offset
        return data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]

    with proxied(sender.offer("r", ALL, TOKENS), flip) as params:
        outcome = pull(receiver, params, ALL)
        stand.eventually(lambda: released == ["r"])
    assert outcome.reason is TransferReason.CORRUPT
    assert_prefix(outcome, store, source, 18, 20)


@both
def test_a_block_corrupted_in_place_is_never_counted(
    make_sender: Any, make_receiver: Any, backend: str
) -> None:
    sender, source, released = make_sender()
    store = stand.empty_store()
    receiver = make_receiver(store, backends=(backend,))
    params = sender.offer("r", ALL, TOKENS)
    stand.eventually(lambda: sender._book._offers["r"].ready.is_set())
    source.as_bytes()[37, 5] ^= 1
    outcome = pull(receiver, params, ALL)
    assert (outcome.reason, outcome.blocks) == (TransferReason.CORRUPT, 37)
    assert_prefix(outcome, store, source, 37, 37)
    stand.eventually(lambda: released == ["r"])


@both
def test_a_layout_that_differs_is_refused_with_both_named_and_the_blocks_freed(
    make_sender: Any, make_receiver: Any, backend: str
) -> None:
    sender, _, released = make_sender()
    other = stand.layout(dtype="bfloat16")
    store = stand.HostBlockStore(other, np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8))
    receiver = make_receiver(store, backends=(backend,))
    outcome = pull(receiver, sender.offer("r", ids(1), 16), ids(0))
    assert (outcome.reason, outcome.blocks) == (TransferReason.LAYOUT, 0)
    assert "bfloat16" in outcome.detail
    assert not store.as_bytes().any()
    stand.eventually(lambda: released == ["r"])


def test_the_sender_checks_the_layout_too(make_sender: Any, make_receiver: Any) -> None:
    sender, _, _ = make_sender()
    mine = stand.layout(dtype="bfloat16")
    store = stand.HostBlockStore(mine, np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8))
    params = sender.offer("r", ids(1), 16) | {"remote_layout": mine.fingerprint()}
    outcome = pull(make_receiver(store), params, ids(0))
    assert (outcome.reason, outcome.blocks) == (TransferReason.LAYOUT, 0)
    assert "float32" in outcome.detail


def test_blocks_that_nobody_takes_are_freed_when_the_lease_expires(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, released = make_sender(lease=SECOND // 10)
    params = sender.offer("r", ids(1), 16)
    stand.eventually(lambda: released == ["r"])
    outcome = pull(make_receiver(stand.empty_store()), params, ids(0))
    assert (outcome.reason, outcome.blocks) == (TransferReason.UNKNOWN, 0)
    assert released == ["r"]


def test_a_shared_memory_pull_that_outlives_its_lease_counts_for_nothing(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, source, released = make_sender(lease=SECOND // 5)
    gated = stand.empty_store(stand.GatedStore)
    receiver = make_receiver(gated, backends=("shm",))
    wait = Wait()
    receiver.pull(sender.offer("r", ALL, TOKENS), 0, ALL, wait)
    assert gated.reached.wait(10)
    stand.eventually(lambda: released == ["r"])
    source.as_bytes()[40:] = 0  # handed to another request
    gated.go.set()
    outcome = wait.one()
    assert outcome.reason is not TransferReason.OK
    assert (outcome.blocks, outcome.tokens) == (0, 0)


def test_a_pull_that_is_slow_but_alive_keeps_its_lease(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, source, released = make_sender(lease=2 * SECOND)

    class Slow(stand.StagedStore):
        def write(self, ids: Any, data: Any) -> None:
            time.sleep(0.9)
            super().write(ids, data)

    store = stand.empty_store(Slow)
    receiver = make_receiver(store, backends=("shm",), copy_threads=1)
    outcome = pull(receiver, sender.offer("r", ALL, TOKENS), ALL)
    assert outcome.seconds > 4  # of a lease of 2
    assert (outcome.reason, released) == (TransferReason.OK, ["r"])
    assert_prefix(outcome, store, source, BLOCKS, BLOCKS)


def test_a_reader_that_stops_reading_loses_its_lease(make_sender: Any, make_receiver: Any) -> None:
    size = 1_000_000
    sender, _, released = make_sender(block_bytes=size, lease=SECOND // 2, timeout=SECOND // 2)
    gated = stand.empty_store(stand.GatedStore, size)
    receiver = make_receiver(gated, backends=("tcp",))
    wait = Wait()
    receiver.pull(sender.offer("r", ALL, TOKENS), 0, ALL, wait)
    assert gated.reached.wait(10)
    stand.eventually(lambda: released == ["r"])
    gated.go.set()
    outcome = wait.one()
    assert outcome.reason in (TransferReason.CUT, TransferReason.EXPIRED)
    assert outcome.blocks < BLOCKS


def test_no_lease_outlives_max_hold_however_alive_the_reader(make_sender: Any) -> None:
    sender, _, released = make_sender(lease=SECOND // 5, max_hold=SECOND // 2)
    began = time.monotonic()
    offer_secret = sender.offer("r", ids(1), 16)["remote_secret"]
    offer = sender._book.find("r", offer_secret)
    while sender._book.keep(offer):
        assert time.monotonic() < began + 60
        time.sleep(0.01)
    stand.eventually(lambda: released == ["r"])
    assert time.monotonic() - began > 0.4


@both
def test_a_sender_that_falls_silent_is_given_up(
    make_sender: Any, make_receiver: Any, backend: str
) -> None:
    sender, _, _ = make_sender()
    receiver = make_receiver(stand.empty_store(), backends=(backend,), timeout=SECOND // 4)
    with proxied(sender.offer("r", ALL, TOKENS), lambda offset, data: b"") as params:
        outcome = pull(receiver, params, ALL)
    assert (outcome.reason, outcome.blocks) == (TransferReason.TIMEOUT, 0)
    assert outcome.seconds < 60


def test_a_sender_that_cannot_be_reached_is_reported(make_sender: Any, make_receiver: Any) -> None:
    sender, _, released = make_sender()
    params = sender.offer("r", ids(1), 16)
    sender.close()
    assert released == ["r"]
    outcome = pull(make_receiver(stand.empty_store()), params, ids(0))
    assert (outcome.reason, outcome.blocks) == (TransferReason.UNREACHABLE, 0)
    with pytest.raises(TransferError, match="closed"):
        sender.offer("s", ids(1), 16)


def test_a_restarted_sender_refuses_tickets_of_its_former_life(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, released = make_sender()
    old = sender.offer("r", ids(1), 16) | {"remote_engine_id": "former"}
    outcome = pull(make_receiver(stand.empty_store()), old, ids(0))
    assert outcome.reason is TransferReason.UNKNOWN
    assert "restarted" in outcome.detail
    assert released == []


@contextlib.contextmanager
def sender_process(block_bytes: int, count: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    script = Path(__file__).with_name("transfer_sender_process.py")
    command = [sys.executable, str(script), str(block_bytes), str(count), "7"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=script.parent
    )
    assert process.stdin
    assert process.stdout
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


@both
def test_kill_9_of_the_sender_in_the_middle_of_a_pull(make_receiver: Any, backend: str) -> None:
    size = 1_000_000
    with sender_process(size, BLOCKS) as (process, params):
        shared = SHARED_DIR / params.pop("shared")
        gated = stand.empty_store(stand.GatedStore, size)
        receiver = make_receiver(gated, backends=(backend,))
        wait = Wait()
        receiver.pull(params, 0, ALL, wait)
        assert gated.reached.wait(10)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        gated.go.set()
        outcome = wait.one()
    assert outcome.reason is TransferReason.CUT
    wanted = np.random.default_rng(7).integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    good = outcome.blocks
    assert good < BLOCKS
    assert good == 0 or backend == "tcp"
    assert (gated._data[:good] == wanted[:good]).all()
    stand.memory().close()  # whoever creates the next one clears away what the dead one left
    assert not shared.exists()


def test_a_pull_beyond_the_queue_is_refused_at_once_and_its_blocks_freed(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, released = make_sender()
    gated = stand.empty_store(stand.GatedStore)
    receiver = make_receiver(gated, threads=1, max_pending=1)
    running, waiting, refused = Wait(), Wait(), Wait()
    receiver.pull(sender.offer("running", ids(1), 16), 0, ids(0), running)
    assert gated.reached.wait(10)
    receiver.pull(sender.offer("waiting", ids(2), 16), 0, ids(1), waiting)
    receiver.pull(sender.offer("refused", ids(3), 16), 0, ids(2), refused)
    assert (refused.one(0).reason, refused.one(0).blocks) == (TransferReason.BUSY, 0)
    gated.go.set()
    assert running.one().reason is TransferReason.OK
    assert waiting.one().reason is TransferReason.OK
    stand.eventually(lambda: sorted(released) == ["refused", "running", "waiting"])


@both
def test_a_cancelled_pull_still_ends_and_frees_the_blocks(
    make_sender: Any, make_receiver: Any, backend: str
) -> None:
    sender, _, released = make_sender()
    gated = stand.empty_store(stand.GatedStore)
    receiver = make_receiver(gated, backends=(backend,))
    wait = Wait()
    running = receiver.pull(sender.offer("r", ALL, TOKENS), 0, ALL, wait)
    assert gated.reached.wait(10)
    running.cancel()
    gated.go.set()
    assert wait.one().reason is TransferReason.CANCELLED
    stand.eventually(lambda: released == ["r"])


@both
def test_closing_the_receiver_ends_every_pull(make_sender: Any, backend: str) -> None:
    sender, _, _ = make_sender()
    gated = stand.empty_store(stand.GatedStore)
    receiver = Receiver(gated, stand.config(backends=(backend,), threads=1))
    waits = [Wait() for _ in range(3)]
    for i, wait in enumerate(waits):
        receiver.pull(sender.offer(str(i), ALL, TOKENS), 0, ALL, wait)
    assert gated.reached.wait(10)
    threading.Timer(0.2, gated.go.set).start()
    receiver.close()
    assert [wait.one(0).reason for wait in waits] == [TransferReason.CLOSED] * 3
    late = Wait()
    receiver.pull(sender.offer("late", ids(1), 16), 0, ids(0), late)
    assert late.one(0).reason is TransferReason.CLOSED


def test_a_store_that_fails_fails_the_pull_and_nothing_else(
    make_sender: Any, make_receiver: Any
) -> None:
    sender, _, released = make_sender()

    class Broken(stand.StagedStore):
        def write(self, ids: Any, data: Any) -> None:
            raise RuntimeError("no device")

    receiver = make_receiver(stand.empty_store(Broken))
    outcome = pull(receiver, sender.offer("r", ids(1), 16), ids(0))
    assert (outcome.reason, outcome.blocks) == (TransferReason.STORE, 0)
    assert "no device" in outcome.detail
    stand.eventually(lambda: released == ["r"])


def test_a_sender_whose_blocks_cannot_be_read_says_so(closing: Any, make_receiver: Any) -> None:
    from pigou.worker.kv_transfer.sender import Sender

    class Broken(stand.StagedStore):
        def read(self, ids: Any) -> Any:
            raise RuntimeError("no device")

    released: list[str] = []
    sender = Sender(stand.empty_store(Broken), released.append, TransferConfig())
    closing.callback(sender.close)
    receiver = make_receiver(stand.empty_store())
    outcome = pull(receiver, sender.offer("r", ids(1), 16), ids(0))
    assert (outcome.reason, outcome.blocks) == (TransferReason.STORE, 0)
    stand.eventually(lambda: released == ["r"])


def test_a_destination_that_does_not_exist_is_refused(make_receiver: Any) -> None:
    receiver = make_receiver(stand.empty_store())
    for first, dest in ((0, ids(BLOCKS)), (0, ids(-1)), (-1, ids(0))):
        with pytest.raises(ValueError, match=r"must be at least 0|does not exist"):
            receiver.pull({}, first, dest, Wait())
