"""KV between two hosts: network namespaces, joined by a link of limited bandwidth."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HOSTS = ("10.213.7.1", "10.213.7.2")
MBPS = 40
BLOCKS, BLOCK_BYTES, BLOCK_SIZE = 200, 4096, 16
#: Runs in the second host: both legs of one request after another; prints what they took.
CLIENT = """
import json, sys, time, urllib.request
prefill, decode, requests = sys.argv[1], sys.argv[2], int(sys.argv[3])
def post(url, body):
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))
def loaded():
    text = urllib.request.urlopen(decode + "/metrics", timeout=60).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines()
               if line.startswith("vllm:prompt_tokens_by_source_total")
               and 'source="external_kv_transfer"' in line)
ask = {"do_remote_decode": True, "do_remote_prefill": False}
rows = []
for number in range(requests):
    prompt = [(number * 7919 + i) % 200 + 10 for i in range(3200)]
    body = {"model": "pigou-tiny", "prompt": prompt, "max_tokens": 2}
    one = post(prefill, body | {"max_tokens": 1, "kv_transfer_params": ask})
    before, began = loaded(), time.monotonic()
    post(decode, body | {"kv_transfer_params": one["kv_transfer_params"]})
    rows.append([loaded() - before, time.monotonic() - began])
print(json.dumps(rows))
"""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with a link between them, `MBPS` each way."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs root, ip and tc, to make network namespaces")
    names = tuple(f"pigou-{os.getpid()}-{side}" for side in "ab")
    links = tuple(f"pg{os.getpid()}{side}" for side in "ab")
    try:
        try:
            for name in names:
                _run("ip", "netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        _run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, HOSTS, strict=True):
            _run("ip", "link", "set", link, "netns", name)
            inside = ("ip", "-n", name)
            _run(*inside, "addr", "add", f"{address}/24", "dev", link)
            _run(*inside, "link", "set", link, "up")
            _run(*inside, "link", "set", "lo", "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf",
                 "rate", f"{MBPS}mbit", "burst", "64kb", "latency", "400ms")  # fmt: skip
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _worker(host: str, address: str, role: str, transfer: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "pigou", "worker",
         "--executor", "sleep", "--model", "bundled", "--blocks", "2048", "--host", address,
         "--port", "0", "--role", role, "--kv-transfer", transfer, "--allow-open",
         "--no-kv-events", "--max-model-len", "8192"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"UCX_TLS": "tcp"},
    )  # fmt: skip


def _urls(workers: list[subprocess.Popen[str]]) -> list[str]:
    urls = []
    for worker in workers:
        assert worker.stdout is not None
        urls.append(json.loads(worker.stdout.readline())["url"])
    return urls


def _nixl() -> bool:
    return any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))


@pytest.mark.parametrize(
    "transfer",
    ["tcp", pytest.param("nixl,tcp", marks=[
        pytest.mark.nixl, pytest.mark.skipif(not _nixl(), reason="NIXL is not installed")])],
)  # fmt: skip
def test_kv_moves_between_two_hosts_no_quicker_than_their_link(
    hosts: tuple[str, str], transfer: str
) -> None:
    roles = ("prefill", "decode")
    workers = [_worker(*at, transfer) for at in zip(hosts, HOSTS, roles, strict=True)]
    try:
        reply = subprocess.run(
            ["ip", "netns", "exec", hosts[1], sys.executable, "-c", CLIENT, *_urls(workers), "5"],
            check=True, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        for worker in workers:
            worker.terminate()
        logs = [worker.communicate(timeout=20)[1] for worker in workers]
    assert all(f" by {name}" in logs[1] for name in transfer.split(","))
    rows: Any = json.loads(reply.stdout)
    for tokens, seconds in rows:
        assert tokens >= (BLOCKS - 1) * BLOCK_SIZE
        moved = tokens / BLOCK_SIZE * BLOCK_BYTES - 65536 * 2  # the bucket's burst
        assert seconds > moved * 8 / (MBPS * 1e6)
