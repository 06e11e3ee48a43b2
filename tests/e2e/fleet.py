"""A fleet of real processes: gateway and workers, asked over HTTP, and killed at will."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.e2e.client import SECRET, Endpoint
from tests.lib.forked_python import Popen

from pigou.wire.fleet_secret import VARIABLE

START = 180.0
#: Looks often, and restarts at once, so that tests wait for little.
WATCH = {"every": 0.2, "timeout": 2.0, "failures": 3, "hang": 20.0, "start": START, "drain": 3.0,
         "min_backoff_s": 0.05, "max_backoff_s": 0.1}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/dev/shm")


def worker(name: str, model: Path, *options: str) -> dict[str, Any]:
    """Describe a worker; its role is its name's first part."""
    role = name.partition("-")[0]
    arguments = ["--model", str(model), "--served-model-name", "tiny", *options]
    return {"id": name, "role": role, "arguments": arguments}


class Fleet(Endpoint):
    """A gateway process and its workers."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        super().__init__("")
        self.process = process
        self.log = log
        self.seen: dict[int, psutil.Process] = {}

    @classmethod
    def start(
        cls,
        log: Path,
        workers: Sequence[dict[str, Any]] = (),
        *,
        attach: Sequence[str] = (),
        gateway: dict[str, Any] | None = None,
        control: dict[str, Any] | None = None,
        watch: dict[str, Any] | None = None,
        **places: str,
    ) -> Fleet:
        """Start a fleet and wait until every local worker is up.

        `places` are URLs: of a prefill_queue, a registry, the bus between peers.
        Its policy splits every prompt, unless `control` names another.
        """
        settings = {
            "workers": list(workers),
            "attach": list(attach),
            "gateway": {
                "port": 0,
                "strict": not (attach or places.get("registry")),
                **(gateway or {}),
            },
            "control": {"policy": "least-loaded"} | (control or {}),
            "watch": WATCH | (watch or {}),
            **places,
        }
        return cls.run([sys.executable, "-m", "tests.e2e.launch", json.dumps(settings)], log)

    @classmethod
    def run(cls, command: Sequence[str], log: Path) -> Fleet:
        """Run a command that prints a line with its port or URL once it is ready."""
        with log.open("w") as errors:
            process = Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
                     VARIABLE: SECRET},
            )  # fmt: skip
        fleet = cls(process, log)
        try:
            fleet.url = _ready(process, log)
            fleet.note()
        except BaseException:
            fleet.abandon()
            raise
        return fleet

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows of `/workers`, by id."""
        return {row["id"]: row for row in self.get("/workers").json["workers"]}

    def worker(self, name: str) -> Endpoint:
        """Return a worker's own address."""
        return Endpoint(self.rows()[name]["url"], SECRET)

    def pid(self, name: str) -> int:
        return int(self.rows()[name]["pid"])

    def note(self) -> None:
        """Remember the processes that exist now, for the leak check at the end."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen.setdefault(child.pid, child)

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a worker a signal (it must be up); return the pid it went to."""
        self.note()
        pid = self.pid(name)
        assert pid, f"{name} is not running"
        os.kill(pid, number)
        return pid

    def wait(self, law: Callable[[dict[str, dict[str, Any]]], bool], seconds: float = 60) -> None:
        """Wait until something holds of the fleet's rows."""
        end = time.monotonic() + seconds
        while not law(rows := self.rows()):
            assert time.monotonic() < end, f"not within {seconds} s: {rows}\n{self.tail()}"
            time.sleep(0.1)

    def recovered(self, pids: Sequence[int] = ()) -> None:
        """Wait until every worker is up, and none under these pids."""
        self.wait(
            lambda rows: all(r["state"] == "up" and r["pid"] not in pids for r in rows.values())
        )
        self.note()

    def settle(self) -> None:
        """Wait until no worker computes, holds, awaits or has lost a block."""
        self.recovered()
        for name, row in self.rows().items():
            Endpoint(row["url"], SECRET).settle(name)
        self.wait(lambda rows: not any(r["decode_requests"] or r["prefill_requests"]
                                       for r in rows.values()))  # fmt: skip

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, *, files: bool = True) -> None:
        """End the fleet as an operator does, and check that nothing of it is left."""
        self.note()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        finally:
            self.abandon()
        assert code == 0, f"the gateway ended with {code}\n{self.tail()}"
        self.gone(files=files)

    def gone(self, seconds: float = 60.0, *, files: bool = True) -> None:
        """Check that no process of the fleet is left, nor any of its shared memory.

        Without `files` the latter is not looked for: the memory of a worker that was killed goes
        only when the next worker of the machine starts.
        """
        end = time.monotonic() + seconds
        while left := [p.pid for p in self.seen.values() if alive(p)]:
            assert time.monotonic() < end, f"processes are left: {left}\n{self.tail()}"
            time.sleep(0.1)
        ours = [path.name for pid in self.seen for path in SHARED.glob(f"pigou-kv-{pid}-*")]
        assert not (files and ours), f"shared memory is left: {ours}"

    def abandon(self) -> None:
        """End everything at once; for fixtures whose test failed."""
        if self.process.poll() is None:
            self.note()
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        for process in self.seen.values():
            if alive(process):
                process.kill()


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs; psutil tells a reused pid apart."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ready(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"port"'):
            return f"http://127.0.0.1:{json.loads(line)['port']}"
        if line.startswith('{"ready"'):  # a worker of its own
            return str(json.loads(line)["url"])
        if " at http://" in line:
            return line.partition(" at ")[2].partition("/v1")[0]
    raise AssertionError(f"the fleet ended with {process.wait()}\n{log.read_text()[-4000:]}")
