"""Malformed requests get the documented error, and leave nothing behind."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from tests.e2e.client import Endpoint, Reply
from tests.e2e.fleet import Fleet

RAW = [
    b"", b"{", b"null", b"[1]", b'"x"', b"{}", b'{"prompt": "a\xff"}', b'{"prompt": NaN}',
    b'{"prompt": "a"} x', b"[" * 5000, b'{"prompt":' * 900, b"\x00" * 100, b'{"prompt": [1.5]}',
    b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": [true]}', b'{"prompt": {"a": 1}}',
    b'{"prompt": "a", "max_tokens": 1e30}', b'{"messages": 1}', b'{"messages": [1]}',
    b'{"messages": [{"role": 1, "content": "a"}]}', b'{"messages": []}',
    b'{"prompt": "\\ud800 a"}', b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
]  # fmt: skip
FIELDS = [
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "stream",
    "stream_options", "logprobs", "logit_bias", "stop_token_ids", "min_tokens", "priority",
    "structured_outputs", "response_format", "cache_salt", "model", "presence_penalty",
    "repetition_penalty", "ignore_eos", "echo", "prompt_logprobs", "request_id", "deadline_ms",
]  # fmt: skip
#: Values that no field of the above takes.
WRONG: list[Any] = [{"a": [1]}, [[]], [{}], {"": None}, -(2**70), -1e300]
#: Fields of other servers; what is unknown altogether is left out, and told in a header.
REFUSED = ["guided_regex", "best_of", "suffix", "chat_template", "bad_words", "logits_processors"]
HOSTILE: list[Any] = [
    {"do_remote_prefill": True},
    {"do_remote_decode": True},
    {"do_remote_prefill": True, "remote_host": "10.255.255.1", "remote_port": 1},
    {"do_remote_prefill": True, "remote_engine_id": "x" * 10_000, "remote_port": 2**70},
    {"do_remote_decode": 1, "do_remote_prefill": "yes"},
    [], "x", 7,
]  # fmt: skip


def malformed(generator: random.Random, chat: bool, hostile: bool) -> bytes:
    """Return a body that no server may accept."""
    kind = generator.randrange(7)
    if kind == 0:
        return generator.choice(RAW)
    messages = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"messages": messages} if chat else {"prompt": "Hello"}
    body["max_tokens"] = 2
    if kind == 1:
        body[generator.choice(REFUSED)] = generator.choice([7, "x", [1], {"a": 1}])
    elif kind == 2:
        body[generator.choice(FIELDS)] = generator.choice(WRONG)
    elif kind == 3:
        long = "Hello " * generator.choice((5_000, 50_000))
        body |= {"messages": [{"role": "user", "content": long}]} if chat else {"prompt": long}
    elif kind == 4 and hostile:
        body["kv_transfer_params"] = generator.choice(HOSTILE)
    elif kind == 5:
        text = json.dumps(body).encode()
        return text[: generator.randrange(len(text))]
    elif kind == 6:
        text = json.dumps(body).encode()
        return text.replace(b"Hello", bytes(generator.choices(range(128, 256), k=9)))
    else:
        body["resume_tokens"] = generator.choice([-1, 10**9, "x", {}, 1.5])
    return json.dumps(body).encode()


def documented(reply: Reply) -> None:
    """Hold an error against its documented shape."""
    assert 400 <= reply.status < 500, (reply.status, reply.body[:300])
    assert set(reply.json) == {"error"}, reply.body[:300]
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == reply.status
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 2000


class Footprint:
    """Memory and open files of processes."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.processes = [psutil.Process(pid) for pid in pids]
        self.rss = [process.memory_info().rss for process in self.processes]
        self.fds = [process.num_fds() for process in self.processes]

    def has_not_grown(self, seconds: float = 60) -> None:
        """Hold it against now; idle connections are closed after some seconds."""
        end = time.monotonic() + seconds
        while told := self.growth():
            assert time.monotonic() < end, told
            time.sleep(0.5)

    def growth(self) -> str:
        now = Footprint(self.pids)
        for before, after in zip(self.fds, now.fds, strict=True):
            if after >= before + 32:
                return f"{before} became {after} open files"
        for before, after in zip(self.rss, now.rss, strict=True):
            if after >= before + 96 * 2**20:
                return f"{before} became {after} bytes"
        return ""


def storm(target: Endpoint, count: int, *, hostile: bool, seed: int) -> Counter[int]:
    """Send so many malformed requests, six at once; return the statuses."""
    generator = random.Random(seed)
    asked = []
    for number in range(count):
        chat = number % 2 == 0
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked.append((path, malformed(generator, chat, hostile)))

    def send(each: tuple[str, bytes]) -> int:
        reply = target.post(*each)
        if reply.status == 200 and b'"stream_options": {' in each[1]:
            return reply.status  # unknown keys have no effect, and the reply's head says so
        try:
            documented(reply)
        except AssertionError as error:
            raise AssertionError(f"{each[0]} {each[1][:200]!r}: {error}") from None
        return reply.status

    with ThreadPoolExecutor(6) as pool:
        return Counter(pool.map(send, asked))


class Healthy(threading.Thread):
    """Streams beside the storm; each must say the same."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self.fleet, self.over, self.count = fleet, threading.Event(), 0
        self.body = {"prompt": [50 + i for i in range(60)], "max_tokens": 8}
        self.expected = fleet.stream(**self.body).told
        self.errors: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            try:
                assert self.fleet.stream(**self.body).told == self.expected
            except Exception as error:
                self.errors.append(repr(error))
            self.count += 1

    def check(self) -> None:
        self.over.set()
        self.join(60)
        assert not self.is_alive()
        assert self.count > 0
        assert not self.errors, self.errors[:3]


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_malformed_requests_leave_no_trace(sleeping: Fleet, target: str, count: int) -> None:
    gateway = target == "gateway"
    endpoint: Endpoint = sleeping if gateway else sleeping.worker("decode-0")
    rows = sleeping.rows()
    storm(endpoint, 60, hostile=gateway, seed=1)  # buffers and caches of the first use
    before = Footprint([sleeping.process.pid, *(row["pid"] for row in rows.values())])
    healthy = [Healthy(sleeping) for _ in range(4)]
    for each in healthy:
        each.start()
    counts = storm(endpoint, count, hostile=gateway, seed=2)
    for each in healthy:
        each.check()
    streams = sum(each.count for each in healthy)
    print(f"{target}: {dict(counts)}, {streams} healthy streams beside them")
    sleeping.settle()
    assert {name: row["pid"] for name, row in sleeping.rows().items()} == {
        name: row["pid"] for name, row in rows.items()
    }
    before.has_not_grown()


def test_hostile_transfer_params_of_a_client_are_refused(sleeping: Fleet) -> None:
    for params in HOSTILE:
        for fields in ({"prompt": "Hello"}, {"messages": [{"role": "user", "content": "a"}]}):
            path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
            reply = sleeping.post(path, fields | {"kv_transfer_params": params})
            documented(reply)
            assert reply.json["error"]["param"] == "kv_transfer_params"


def test_hostile_tickets_hurt_no_worker(sleeping: Fleet) -> None:
    worker = sleeping.worker("decode-0")
    for params in HOSTILE:
        reply = worker.post("/v1/completions", {"prompt": "Hello " * 50, "max_tokens": 2,
                                                "kv_transfer_params": params})  # fmt: skip
        if reply.status != 200:
            documented(reply)
    sleeping.settle()
    assert worker.complete(prompt="Hello", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_a_huge_body_is_refused_before_it_is_read(sleeping: Fleet, target: str) -> None:
    endpoint: Endpoint = sleeping if target == "gateway" else sleeping.worker("decode-1")
    pid = sleeping.process.pid if target == "gateway" else sleeping.pid("decode-1")
    before = Footprint([pid])
    for _ in range(8):
        reply = endpoint.post("/v1/completions", b'{"prompt": "' + b"a" * (20 * 2**20) + b'"}')
        assert reply.status == 413, reply.body[:200]
        documented(reply)
    before.has_not_grown()


WIRES = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\x00" * 4000,
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 50_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: 1\r\n" * 2_000 + b"\r\n",
]  # fmt: skip


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_what_is_not_http_is_answered_or_cut_and_never_hurts(sleeping: Fleet, target: str) -> None:
    endpoint: Endpoint = sleeping if target == "gateway" else sleeping.worker("decode-0")
    host, _, port = urlsplit(endpoint.url).netloc.partition(":")
    for data in WIRES * 3:
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.settimeout(2)
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
            except (TimeoutError, OSError):
                continue
        status = answer.split(b" ")[1] if answer else b"400"
        # A worker asks for the fleet's secret first.
        refused = {b"400", b"413", b"431"} | ({b"401"} if target == "worker" else set())
        assert status in refused, (data[:60], answer[:200])
    assert endpoint.get("/health").status == 200


@pytest.mark.parametrize("target", ["gateway", "worker"])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405),
     ("HEAD", "/v1/models", 405), ("DELETE", "/v1/completions", 405)],
)  # fmt: skip
def test_unknown_paths_and_methods_are_refused(
    sleeping: Fleet, target: str, method: str, path: str, status: int
) -> None:
    endpoint: Endpoint = sleeping if target == "gateway" else sleeping.worker("decode-0")
    reply = endpoint.call(method, path)
    assert reply.status == status
    if path == "/v1/completions":
        assert reply.headers["allow"] == "POST"
