"""Fork server: a process that imports torch once, and forks workers.

`python -m pigou.fleet.fork_server FD THREADS` is that process, FD its socket to the gateway. One
message asks for a worker, with the descriptors of its stdout and stderr, and of the fleet's secret
where there is one. Answers are `{"pid"}` at once, and `{"pid", "status"}` when it has ended.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from pigou.fleet.config import sleeps, threads_of, values_of
from pigou.wire.fleet_secret import DESCRIPTOR

#: OpenMP threads that wait must not burn the cores that others need.
QUIET = {
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "PYTHONUNBUFFERED": "1",
    "PIGOU_HEARTBEAT": "1",
}
_MAX_MESSAGE = 2**17
#: Modules that a worker imports before it loads its model.
_MODULES = ("pigou.cli.worker", "pigou.worker.process", "pigou.runtime.models.load")
#: Name of a forked worker for `ps`, whose arguments are the fork server's.
FORKED_NAME = "pigou-worker"


class ForkedProcess:
    """A forked worker, with the part of `asyncio.subprocess.Process` that is used."""

    def __init__(
        self, pid: int, exit: asyncio.Future[int], stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:  # fmt: skip
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self._exit = exit

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> int:
        """Wait for its end; return the exit status."""
        return await asyncio.shield(self._exit)

    def send_signal(self, number: int) -> None:
        """Send a signal; raise ProcessLookupError after its end."""
        if self.returncode is not None:
            raise ProcessLookupError(f"process {self.pid} has ended")
        os.kill(self.pid, number)


class ForkServer:
    """A fork server's client; the server ends with this process, and its workers with it."""

    def __init__(self, threads: int) -> None:
        """Start the server for workers of `threads` compute threads; it imports meanwhile."""
        self.threads = threads
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(threads)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **QUIET},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._channel.setblocking(False)
        self._pending: deque[asyncio.Future[tuple[int, asyncio.Future[int]]]] = deque()
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def takes(self, arguments: Sequence[str]) -> bool:
        """True if a worker of these arguments needs what is imported: it computes on the CPU."""
        computes = not sleeps(arguments) and set(values_of(arguments, "--device")) <= {"cpu"}
        return computes and threads_of(arguments) == self.threads

    async def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str],
        descriptors: Sequence[int], line: int,
    ) -> ForkedProcess:  # fmt: skip
        """Fork a worker whose output has lines of up to `line` bytes; raise OSError."""
        if self._channel.fileno() < 0:
            raise OSError("the fork server has ended")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._channel, self._read)
        pipes = os.pipe(), os.pipe()
        streams = [await _stream(reading, line) for reading, _ in pipes]
        writing = [end for _, end in pipes]
        answer: asyncio.Future[tuple[int, asyncio.Future[int]]] = self._loop.create_future()
        request = {"arguments": list(arguments), "environment": dict(environment)}
        try:
            message = msgspec.json.encode(request)
            socket.send_fds(self._channel, [message], [*writing, *descriptors])
            self._pending.append(answer)
        finally:
            for end in writing:
                os.close(end)
        return ForkedProcess(*await answer, *streams)

    def close(self) -> None:
        """End the server, and workers that are left."""
        if self._loop is not None and self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel)
        self._channel.close()
        self._process.kill()
        self._process.wait()
        while self._pending:
            self._pending.popleft().set_exception(OSError("the fork server has ended"))
        for ending in self._exits.values():
            ending.set_result(-signal.SIGKILL)
        self._exits.clear()

    def _read(self) -> None:
        """Take in an answer."""
        try:
            message = self._channel.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.close()
            return
        answer = msgspec.json.decode(message, type=dict[str, int])
        pid = answer["pid"]
        if "status" in answer:
            self._exits.pop(pid).set_result(answer["status"])
            return
        assert self._loop is not None
        self._exits[pid] = self._loop.create_future()
        request = self._pending.popleft()
        if request.cancelled():
            os.kill(pid, signal.SIGKILL)
        else:
            request.set_result((pid, self._exits[pid]))


async def _stream(descriptor: int, line: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(line)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    return reader


# --- the server's process ---------------------------------------------------------------------


def _serve(channel: socket.socket) -> None:
    """Fork a worker for each request; return within it. Ends with the gateway."""

    def tell(**answer: int) -> None:
        with suppress(OSError):  # the gateway has ended
            channel.send(msgspec.json.encode(answer))

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                tell(pid=ended[0], status=os.waitstatus_to_exitcode(ended[1]))

    signal.signal(signal.SIGCHLD, reap)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MAX_MESSAGE, 3)
        if not message:
            os._exit(0)
        # An end is told after its beginning.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if not (pid := os.fork()):
            channel.close()
            _become_worker(msgspec.json.decode(message), descriptors)
            return
        tell(pid=pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for descriptor in descriptors:
            os.close(descriptor)


def _become_worker(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Make this fork a process like one that was executed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.setsid()
    for descriptor, stream in zip(descriptors, (1, 2), strict=False):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.update(request["environment"])
    os.environ["PIGOU_PARENT"] = str(os.getppid())
    if secret := descriptors[2:]:
        os.environ[DESCRIPTOR] = str(secret[0])
    with suppress(OSError):
        Path("/proc/self/comm").write_text(FORKED_NAME)
    sys.argv = ["pigou", *request["arguments"]]


def main(descriptor: int, threads: int) -> None:
    """Import what workers need, then serve; a worker that is forked runs here."""
    from pigou.registry import uncollected
    from pigou.runtime.resources import prepare_environment

    prepare_environment(threads)
    from numba.core.registry import cpu_target

    with uncollected():
        for name in _MODULES:
            import_module(name)
        for context in (cpu_target.typing_context, cpu_target.target_context):
            context.refresh()  # half of what loading the first kernel takes
    gc.freeze()  # pages that collections do not write to stay shared
    _serve(socket.socket(fileno=descriptor))
    import_module("pigou.cli").main()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
