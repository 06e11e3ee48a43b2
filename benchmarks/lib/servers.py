"""What every benchmark needs: servers as process groups, free ports, a small HTTP client."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """``count`` different TCP ports of the loopback interface that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def available_cores() -> list[int]:
    """The numbers of the CPU cores that this process may run on, in order."""
    return sorted(os.sched_getaffinity(0))


def machine() -> dict[str, str]:
    """CPU model, usable cores, memory (GiB) and Python: what a figure is worth nothing without."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": str(len(available_cores())),
        "memory_gib": f"{memory:.0f}",
        "python": platform.python_version(),
    }


class ServerFailed(RuntimeError):
    """A server ended, or was not healthy in time; the message holds the end of its log."""


class Server:
    """A child process that leads its own process group, so that all of it can be signalled.

    ``url`` is its base address, ``log`` the file that takes its output. ``cores`` pins the
    process and all its children; None leaves them where they are. Use it as a context manager,
    or call ``stop``.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        url: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        cores: Sequence[int] | None = None,
    ) -> None:
        self.url = url
        self.log = log
        self._stopped = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        if cores is not None:
            os.sched_setaffinity(self.pid, cores)  # it has not forked yet: children inherit

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the leading process still runs (or is paused)."""
        return self._process.poll() is None

    def wait_healthy(self, path: str = "/health", timeout_s: float = 300.0) -> Self:
        """Wait until GET ``path`` answers 200; raises ServerFailed if that does not happen."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise ServerFailed(f"{self.url} ended by itself\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(self.url + path, timeout=5) as reply:
                    if reply.status == 200:
                        return self
            except (urllib.error.URLError, OSError):
                pass  # not listening yet, or not ready: the deadline bounds this
            time.sleep(0.2)
        raise ServerFailed(f"{self.url} not healthy in {timeout_s:.0f} s\n{self.log_tail()}")

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the server wrote."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def pause(self) -> None:
        """Stop every process of the group (SIGSTOP): it uses no CPU until ``resume``."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused group run on (SIGCONT)."""
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the whole group: SIGTERM, then SIGKILL to what is left. May be called twice."""
        if self._stopped:
            return  # the group's number may belong to somebody else by now
        self._stopped = True
        if self.alive:
            os.killpg(self.pid, signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        try:
            os.killpg(self.pid, signal.SIGKILL)  # helpers that outlived their leader
        except ProcessLookupError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def get_text(url: str, timeout_s: float = 30.0) -> str:
    """The body of GET ``url``; raises urllib.error.HTTPError when it is not a success."""
    with urllib.request.urlopen(url, timeout=timeout_s) as reply:
        return str(reply.read().decode())


def get_json(url: str, timeout_s: float = 30.0) -> Any:
    """The parsed JSON body of GET ``url``."""
    return json.loads(get_text(url, timeout_s))


def post_json(
    url: str,
    body: Mapping[str, Any],
    timeout_s: float = 120.0,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """The parsed JSON answer to POST ``url``; raises urllib.error.HTTPError on a failure."""
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"content-type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.loads(reply.read())


def unwind_on_terminate() -> None:
    """Let SIGTERM unwind the stack, so that servers started here are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
