"""Two gateways on one fleet, over a real NATS server, as real processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.fleet import Fleet
from tests.lib.server_process import ServerProcess, free_ports, nats_server

_PIGOU = [sys.executable, "-m", "pigou"]
#: 20 ms a token.
_WORKER = ("--executor", "sleep", "--sleep-base", "20000000", "--repeat", "1", "--rehearse", "0",
           "--kv-transfer", "none", "--served-model-name", "tiny")  # fmt: skip
_ASKED = {"model": "tiny", "prompt": "a prompt " * 40, "ignore_eos": True}


def _until(law: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not law():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.05)


def _row(gateway: Fleet) -> dict[str, Any]:
    (row,) = gateway.rows().values()
    return row


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[ServerProcess]:
    pytest.importorskip("nats")
    with nats_server(tmp_path) as server:
        yield server


@pytest.fixture
def gateways(nats: ServerProcess, tmp_path: Path) -> Iterator[list[Fleet]]:
    with ExitStack() as stack:

        def run(name: str, *command: str) -> Fleet:
            fleet = Fleet.run([*_PIGOU, *command], tmp_path / f"{name}.log")
            stack.callback(fleet.abandon)
            return fleet

        (port,) = free_ports(1)
        serve = (
            "serve",
            "--port",
            "0",
            "--peers",
            nats.url,
            "--attach",
            f"http://127.0.0.1:{port}",
            "--key-budget",
            "day.requests=99",
        )
        starts = [("worker", "worker", "--port", str(port), *_WORKER)]
        starts += [(f"gateway-{number}", *serve) for number in range(2)]
        with ThreadPoolExecutor() as pool:
            _, *both = pool.map(lambda start: run(*start), starts)
        _until(lambda: all(_row(gateway)["state"] == "up" for gateway in both))
        _until(lambda: _hear(both))
        yield both


def _hear(gateways: list[Fleet]) -> bool:
    found = [gateway.get("/health").json["peers"] for gateway in gateways]
    return all(one["bus"] == "up" and len(one["peers"]) == 1 for one in found)


def test_streams_outlive_the_bus_and_the_other_gateway(
    nats: ServerProcess, gateways: list[Fleet]
) -> None:
    first, second = gateways
    begins = first.complete(**_ASKED, max_tokens=20)["choices"][0]["text"]
    _until(lambda: _row(second)["cached_blocks"] == _row(first)["cached_blocks"] > 0)
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(first.stream, **_ASKED, max_tokens=200) for _ in range(3)]
        lost = pool.submit(second.stream, **_ASKED, max_tokens=1000)
        _until(lambda: [_row(one)["decode_requests"] for one in gateways] == [4, 4])
        nats.kill()
        _until(lambda: not _hear(gateways))
        assert not any(stream.done() for stream in streams)
        nats.start()
        _until(lambda: _hear(gateways))
        assert not lost.done()
        second.process.kill()
        assert _hear([first]), "who is killed is not known to be gone before its lease ends"
        whole = [stream.result().told for stream in streams]
        assert whole == [whole[0]] * 3
        assert whole[0][0].startswith(begins)
        assert whole[0][2] == "length"
        assert not lost.result().done
    _until(lambda: not _hear([first]))
    assert _row(first)["decode_requests"] == 0
    (budget,) = first.get("/usage").json["budgets"]
    assert budget["used"] == 5, "the killed gateway's request counts"
