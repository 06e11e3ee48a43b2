"""Malformed requests get the documented error, and leave nothing behind."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from worker_process import Reply, Worker

RAW = [
    b"", b"{", b"null", b"[1]", b'"x"', b"{}", b'{"prompt": "a\xff"}', b'{"prompt": NaN}',
    b'{"prompt": "a"} x', b"[" * 5000, b'{"prompt":' * 900, b'{"prompt": "\\ud800 a"}',
    b'{"prompt": "a", "temperature": 1e999}', b"\x00" * 100, b'{"prompt": [1.5]}',
    b'{"prompt": [true]}', b'{"prompt": {"a": 1}}', b'{"prompt": "a", "max_tokens": 1e30}',
]  # fmt: skip
WRONG: list[Any] = ["x", -1, 2**70, 1.5, [], {}, [[]], {"a": 1}, True, ["x"], -1e300]
FIELDS = [
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "stream",
    "stream_options", "logprobs", "logit_bias", "stop_token_ids", "min_tokens", "priority",
    "structured_outputs", "response_format", "kv_transfer_params", "cache_salt", "resume_tokens",
]  # fmt: skip


def malformed(random: random.Random) -> bytes:
    """Return a body that is broken in one way or another (now and then it is harmless)."""
    kind = random.randrange(4)
    if kind == 0:
        return random.choice(RAW)
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
    if kind == 1:
        body[random.choice(["guided_regex", "suffix", "bad_words"])] = 1
    elif kind == 2:
        body[random.choice(FIELDS)] = random.choice(WRONG)
    else:
        text = bytearray(json.dumps(body).encode())
        for _ in range(3):
            text[random.randrange(len(text))] = random.randrange(256)
        return bytes(text)
    return json.dumps(body).encode()


@pytest.mark.parametrize("body", RAW, ids=lambda body: repr(body[:24]))
def test_each_broken_body_is_a_400(worker: Worker, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = worker.post(path, body)
        assert reply.status == 400, (path, reply.body)
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}


def test_a_thousand_malformed_requests_leave_healthy_ones_alone(worker: Worker) -> None:
    expected = worker.complete("Hello world", max_tokens=8)["choices"][0]["text"]
    generator = random.Random(7)
    bodies = [malformed(generator) for _ in range(1000)]

    def send(body: bytes) -> Reply:
        return worker.post("/v1/completions", body)

    def healthy(_: int) -> str:
        text: str = worker.complete("Hello world", max_tokens=8)["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(healthy, i) for i in range(20)]
        replies = list(pool.map(send, bodies))
        assert [future.result() for future in good] == [expected] * 20
    refused = [reply for reply in replies if reply.status != 200]
    assert {reply.status for reply in refused} == {400}
    assert all(reply.json["error"]["message"] for reply in refused)
    assert len(refused) > 800
    worker.settle()


def test_unknown_paths_and_methods_have_error_bodies(worker: Worker) -> None:
    lost = worker.get("/v1/nope")
    assert (lost.status, lost.json["error"]["code"]) == (404, 404)
    known = worker.post("/v1/complete", {"input": "a"})
    assert (known.status, known.headers["x-should-retry"]) == (404, "false")
    assert "/v1/completions" in known.json["error"]["message"]
    wrong = worker.get("/v1/completions")
    assert (wrong.status, wrong.json["error"]["code"]) == (405, 405)
    assert wrong.headers["Allow"] == "POST"


def test_a_body_must_be_declared_as_json(worker: Worker) -> None:
    reply = worker.call("POST", "/v1/completions", b'{"prompt": "a"}')
    assert (reply.status, reply.json["error"]["param"]) == (400, "content-type")


def test_a_huge_body_is_refused(worker: Worker) -> None:
    reply = worker.post("/v1/completions", b'{"prompt": "' + b"a" * (17 * 2**20) + b'"}')
    assert reply.status == 413
    assert "error" in reply.json


def test_a_huge_header_is_refused(worker: Worker) -> None:
    address = urlsplit(worker.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n")
        assert b" 431 " in peer.recv(64)


def test_bytes_that_are_not_http_are_refused(worker: Worker) -> None:
    address = urlsplit(worker.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as peer:
        peer.sendall(b"\x16\x03\x01\x00\xff nonsense\r\n\r\n")
        assert b" 400 " in peer.recv(64)
    assert worker.get("/health").status == 200
