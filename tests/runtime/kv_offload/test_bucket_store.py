"""An object storage: blocks come back as they were put, and a bad server is only ever a miss."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_bench import NAMESPACE, SIZE, bytes_of, entries_of, keys_of, rows_of

from pigou.kv.block import KVLayout
from pigou.request import NEVER
from pigou.runtime.stores.bucket_store import BucketLocation, BucketStore
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.offloader import KVOffloader, OffloaderSettings
from pigou.runtime.stores.store import StoreError
from pigou.runtime.stores.transfer_queue import OffloadResult

RECORD = SIZE + 128
CAP = 300 * RECORD


class Server:
    """The S3 server, as a process."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        file = Path(__file__).with_name("s3_server.py")
        command = [sys.executable, str(file)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def set(self, mode: str) -> None:
        url = f"http://127.0.0.1:{self.port}/-/{mode}"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "eu-north-1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    yield server
    server.kill()


def s3(server: Server, *, timeout: float = 60.0, retries: int = 0, cap: int = CAP) -> BucketStore:
    endpoint = f"http://127.0.0.1:{server.port}"
    location = BucketLocation("s3://bucket/a/prefix", endpoint, timeout=timeout, retries=retries)
    return BucketStore(location, NAMESPACE, SIZE, cap, clock=lambda: 100)


def put(store: BucketStore, numbers: list[int], expiry: int = NEVER) -> int:
    entries = entries_of(numbers, expiry)
    return int(store.put(entries, bytes_of(numbers), rows_of(len(numbers))).sum())


def get(store: BucketStore, numbers: list[int]) -> list[int]:
    out = np.zeros((len(numbers), SIZE), dtype=np.uint8)
    good = store.get(keys_of(numbers), out, rows_of(len(numbers)))
    assert (out[good] == bytes_of(numbers)[good]).all()
    return [n for n, hit in zip(numbers, good.tolist(), strict=True) if hit]


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_a_storage_of_any_kind_keeps_blocks(server: Server, tmp_path: Path, kind: str) -> None:
    if kind == "s3":
        store = s3(server)
    else:
        url = f"file://{tmp_path}/deep/er" if kind == "file" else "memory://"
        store = BucketStore(BucketLocation(url), NAMESPACE, SIZE, CAP, clock=lambda: 100)
    numbers = list(range(250))
    assert put(store, numbers) == 250
    assert put(store, numbers[:3]) == 3
    assert store.counts.written == 250
    assert get(store, [*numbers[:20], 999]) == numbers[:20]
    assert store.delete(keys_of([1, 2, 999])) == 2
    assert get(store, [1, 2, 3]) == [3]
    store.probe()
    found = store.entries()
    order = np.argsort(found.keys[:, 1])
    assert (found.keys[order] == keys_of([0, *range(3, 250)])).all()
    assert (found.depths[order] == [0, *range(3, 250)]).all()
    assert store.used_bytes == 248 * RECORD
    store.close()
    with pytest.raises(StoreError, match="closed"):
        get(store, [1])


def test_what_is_in_a_bucket_is_found_again_up_to_the_cap(server: Server) -> None:
    first = s3(server)
    put(first, list(range(10)))
    put(first, [20], expiry=200)
    again = s3(server)
    assert again.used_bytes == 0
    assert len(again.entries()) == 11
    assert again.used_bytes == 11 * RECORD
    small = s3(server, cap=4 * RECORD + 1)
    assert len(small.entries()) == small.capacity == 4
    assert put(small, [40, 41]) == 0
    assert small.counts.refused == 2
    assert small.used_bytes <= small.cap_bytes


def test_void_blocks_are_neither_put_nor_served_nor_found(server: Server) -> None:
    store = s3(server)
    assert put(store, [1], expiry=100) == 0
    assert put(store, [2], expiry=101) == 1
    store._clock = lambda: 101
    assert len(store.entries()) == 0
    assert get(store, [2]) == []
    assert store.counts.expired == 1
    assert not store.has(keys_of([2])).any()


def test_another_layout_sees_nothing(server: Server) -> None:
    put(s3(server), [1, 2])
    other = BucketStore(s3(server).location, bytes(16), SIZE, CAP)
    out = np.zeros((2, SIZE), dtype=np.uint8)
    assert not other.get(keys_of([1, 2]), out, rows_of(2)).any()
    assert len(other.entries()) == 0


def test_altered_cut_and_foreign_objects_are_misses_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    location = BucketLocation(f"file://{tmp_path}")
    store = BucketStore(location, NAMESPACE, SIZE, CAP, clock=lambda: 100)
    put(store, list(range(6)))
    files = {n: next(tmp_path.rglob(f"*{n + 1:016x}")) for n in range(6)}
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].write_bytes(files[1].read_bytes()[:200] + b"?" + files[1].read_bytes()[201:])
    files[2].write_bytes(files[3].read_bytes())
    files[4].write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert get(store, list(range(6))) == [3, 5]
    assert len(caplog.records) == 1
    assert store.counts.corrupt == 4
    assert sorted(n for n, file in files.items() if file.exists()) == [3, 5]
    assert put(store, [0, 1]) == 2
    assert get(store, [0, 1]) == [0, 1]


@pytest.mark.parametrize("mode", ["alter", "cut", "error", "deny", "hang"])
def test_a_server_that_misbehaves_gives_no_wrong_byte(server: Server, mode: str) -> None:
    store = s3(server, timeout=0.5 if mode == "hang" else 60.0)
    patient = s3(server)
    assert put(patient, [1, 2, 3]) == 3
    server.set(mode)
    if mode == "alter":
        assert get(store, [1, 2, 3]) == []
        assert store.counts.corrupt == 3
    else:
        with pytest.raises(StoreError, match="cannot be read"):
            get(store, [1, 2, 3])
    if mode in ("error", "deny", "hang"):
        for call in (lambda: put(store, [4]), store.entries, store.probe):
            with pytest.raises(StoreError):
                call()
        assert store.used_bytes == 0
    server.set("normal")
    put(patient, [1, 2, 3])
    assert get(patient, [1, 2, 3]) == ([1, 2, 3] if mode != "alter" else [])


def test_a_dead_server_raises_at_once(server: Server) -> None:
    store = s3(server)
    server.kill()
    for call in (lambda: get(store, [1]), lambda: put(store, [1]), store.probe):
        with pytest.raises(StoreError, match="cannot be"):
            call()
    server.start()


def test_objects_that_could_not_be_deleted_count_until_they_are(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = s3(server, cap=4 * RECORD)
    assert put(store, [1, 2, 3]) == 3
    server.set("error")
    assert store.delete(keys_of([1])) == 1
    assert store.delete(keys_of([2])) == 1  # which does not ask the server again so soon
    assert len(caplog.records) == 1
    assert store.has(keys_of([1, 2, 3])).tolist() == [False, False, True]
    assert store.used_bytes == 3 * RECORD
    server.set("normal")
    assert put(store, [1, 4, 5]) == 1  # room is counted before
    assert put(store, [4, 5]) == 1
    store._patience = 0.0
    assert store.delete(keys_of([4])) == 1
    assert sorted(get(s3(server), [1, 2, 3, 4, 5])) == [1, 3]
    assert store.used_bytes == 2 * RECORD


def test_wrong_credentials_say_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreError, match=r"403|denied|permi"):
        put(s3(server), [1])


class Device:
    """Four blocks in an array."""

    layout = KVLayout("m", "d", "float32", 16, 1, 1, 4, SIZE)

    def __init__(self) -> None:
        self.data = bytes_of(range(4))

    def as_bytes(self) -> np.ndarray:
        return self.data

    read = write = None


def test_a_server_that_is_killed_is_a_miss_until_it_is_back(server: Server) -> None:
    endpoint = f"http://127.0.0.1:{server.port}"
    store = BucketStore(
        BucketLocation("s3://bucket", endpoint, timeout=60.0, retries=0), NAMESPACE, SIZE, CAP
    )
    put(store, [0, 1])
    host = HostStore(np.zeros((4, SIZE), dtype=np.uint8), 0)
    settings = OffloaderSettings(failures=1, pause=1_000_000, longest_pause=2_000_000)
    mover = KVOffloader(Device(), host, {"remote": store}, settings)  # type: ignore[arg-type]

    def restore() -> OffloadResult | None:
        there, answers = threading.Event(), []

        def done(moved: OffloadResult) -> None:
            answers.append(moved)
            there.set()

        if not mover.restore(keys_of([0, 1]), "remote", np.array([2, 3], dtype=np.int32), done):
            return None
        assert there.wait(60)
        return answers[0]

    moved = restore()
    assert moved is not None
    assert moved.good.all()
    server.kill()
    moved = restore()
    assert moved is not None
    assert "cannot be read" in moved.reason
    assert not moved.good.any()
    assert restore() is None
    assert not mover.status()["remote"].up
    revived = Server.__new__(Server)
    revived.process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("s3_server.py")), str(server.port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert revived.process.stdout is not None
    revived.port = int(revived.process.stdout.readline())
    pause = threading.Event()
    while (moved := restore()) is None or moved.reason:
        pause.wait(0.005)
    assert not moved.good.any()  # it is up, and has forgotten everything
    assert mover.status()["remote"].up
    mover.close()
    revived.kill()
    server.start()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "bucket"}, "give one like s3://"),
        ({"url": "file:///x", "endpoint": "http://h"}, "endpoint is for s3"),
        ({"url": "s3://b", "timeout": 0}, "timeout is 0"),
        ({"url": "s3://b", "retries": -1}, "retries is -1"),
    ],
)
def test_locations_that_make_no_sense_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketLocation(**given)  # type: ignore[arg-type]


def test_an_unknown_scheme_is_refused_when_it_is_opened() -> None:
    with pytest.raises(StoreError, match="gopher"):
        BucketStore(BucketLocation("gopher://x"), NAMESPACE, SIZE, CAP)
