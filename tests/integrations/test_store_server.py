"""`pigou store`: what Redis clients send is kept within limits; hostile input is refused."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.forked_python import Popen
from tests.lib.server_process import free_ports

from pigou.integrations.store_server import tenure_of
from pigou.runtime.stores.page_store import PageStore, ValueStore

PAGE = 1024
MP = b"llama/8b@01000100@0@%s"


class Redis:
    """A client that sends commands as Redis' own do."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.file = self.socket.makefile("rb")

    def send(self, *words: bytes) -> None:
        parts = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        self.socket.sendall(b"*%d\r\n%b" % (len(words), b"".join(parts)))

    def read(self) -> Any:
        line = self.file.readline()
        if not line:
            raise EOFError
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self.file.read(size + 2)[:-2]
        if kind in b"*%":
            return [self.read() for _ in range(int(rest) * (2 if kind == b"%" else 1))]
        return {b"+": rest, b":": rest, b"-": b"-" + rest, b"_": None}[kind]

    def __call__(self, *words: bytes) -> Any:
        self.send(*words)
        return self.read()


@contextmanager
def running(folder: Path, *options: str, size: str = "400KiB") -> Iterator[tuple[int, int]]:
    ports = free_ports(2)
    command = [
        sys.executable, "-m", "pigou", "store", "--tier", f"disk={size}@{folder}", "--page",
        str(PAGE), "--max-value", "20KiB", "--port", str(ports[0]), "--metrics-port",
        str(ports[1]), *options,
    ]  # fmt: skip
    with Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == b"127.0.0.1:%d" % ports[0]
            yield ports[0], ports[1]
        finally:
            process.terminate()
            assert process.wait(60) == 0


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name)))


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    folder = tmp_path_factory.mktemp("store")
    with running(folder, "--quota", "alice=52KiB", "--connections", "4") as both:
        yield both


def content(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_values_of_any_size_are_kept_replaced_and_deleted(ports: tuple[int, int]) -> None:
    redis = Redis(ports[0])
    for size in (0, 1, PAGE - 16, PAGE - 15, PAGE, 5 * PAGE, 20 * 1024):
        for seed in (1, 2):
            value = content(seed, size)
            assert redis(b"SET", b"k", value) == b"OK"
            assert redis(b"GET", b"k") == value
    assert redis(b"SET", b"k", b"small") == b"OK"
    assert redis(b"MGET", b"k", b"none", b"k") == [b"small", None, b"small"]
    assert redis(b"EXISTS", b"k", b"none", b"k") == b"2"
    assert redis(b"DEL", b"k", b"none") == b"1"
    assert redis(b"GET", b"k") is None
    assert redis(b"EXISTS", b"k") == b"0"


def test_what_clients_ask_when_they_connect_is_answered(ports: tuple[int, int]) -> None:
    redis = Redis(ports[0])
    assert redis(b"PING") == b"PONG"
    assert redis(b"HELLO", b"3")[-1] == b"3"
    assert redis(b"GET", b"none") is None
    assert redis(b"CLIENT", b"SETINFO", b"LIB-NAME", b"x") == b"OK"
    assert redis(b"SELECT", b"0") == b"OK"
    assert redis(b"SELECT", b"1").startswith(b"-ERR")
    assert redis(b"EXPIRE", b"k", b"1").startswith(b"-ERR")
    assert redis(b"FLUSHALL") == b"OK"
    assert redis(b"QUIT") == b"OK"


def test_a_salt_has_its_quota_and_its_own_keys(ports: tuple[int, int]) -> None:
    redis = Redis(ports[0])
    redis(b"FLUSHALL")
    for i in range(30):
        assert redis(b"SET", MP % (b"%04x@alice" % i), content(i, 3000)) == b"OK"
        assert metric(ports[1], 'pigou_store_tenure_bytes{salt="alice"}') <= 0.00005 * 2**30
    kept = [i for i in range(30) if redis(b"EXISTS", MP % (b"%04x@alice" % i)) == b"1"]
    assert 10 <= len(kept) < 20
    assert kept[-1] == 29  # the least recent went
    for i in kept:
        assert redis(b"GET", MP % (b"%04x@alice" % i)) == content(i, 3000)
        assert redis(b"GET", MP % (b"%04x@bob" % i)) is None
        assert redis(b"GET", MP % (b"%04x" % i)) is None


def test_endless_writes_stay_within_the_tier(ports: tuple[int, int]) -> None:
    redis = Redis(ports[0])
    for i in range(300):
        assert redis(b"SET", b"k%d" % i, content(i, 5000)) == b"OK"
    assert metric(ports[1], 'pigou_store_used_bytes{tier="disk"}') <= 400 * 1024
    held = [i for i in range(300) if (got := redis(b"GET", b"k%d" % i)) is not None
            and got == content(i, 5000)]  # fmt: skip
    assert 40 < len(held) < 90
    assert redis(b"EXISTS", *[b"k%d" % i for i in range(300)]) == b"%d" % len(held)


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b"GET k\r\n", b"Protocol error"),
        (b"*1000000\r\n", b"at most"),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$99999999999\r\n", b"at most"),
        (b"*2\r\n$3\r\nGET\r\n$99999\r\n", b"at most"),
        (b"*-1\r\n", b"Protocol error"),
        (b"*2\r\n:3\r\n", b"Protocol error"),
        (b"\x00" * 600_000, b"-ERR"),
        (b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n", b"without options"),
    ],
)
def test_what_is_not_the_protocol_ends_the_connection(
    raw: bytes, answer: bytes, ports: tuple[int, int]
) -> None:
    redis = Redis(ports[0])
    reply = b""
    try:
        redis.socket.sendall(raw)
        redis.socket.shutdown(socket.SHUT_WR)
        reply = redis.file.read()
    except OSError:  # closed while it was sending
        assert len(raw) > 1000
    assert answer in reply or len(raw) > 1000
    assert Redis(ports[0])(b"PING") == b"PONG"


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_harms_no_other_connection(ports: tuple[int, int], raw: bytes) -> None:
    redis = Redis(ports[0])
    redis.socket.sendall(raw)
    redis.socket.close()
    redis.file.close()


def test_a_malformed_tenure_is_refused(ports: tuple[int, int]) -> None:
    reply = Redis(ports[0])(b"SET", MP % b"00@tenure1:x", b"v")
    assert reply.startswith(b"-ERR")
    assert b"tenure1" in reply


def test_a_connection_too_many_is_refused(ports: tuple[int, int]) -> None:
    time.sleep(0.2)
    held = [Redis(ports[0]) for _ in range(4)]
    assert [redis(b"PING") for redis in held] == [b"PONG"] * 4
    assert b"max number" in Redis(ports[0]).file.read()
    for redis in held:
        redis.socket.close()
        redis.file.close()


def test_a_client_that_stalls_blocks_nobody_else(tmp_path: Path) -> None:
    with running(tmp_path, "--buffers", "1") as (port, _):
        reader = Redis(port)
        assert reader(b"SET", b"k", content(0, 20_000)) == b"OK"
        for _ in range(200):  # replies that are not read
            reader.send(b"GET", b"k")
        other = Redis(port)
        assert other(b"PING") == b"PONG"
        for _ in range(200):
            assert reader.read() == content(0, 20_000)
        assert other(b"GET", b"k") == content(0, 20_000)


def test_a_password_is_needed_where_there_is_one(tmp_path: Path) -> None:
    with running(tmp_path, "--password", "s3cret") as (port, _):
        assert Redis(port)(b"GET", b"k").startswith(b"-NOAUTH")
        assert Redis(port)(b"SET", b"k", b"v").startswith(b"-NOAUTH")
        assert Redis(port)(b"AUTH", b"no").startswith(b"-WRONGPASS")
        redis = Redis(port)
        assert redis(b"AUTH", b"default", b"s3cret") == b"OK"
        assert redis(b"SET", b"k", b"v") == b"OK"
        other = Redis(port)
        assert other(b"HELLO", b"3", b"AUTH", b"default", b"s3cret")[-1] == b"3"
        assert other(b"GET", b"k") == b"v"


def test_values_survive_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as (port, _):
        Redis(port)(b"SET", b"k", content(5, 9000))
    with running(tmp_path) as (port, _):
        assert Redis(port)(b"GET", b"k") == content(5, 9000)


@pytest.mark.parametrize(
    ("key", "tenure"),
    [
        (b"llama@01000100@0@ab12@alice", "alice"),
        (b"llama@01000100@0@ab12", ""),
        (b"llama@1@0@ab12@bfloat16", ""),
        (b"llama@1@0@ab12@bfloat16metadata", ""),
        (b"llama@1@0@-ab12@bfloat16@user%alice@team%x", "user%alice@team%x"),
        (b"llama@1@0@ab12@bfloat16@user%alicekv_bytes", "user%alice"),
        (b"llama@1@0@ab12@bfloat16@user%alicemetadata", "user%alice"),
        (b"any key", ""),
    ],
)
def test_a_tenure_is_read_from_keys_of_lmcache(key: bytes, tenure: str) -> None:
    assert tenure_of(key) == tenure


def test_concurrent_values_of_one_name_are_never_mixed(tmp_path: Path) -> None:
    store = PageStore([f"disk=200KiB@{tmp_path}"], "values", PAGE)
    values = ValueStore(store, 8 * PAGE)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        frame = values.frame()
        try:
            for _ in range(150):
                name = b"%d" % chance.integers(4)
                if chance.random() < 0.5:
                    size = int(chance.integers(8 * PAGE))
                    values.body(frame, size)[:] = bytes([size % 251]) * size
                    values.put(name, "", frame, size)
                elif (size := values.get(name, "", frame)) >= 0:
                    assert bytes(values.body(frame, size)) == bytes([size % 251]) * size
                elif chance.random() < 0.2:
                    values.delete(name, "")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    store.close()


def test_quotas_hold_to_the_byte_under_load(tmp_path: Path) -> None:
    quotas = {"alice": 53_000, "bob": 21_000}
    options = [word for salt, quota in quotas.items() for word in ("--quota", f"{salt}={quota}")]
    errors: list[BaseException] = []

    def load(port: int, seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            redis = Redis(port)
            for _ in range(60):
                key = MP % b"%04x@%b" % (chance.integers(40), [b"alice", b"bob", b"c"][seed % 3])
                size = int(chance.integers(1, 9000))
                assert redis(b"SET", key, content(size, size)) == b"OK"
                value = redis(b"GET", key)
                assert value is None or value == content(len(value), len(value))
        except BaseException as error:
            errors.append(error)

    with running(tmp_path, *options) as (port, metrics_port):
        threads = [threading.Thread(target=load, args=(port, i)) for i in range(6)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
                for line in page.read().decode().splitlines():
                    for salt, quota in quotas.items():
                        if line.startswith(f'pigou_store_tenure_bytes{{salt="{salt}"}}'):
                            assert float(line.split()[-1]) <= quota
            time.sleep(0.02)
    assert not errors, errors[0]
    store = PageStore([f"disk=400KiB@{tmp_path}"], "values", PAGE + ValueStore.HEAD_BYTES)
    records = store._levels[0].store.entries()  # what lies on the disk
    for salt, quota in quotas.items():
        held = sum(bytes(row) == store._seeds(salt).digest for row in records.tenures)
        assert 0 < held * store.page_bytes <= quota
    store.close()
