"""The Compose file starts: its services as processes, after the commands that its head gives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.images import DEPLOY, compose, entry, environment, health_check, stages
from tests.lib.forked_python import Popen
from tests.lib.server_process import free_ports

_START_S = 180.0


class Services:
    """The services of the Compose file on loopback: own ports, secrets' files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._file, self._folder = compose(), folder
        self.ports = dict(zip(self._file["services"], free_ports(3), strict=True))
        (folder / "bin").mkdir()
        (folder / "deploy").mkdir()
        program = folder / "bin" / "pigou"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pigou "$@"\n')
        program.chmod(0o755)
        self._path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def prepare(self) -> str:
        """Run the commands of the file's head that make files; return what they say."""
        head = (DEPLOY / "docker-compose.yml").read_text().partition("x-worker")[0]
        commands = re.findall(r"^#   ([^(\n]* > deploy/\S+)", head, re.M)
        assert len(commands) == len(self._file["secrets"])
        said = ""
        for command in commands:
            done = subprocess.run(
                ["sh", "-ec", command], cwd=self._folder, env=_environment({"PATH": self._path}),
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            said += done.stderr
        return said

    def start(self, name: str, *further: str) -> None:
        """Start a service as Compose would: entry point, its command, variables of the image.

        Args:
            name: of the service.
            further: options beside those of the file.
        """
        service = self._file["services"][name]
        target = service["build"]["target"]
        command = [*entry(target)[0], *service.get("command", entry(target)[1])]
        places = {
            f"http://{each}:{dict(stages()['worker'])['EXPOSE']}": f"http://127.0.0.1:{port}"
            for each, port in self.ports.items()
        }
        for secret in service.get("secrets", ()):
            file = self._folder / "deploy" / self._file["secrets"][secret]["file"]
            places[f"/run/secrets/{secret}"] = str(file)
        for place, ours in places.items():
            command = [word.replace(place, ours) for word in command]
        assert not any("/run/secrets/" in word for word in command), command
        variables = {**environment(target), **service.get("environment", {})}
        variables.pop("NUMBA_CACHE_DIR")  # a folder of the image
        assert command.pop(0) == "pigou"
        command = [sys.executable, "-m", "pigou", *command, *further]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = Popen(
                [*command, "--port", str(self.ports[name])],
                stderr=log, stdout=log, env=_environment(variables),
            )  # fmt: skip

    def until_healthy(self, name: str) -> None:
        """Wait until the service listens, then run the image's health check until it succeeds."""
        service = self._file["services"][name]
        port = dict(stages()[service["build"]["target"]])["EXPOSE"]
        check = [
            word.replace(f":{port}/", f":{self.ports[name]}/")
            for word in health_check(service["build"]["target"])
        ]
        end = time.monotonic() + _START_S
        while self._processes[name].poll() is None and time.monotonic() < end:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.ports[name]), 10).close()
                break
            time.sleep(0.1)
        while subprocess.run([sys.executable, *check[1:]], capture_output=True).returncode:
            log = (self._folder / f"{name}.log").read_text()
            assert self._processes[name].poll() is None, log
            assert time.monotonic() < end, log
            time.sleep(0.3)

    def end(self) -> dict[str, int]:
        """Stop all as Compose does; return their exit statuses."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        try:
            return {name: each.wait(60) for name, each in self._processes.items()}
        finally:
            for process in self._processes.values():
                process.kill()


def _environment(variables: dict[str, str]) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIGOU_")}
    return {**clean, **variables}


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path)
    yield made
    with contextlib.suppress(subprocess.TimeoutExpired):
        made.end()


def ask(port: int, key: str, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}", None if body is None else json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply), reply.headers


def check_selectors(port: int) -> None:
    """Look for each label that a rule selects by on the live pages."""
    labels: dict[str, set[str]] = {}
    for path in ("metrics", "metrics/workers"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as reply:
            page = reply.read().decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    assert len(labels) > 100
    files = [*(DEPLOY / "rules").glob("*.yml"), DEPLOY / "prometheus-alerts.yml"]
    seen = 0
    for expr in re.findall(r"^ +expr: (.*?)(?=^ +(?:for|labels):|^ *- )", "\n".join(
        file.read_text() for file in files), re.M | re.S):  # fmt: skip
        for name, matchers in re.findall(r"([\w:]+)\{([^}]*)\}", expr):
            for label in re.findall(r"(\w+)\s*[!=]~?", re.sub(r'"[^"]*"', "", matchers)):
                if name in labels:
                    assert label in labels[name], f"{name} has no label {label}: {expr}"
                    seen += 1
    assert seen > 10


def test_the_services_start_serve_and_end(services: Services) -> None:
    key = re.findall(r"\S{24,}", services.prepare())[0]
    waits = compose()["services"]["gateway"]["depends_on"]
    assert all(each["condition"] == "service_healthy" for each in waits.values())
    for name in waits:
        services.start(name)
    for name in waits:
        services.until_healthy(name)
    services.start("gateway", "--open-metrics", "--slo=ttft=10,itl=1")
    services.until_healthy("gateway")
    port = services.ports["gateway"]
    (model,) = ask(port, key, "models")[0]["data"]
    prompt = "Once upon a time there was a little house by the sea. " * 8
    body = {"model": model["id"], "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    reply, headers = ask(port, key, "completions", body)
    assert reply["usage"]["completion_tokens"] == 8
    assert headers["X-Pigou-Worker"]
    check_selectors(port)
    assert services.end() == {"prefill": 0, "decode": 0, "gateway": 0}
