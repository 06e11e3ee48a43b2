"""A worker process over HTTP, without a model: the sleeping executor."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.lib.forked_python import Popen

START = 120.0


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def chunks(self) -> list[Any]:
        """Payloads of a stream; it must end with [DONE]."""
        frames = self.body.decode().split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@dataclass
class Worker:
    process: subprocess.Popen[str]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.info["url"])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return Reply(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.call("GET", path)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", path, data, {"content-type": "application/json"} | (headers or {}))

    def complete(self, prompt: Any, **fields: Any) -> Any:
        reply = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert reply.status == 200, reply.body
        return reply.json

    def metric(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in self.get("/metrics").body.decode().splitlines():
            head, _, value = line.rpartition(" ")
            given = head.partition("{")[0]
            if given == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until nothing runs, waits or is held, and every block is free."""
        end = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "pigou_kv_requests_held")
        while time.monotonic() < end:
            busy = [name for name in names if self.metric(name)]
            if not busy and self.get("/load").json["server_load"] == 0:
                free = self.metric("pigou_kv_blocks_free")
                assert free == self.metric("pigou_kv_blocks")
                return
            time.sleep(0.05)
        raise AssertionError(f"still busy: {busy}")


def start(folder: Path | str, *options: str, log: Path | None = None) -> Worker:
    """Start a worker; what it logs goes to a file, or where the tests' own does."""
    command = [sys.executable, "-m", "pigou", "worker", "--model", str(folder), "--port", "0"]
    command += ["--served-model-name", "tiny", "--exit-with-parent"]
    if "--executor" not in options:
        command += ["--executor", "sleep"]
    if "--rehearse" not in options:
        command += ["--rehearse", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    errors = log.open("ab") if log is not None else None
    process = Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
    if errors is not None:
        errors.close()
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the worker ended with {process.wait(START)}"
    return Worker(process, json.loads(line))


def stop(worker: Worker) -> None:
    if worker.process.poll() is None:
        worker.process.kill()
    worker.process.wait()
    if worker.process.stdout is not None:
        worker.process.stdout.close()
