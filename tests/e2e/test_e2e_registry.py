"""Workers and a gateway that only know a registry: real processes, a real NATS server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.e2e.client import SECRET
from tests.e2e.fleet import Fleet
from tests.lib.forked_python import Popen
from tests.lib.server_process import nats_server

from pigou.wire.fleet_secret import VARIABLE

#: 20 ms a token.
_WORKER = ("--port", "0", "--executor", "sleep", "--sleep-base", "20000000", "--repeat", "1",
           "--rehearse", "0", "--lease", "1")  # fmt: skip


@contextmanager
def running_worker(name: str, registry: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `pigou worker --registry`; end it at once at the end."""
    command = [sys.executable, "-m", "pigou", "worker", "--registry", registry, *_WORKER]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: SECRET}
    with log.open("wb") as errors:
        process = Popen(
            [*command, "--worker-id", name, "--label", "rack=r1"],
            stdout=subprocess.DEVNULL, stderr=errors, env=environment,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def states(fleet: Fleet) -> dict[str, tuple[str, int]]:
    return {name: (row["state"], row["restarts"]) for name, row in fleet.rows().items()}


def test_streams_outlive_a_blip_of_the_registry_and_killed_workers_leave(tmp_path: Path) -> None:
    pytest.importorskip("nats")
    with ExitStack() as stack:
        server = stack.enter_context(nats_server(tmp_path))
        url = f"{server.url}/fleet"
        workers = {
            name: stack.enter_context(running_worker(name, url, tmp_path / f"{name}.log"))
            for name in ("w0", "w1")
        }
        command = [sys.executable, "-m", "pigou", "serve", "--port", "0", "--registry", url]
        fleet = Fleet.run(command, tmp_path / "serve.log")
        stack.callback(fleet.abandon)
        fleet.wait(lambda rows: [row["state"] for row in rows.values()] == ["up", "up"])

        prompt, streamed = "a prompt", []
        asked = {"prompt": prompt, "max_tokens": 150, "ignore_eos": True,
                 "stream_options": {"include_usage": True}}  # fmt: skip

        def follow() -> None:
            streamed.append(fleet.stream(**asked).told)

        streams = [threading.Thread(target=follow) for _ in range(4)]
        for stream in streams:
            stream.start()
        server.kill()
        _until(lambda: fleet.get("/health").json["registry"]["stale"])
        assert fleet.complete(prompt=prompt, max_tokens=2)["usage"]["completion_tokens"] == 2
        time.sleep(0.7)  # all leases end
        server.start()
        _until(lambda: not fleet.get("/health").json["registry"]["stale"])
        for stream in streams:
            stream.join()
        assert streamed == [streamed[0]] * 4, "whole, whichever worker they are from"
        assert streamed[0][4]["completion_tokens"] == 150
        # A worker that a busy machine kept from renewing its lease drains, and comes up again.
        _until(lambda: states(fleet) == {"w0": ("up", 0), "w1": ("up", 0)})
        assert all(process.poll() is None for process in workers.values())

        workers["w0"].kill()
        assert fleet.complete(prompt=prompt, max_tokens=2)["usage"]["completion_tokens"] == 2
        fleet.wait(lambda rows: set(rows) == {"w1"})

        workers["w1"].terminate()
        assert workers["w1"].wait(60) == 0
        fleet.wait(lambda rows: not rows)
        assert fleet.get("/workers").json["registry"]["ignored"] == 0


def _until(law: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not law():  # type: ignore[operator]
        assert time.monotonic() < end, "it never held"
        time.sleep(0.05)
