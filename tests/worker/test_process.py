"""Disconnects, overload, shutdown, death: nothing leaks and nobody hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from worker_process import Worker

SLOW = ("--sleep-base", "20000000", "--blocks", "128")


def begin(worker: Worker, body: dict[str, object]) -> socket.socket:
    """Send a request and return its connection, unread."""
    address = urlsplit(worker.url)
    peer = socket.create_connection((address.hostname, address.port), timeout=30)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    peer.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return peer


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_blocks(start_worker: Callable[..., Worker], stream: bool) -> None:
    worker = start_worker(*SLOW)
    peers = [
        begin(worker, {"prompt": "Hello world", "max_tokens": 1000, "stream": stream, "n": n})
        for n in (1, 3)
    ]
    wait_for(lambda: worker.metric("vllm:num_requests_running") >= 2)
    for peer in peers:
        peer.close()
    worker.settle()


def test_a_disconnect_frees_who_waits(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(*SLOW, "--max-seqs", "1")
    running = begin(worker, {"prompt": "a", "max_tokens": 1000})
    waiting = begin(worker, {"prompt": "b", "max_tokens": 1000})
    wait_for(lambda: worker.metric("vllm:num_requests_waiting") == 1)
    waiting.close()
    wait_for(lambda: worker.metric("vllm:num_requests_waiting") == 0)
    running.close()
    worker.settle()


def test_a_full_queue_is_a_503_with_retry_after(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(*SLOW, "--max-seqs", "1", "--max-waiting", "2")
    body = {"prompt": "a", "max_tokens": 1000}
    peers = [begin(worker, body)]
    # While it waits for its row, it takes a place of the queue.
    wait_for(lambda: worker.metric("vllm:num_requests_running") == 1)
    peers += [begin(worker, body) for _ in range(2)]
    wait_for(lambda: worker.metric("vllm:num_requests_waiting") == 2)
    for stream in (False, True):
        reply = worker.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "1"
        assert reply.json["error"]["type"] == "ServiceUnavailableError"
    for peer in peers:
        peer.close()
    worker.settle()


def test_a_burst_beyond_the_queue_loses_nobody(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("--max-seqs", "2", "--max-waiting", "2", "--sleep-base", "1000000")

    def run(_: int) -> int:
        return worker.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(run, range(200)))
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= 4
    worker.settle()


def test_a_request_larger_than_the_pool_is_refused(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("--blocks", "8")
    assert worker.get("/v1/models").json["data"][0]["max_model_len"] == 128
    reply = worker.post("/v1/completions", {"prompt": [5] * 200})
    assert reply.status == 400


def test_sigterm_lets_streams_end_and_takes_no_more(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("--sleep-base", "20000000")
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "Hello", "max_tokens": 250, "stream": True}
        running = pool.submit(worker.post, "/v1/completions", body)
        wait_for(lambda: worker.metric("vllm:num_requests_running") == 1)
        worker.process.send_signal(signal.SIGTERM)
        wait_for(lambda: worker.get("/health").status == 503)
        refused = worker.post("/v1/completions", {"prompt": "a"})
        assert refused.status == 503
        assert "Retry-After" in refused.headers
        assert len(running.result().chunks) == 250
    assert worker.process.wait(60) == 0


@pytest.mark.parametrize("signals", [1, 2], ids=["drain", "second-signal"])
def test_what_outlasts_the_drain_is_told_so(
    start_worker: Callable[..., Worker], signals: int
) -> None:
    drain = "1" if signals == 1 else "60"
    worker = start_worker("--sleep-base", "20000000", "--drain", drain)
    body = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(worker.post, "/v1/completions", body)
        stream = pool.submit(worker.post, "/v1/completions", {**body, "stream": True})
        wait_for(lambda: worker.metric("vllm:num_requests_running") == 2)
        before = time.monotonic()
        for _ in range(signals):
            worker.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        *chunks, last = stream.result().chunks
        assert chunks[0]["choices"]
        for error in (last["error"], plain.result().json["error"]):
            assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
            assert "shutting down" in error["message"]
        assert plain.result().status == 503
        assert plain.result().headers["Retry-After"] == "1"
    assert worker.process.wait(60) == 0
    assert time.monotonic() - before < 25  # the requests would take 30


def test_an_idle_worker_ends_at_once(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker()
    before = time.monotonic()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    assert time.monotonic() - before < 20


def test_a_worker_ends_with_its_parent(model_folder: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "print(p.pid, flush=True); p.stdout.readline(); print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "pigou", "worker", "--model", str(model_folder),
               "--executor", "sleep", "--port", "0", "--exit-with-parent"]  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status != "Z"


def test_no_shared_memory_is_left_behind(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker()
    pid = worker.process.pid
    mine = [name for name in os.listdir("/dev/shm") if name.startswith(f"pigou-kv-{pid}-")]
    assert len(mine) == 1
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"pigou-kv-{pid}-")]
