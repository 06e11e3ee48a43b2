"""Python processes that are forked from one that has imported Pigou, torch and the kernels.

A worker's start takes 0.3 CPU-seconds instead of 2.5. `main` is the process that forks; `Popen` is
`subprocess.Popen` over it.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
#: Modules whose processes are forked.
FORKED = ("pigou", "tests.e2e.launch")
#: What they import, beside what compiled kernels do.
_IMPORTED = ("pigou.cli.worker", "pigou.cli.serve", "pigou.worker.process", "tests.e2e.launch")
#: Variables that what is imported has read already.
_READ_BY_IMPORTS = ("PYTHON", "NUMBA", "OMP", "OPENBLAS", "MKL", "KMP", "GOMP", "TORCH", "LD_")
_HARMLESS = {"PYTHONUNBUFFERED", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"}
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE, _MAX_DESCRIPTORS = 2**17, 8


class Popen(subprocess.Popen[Any]):
    """A process that is forked where that cannot be told from executing it; executed elsewhere.

    It becomes a child of this process, as if executed: its parent, which ends, gives it away.
    """

    _lock = threading.Lock()
    _channel: socket.socket | None = None
    #: True in the process that forks, and in its forks.
    loaded = False

    def _execute_child(self, args: Any, *given: Any) -> None:
        """Fork instead of executing; `given` are the parameters of `subprocess.Popen`'s own."""
        executable, preexec, _, passed, cwd, env, *_ = given
        pipes = p2cread, _, _, c2pwrite, _, errwrite = given[9:15]
        plain = executable is None and preexec is None and p2cread in (-1, None)
        if not plain or not _forks(args, cwd, env):
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        output = [c2pwrite if c2pwrite != -1 else 1, errwrite if errwrite != -1 else 2]
        environment = dict(os.environ if env is None else env)
        request = {"arguments": args[2:], "environment": environment, "descriptors": list(passed)}
        libc = ctypes.CDLL(None)
        with self._lock:
            server = self.server()
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(server, [msgspec.json.encode(request)], [*output, *passed])
                answer = server.recv(_MAX_MESSAGE)
            finally:
                libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the process that forks has ended")
        self.pid = int(answer)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    @classmethod
    def server(cls) -> socket.socket:
        """Return the socket to the process that forks, which ends with this one.

        It is a fork of this process where this is one itself; call that before there are threads.
        """
        if cls._channel is not None:
            return cls._channel
        cls._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if cls.loaded:
            if not os.fork():
                cls._channel.close()
                cls._channel = None
                os.setsid()
                become(_serve(theirs))
        else:
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip
        theirs.close()
        return cls._channel


class Forks:
    """What `ForkServer` is to a fleet, by `Popen`."""

    def takes(self, arguments: Sequence[str]) -> bool:
        """Return True: processes of several threads are executed by `Popen`."""
        return True

    async def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str],
        descriptors: Sequence[int], line: int,
    ) -> Any:  # fmt: skip
        """Fork a worker."""
        from pigou.fleet.fork_server import QUIET, ForkedProcess, _stream
        from pigou.wire.fleet_secret import DESCRIPTOR

        passed = {DESCRIPTOR: str(descriptors[0])} if descriptors else {}
        process = Popen(
            [sys.executable, "-m", "pigou", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=descriptors,
            env={**os.environ, **QUIET, **environment, **passed},
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        watched = os.pidfd_open(process.pid)

        def end() -> None:
            loop.remove_reader(watched)
            os.close(watched)
            ended.set_result(process.wait())

        loop.add_reader(watched, end)
        assert process.stdout is not None
        assert process.stderr is not None
        streams = [
            await _stream(os.dup(f.fileno()), line) for f in (process.stdout, process.stderr)
        ]
        for file in (process.stdout, process.stderr):
            file.close()
        return ForkedProcess(process.pid, ended, *streams)

    def close(self) -> None:
        """Do nothing: workers are children of this process."""


def _forks(args: Any, cwd: Any, env: Mapping[str, str] | None) -> bool:
    """Return whether a fork would be the process that these arguments execute."""
    if sys.platform != "linux" or not isinstance(args, list) or len(args) < 3:
        return False
    if args[:2] != [sys.executable, "-m"] or args[2] not in FORKED:
        return False
    if (cwd is not None and Path(cwd) != ROOT) or Path.cwd() != ROOT:
        return False
    given = os.environ if env is None else env
    changed = {k for k in {*given, *os.environ} if given.get(k) != os.environ.get(k)} - _HARMLESS
    if any(k.startswith(_READ_BY_IMPORTS) for k in changed):
        return False
    threads = args[args.index("--threads") + 1] if "--threads" in args else "1"
    return args[3:4] != ["worker"] or threads == "1"


def load() -> None:
    """Import what the processes need, with compiled kernels, on one thread."""
    from pigou.registry import uncollected
    from pigou.runtime.resources import prepare_environment

    prepare_environment(1)
    with uncollected():
        for name in _IMPORTED:
            import_module(name)
        from pigou.control.warm_up import warm_up as warm_control
        from pigou.worker.config import WorkerConfig
        from pigou.worker.startup.profiling import warm_all

        warm_control()
        warm_all(WorkerConfig(threads=1, blocks=64))
    for module in FORKED[1:]:
        del sys.modules[module]  # it runs as `__main__`
    Popen.loaded = True
    gc.collect()
    gc.freeze()


def _serve(channel: socket.socket) -> list[str]:
    """Fork for each request; return within the new process, with its arguments."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MAX_MESSAGE, _MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        if between := os.fork():
            os.close(writing)
            os.waitpid(between, 0)
            with suppress(OSError):  # who asked has ended
                channel.send(os.read(reading, 32))
            for descriptor in (reading, *descriptors):
                os.close(descriptor)
            continue
        parent = os.getpid()
        if pid := os.fork():
            os.write(writing, str(pid).encode())
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.0005)
        for closed in (reading, writing):
            os.close(closed)
        channel.close()
        request = msgspec.json.decode(message, type=dict[str, Any])
        _take(descriptors, [1, 2, *request["descriptors"]])
        ours = {k: v for k, v in os.environ.items() if k.startswith(_READ_BY_IMPORTS)}
        os.environ.clear()
        os.environ.update(request["environment"] | ours)
        return list(request["arguments"])


def _take(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers, which may be those of others among them."""
    high = [os.dup2(d, 1000 + i) for i, d in enumerate(descriptors)]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def become(arguments: list[str]) -> None:
    """Run a module as this process, and end without freeing what was imported before the fork."""
    sys.argv = arguments
    status: object = 0
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    # What `Py_Finalize` does, but for the objects: to free pages that are shared copies them.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def main(descriptor: int) -> None:
    """Import what processes need, then serve; a process that is forked runs here."""
    load()
    become(_serve(socket.socket(fileno=descriptor)))
